"""Tiny models of every family are beside the tests of `mlxlm`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "mlxlm"))
