"""States of the random generators, so that a resumed run draws the same numbers."""

from typing import Any

import torch

from tritonamp.ambient import Generators
from tritonamp.checkpoint.agreement import gather
from tritonamp.kernels.device import rank, world_size


class RNGState:
    """The random states of all ranks, for `save` and `save_sharded`.

    They are the states of Python's `random`, of `numpy.random` if numpy is imported, of torch on
    the CPU, and of torch on all CUDA devices if the process has used CUDA. ::

        tritonamp.save("run.pt", model=model, amp=amp, rng=tritonamp.RNGState())
        tritonamp.RNGState().load_state_dict(tritonamp.load("run.pt")["rng"])  # after building all
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain values and uint8 tensors.

        With torch.distributed, call it on every rank.
        """
        return {"ranks": gather(_states())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators of this rank to its saved states. Uses no collectives.

        Raises:
            ValueError: the state is not of an RNGState, or of another number of ranks or CUDA
                devices. Nothing was changed.
        """
        if set(state_dict) != {"ranks"}:
            raise ValueError(
                "RNGState.load_state_dict: expected the keys ['ranks'] of RNGState().state_dict(), "
                f"got {sorted(map(str, state_dict))}"
            )
        saved, ranks = state_dict["ranks"], world_size()
        if len(saved) != ranks:
            raise ValueError(
                f"RNGState.load_state_dict: expected the random states of {ranks} rank(s), got "
                f"those of {len(saved)}: no choice of them would give the same numbers; leave them "
                "out and seed each rank again"
            )
        states, devices = saved[rank()], torch.cuda.device_count()
        if states["cuda"] and len(states["cuda"]) != devices:
            raise ValueError(
                f"RNGState.load_state_dict: expected the random states of {devices} CUDA "
                f"device(s), got those of {len(states['cuda'])}: show this process as many "
                "(CUDA_VISIBLE_DEVICES), or leave them out and seed again"
            )
        cuda = {torch.device("cuda", i): state for i, state in enumerate(states["cuda"])}
        Generators(states["python"], states["numpy"], states["torch"], cuda).restore()


def _states() -> dict[str, Any]:
    # asking would initialise CUDA, which a process that forks does not want
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    generators = Generators.now(torch.device("cuda", i) for i in range(count))
    return {
        "python": generators.python,
        "numpy": _plain(generators.numpy),
        "torch": generators.cpu,
        "cuda": [state.cpu() for state in generators.cuda.values()],
    }


def _plain(value: Any) -> Any:
    """Return numpy's state in Python's types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
