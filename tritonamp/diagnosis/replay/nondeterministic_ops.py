"""Ops whose results may have other bits in each run, by torch's own list."""

from collections.abc import Iterable
from typing import Any

import torch

from tritonamp.watched.ops import schema_of

_CUDA, _ANY = frozenset(["cuda"]), frozenset(["cpu", "cuda"])
# the documentation of torch.use_deterministic_algorithms, in the words of torch's dispatcher
DEVICES: dict[str, frozenset[str]] = dict.fromkeys(
    """scatter scatter_add scatter_reduce index_add index_reduce gather_backward
    index_select_backward histc bincount kthvalue median nanmedian cumsum grid_sampler_2d_backward
    grid_sampler_3d_backward ctc_loss_backward embedding_bag_backward embedding_bag_dense_backward
    nll_loss2d_forward nll_loss2d_backward avg_pool3d_backward adaptive_avg_pool2d_backward
    adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    max_pool3d_with_indices_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
    max_unpool2d max_unpool3d upsample_linear1d_backward upsample_bilinear2d_backward
    upsample_bicubic2d_backward upsample_trilinear3d_backward upsample_bilinear2d_aa_backward
    upsample_bicubic2d_aa_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward scaled_dot_product_flash_attention_backward
    scaled_dot_product_efficient_attention_backward flash_attention_backward
    efficient_attention_backward""".split(),
    _CUDA,
) | dict.fromkeys("index_put index_put_impl unsafe_index_put put index_copy".split(), _ANY)
"""Types of devices on which an op is nondeterministic, by its name without underscores around."""
_OF_CUDNN = "convolution", "convolution_backward"
_OWN = "aten", "prim", "prims", "tritonamp"  # namespaces of torch and of this package


def nondeterministic(ops: Iterable[tuple[Any, str]]) -> list[str]:
    """Return the names of the ops that may have other bits in each run, each once.

    An op that another library has registered counts, because torch's list says nothing about it.

    Args:
        ops: each op, and a type of a device that it ran on.
    """
    found = dict[str, None]()
    asked = torch.are_deterministic_algorithms_enabled()
    on_one_thread = torch.get_num_threads() == 1  # which adds up in one order
    for func, device in ops:
        name = schema_of(func).name
        if func.namespace not in _OWN:
            found[f"{func.namespace}::{func._opname}"] = None
        elif asked or (device == "cpu" and on_one_thread):
            continue
        elif device in DEVICES.get(name, ()) or (device == "cuda" and _chosen_by_cudnn(name)):
            found[func._opname.strip("_")] = None
    return list(found)


def _chosen_by_cudnn(name: str) -> bool:
    """Return whether cuDNN may choose a nondeterministic algorithm for an op."""
    return name in _OF_CUDNN and not torch.backends.cudnn.deterministic
