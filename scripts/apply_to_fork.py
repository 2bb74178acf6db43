#!/usr/bin/env python3
"""``sglang-w4afp8 fork`` of this checkout, installed or not.

python scripts/apply_to_fork.py TREE [--check | --diff | --revert]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from sglang_w4afp8.fork.cli import main

if __name__ == "__main__":
    sys.exit(main())
