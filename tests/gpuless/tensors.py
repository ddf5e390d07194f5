"""Tensors whose device is ``cuda:0`` and whose values are in main memory."""

import contextlib
from typing import Any

import pytest
import torch
from gpuless.arithmetic import computed
from gpuless.facts import facts
from gpuless.gpu import Gpu
from gpuless.nested import mapped, tensors_of
from gpuless.subclasses import on_gpu, seen_as
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritonamp.casts.unread import Unread
from tritonamp.kernels._by_length import by_length
from tritonamp.kernels._implementations import operations

CUDA = torch.device("cuda", 0)
SIZE_IS_READ = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
"""Operations whose result, or its size, the host waits for."""
INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
TAKES_CPU_TENSORS = {*INDEX, "_pack_padded_sequence"}


class CudaTensor(Tensor):
    """A tensor on ``cuda:0`` for torch's autograd, autocast and checks.

    Attributes:
        place: the device that it is on for torch; ``other_device.py`` changes it.
        inner: its values, on the CPU, laid out the same.
    """

    place = CUDA
    gpu: Gpu  # of the fixture that is in force
    restored_on = "cuda"  # where a file's tensors go
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        if inner.layout is not torch.strided:
            pytest.skip("the GPU in software has no sparse tensors")
        if inner.dtype is torch.float64 and not cls.gpu.has_float64:
            raise TypeError("this device has no float64")
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=cls.place,
        )
        wrapper.inner = inner
        return wrapper

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.inner, self.requires_grad, getattr(self, "_is_param", False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            restore, (inner, *rest) = self.__reduce_ex__(2)
            memo[id(self)] = restore(inner.clone(), *rest)
            if self.grad is not None and not isinstance(self, torch.nn.Parameter):
                memo[id(self)].grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]

    # what torch would ask of the memory that the wrapper has not

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def as_subclass(self, cls: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return seen_as(self, on_gpu(CudaTensor, cls))

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CudaTensor({self.inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if Unread in types:
            return NotImplemented
        return run(cls.gpu, func, args, kwargs or {})


def _restored(inner: Tensor, requires_grad: bool, is_param: bool) -> Tensor:
    tensor = CudaTensor(inner) if CudaTensor.restored_on == "cuda" else inner
    tensor.requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_param else tensor


torch.serialization.add_safe_globals([_restored])


class FakeCudaMode(TorchDispatchMode):
    """Inside, an operation without tensors of the GPU can make some: ``ones(3, device="cuda")``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if Unread in types:  # it holds tensors of the GPU, and runs the operation with them
            return func(*args, **(kwargs or {}))
        return run(CudaTensor.gpu, func, args, kwargs or {})


def unwrap(tree: Any) -> Any:
    """Return the same arguments or results with the tensors of main memory."""
    return mapped(_inner, CudaTensor, tree, subclasses=True)


def wrap(tree: Any) -> Any:
    """Return the same results with tensors of the GPU."""
    return mapped(CudaTensor, Tensor, tree)


def _inner(tensor: CudaTensor) -> Tensor:
    return tensor.inner


def run(gpu: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with the tensors of main memory."""
    tensors, known = tensors_of((*args, *kwargs.values())), facts(func)
    ours = any(isinstance(x, CudaTensor) for x in tensors)
    device = kwargs.get("device")
    kind = None if device is None else torch.device(device).type
    to_gpu = ours if kind is None else kind == CudaTensor.place.type
    if not ours and not to_gpu:
        return _on_host(gpu, func, args, kwargs)
    if known.is_composite:
        with FakeCudaMode():  # here autograd is over, which takes such operations to pieces
            return func.decompose(*args, **kwargs)
    if func.namespace == "tritonamp":  # a dispatch mode made an op of it: it launches by itself
        name = known.name.removeprefix("tritonamp::")
        operation = operations()[name.removesuffix("_by_length")]
        scope = by_length() if name.endswith("_by_length") else contextlib.nullcontext()
        with FakeCudaMode(), scope:
            return operation.triton_function(*args, **kwargs)
    if known.name == "_to_copy" and kind == ("cpu" if ours else CudaTensor.place.type):
        return _moved(gpu, func, args[0], kwargs)
    if known.name == "copy_" and len({isinstance(x, CudaTensor) for x in args[:2]}) == 2:
        _transfer(gpu, *args, **kwargs)
        return args[0]
    if ours:
        if not known.is_view:
            reads = tensors if known.reads_values else []
            gpu.use(known.name, reads=reads, writes=tensors_of(known.writes(args, kwargs)))
        _check(gpu, known.name, args, tensors)
    result = _computed_on(gpu, func, args, kwargs, tensors, to_gpu)
    gpu.observer.computed(func, args, kwargs, result)
    return result


def _computed_on(
    gpu: Gpu,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    to_gpu: bool,
) -> Any:
    """Compute the operation. With ``to_gpu`` its result is on the GPU, else on the CPU."""
    known = facts(func)
    given = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if to_gpu and given.get("device") is not None:
        given["device"] = torch.device("cpu")
    inner = unwrap((args, given))

    def compute(args: Any, kwargs: Any) -> Any:
        return computed(gpu, func, args, kwargs)

    if known.is_in_place:
        if known.is_resize:
            compute(*inner)
            _apply_to_sizes(func, args, kwargs)
        else:
            gpu.do(lambda: compute(*inner))
        written = _count_versions(known.writes(args, kwargs))
        returned = len(func._schema.returns)
        return None if not returned else written[0] if returned == 1 else tuple(written)
    if known.is_view:
        result = compute(*inner)
        # an inference tensor only where it is a view of one
        with torch.inference_mode(any(x.is_inference() for x in tensors)):
            return wrap(result)
    result = gpu.compute(compute, inner)
    if to_gpu and gpu.streams.has_several:
        gpu.use(known.name, makes=[x for x in tree_leaves(result) if isinstance(x, Tensor)])
    if known.name == "_pack_padded_sequence":
        return wrap(result[0]), result[1]  # sizes of batches are the host's
    return wrap(result) if to_gpu else result


def _apply_to_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the wrapper itself other sizes and strides, as ``t_`` does."""
    # private (torch 2.11 to 2.15), as torch.utils._python_dispatch does it for its wrappers
    included = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    finally:
        torch._C._set_meta_in_tls_dispatch_include(included)


def _count_versions(written: list[Any]) -> list[Any]:
    """Count the versions of tensors in lists, after a write; those of single ones torch counts."""
    for tensors in written:
        if isinstance(tensors, list | tuple):
            torch.autograd.graph.increment_version(tensors)
    return written


def _on_host(gpu: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of main memory, which may be pinned: torch would ask a driver for that."""
    name = func._schema.name
    if name == "aten::is_pinned":
        return gpu.is_pinned(args[0])
    if name == "aten::_pin_memory":
        func, kwargs = torch.ops.aten.clone.default, {"pin_memory": True}
    pinned = kwargs.get("pin_memory")
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory" or not v})
    if pinned:
        gpu.pin(result)
    _count_versions(facts(func).writes(args, kwargs))
    return result


def _check(gpu: Gpu, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Refuse what a GPU cannot do, and note where the host has to wait."""
    elsewhere = [x for x in tensors if not isinstance(x, CudaTensor) and x.dim()]
    if elsewhere and name not in TAKES_CPU_TENSORS:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, cuda:0 and cpu! {[tuple(x.shape) for x in elsewhere]}"
        )
    if name in SIZE_IS_READ:
        gpu.waits_for(name)
    if name in INDEX:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        fills = name != "index" and args[2].numel() == 1  # torch makes masked_fill of it
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not fills:
            gpu.waits_for(f"{name} by a mask")
        if elsewhere:
            gpu.waits_for(f"{name} of a tensor on the GPU by one on the CPU")


def _moved(gpu: Gpu, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor on the other device."""
    non_blocking = kwargs.get("non_blocking", False)
    layout = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
    target = func(torch.empty_like(unwrap(source)), **layout)
    if not isinstance(source, CudaTensor):
        target = CudaTensor(target)
        gpu.use("memory for a copy", makes=[target])
    elif non_blocking:  # torch pins what it will copy to without waiting
        gpu.pin(target)
    _transfer(gpu, target, source, non_blocking)
    return target


def _transfer(gpu: Gpu, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copy between main memory and the GPU."""
    to_host = isinstance(source, CudaTensor)
    host, copy = (target, gpu.send) if to_host else (source, gpu.fetch)
    what = f"of {tuple(source.shape)} {'to the CPU' if to_host else 'to the GPU'}"
    into, out_of = unwrap((target, source))
    if not host.numel():
        return
    gpu.use(f"copy {what}", reads=[source], writes=[target])
    if not non_blocking:
        gpu.waits_for(f"blocking copy {what}")
    elif source.dtype is not target.dtype or not host.is_contiguous():
        gpu.waits_for(f"copy by way of another on the CPU {what}")
    elif not gpu.is_pinned(host):
        gpu.note("pageable", f"copy {what}")
    else:
        gpu.do(lambda: copy(into, out_of))
        return
    gpu.do(lambda: into.copy_(out_of))
