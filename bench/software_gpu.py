"""Import this before torch, because the GPU in software needs two functions of a driver."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from gpuless import driver

driver.load()
