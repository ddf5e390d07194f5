"""Windows and macOS, of which no machine is at hand: what they lack, and what they do otherwise."""

import ast
from pathlib import Path

from fresh_python import FreshPython

import tritonamp

PACKAGE = Path(tritonamp.__file__).parent
ABSENT = """
import os, sys
for name in ("fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "triton"):
    sys.modules[name] = None
for name in ("fork", "getuid", "geteuid", "killpg", "setsid", "mkfifo", "O_DIRECTORY", "uname"):
    delattr(os, name)
os.supports_dir_fd = set()
"""
RUN = """
import torch, tritonamp
from tritonamp.commands import doctor

def trained(level, path=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with tritonamp.enable(model, optimizer, level=level) as amp:
        states = dict(model=model, optimizer=optimizer, amp=amp, rng=tritonamp.RNGState())
        for step in range(3):
            if path and step == 2:
                tritonamp.load(path, **states)
            amp.backward(model(torch.ones(2, 8)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            if path is None and step == 1:
                tritonamp.save("run.pt", **states)
                tritonamp.save_sharded("run", **states)
        assert amp.stats()["backend"] == "eager"
        return [p.detach().clone() for p in amp.master_params()]

for level in "O1", "O2":
    expected = trained(level)
    for found in trained(level), trained(level, "run.pt"):
        assert all(map(torch.equal, found, expected))
assert "eager torch" in doctor._backend(torch.device("cpu"))
"""


def test_training_on_a_cpu(fresh_python: FreshPython, tmp_path: Path) -> None:
    """With a save, a resume and a report of the machine."""
    done = fresh_python.run(ABSENT + RUN, tmp_path)
    assert done.returncode == 0, done.stderr


def test_texts_have_an_encoding() -> None:
    """Windows would write names of modules in that of its language, and fail on others."""
    without = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            positional = {"read_text": 1, "write_text": 2}.get(name)
            if positional and len(node.args) < positional and not node.keywords:
                without.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert without == []
