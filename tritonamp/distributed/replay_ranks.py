"""Replay of batches on several ranks: they begin and end together, and each replays alone."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tritonamp.distributed.ddp import unsynchronised
from tritonamp.distributed.ranks import Ranks
from tritonamp.distributed.sharding import full_tensor
from tritonamp.distributed.unsharded import missing_memory, unsharded
from tritonamp.kernels._shards import is_sharded


class ReplayRanks:
    """Lets each rank replay its own batch, and exchanges the results.

    Ranks replay different numbers of times, or raise. So no forward may wait for another rank,
    whichever wrapper is around the model.

    Args:
        ranks: ranks that train together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hindrance: str | None = None  # what ``alone`` has yielded; None: outside of it

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.several

    @property
    def members(self) -> int:
        """Number of ranks that train together."""
        return max(1, len(self._ranks.members))

    @property
    def may_be_missing(self) -> bool:
        """Whether other ranks may have run out of batches, so that collectives would hang."""
        return self._ranks.may_be_missing

    def gather(self, value: Any) -> Mapping[int, Any]:
        """Return the ranks' values by rank; only this rank's value if others may be missing."""
        return self._ranks.gather(value)

    @contextlib.contextmanager
    def alone(self) -> Iterator[str]:
        """Inside the block, forwards and backwards of this rank wait for no other rank.

        All ranks enter the block together, because FSDP2's parameters are gathered at its start.
        Yields "", or the reason why they cannot be gathered, the same on all ranks. Nested blocks
        change nothing.
        """
        if self._hindrance is not None:
            yield self._hindrance
            return
        modules = self._ranks.sharded_modules.found()
        lacking = self.gather(missing_memory(modules)) if modules else {}
        self._hindrance = "; ".join(f"{text} on rank {r}" for r, text in lacking.items() if text)
        try:
            with contextlib.ExitStack() as stack:
                for wrapper in self._ranks.wrappers:
                    stack.enter_context(unsynchronised(wrapper))
                if not self._hindrance:
                    stack.enter_context(unsharded(modules))
                yield self._hindrance
        finally:
            self._hindrance = None

    def full_state(self, model: nn.Module, keep: bool) -> dict[str, Any]:
        """Return the state of a model with whole tensors; {} on ranks that do not ``keep`` it.

        All ranks take part. Tensors that were sharded are on the CPU.
        """
        state = {}
        for name, value in model.state_dict().items():
            whole = full_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                state[name] = whole.cpu() if is_sharded(value) else whole
        return state
