"""`make crash` and its short version here share their code, and tests what they sample."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # for `import chaos`
sys.path.insert(0, str(Path(__file__).parent))  # for `import sampling`
