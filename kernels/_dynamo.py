"""What runs between the graphs of torch.compile."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

# private: all that torch._dynamo.eval_frame.skip_code needs in torch 2.11 to 2.15
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "it decides on gradients by what the device and this process have seen so far. Under "
    "fullgraph=True compile the model, or the function that returns the loss"
)


def between_graphs(function: F) -> F:
    """Have torch.compile call ``function`` as it is: the graph before it ends, none is made of it.

    Nor of what it calls. That is ``torch.compiler.disable``, without its frame around each call,
    and without the import of dynamo, which takes seconds.

    Args:
        function: a function, or one that ``contextlib.contextmanager`` has made: a block of that
            ends the graph, too, and is not compiled.
    """
    marked: Any = function
    # both private (torch 2.11 to 2.15): what torch.compiler.disable leaves for the trace of a
    # caller to find
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    # its frame, called then, and all below it
    nowhere = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(inspect.unwrap(marked).__code__, nowhere)
    return function
