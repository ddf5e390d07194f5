"""Spectators of an enabled model's forwards."""

from typing import Any


class Spectator:
    """Hears of each forward of an enabled model. This one does nothing.

    A spectator must not change the arguments or the output.
    """

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> Any:
        """Note that a forward begins, which runs eagerly.

        Args:
            model: the enabled model.
            args: positional arguments of the caller.
            kwargs: keyword arguments of the caller.
            method: name of the called method, "__call__" for the forward itself.

        Returns:
            a value for ``after`` or ``failed``. None: the end need not be reported.
        """
        return None

    def after(self, noted: Any, output: Any) -> None:
        """Note that the forward returned ``output``. ``noted`` is the result of ``before``."""

    def failed(self, noted: Any) -> None:
        """Note that the forward raised. ``noted`` is the result of ``before``."""

    def traced(self) -> None:
        """Note that torch.compile traces a forward."""
