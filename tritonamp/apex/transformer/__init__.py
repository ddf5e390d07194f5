"""Drop-in for the parts of ``apex.transformer`` that do not depend on its model parallelism."""

from tritonamp.apex.transformer import functional as functional
from tritonamp.apex.transformer.enums import AttnMaskType as AttnMaskType
from tritonamp.apex.transformer.enums import AttnType as AttnType
from tritonamp.apex.transformer.enums import LayerType as LayerType
from tritonamp.apex.transformer.enums import ModelType as ModelType
