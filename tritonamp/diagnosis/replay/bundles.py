"""Save a failing batch as a folder from which it can run elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from tritonamp.ambient import AmbientState, Generators
from tritonamp.diagnosis.replay.faults import NOT_REPRODUCED, FaultReport
from tritonamp.policy import Policy
from tritonamp.step.snapshots import Snapshot

_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype)

_SCRIPT = '''"""Run a failing batch again.

Complete make_model and, if there is one, loss; then: python replay.py
"""

from pathlib import Path

import torch

import tritonamp
from tritonamp.diagnosis.replay.bundles import load_bundle
from tritonamp.diagnosis.replay.faults import NOT_REPRODUCED
from tritonamp.diagnosis.replay.search import find_fault

FOLDER = Path(__file__).parent
SCALE = {scale!r}  # the loss scale of that step


def make_model():
    raise NotImplementedError(
        "return the model, in FP32 and on its device, as it was given to tritonamp.enable"
    )


def loss(output):
    return output


if __name__ == "__main__":
    model = make_model()
    weights = torch.load(FOLDER / "weights.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    policy = tritonamp.Policy.from_json((FOLDER / "policy.json").read_text("utf-8"))
    tritonamp.enable(model, policy=policy)
    snapshot = load_bundle(FOLDER, model)
    fault = find_fault(model, lambda: loss(snapshot.run()), scale=SCALE)
    print(NOT_REPRODUCED if fault is None else fault)
'''


def write_bundle(
    folder: str | Path,
    fault: FaultReport | None,
    snapshot: Snapshot,
    policy: Policy,
    state: Mapping[str, Any],
    skip: str,
    scale: float,
) -> None:
    """Write a folder from which a forward can run again elsewhere.

    It holds inputs.pt (arguments, generators, training flag; ``torch.load(..., weights_only=True)``
    takes it), weights.pt (the model's ``state_dict``), policy.json, report.txt, and replay.py, to
    which the user adds the function that makes the model.

    Args:
        folder: folder to write, made if it does not exist.
        fault: result of ``find_fault``; None: not reproduced.
        snapshot: forward to write.
        policy: policy that the model was enabled with.
        state: ``state_dict`` of the model.
        skip: report of the skipped step.
        scale: loss scale of that step.

    Raises:
        BatchGoneError: the batch no longer exists.
        ValueError: an argument of the model is neither tensor nor plain value.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generators = snapshot.ambient.generators
    assert generators is not None
    batch = {
        "arguments": tree_map(_plain, snapshot.arguments()),
        "cpu": generators.cpu,
        "cuda": {str(device): state for device, state in generators.cuda.items()},
        "python": generators.python,
        "training": snapshot.training,
        "method": snapshot.method,
    }
    torch.save(batch, folder / "inputs.pt")
    torch.save({k: _plain(v) for k, v in state.items()}, folder / "weights.pt")
    texts = {
        "policy.json": policy.to_json(),
        "report.txt": f"{skip}\n{NOT_REPRODUCED if fault is None else fault}\n",
        "replay.py": _SCRIPT.format(scale=scale if fault is None else fault.scale),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, _PLAIN):
        kind = type(value).__name__
        raise ValueError(
            f"write_bundle: expected a model called with tensors and plain values, got {kind}"
        )
    return value


def load_bundle(folder: str | Path, model: nn.Module) -> Snapshot:
    """Return the forward of ``model`` that ``write_bundle`` wrote, on any device.

    The model should have the same weights. Arguments move to the model's device. If they were on
    one GPU, the state of its generator moves with them.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    state = torch.load(Path(folder) / "inputs.pt", map_location="cpu", weights_only=True)
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), state["arguments"])
    snapshot = Snapshot(model, args, kwargs, method=state["method"])
    cuda = {torch.device(name): generator for name, generator in state["cuda"].items()}
    if len(cuda) == 1 and device.type == "cuda":
        cuda = dict(zip([device], cuda.values(), strict=True))
    cuda = {gpu: cuda[gpu] for gpu in cuda if gpu.index < torch.cuda.device_count()}
    generators = Generators(state["python"], None, state["cpu"], cuda)
    snapshot.ambient = AmbientState.now(generators)
    snapshot.training = state["training"]
    return snapshot
