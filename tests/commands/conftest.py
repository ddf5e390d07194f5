"""Where commands print."""

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests look for words of an output, which a narrow terminal would break."""
    monkeypatch.setenv("COLUMNS", "200")
