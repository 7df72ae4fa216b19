"""Exit codes of the command line, by kind of failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npu_iree.cli.outputs import keeping_stdout, write_json
from npu_iree.errors import (
    ArgumentError,
    ArtifactError,
    CapabilityError,
    DeviceError,
    ExportError,
    FlagError,
    NpuIreeError,
    OptionError,
    SourceError,
    StageError,
    TargetError,
    UnsupportedOpError,
    VerificationError,
    VersionError,
)

# kind of failure -> exit code; 2 is also what a wrong command line ends with.
EXIT_CODES: dict[type[NpuIreeError], int] = {
    OptionError: 2,
    FlagError: 2,
    UnsupportedOpError: 3,
    StageError: 4,
    ArtifactError: 5,
    TargetError: 6,
    CapabilityError: 6,
    SourceError: 7,
    ExportError: 7,
    VerificationError: 8,
    ArgumentError: 9,
    DeviceError: 10,
    VersionError: 11,
}
HELP = (
    "Exit codes: 0 done; 1 another error; 2 wrong command line or option; 3 ops that the target "
    "cannot run; 4 the compiler refused; 5 an artifact or parameter file is unusable; 6 wrong "
    "target or machine; 7 the source cannot be read or exported; 8 other numbers than eager's; "
    "9 wrong inputs; 10 the device failed; 11 other versions than the verified ones."
)

# What is told in a line: errors of ours, and the system's, e.g. of a path that is too long.
TOLD = (NpuIreeError, OSError)


def exit_code(error: Exception) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def as_json(error: Exception) -> dict[str, object]:
    """Describe an error as plain data."""
    found: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, UnsupportedOpError):
        found["ops"] = [
            {"op": o.op, "reason": o.reason, "where": o.where, "code": o.code} for o in error.ops
        ]
    return found


@contextlib.contextmanager
def telling_errors(*, as_json_: bool) -> Iterator[None]:
    """With `--json`, print an error of ours as JSON, and end with its exit code.

    Standard output is for the JSON alone then.
    """
    try:
        with keeping_stdout(is_data=as_json_):
            yield
    except TOLD as error:
        if not as_json_:
            raise
        write_json(as_json(error))
        raise SystemExit(exit_code(error)) from error
