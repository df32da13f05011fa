"""Makes the test tools that tests share importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("unit", "e2e"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
