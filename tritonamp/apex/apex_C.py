"""apex's extension module ``apex_C``, which flattens lists of tensors and unflattens them."""

# Private, since torch 0.4: what apex's extension and torch.distributed call. There is no public
# name for views of a flat tensor in the shapes of others.
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
