"""Single values out of all proportion in weights and moments, as a flipped bit leaves them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.skips import Writer
from tritonamp.kernels._optimizers import OPTIMIZERS, Known
from tritonamp.kernels._shards import to_local
from tritonamp.kernels.device import is_distributed, rank

_BEYOND = 2.0**24  # factor over all others; no training moves one weight so far alone
_HALF_BEYOND = 64.0  # factor of a half copy over all masters, if it differs from its own
_SHOWN = 4  # values in a text
_SMALL = 0.1  # smaller weights count as this
_SQUARES = "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"
"""Keys of squared gradients in an optimizer's state; others may use "sum" for something else."""
_RELOAD = "Load the last good checkpoint"


class Odd(NamedTuple):
    """A value that is out of all proportion.

    Attributes:
        name: name of the parameter.
        key: key in the optimizer's state; "": the weight itself; "half": a half copy, which differs
            from its master.
        at: indices of the value in the tensor.
        value: the value.
        others: largest magnitude of all others; for "half", the value in the master.
    """

    name: str
    key: str
    at: tuple[int, ...]
    value: float
    others: float

    def __str__(self) -> str:
        where = f"{self.key} of {self.name}" if self.key else self.name
        is_one = f"one value of {where}, at {list(self.at)}, is {self.value:.2g}"
        if self.key == "half":
            where = f"the half value of {self.name} at {list(self.at)}"
            return f"{where} is {self.value:.2g}, and that of its FP32 master is {self.others:.2g}"
        if self.key in _SQUARES and self.value < 0.0:
            return f"{is_one}, although squares are never negative"
        return f"{is_one}, and all others are at most {self.others:.2g}"


def odd_weights(writers: Mapping[str, Writer], parameters: Mapping[Tensor, str]) -> list[Odd]:
    """Find weights that are out of all proportion to the other weights of their parameter.

    A weight that is inf or NaN counts if it is the only one, and its optimizer cannot have made it.
    So does a half copy far above the masters of its parameter, if its own master is another number.
    Waits for the device.

    Args:
        writers: optimizer of each parameter, by name.
        parameters: names of parameters and buffers.
    """
    params = {n: p for p, n in parameters.items() if isinstance(p, nn.Parameter) and n in writers}
    masters = {n: m.detach() for n in params if (m := writers[n].master) is not None}
    values = {n: masters.get(n, p) for n, p in params.items()}
    found = []
    for name, sizes in _measured(values, _BEYOND).items():
        value = values[name]
        is_large = sizes.bad == 0 and sizes.near == 1 and sizes.largest > _BEYOND * _SMALL
        if value.numel() > 1 and (is_large or sizes.bad == 1):
            odd = _largest(name, "", value)
            # a large weight that is only half becomes inf
            may_be_bad = value.dtype.itemsize < 4 and math.isinf(odd.value)
            if is_large or (_known(writers[name]).finite and not may_be_bad):
                found.append(odd)
    sound = [n for n in masters if n not in {odd.name for odd in found}]
    return found + _unlike({n: (params[n].detach(), masters[n]) for n in sound})


def odd_moments(writers: Mapping[str, Writer]) -> list[Odd]:
    """Find moments that are out of all proportion to those of all parameters, or impossible.

    A second moment that is far too large keeps its weight from moving, and a negative one makes it
    NaN. Waits for the device.
    """
    moments = {name: moments_of(writer) for name, writer in writers.items()}
    found = []
    for key in sorted({key for own in moments.values() for key in own}):
        values = {n: own[key] for n, own in moments.items() if key in own}
        beyond = _BEYOND**2 if key in _SQUARES else _BEYOND
        measured = _measured(values, beyond)
        for name, sizes in measured.items():
            is_candidate = sizes.bad == 1 or (sizes.bad == 0 and sizes.near == 1)
            if is_candidate and values[name].numel() > 1:
                others = max((s.largest for n, s in measured.items() if n != name), default=0.0)
                odd = _largest(name, key, values[name])
                odd = odd._replace(others=max(odd.others, others))
                if sizes.bad == 1 or 0.0 < odd.others * beyond < sizes.largest:
                    found.append(odd)
            if key in _SQUARES and key != "sum" and sizes.least < 0.0:
                found.append(_at(name, key, values[name], int(values[name].argmin())))
    return found


def moments_of(writer: Writer) -> dict[str, Tensor]:
    """Return the moments of a parameter by key; not those of one byte, which have other shapes."""
    stepped = writer.stepped
    if writer.optimizer is None or stepped is None:
        return {}
    state = writer.optimizer.state.get(stepped, {})
    tensors = {key: to_local(t) for key, t in state.items() if isinstance(t, Tensor)}
    shape = to_local(stepped).shape
    return {k: t for k, t in tensors.items() if k != "step" and t.shape == shape}


def told(
    odd: Sequence[Odd], writers: Mapping[str, Writer], when: str = "", others: Sequence[Odd] = ()
) -> str:
    """Return a text about odd values, with advice.

    Args:
        odd: weights and moments.
        writers: optimizer of each parameter, by name.
        when: steps in which they were seen, in words.
        others: further values to name, which the advice for ``odd`` covers.
    """
    frozen = [one for one in odd if one.key in _SQUARES and one.value > 0.0]
    stops = ". Its weight practically never moves again" if frozen == [*odd] else ""
    where = f"on rank {rank()}" if is_distributed() else ""
    seen = f", seen {' '.join(filter(None, [when, where]))}" if when or where else ""
    # a value may have been large from the beginning
    made = ", perhaps as the model was made or loaded" if any(map(_may_be_old, odd)) else ""
    why = (
        f"or other code wrote there{made}: no scale, batch or learning rate explains a single value"
    )
    if any(one.key != "half" and not is_bounded(one, writers[one.name]) for one in odd):
        why = "other code wrote there, or a single gradient was huge"
    return (
        f"{'; '.join(map(str, [*odd, *others][:_SHOWN]))}{seen}{stops}. A bit "
        f"has flipped in memory, {why}. {_what_to_do(odd, writers)}"
    )


def _may_be_old(odd: Odd) -> bool:
    """Return whether a model may train with the value."""
    return not odd.key and math.isfinite(odd.value)


def is_bounded(odd: Odd, writer: Writer) -> bool:
    """Return whether no gradient can lead to the value."""
    if odd.key:
        return odd.value < 0.0 and odd.key in _SQUARES
    return _known(writer).bounded or not math.isfinite(odd.value)


def _known(writer: Writer) -> Known:
    return OPTIMIZERS.get(writer.name, Known())


def _what_to_do(odd: Sequence[Odd], writers: Mapping[str, Writer]) -> str:
    """Return advice: the code that sets odd values and their moments."""
    lines = []
    for one in odd:
        writer = writers[one.name]
        at = list(one.at) or "[()]"
        master = f"dict(amp.named_master_params())[{one.name!r}]"
        if one.key == "half":
            lines.append(f"{master}.mul_(1.0)")
            continue
        path, moments = _path(writer), moments_of(writer)
        if not path or len(_optimizers(writers)) > 1 or not (moments or _is_bare(writer)):
            return f"{_RELOAD}."
        lines += [f"{master}{at} = 0.0"] if not one.key else []
        lines += [f"optimizer.state[{path}][{key!r}]{at} = 0.0" for key in moments]
    code = "; ".join(dict.fromkeys(lines))
    on_all = " on all ranks" if is_distributed() else ""  # so that they stay equal
    # no full stop, so that the code can be copied to the end of the line
    return f"{_RELOAD}, or repair it{on_all}: with torch.no_grad(): {code}"


def _optimizers(writers: Mapping[str, Writer]) -> set[int]:
    return {id(writer.optimizer) for writer in writers.values()}


def _is_bare(writer: Writer) -> bool:
    """Return whether the optimizer keeps no state of the parameter, but for a count of steps."""
    return not set(writer.optimizer.state.get(writer.stepped, {})) - {"step"}


def _path(writer: Writer) -> str:
    """Return an expression for the parameter in the optimizer; "" if there is none, or a shard."""
    if writer.optimizer is None or writer.stepped is None:
        return ""
    if to_local(writer.stepped) is not writer.stepped:
        return ""
    for g, group in enumerate(writer.optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param is writer.stepped:
                return f"optimizer.param_groups[{g}]['params'][{i}]"
    return ""


class _Sizes(NamedTuple):
    bad: float  # number of values that are inf or NaN
    near: float  # number of values not far below the largest
    largest: float  # magnitude
    least: float  # value


def _measured(values: Mapping[str, Tensor], beyond: float) -> dict[str, _Sizes]:
    """Return sizes by name, of floating tensors that are not empty. Reads the device once."""
    real = {
        n: t.detach()
        for n, t in values.items()
        if t.is_floating_point() and t.layout is torch.strided and t.numel()
    }
    if not real:
        return {}
    device = next(iter(real.values())).device
    sizes = [_sizes(t, beyond).to(device) for t in real.values()]
    return {n: _Sizes(*one) for n, one in zip(real, torch.stack(sizes).tolist(), strict=True)}


def _sizes(t: Tensor, beyond: float) -> Tensor:
    finite = t.isfinite()
    known = t.where(finite, 0.0)
    magnitudes = known.abs()
    largest = magnitudes.max()
    near = (magnitudes > largest.float() / beyond).sum()
    return torch.stack([x.float() for x in ((~finite).sum(), near, largest, known.min())])


def _largest(name: str, key: str, values: Tensor) -> Odd:
    """Return the value of the largest magnitude, or that is not finite."""
    magnitudes = values.detach().abs().nan_to_num(torch.inf, torch.inf).flatten()
    place = int(magnitudes.argmax())
    magnitudes[place] = 0.0
    return _at(name, key, values, place, float(magnitudes.max()))


def _unlike(halves: Mapping[str, tuple[Tensor, Tensor]]) -> list[Odd]:
    """Return half copies that are far above all masters, and are not their master's half value.

    Args:
        halves: half copy and master of each parameter, by name.
    """
    wrong = {
        n: _wrong_halves(half, master)
        for n, (half, master) in halves.items()
        if half.shape == master.shape and half.numel() and half.dtype.itemsize == 2
    }
    if not wrong:
        return []
    device = next(iter(wrong.values())).device
    has_any = torch.stack([flags.any().to(device) for flags in wrong.values()]).tolist()
    found = []
    for (name, flags), has in zip(wrong.items(), has_any, strict=True):
        if has:
            half, master = halves[name]
            place = int(flags.flatten().int().argmax())
            found.append(_at(name, "half", half, place, float(master.flatten()[place])))
    return found


def _wrong_halves(half: Tensor, master: Tensor) -> Tensor:
    due = master.to(half.device, half.dtype)  # from the host, if it is offloaded
    usual = due.abs().max().float().clamp(min=_SMALL)
    return (half != due) & due.isfinite() & ~(half.abs().float() <= _HALF_BEYOND * usual)


def _at(name: str, key: str, values: Tensor, place: int, others: float = 0.0) -> Odd:
    index = tuple(map(int, torch.unravel_index(torch.tensor(place), values.shape)))
    return Odd(name, key, index, float(values.detach()[index]), others)
