"""Whose code a frame runs, by its file and by the registration of our functions."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import tritonamp
from tritonamp import kernels
from tritonamp.casts.enabled_module import enabled_forward
from tritonamp.diagnosis.replay.search import find_fault
from tritonamp.watched.frames import Role, outwards, plays, role_of

OURS = Path(tritonamp.__file__).parent
SITE = os.path.join(os.path.dirname(json.__file__), os.pardir, "site-packages", "other", "code.py")


def of_file(file: str | Path) -> Role:
    return role_of(compile("pass", str(file), "exec"))


@pytest.mark.parametrize("package", [OURS, Path(kernels.__file__).parent], ids=lambda p: p.name)
def test_every_file_of_ours_is_a_library_but_the_demo(package: Path) -> None:
    for file in package.rglob("*.py"):
        demo = OURS / "demo" in file.parents
        assert of_file(file) is (Role.USER if demo else Role.LIBRARY), file


@pytest.mark.parametrize(
    ("file", "role"),
    [
        (torch.nn.modules.linear.__file__, Role.LIBRARY),
        (json.__file__, Role.LIBRARY),
        ("<frozen importlib._bootstrap>", Role.LIBRARY),
        ("<eval_with_key>.0", Role.LIBRARY),
        (os.path.normpath(SITE), Role.USER),
        (__file__, Role.USER),
        (f"{OURS}_of_mine/code.py", Role.USER),
        ("<stdin>", Role.USER),
        ("<ipython-input-1-abc>", Role.USER),
    ],
)
def test_files_of_others(file: str, role: Role) -> None:
    assert of_file(file) is role


def test_functions_that_mean_something() -> None:
    assert role_of(enabled_forward.__code__) is Role.EDGE
    assert role_of(find_fault.__code__) is Role.RUN


@plays(Role.RULE)
def stands_for_a_rule() -> list[Role]:
    return [role for _, role in outwards(sys._getframe())]


def test_from_inside_to_outside() -> None:
    assert stands_for_a_rule()[:2] == [Role.RULE, Role.USER]
