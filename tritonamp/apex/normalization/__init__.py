"""Drop-in for ``apex.normalization``."""

from tritonamp.apex.normalization.fused_layer_norm import FusedLayerNorm as FusedLayerNorm
from tritonamp.apex.normalization.fused_layer_norm import FusedRMSNorm as FusedRMSNorm
from tritonamp.apex.normalization.fused_layer_norm import MixedFusedLayerNorm as MixedFusedLayerNorm
from tritonamp.apex.normalization.fused_layer_norm import MixedFusedRMSNorm as MixedFusedRMSNorm
