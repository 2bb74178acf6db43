#!/usr/bin/env python3
"""Summarize a pytest run on a GPU for ``benchmark/results``: counts, failures and every version on the path.

Usage: python -m pytest ... --junitxml=run.xml; device_summary.py run.xml --out kernel_unit.json
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from sglang_w4afp8.bench.measure import run_metadata, write_json


def main() -> int:
    """Write the summary; returns 1 when the run was red or empty."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("junit", type=Path, help="pytest's --junitxml file")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    options = parser.parse_args()
    cases = list(ElementTree.parse(options.junit).iter("testcase"))
    files: dict[str, dict[str, int]] = {}
    failed = []
    for case in cases:
        outcome = "passed"
        for tag in ("failure", "error", "skipped"):
            if case.find(tag) is not None:
                outcome = "skipped" if tag == "skipped" else "failed"
        counts = files.setdefault(case.get("classname", ""), {"passed": 0, "failed": 0, "skipped": 0})
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    write_json(options.out, {"meta": run_metadata(), "files": files, "failed": failed})
    return 1 if failed or not any(counts["passed"] for counts in files.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
