"""A small project whose tests run with some of the plugins of this folder."""

import os
import subprocess
import sys
from pathlib import Path


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a folder, with no plugins but those that its conftest.py or ``-p`` names."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    # with CI in the environment pytest's summary repeats whole messages
    left_out = "PYTEST", "CI", "BUILD_N"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
