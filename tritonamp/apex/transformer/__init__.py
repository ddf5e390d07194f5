"""Drop-in for the parts of ``apex.transformer`` that do not depend on its model parallelism."""

from tritonamp.apex.transformer import functional
from tritonamp.apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "functional"]
