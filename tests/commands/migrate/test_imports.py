"""Imports and names that are rewritten: of apex, and those that torch deprecates."""

import pytest

from tritonamp.commands.migrate.command import convert

OLD = """\
import torch as th
from torch.cuda.amp import autocast, custom_fwd


def evaluate(model, x):
    with autocast(), th.no_grad():
        model(x)
    with autocast(False, cache_enabled=(False)):
        model(x)
    with autocast(  # half
        dtype=th.bfloat16, **options
    ):
        return model(x)


class Product(th.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x):
        return x

    @staticmethod
    @th.cuda.amp.custom_bwd
    def backward(ctx, x):
        return x
"""
TODAY = """\
import torch as th
from torch.amp import autocast, custom_fwd


def evaluate(model, x):
    with autocast("cuda"), th.no_grad():
        model(x)
    with autocast("cuda", enabled=False, cache_enabled=(False)):
        model(x)
    with autocast("cuda",   # half
        dtype=th.bfloat16, **options
    ):
        return model(x)


class Product(th.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return x

    @staticmethod
    @th.amp.custom_bwd(device_type="cuda")
    def backward(ctx, x):
        return x
"""


def test_deprecated_names_become_those_of_today() -> None:
    script = convert(OLD)
    assert script.after == TODAY
    assert not script.is_list and not script.notes
    assert all("deprecates" in change.reason for change in script.changes())
    assert not list(convert(script.after).changes())


def test_a_name_in_several_lines_is_renamed_with_its_call() -> None:
    script = convert("import torch\nx = torch.cuda.amp.\\\n    autocast(True)\n")
    assert script.after == 'import torch\nx = torch.amp.autocast("cuda", enabled=True)\n'


EVERY_IMPORT = {
    # how the name is imported, how it is called; what becomes of both
    ("import torch", "torch.cuda.amp.autocast(True)"): (
        "import torch",
        'torch.amp.autocast("cuda", enabled=True)',
    ),
    ("import torch.cuda.amp", "torch.cuda.amp.autocast()"): (
        "import torch.cuda.amp",
        'torch.amp.autocast("cuda")',
    ),
    ("from torch.cuda import amp", "amp.autocast()"): (
        "from torch import amp",
        'amp.autocast("cuda")',
    ),
    ("import torch.cuda.amp as amp", "amp.autocast()"): (
        "import torch.amp as amp",
        'amp.autocast("cuda")',
    ),
    ("from torch.cuda.amp import autocast as cast", "cast()"): (
        "from torch.amp import autocast as cast",
        'cast("cuda")',
    ),
    ("from torch.cuda.amp.autocast_mode import autocast", "autocast()"): (
        "from torch.amp import autocast",
        'autocast("cuda")',
    ),
    ("from torch.cpu.amp import autocast", "autocast(True, half)"): (
        "from torch.amp import autocast",
        'autocast("cpu", enabled=True, dtype=half)',
    ),
    ("from torch.amp import autocast", 'autocast("cuda")'): None,
    ("from torch import autocast", 'autocast("cuda")'): None,
}


@pytest.mark.parametrize(("imported", "called"), EVERY_IMPORT)
def test_every_way_to_import_a_deprecated_name(imported: str, called: str) -> None:
    text = f"{imported}\nwith {called}:\n    pass\n"
    expected = EVERY_IMPORT[imported, called]
    after = text if expected is None else "{}\nwith {}:\n    pass\n".format(*expected)
    assert convert(text).after == after
    assert not convert(text).notes


def test_a_name_with_two_meanings_stays() -> None:
    text = (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n"
        "    from contextlib import nullcontext as autocast\nwith autocast():\n    pass\n"
    )
    assert convert(text).after == text


IMPORTS = {
    "import apex": "import tritonamp.apex as apex",
    "import apex.amp": "import tritonamp.apex as apex",
    "import os, apex": "import os\nimport tritonamp.apex as apex",
    "import amp_C": "import tritonamp.apex.amp_C as amp_C",
    "import apex.parallel as p": "import tritonamp.apex.parallel as p",
    "from apex import amp, optimizers": "from tritonamp.apex import amp, optimizers",
    "from apex.amp import initialize as i": "from tritonamp.apex.amp import initialize as i",
    "from apex.optimizers import (\n    FusedAdam,  # Adam\n)": (
        "from tritonamp.apex.optimizers import (\n    FusedAdam,  # Adam\n)"
    ),
    "from apex.fp16_utils import *": "from tritonamp.apex.fp16_utils import *",
    "from apex.normalization.fused_layer_norm import FusedLayerNorm": (
        "from tritonamp.apex.normalization.fused_layer_norm import FusedLayerNorm"
    ),
    "if True:\n    import apex; x = 1": "if True:\n    import tritonamp.apex as apex; x = 1",
    "from .apex import amp": None,
    "import apexes": None,
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports_of_apex_are_all_that_to_apex_changes(text: str) -> None:
    conversion = convert(f"{text}\n", "apex")
    assert not conversion.notes
    assert conversion.after == f"{IMPORTS[text] or text}\n"
    assert bool([*conversion.changes()]) == (IMPORTS[text] is not None)
    exec(conversion.after) if IMPORTS[text] else None


def test_what_comes_with_initialize_is_not_looked_for() -> None:
    text = "from apex import amp\namp._amp_state.of_later[0]._loss_scale = 2**20\n"
    assert convert(text, "apex").after == text.replace("from apex", "from tritonamp.apex")
    assert (
        "`apex.amp.nothing.of_later` is not"
        in (min(convert(text.replace("_amp_state", "nothing"), "apex").notes)[1])
    )


def test_to_apex_leaves_torchs_amp_alone() -> None:
    text = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
    assert convert(text, "apex").after == text
