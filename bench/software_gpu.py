"""Import this before torch: the GPU in software needs two functions of a driver (tests/gpuless)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from gpuless import driver

driver.load()
