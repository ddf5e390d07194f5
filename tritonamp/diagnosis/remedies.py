"""Remedies for a fault. Each is tried on the batch that showed the fault before it is advised."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from tritonamp.casts.healing import Healing
from tritonamp.diagnosis.replay import FaultReport, Remedy
from tritonamp.diagnosis.replay.costs import cost_in_words
from tritonamp.diagnosis.replay.edits import edits_for
from tritonamp.diagnosis.replay.faults import BFLOAT16, WHOLE, listed
from tritonamp.diagnosis.replay.user_calls import Patch
from tritonamp.diagnosis.replay.verdicts import GOOD_SCALE
from tritonamp.policy import HALF_DTYPES
from tritonamp.watched.products import Products

MOST_MODULES = 4  # in FP32 together
MOST_EDITS = 2  # that are advised
MOST_RUNS = 6  # of edits
NOT_OF_CODE = frozenset("data parameters propagated own_backward".split())
"""Kinds of faults that neither an edit of the model nor another precision cures."""


Faulty = Mapping[str | None, bool]
"""Full names of faulty modules, None outside of modules; whether FP32 results may cure each."""


def find_remedy(wrong: Faulty, again: Callable[[Remedy], Faulty], most: int) -> Remedy:
    """Find a remedy under which the batch is finite, in tiers.

    First the faulty modules get FP32 results, where that may help, then they compute in FP32, and
    then everything computes in bfloat16. Where nothing helps, the result's ``helps`` is False.

    Args:
        wrong: the faulty modules.
        again: function that runs the batch under a remedy and returns the modules that are still
            faulty.
        most: number of runs with further modules. A fault may move on from module to module.
    """
    tried, runs = Remedy(), 0
    while runs < most:
        new = {n: helps for n, helps in wrong.items() if n is not None and n not in tried.in_tiers}
        if None in wrong:  # in full FP32 the fault may stay inside
            wider, new = [*tried.results], {}
        else:
            wider = [name for name in wrong if name in tried.results]
        if not new and not wider:
            break
        runs += bool(new)
        wider += [name for name, helps in new.items() if not helps]
        results = [n for n in tried.results if n not in wider]
        results += [name for name, helps in new.items() if helps]
        modules = *tried.modules, *wider
        # products of a module in FP32 have FP32 results already
        results = [name for name in results if not is_inside(name, modules)]
        tried = Remedy(modules, results=tuple(results))
        wrong = again(tried)
        if not wrong:
            return tried
    return Remedy(bfloat16=not again(Remedy(bfloat16=True)))


def is_inside(name: str, names: Iterable[str]) -> bool:
    """Return whether one of the names is that of a module, or of a module around it."""
    return any(f"{name}.".startswith(f"{outer}.") or not outer for outer in names)


def remedy_of(
    fault: FaultReport, search: Callable[..., FaultReport | None], healing: Healing
) -> Remedy | None:
    """Try remedies on the batch of a fault, one at a time; None: nothing can be tried.

    Edits of the user's code come first, then FP32 results of a few modules, FP32 for them, for the
    whole model, and bfloat16.

    Args:
        fault: fault of the batch.
        search: function that runs the batch again, and returns the fault of that run. Its keywords
            are ``around``, a block around the run, and ``patch``, an edit.
        healing: blocks that compute in another precision.
    """
    if fault.kind == "data":
        return _of_data(fault, search)
    is_scale = fault.kind == "scale_too_high" and (fault.fits or 0.0) >= GOOD_SCALE
    if fault.kind in NOT_OF_CODE or is_scale:
        return None
    tried = _Trials(search, fault)
    for patch in edits_for(fault):
        if len(tried.passed) < MOST_EDITS and len(tried.passed) + len(tried.vain) < MOST_RUNS:
            tried.edit(patch)
    if fault.event.softmax is not None and healing.policy.softmax_dtype is None:
        tried.block("set softmax_dtype=torch.float32", healing.in_fp32_softmax())
    if fault.kind == "cast_overflow" and not fault.event.place.file:
        tried.uncast(healing)
    found = tried.precision(fault, healing) if healing.decides else Remedy()
    is_overflow = fault.event.overflowed and fault.event.phase == "forward"
    too_large = is_overflow and any(found.in_tiers)
    if not found.helps:
        tried.add_moves()
    return found._replace(edits=tuple(tried.passed), vain=tuple(tried.vain), too_large=too_large)


class _Trials:
    """Runs of a batch, each under one remedy.

    Attributes:
        passed: words of the remedies that passed.
        vain: words of the others.
    """

    def __init__(self, search: Callable[..., FaultReport | None], fault: FaultReport) -> None:
        self._search = search
        self._fault = fault
        self._moves: list[str] = []  # edits after which another line has the fault
        self.passed: list[str] = []
        self.vain: list[str] = []
        self._forms: set[str] = set()  # of edits that passed
        self._products = Products()  # of the last run with modules in another precision

    def edit(self, patch: Patch) -> None:
        """Run the batch with one edit, unless an edit of the same form has passed.

        An edit that cannot run counts as not tried.
        """
        if patch.form and patch.form in self._forms:
            return
        try:
            left = self._search(patch=patch)
        except Exception:  # the call cannot be changed like that
            return
        if not patch.used:
            return
        if left is None or _passes(left):
            self._forms.add(patch.form)
            self.passed.append(patch.words)
        elif left.event.place == self._fault.event.place:
            self.vain.append(patch.words)
        else:
            then = f"(tried: it helps here; {left.title} follows in {left.event.place})"
            self._moves.append(f"{patch.words} {then}")

    def add_moves(self) -> None:
        """Where nothing passes, advise the first edit that only moves the fault."""
        if self._moves and not self.passed:
            self.passed.append(self._moves[0])

    def block(self, words: str, around: AbstractContextManager[None], keep: bool = True) -> bool:
        """Return whether the batch passes inside a block; ``keep`` adds it to ``passed``."""
        try:
            passes = _passes(self._search(around=around))
        except Exception:  # there may be no memory for it
            return False
        if not passes:
            self.vain.append(words)
        elif keep:
            self.passed.append(words)
        return passes

    def uncast(self, healing: Healing) -> None:
        """Run the batch without the cast of inputs, and with modules that then fail in FP32."""

        def again(tried: Remedy) -> Faulty:
            if tried.bfloat16:
                return {None: False}
            left = self._search(around=healing.with_inputs_uncast(tried.modules))
            return {} if left is None or _passes(left) else {left.module: False}

        try:
            wrong = again(Remedy())
            modules = find_remedy(wrong, again, MOST_MODULES).modules
        except Exception:  # half weights cannot take FP32 inputs
            return
        if modules or not wrong:
            also = f" and fp32_modules={list(modules)}" if modules else ""
            self.passed.append(f"set cast_inputs=False{also}")

    def precision(self, fault: FaultReport, healing: Healing) -> Remedy:
        """Run the batch in other precisions; the result is empty if there is no memory for it."""
        again, found = self.again(healing), Remedy()
        with contextlib.suppress(Exception):
            if fault.module is not None or not self.passed:
                found = find_remedy(_faulty(fault, healing), again, MOST_MODULES)
                found = found._replace(costs=self._costs(found, healing, fault.has_backward))
        if not found.in_tiers:  # also if code refuses FP32 results, and FP32 of a single module
            found = found._replace(fp32=self.block(WHOLE, healing.in_fp32(), keep=False))
        return found

    def again(self, healing: Healing) -> Callable[[Remedy], Faulty]:
        """Return a function that runs the batch under a remedy, and names the faulty modules."""

        def run(tried: Remedy) -> Faulty:
            if tried.bfloat16:
                if healing.policy.dtype is torch.bfloat16:
                    return {None: False}
                passes = self.block(BFLOAT16, healing.in_bfloat16(), keep=False)
                return {} if passes else {None: False}
            try:
                self._products = Products()
                around = healing.in_fp32(tried.modules, tried.results)
                left = self._search(around=around, products=self._products)
            except Exception:
                if not tried.results:
                    raise
                return dict.fromkeys(tried.results, False)  # code that refuses FP32 results
            # of the growing lists of modules, only the last one counts
            lists = ("fp32_modules", "fp32_results")
            self.vain = [words for words in self.vain if not words.startswith(lists)]
            if left is None or (_passes(left) and not (tried.results and needs_low_scale(left))):
                return {}
            if "" not in tried.modules:  # the whole model in FP32 is a trial of its own
                self.vain.append(tried.fields)
            # a gradient is cast for the module that made the input, so that one joins the trial
            if needs_low_scale(left) and tried.results:  # half gradients, which FP32 widens
                return dict.fromkeys(tried.results, False)
            maker = left.event.maker
            name = None if maker is None else maker.module
            made_in: Faulty = {name: False} if name and name not in tried.results else {}
            return {**_faulty(left, healing), **made_in}

        return run

    def _costs(self, found: Remedy, healing: Healing, trains: bool) -> str:
        """Return the cost of a remedy that has passed, in words."""
        half = (p for p in healing.parameters(found.modules) if p.dtype in HALF_DTYPES)
        # the weight, and its gradient
        sizes = [(4 if trains and p.requires_grad else 2) * p.numel() for p in half]
        return cost_in_words(self._products, found.results, found.modules, sum(sizes))


def _faulty(fault: FaultReport, healing: Healing) -> Faulty:
    """Return the module of a fault, and whether FP32 results of its products may cure it."""
    is_named = bool(fault.module) and fault.module not in healing.with_results
    return {fault.module: is_named and fault.event.is_product and healing.policy.op_policy}


def _passes(left: FaultReport | None) -> bool:
    """Return whether a run passes. A scale that is too high does, because it adapts by itself."""
    return left is None or left.kind == "scale_too_high" or left.harmless


def needs_low_scale(left: FaultReport | None) -> bool:
    """Return whether gradients of a run overflow at every loss scale that is good enough."""
    kinds = ("scale_too_high", "gradient_overflow")
    return left is not None and left.kind in kinds and (left.fits or 0.0) < GOOD_SCALE


def _of_data(fault: FaultReport, search: Callable[..., FaultReport | None]) -> Remedy | None:
    """Try whether the batch passes with zeros in place of its inf and NaN."""
    tensor = fault.event.tensor
    if tensor is None:
        return None
    samples = fault.event.samples
    repair = f"drop or repair samples {listed(samples)} of dim 0" if samples else "repair it"
    words = f"{repair} before the model, for example x.nan_to_num(0, 0, 0)"
    try:
        left = search(around=_repaired(tensor))
    except Exception:  # no memory for it, or memory that must not be written
        return None
    if _passes(left):
        run = "batch" if fault.has_backward else "forward"
        return Remedy(edits=(f"{words} (tried: with zeros in their place the {run} passes)",))
    if left is not None and left.kind == "data" and left.event.tensor is not tensor:
        return None  # the run makes its batch itself
    return Remedy(vain=(words,))


@contextlib.contextmanager
def _repaired(tensor: Tensor) -> Iterator[None]:
    """Put zeros in place of inf and NaN inside the block."""
    values = tensor.detach().clone()
    # the batch of a recorded forward runs again only if it was not written to
    with torch.no_grad(), preserve_versions((tensor,)):
        tensor.detach().nan_to_num_(0.0, 0.0, 0.0)
    try:
        yield
    finally:
        with torch.no_grad(), preserve_versions((tensor,)):
            tensor.detach().copy_(values)
