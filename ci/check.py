"""The one check command, for people and CI alike: format, lint, types, tests.

python ci/check.py            everything
python ci/check.py types      one step
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "tests": ["pytest", "-m", "not sweep", "--durations=25"],
    # A process that knows "npu" before its first backward.
    "device": ["pytest", "-m", "not sweep", "tests/device"],
}


def main(names: list[str]) -> int:
    """Run the steps that were asked for, all of them even if one fails; exit code 1 if one did."""
    if unknown := set(names) - set(STEPS):
        print(f"no step {', '.join(sorted(unknown))}; there are: {', '.join(STEPS)}")
        return 2
    failed = []
    for name in names or STEPS:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *STEPS[name]], cwd=ROOT).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
