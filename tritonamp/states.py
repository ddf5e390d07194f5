"""What ``Amp.state_dict`` holds, and the other formats that ``Amp.load_state_dict`` takes."""

from typing import Any, NamedTuple

from tritonamp.scaler import GradScaler


class AmpState(NamedTuple):
    """Scaler states by loss_id, counts of decisions by outcome, the policy's loss_scale, names of healed modules."""

    scalers: dict[int, dict[str, Any]]
    counts: tuple[int, int, int]
    loss_scale: str | float
    healed: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "loss_scalers": {str(loss_id): state for loss_id, state in self.scalers.items()},
            "counts": list(self.counts),
            "loss_scale": self.loss_scale,
            "healed": self.healed,
        }


def parse_state(state_dict: dict[str, Any]) -> AmpState:
    """From a dictionary of ``to_dict``, of a GradScaler, or of ``torch.amp.GradScaler``.

    Raises:
        ValueError: other keys, listed.
    """
    own = {"loss_scalers", "counts", "loss_scale"}
    scaler_keys = set(GradScaler("cpu").state_dict())
    all_keys = scaler_keys | {"_hysteresis_tracker", "_ceiling"}

    def is_scaler(state: Any) -> bool:
        return isinstance(state, dict) and scaler_keys <= set(state) <= all_keys

    if own <= set(state_dict) <= own | {"healed"} and all(map(is_scaler, state_dict["loss_scalers"].values())):
        scalers = {int(loss_id): state for loss_id, state in state_dict["loss_scalers"].items()}
        clean, overflow, fault = state_dict["counts"]
        healed = list(state_dict.get("healed", []))
        return AmpState(scalers, (clean, overflow, fault), state_dict["loss_scale"], healed)
    if is_scaler(state_dict):
        return AmpState({0: state_dict}, (0, 0, 0), "dynamic", [])
    raise ValueError(
        f"amp.load_state_dict: got the keys {sorted(map(str, state_dict))}; allowed are those of amp.state_dict() "
        f"({sorted(own)}) and of a GradScaler ({sorted(scaler_keys)})"
    )
