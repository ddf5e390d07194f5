"""Functions that torch.compile does not trace, and functions that it calls while it traces."""

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
    """Mark ``function`` so that torch.compile ends its graph before a call and traces none of it.

    Functions that ``function`` calls are not traced either. The mark has the effect of
    ``torch.compiler.disable`` without a frame around each call, and without the import of dynamo,
    which takes seconds.

    Args:
        function: a function, or a result of ``contextlib.contextmanager``, whose block ends the
            graph, too, and is not compiled.
    """
    marked: Any = never_alone(function)
    # both private (torch 2.11 to 2.15): the marks of torch.compiler.disable, by which the trace of
    # a caller recognises such functions
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return function


def never_alone(function: F) -> F:
    """Mark ``function`` so that torch.compile makes no graph of its own for a call of it.

    A call inside a graph becomes part of that graph. A call between graphs, such as one by a
    forward hook of the compiled module, runs uncompiled.
    """
    # skip the frame of the function, and all frames below it
    nowhere = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(inspect.unwrap(function).__code__, nowhere)
    return function


def constant_to_dynamo(function: F) -> F:
    """Make torch.compile call ``function`` while it traces, and treat the result as a constant.

    The mark has the effect of torch.compiler.assume_constant_result (in all supported versions)
    without the import of dynamo, which takes seconds.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
