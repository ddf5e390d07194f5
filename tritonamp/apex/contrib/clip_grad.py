"""Drop-in for ``apex.contrib.clip_grad``: torch's function, which is fused today."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_
