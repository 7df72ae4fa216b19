"""`python -m lowering FILE`: restart the stages from a dumped file (what a `repro.sh` calls)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lowering.errors import NpuIreeError
from lowering.pipeline import restart
from lowering.stages import CompileOptions


def main() -> int:
    """Run the stages after the one that wrote FILE; exit code 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m lowering", description=main.__doc__)
    parser.add_argument("file", type=Path, help="a dump that ends in .torch.mlir or .linalg.mlir")
    parser.add_argument("--parameters", type=int, default=0, help="last arguments that are bound")
    parser.add_argument("--flag", action="append", default=[], help="an iree-compile flag")
    parser.add_argument("--out", type=Path, default=Path("restarted"), help="folder for products")
    args = parser.parse_args()
    options = CompileOptions(flags=tuple(args.flag), parameters=args.parameters)
    try:
        sys.stdout.write(f"{restart(args.file, options, args.out)}\n")
    except (NpuIreeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
