"""``apex.amp`` on tritonamp: ``initialize``, ``scale_loss`` and related functions."""

from tritonamp.apex.amp._amp_state import _amp_state as _amp_state
from tritonamp.apex.amp._amp_state import master_params as master_params
from tritonamp.apex.amp.frontend import initialize as initialize
from tritonamp.apex.amp.frontend import load_state_dict as load_state_dict
from tritonamp.apex.amp.frontend import scale_loss as scale_loss
from tritonamp.apex.amp.frontend import state_dict as state_dict
from tritonamp.apex.amp.functions import bfloat16_function as bfloat16_function
from tritonamp.apex.amp.functions import float_function as float_function
from tritonamp.apex.amp.functions import half_function as half_function
from tritonamp.apex.amp.functions import init as init
from tritonamp.apex.amp.functions import promote_function as promote_function
from tritonamp.apex.amp.functions import register_bfloat16_function as register_bfloat16_function
from tritonamp.apex.amp.functions import register_float_function as register_float_function
from tritonamp.apex.amp.functions import register_half_function as register_half_function
from tritonamp.apex.amp.functions import register_promote_function as register_promote_function
from tritonamp.apex.amp.handle import disable_casts as disable_casts
