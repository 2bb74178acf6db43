#!/usr/bin/env python3
"""Summarize a pytest run on a GPU for ``benchmark/results``: counts, failures and every version on the path.

Usage: python -m pytest ... --junitxml=run.xml; device_summary.py run.xml --out kernel_unit.json
       compute-sanitizer --log-file memcheck.log python -m pytest ... --junitxml=memcheck.xml
       device_summary.py memcheck.xml --log memcheck.log --out sanitize_memcheck.json
"""

import argparse
import re
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
    parser.add_argument("--log", type=Path, help="compute-sanitizer's log of the run: its last line is the verdict")
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
    content = {"meta": run_metadata(), "files": files, "failed": failed}
    clean = True
    if options.log:
        verdict = options.log.read_text(encoding="utf-8").strip().splitlines()[-1].strip("= ")
        clean = re.search(r": 0 (errors|hazards)", verdict) is not None
        content["sanitizer"] = verdict
    write_json(options.out, content)
    return 0 if clean and not failed and any(counts["passed"] for counts in files.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
