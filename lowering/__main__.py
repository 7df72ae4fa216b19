"""`python -m lowering FILE`: restart the stages from a dumped file (what a `repro.sh` calls)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from lowering.errors import NpuIreeError
from lowering.pipeline import OPTIONS_FILE, restart
from lowering.stages import CompileOptions


def main() -> int:
    """Run the stages after the one that wrote FILE; exit code 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m lowering", description=main.__doc__)
    parser.add_argument(
        "file", type=Path, help="a dump that ends in .torch.mlir, .linalg.mlir or .flow.mlir"
    )
    parser.add_argument("--flag", action="append", default=[], help="one more iree-compile flag")
    parser.add_argument("--out", type=Path, default=Path("restarted"), help="folder for products")
    args = parser.parse_args()
    try:
        options = _options(args.file.parent / OPTIONS_FILE)
        options = replace(options, flags=(*options.flags, *args.flag))
        sys.stdout.write(f"{restart(args.file, options, args.out)}\n")
    except (NpuIreeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _options(path: Path) -> CompileOptions:
    """Read the options that were dumped beside FILE; without them, there are none."""
    if not path.exists():
        return CompileOptions()
    try:
        return CompileOptions.from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no compile options: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
