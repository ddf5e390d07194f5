"""Register the op table at torch's autocast keys.

Outside an enabled forward every entry calls the kernel that torch had there before.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils import checkpoint

from tritonamp.ambient import device_types
from tritonamp.casts import batched_norms
from tritonamp.casts.active import active, checkpointed, enter, leave, process, thread
from tritonamp.casts.compiled_backward import compilations
from tritonamp.casts.linear_losses import LINEAR_LOSSES
from tritonamp.casts.op_rules import ALSO_WITHOUT_OP_POLICY, Rule, Stock
from tritonamp.casts.op_table import op_table
from tritonamp.casts.product_rules import FP32_RESULTS
from tritonamp.casts.user_functions import registered
from tritonamp.casts.written import installed
from tritonamp.kernels.device import UnsupportedDeviceError
from tritonamp.watched.frames import Role, plays


class _Registration:
    """The state of the registration, one for the whole process."""

    def __init__(self) -> None:
        self.libraries: list[torch.library.Library] = []  # of the op table
        self.stock: Any = None  # torch.utils.checkpoint's function that ``noted`` replaces
        self.noted: Any = None
        self.owners = 0  # number of enabled models, and of copies that borrow
        self.products: torch.library.Library | None = None  # the rules of FP32_RESULTS on CUDA
        self.product_users = weakref.WeakSet[Any]()  # contexts that need them


registration = _Registration()


def is_registered() -> bool:
    """Return whether torch's dispatch tables hold the op table now."""
    return len(registration.libraries) > 0


def acquire() -> None:
    """Register the op table, and the user's functions, for one more enabled model."""
    registration.owners += 1
    _register()
    registered.replace_originals()


def borrow(borrower: Any) -> None:
    """Do what ``acquire`` does for the lifetime of ``borrower``, the context of a copy."""
    acquire()
    installed.place()
    weakref.finalize(borrower, release).atexit = False


def _register() -> None:
    if registration.libraries:
        return
    for function in (enter, leave):
        torch.fx.node.has_side_effect(function)
    # private: the effect of torch._dynamo.eval_frame.skip_code in torch 2.11 to 2.15, without the
    # import of dynamo, which takes seconds
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    for function in process.inlined:
        set_code_exec_strategy(function.__code__, skip)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        aten, torch_nn = (torch.library.Library(name, "IMPL") for name in ("aten", "torch_nn"))
        registration.libraries += [aten, torch_nn]
        for device_type in device_types:
            _register_for(device_type, aten, torch_nn)
        batched_norms.register(aten)
    _update_products()
    # private (torch 2.11 to 2.15): nothing public tells a checkpointed segment whose forward it is
    # a part of
    registration.stock = checkpoint._get_autocast_kwargs
    registration.noted = checkpoint._get_autocast_kwargs = checkpointed(registration.stock)


def _register_for(device_type: str, *libraries: torch.library.Library) -> None:
    key = _autocast_key(device_type)
    for library, table in zip(libraries, (op_table(device_type), LINEAR_LOSSES), strict=True):
        for op, rule in table.items():
            implementation = _implementation(library.ns, op, rule, key)
            library.impl(op, implementation, key, with_keyset=True)


def _autocast_key(device_type: str) -> str:
    # private (torch 2.11 to 2.15): nothing public names the key of a device type
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


def has_autocast(device_type: str) -> bool:
    """Return whether ops on devices of this type can have rules."""
    return hasattr(torch._C.DispatchKey, _autocast_key(device_type))


def check_autocast(device: torch.device) -> None:
    """Refuse an op policy on a device whose ops cannot have rules.

    Raises:
        UnsupportedDeviceError: torch has no autocast for the device.
    """
    if device.type != "meta" and not has_autocast(device.type):
        raise UnsupportedDeviceError(
            f"expected a device for which torch has autocast, to cast by operation, got {device}: "
            "use level='O3' with a model that computes in half, or level='O0'"
        )


def serve(device_type: str) -> None:
    """Register the op table for a device type, too, as long as any model is enabled."""
    if device_type in device_types:
        return
    device_types.append(device_type)
    if registration.libraries:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            _register_for(device_type, *registration.libraries)


def need_products(context: Any, needed: bool = True) -> None:
    """Keep the rules of FP32_RESULTS registered on CUDA while a context needs them.

    They are not registered all the time, because each product of the process would pass through
    Python. On a CPU each product does.
    """
    users = registration.product_users
    if needed != (context in users):
        users.add(context) if needed else users.discard(context)
        _update_products()


def _update_products() -> None:
    needed = len(registration.product_users) > 0 and is_registered()
    if needed == (registration.products is not None):
        return
    if registration.products is not None:
        registration.products._destroy()  # as in ``release``
        registration.products = None
        return
    library = registration.products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for op in FP32_RESULTS.keys() - op_table("cuda").keys():
            implementation = _implementation(library.ns, op, None, "AutocastCUDA")
            library.impl(op, implementation, "AutocastCUDA", with_keyset=True)


def release() -> None:
    """Undo one ``acquire``. The last call restores torch's dispatch tables and functions."""
    registration.owners -= 1
    if registration.owners == 0:
        registered.restore_originals()
        installed.restore()
        compilations.release()
        for library in registration.libraries:
            # private (torch 2.11 to 2.15): else the kernels stay until the library is collected
            library._destroy()
        registration.libraries.clear()
        _update_products()
        if checkpoint._get_autocast_kwargs is registration.noted:  # else other code has wrapped it
            checkpoint._get_autocast_kwargs = registration.stock


def _implementation(
    namespace: str, op: str, rule: Rule | None, key_name: str
) -> Callable[..., Any]:
    """Return the kernel of an op. Without a rule it is torch's own, except for FP32 results."""
    stock = Stock(namespace, op, key_name)
    needs_op_policy = rule not in ALSO_WITHOUT_OP_POLICY
    with_fp32_result = FP32_RESULTS.get(op) if namespace == "aten" else None

    @plays(Role.RULE)
    def implementation(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        found = None if thread.in_rule else active()
        if found is not None and found.fp32_results and with_fp32_result is not None:
            return with_fp32_result(stock, found, *args, **kwargs)
        if found is None or rule is None:
            return stock.call_torchs(keyset, *args, **kwargs)
        if needs_op_policy and not found.policy.op_policy:
            return stock(*args, **kwargs)
        return rule(stock, found, *args, **kwargs)

    # torch.compile gets the graph of what rules call; the rules themselves are not worth compiling
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(implementation.__code__, skip)
    return implementation
