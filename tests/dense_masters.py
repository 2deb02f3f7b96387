"""`MasterWeights` of benchmarks/, which are scripts: their folder is put on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from masters import MasterWeights

__all__ = ["MasterWeights"]
