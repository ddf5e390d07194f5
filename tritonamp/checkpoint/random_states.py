"""The states of the random number generators, so that a resumed run draws what it would have drawn."""

import importlib
import random
import sys
from typing import Any

import torch

from tritonamp.checkpoint.agreement import gather, rank, world_size


class RNGState:
    """The random states of all ranks, for `save` and `save_sharded`: those of Python's `random`, of
    `numpy.random` where numpy is imported, of torch on the CPU, and on the CUDA devices of a
    process that has used CUDA.

        tritonamp.save("run.pt", model=model, optimizer=optimizer, amp=amp,
        rng=tritonamp.RNGState())
        tritonamp.RNGState().load_state_dict(tritonamp.load("run.pt")["rng"])       # after building
        everything
    """

    def state_dict(self) -> dict[str, Any]:
        """Plain values and uint8 tensors. With torch.distributed initialised, every rank has to
        call it.
        """
        return {"ranks": gather(_states())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each rank takes its own. No collectives.

        Raises:
            ValueError: a state of something else, of another number of ranks or of CUDA devices;
                nothing was changed then.
        """
        if set(state_dict) != {"ranks"}:
            raise ValueError(
                f"RNGState.load_state_dict: got the keys {sorted(map(str, state_dict))}, allowed is ['ranks'] of "
                "RNGState().state_dict()"
            )
        saved, ranks = state_dict["ranks"], world_size()
        if len(saved) != ranks:
            raise ValueError(
                f"RNGState.load_state_dict: got the random states of {len(saved)} rank(s), this run has {ranks}: no "
                "choice of them would give the same numbers; leave them out and seed each rank anew"
            )
        _set_states(saved[rank()])


def _states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else _plain(numpy.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        # asking would initialise CUDA, which a process that forks does not want
        "cuda": [state.cpu() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()
        else [],
    }


def _set_states(states: dict[str, Any]) -> None:
    if states["cuda"] and len(states["cuda"]) != torch.cuda.device_count():
        raise ValueError(
            f"RNGState.load_state_dict: got the random states of {len(states['cuda'])} CUDA device(s), this process "
            f"has {torch.cuda.device_count()}: show it as many (CUDA_VISIBLE_DEVICES), or leave them out and seed anew"
        )
    random.setstate(states["python"])
    if states["numpy"] is not None:
        importlib.import_module("numpy").random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def _plain(value: Any) -> Any:
    """numpy's state in Python's own types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
