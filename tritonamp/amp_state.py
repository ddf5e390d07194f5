"""The content of ``Amp.state_dict``, and the other formats that ``Amp.load_state_dict`` takes."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tritonamp.kernels._decision import COUNTS
from tritonamp.kernels.outliers import WINDOW
from tritonamp.policy import STATES
from tritonamp.scaler import GradScaler

_OWN = {"loss_scalers", "counts", "loss_scale"}
_COUNTED_LATER = {"outliers", "vetoes", "huge_gradients"}  # not in older states
_SCALER = set(GradScaler("cpu").state_dict())
_SCALER_SINCE = {"_hysteresis_tracker", "_ceiling"}  # not in those of torch
_APEX = re.compile(r"loss_scaler(\d+)")
_EMPTY = ": an empty state is that of a GradScaler with enabled=False, leave it out"


class ResumeState(NamedTuple):
    """The state that a resume needs in addition to the states of models and optimizers.

    Attributes:
        scalers: states of scalers by loss_id; None: the scalers stay as they are.
        counts: number of decisions with each outcome of ``COUNTS``.
        loss_scale: ``Policy.loss_scale``.
        healed: names of healed modules that compute in FP32.
        faults: counts of ``Response``. Its entry "last_good" holds the gradient statistics of the
            last good step, by which the cause of a fault is found.
        schedulers: outstanding steps of schedulers, by number of the optimizer.
        outliers: windows of losses and norms, by loss_id.
        state: format of optimizer state in the run that saved. Only people read it, because any
            format loads.
        healed_results: names of healed modules with FP32 results.
    """

    scalers: dict[int, dict[str, Any]] | None
    counts: dict[str, int]
    loss_scale: str | float
    healed: Sequence[str] = ()
    faults: Mapping[str, Any] = {}
    schedulers: Sequence[dict[str, Any]] = ()
    outliers: Mapping[str, list[float]] = {}
    state: str = STATES[0]
    healed_results: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which ``parse_state`` takes."""
        fields = self._asdict()
        scalers = fields.pop("scalers") or {}
        return {"loss_scalers": {str(i): state for i, state in scalers.items()}, **fields}


# a state that is written by hand may lack these
_EXTRA = set(ResumeState._field_defaults)


def parse_state(state_dict: Any, loss_scale: str | float, scaler: GradScaler) -> ResumeState:
    """Read a state of ``to_dict``, of a GradScaler (torch's, too), or of ``apex.amp``.

    Args:
        state_dict: the state.
        loss_scale: ``Policy.loss_scale`` of the run that loads.
        scaler: scaler whose settings fill in the numbers that apex does not save.

    Raises:
        ValueError: the state has other keys (listed), numbers that no scaler has, or windows of
            outliers of another length.
    """
    state = _parse(state_dict, loss_scale, scaler)
    for loss_id, scaler_state in (state.scalers or {}).items():
        scale = scaler_state["scale"]
        if not (isinstance(scale, (int, float)) and math.isfinite(scale)):
            raise ValueError(
                f"amp.load_state_dict: expected finite scales, got {scale!r} for loss_id {loss_id}"
            )
    for of_loss, window in state.outliers.items():
        if not isinstance(window, (list, tuple)) or len(window) != WINDOW:
            got = len(window) if isinstance(window, (list, tuple)) else type(window).__name__
            raise ValueError(
                f"amp.load_state_dict: expected {WINDOW} numbers in a window of outliers, got "
                f"{got} for loss_id {of_loss}: leave 'outliers' out, and they are counted again"
            )
    # a fixed scale stays, and a dynamic one does not begin at a fixed one
    return state if state.loss_scale == loss_scale else state._replace(scalers=None)


def _parse(state_dict: Any, loss_scale: str | float, scaler: GradScaler) -> ResumeState:
    keys = set(state_dict) if isinstance(state_dict, dict) else set()
    if _OWN <= keys <= _OWN | _EXTRA and all(
        map(_is_scaler_state, state_dict["loss_scalers"].values())
    ):
        scalers = {int(i): state for i, state in state_dict["loss_scalers"].items()}
        # copies of the plain types, because nothing may raise once a part is loaded
        extra = {
            name: type(default)(state_dict[name])
            for name, default in ResumeState._field_defaults.items()
            if state_dict.get(name)
        }
        return ResumeState(
            scalers, _checked_counts(state_dict["counts"]), state_dict["loss_scale"], **extra
        )
    if _is_scaler_state(state_dict):
        scalers = {0: state_dict}
    elif keys and all(map(_is_apex_item, state_dict.items())):
        scalers = {
            int(key.removeprefix("loss_scaler")): _from_apex(state, scaler)
            for key, state in state_dict.items()
        }
    else:
        is_dict = isinstance(state_dict, dict)
        got = f"the keys {_listed(keys)}" if is_dict else type(state_dict).__name__
        raise ValueError(
            f"amp.load_state_dict: expected the keys of amp.state_dict() ({sorted(_OWN)}), of a "
            f"GradScaler ({sorted(_SCALER)}) or of apex.amp (loss_scaler0, ...), got {got}"
            + (_EMPTY if state_dict == {} else "")
        )
    # these formats do not say whether the scale was fixed: one that is as ours may have been
    same = all(state["scale"] == loss_scale for state in scalers.values())
    none = dict.fromkeys(COUNTS, 0)
    return ResumeState(scalers, none, loss_scale if same else "dynamic")


def _checked_counts(counts: Any) -> dict[str, int]:
    """Return counts by name; raise ValueError if the names differ from ``COUNTS``."""
    if not isinstance(counts, dict) or set(counts) | _COUNTED_LATER != set(COUNTS):
        raise ValueError(f"amp.load_state_dict: expected counts of {list(COUNTS)}, got {counts!r}")
    return {name: counts.get(name, 0) for name in COUNTS}


def _is_scaler_state(state: Any) -> bool:
    return isinstance(state, dict) and _SCALER <= set(state) <= _SCALER | _SCALER_SINCE


def _is_apex_item(item: tuple[Any, Any]) -> bool:
    key, state = item
    named = isinstance(key, str) and _APEX.fullmatch(key) is not None
    return named and isinstance(state, dict) and set(state) == {"loss_scale", "unskipped"}


def _from_apex(state: dict[str, Any], scaler: GradScaler) -> dict[str, Any]:
    return {
        **scaler.state_dict(),
        "scale": float(state["loss_scale"]),
        "_growth_tracker": int(state["unskipped"]),
    }


def _listed(keys: set[Any]) -> str:
    names = sorted(map(str, keys))
    return f"{names[:20]}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
