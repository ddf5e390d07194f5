"""All planted faults."""

from diagnosis.planted.backwards import BACKWARDS
from diagnosis.planted.data import DATA
from diagnosis.planted.domains import DOMAINS
from diagnosis.planted.layers import LAYERS
from diagnosis.planted.losses import LOSSES
from diagnosis.planted.optimizers import OPTIMIZERS
from diagnosis.planted.overflows import OVERFLOWS
from diagnosis.planted.recipes import RECIPES

PLANTED = [*OVERFLOWS, *DOMAINS, *BACKWARDS, *LOSSES, *DATA, *OPTIMIZERS, *RECIPES, *LAYERS]
