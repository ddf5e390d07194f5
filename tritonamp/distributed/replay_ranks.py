"""Ranks that run batches again: together they begin, each runs its own, together they go on."""

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
    """What runs batches again, and asks the other ranks what came of theirs.

    A batch runs as often as its faults need, each rank's another number of times, or raises. So no
    forward may wait for another rank, under whatever wraps the model.

    Args:
        ranks: that train together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hindrance: str | None = None  # what ``alone`` has yielded; None: outside of it

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.several

    @property
    def may_be_missing(self) -> bool:
        """Whether others may have run out of batches, so that nothing can be done together."""
        return self._ranks.may_be_missing

    def gather(self, value: Any) -> Mapping[int, Any]:
        """Return by rank what each has given; only one's own where no other can be asked."""
        return self._ranks.gather(value)

    @contextlib.contextmanager
    def alone(self) -> Iterator[str]:
        """Have forwards and backwards of this rank wait for no other inside the block.

        All ranks enter it together: what FSDP2 shards is gathered once. Yields "", or why that is
        impossible, the same on all ranks. A block inside of another adds nothing.
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
        """Return the state of a model, sharded tensors whole; {} on ranks that do not ``keep`` it.

        All ranks take part.
        """
        state = {}
        for name, value in model.state_dict().items():
            whole = full_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                state[name] = whole.cpu() if is_sharded(value) else whole
        return state
