"""Where forecasts are printed."""

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests look for words of a report, which a narrow terminal would break."""
    monkeypatch.setenv("COLUMNS", "120")
