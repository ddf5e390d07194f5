"""The page of the public names holds all of them, as signatures and docstrings say today."""

import re
from pathlib import Path

import api_page
import pytest
import torch

import tritonamp
import tritonamp.testing
from tritonamp import functional, optim


def test_the_page_is_what_the_command_writes() -> None:
    """After a change of a signature or docstring: python bench/api_page.py --write."""
    assert api_page.PAGE.read_text() == api_page.page()


@pytest.mark.parametrize("module", [tritonamp, functional, optim])
def test_every_public_name_is_on_the_page(module) -> None:
    page = api_page.PAGE.read_text()
    modules = {"functional", "optim"}
    names = set(module.__all__) - modules
    assert len(names) >= 5
    missing = [name for name in names if not re.search(rf"`{name}[(`:]", page)]
    assert missing == []


@pytest.mark.parametrize(
    "owner", [tritonamp.Amp, tritonamp.Policy, tritonamp.Forecast, tritonamp.GradScaler]
)
def test_every_method_and_field_is_on_the_page(owner) -> None:
    part = re.split(r"^##+ ", api_page.PAGE.read_text(), flags=re.MULTILINE)
    lines = next(text for text in part if text.startswith(f"{owner.__name__}\n"))
    names = {name for name in dir(owner) if not name.startswith("_")}
    if owner is tritonamp.GradScaler:  # the step calls its other methods
        names = {"scale", "unscale_", "step", "update", "state_dict", "load_state_dict"}
    names -= api_page.INTERNAL
    assert len(names) >= 3
    assert [name for name in names if not re.search(rf"^- `{name}[(:`]", lines, re.M)] == []


def test_a_line_has_types_and_one_sentence() -> None:
    lines = [line for line in api_page.lines_of("Amp") if line.startswith("- `veto")]
    assert lines == [
        "- `veto(flag: bool | Tensor) -> None`: Skip the step that the pending losses lead to, if "
        "`flag` is True."
    ]
    assert any("state: str = 'fp32'" in line for line in api_page.lines_of("optim.AdamW"))
    assert "Iterator" not in "".join(api_page.lines_of("disable_casts"))  # but its context manager


def test_an_optimizer_that_was_built_adds_no_line() -> None:
    """torch puts a wrapped ``step`` onto the class of an optimizer's first instance."""
    optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert "step" in vars(optim.AdamW)
    assert sum(line.startswith("- `step(") for line in api_page.lines_of("optim.AdamW")) == 1


def test_an_entry_of_several_attributes_has_a_line() -> None:
    lines = list(api_page.lines_of("functional.LinearHead"))
    assert "- `weight, bias`: the arguments in `operand`." in lines


@pytest.mark.parametrize("module", [tritonamp, functional])
def test_dir_shows_public_names_alone(module) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))


def test_integrations_are_on_the_page() -> None:
    """From their source, because their libraries may not be installed."""
    folder = Path(tritonamp.__file__).parent / "integrations"
    definition = re.compile(r"^(?:def|class) (enable|MixedPrecision)\b", re.MULTILINE)
    found = [
        f"{p.stem}.{name}"
        for p in folder.glob("*.py")
        for name in definition.findall(p.read_text())
    ]
    assert len(found) >= 4
    page = api_page.PAGE.read_text()
    assert [name for name in found if f"- `{name}(" not in page] == []
    assert "*, fused_loss: bool = True, **settings: Any) -> None`: Make `trainer.train`" in page
