"""The peers, their packages, and the processes in which they run."""

from importlib.util import find_spec
from typing import NamedTuple


class Peer(NamedTuple):
    """A peer.

    Attributes:
        process: name of the process that measures the peer. Some packages patch torch, so they
            cannot share a process with others.
        module: module that the peer imports; None for torch alone.
        package: name of the package for pip.
    """

    process: str
    module: str | None = None
    package: str | None = None


PEERS = {
    "tritonamp": Peer("tritonamp"),
    "tritonamp O1": Peer("tritonamp"),
    "tritonamp O2": Peer("tritonamp"),
    "tritonamp O2, linear loss": Peer("tritonamp"),
    "eager": Peer("torch"),
    "autocast": Peer("torch"),
    "fp32": Peer("torch"),
    "torch.amp": Peer("torch"),
    "fused AdamW": Peer("torch"),
    "fused SGD": Peer("torch"),
    "foreach SGD": Peer("torch"),
    "half pipeline": Peer("torch"),
    "compile": Peer("compile"),
    "Liger-Kernel": Peer("liger", "liger_kernel", "liger-kernel"),
    "FlagGems": Peer("flag_gems", "flag_gems", "flag_gems"),
    "Transformer Engine": Peer("te", "transformer_engine", "transformer_engine[pytorch]"),
    "apex": Peer("apex", "apex.optimizers", "apex, from source with its CUDA extensions"),
    "optimi": Peer("optimi", "optimi", "torch-optimi"),
    "FlashOptim": Peer("flashoptim", "flashoptim", "flashoptim"),
    "bitsandbytes": Peer("bitsandbytes", "bitsandbytes", "bitsandbytes"),
    "torchao": Peer("torchao", "torchao", "torchao"),
}
"""In the order of tables.

- "eager": torch as it is.
- "autocast": stock ``torch.autocast``, with results cast to half if a half matmul would read them.
- "compile": ``torch.compile`` of "eager" or "torch.amp".
- "torch.amp": autocast, GradScaler and the fused optimizer on an FP32 model.
- "half pipeline": the step of a half model with FP32 masters in stock torch.
- "linear loss": the loss is computed from the last layer's inputs, a part of the logits at a time.
"""


def missing(peer: str) -> str | None:
    """Return the missing package of ``peer``, or None."""
    module, package = PEERS[peer].module, PEERS[peer].package
    if module is None:
        return None
    try:
        found = find_spec(module)
    except ImportError:
        found = None
    return None if found else f"{peer} is not installed: {package}"
