"""What the stages are doing, on standard error while they do it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lowering.errors import first_line

Tell = Callable[[str], None]
err_console = Console(stderr=True)


@contextlib.contextmanager
def stage_progress() -> Iterator[Tell]:
    """Show what is being done: in one line of a terminal, or line by line in a log."""
    if not err_console.is_terminal:
        with _telling_stages(_print_line):
            yield _print_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err_console, transient=True) as progress:
        task = progress.add_task("starting")

        def tell(text: str) -> None:
            progress.update(task, description=text)

        with _telling_stages(tell):
            yield tell


def _print_line(text: str) -> None:
    err_console.print(escape(text), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _telling_stages(tell: Tell) -> Iterator[None]:
    """Tell what the stages log."""
    log = logging.getLogger("lowering.pipeline")
    handler, level, propagate = _Teller(tell), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = level not in (logging.NOTSET,) and propagate
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _Teller(logging.Handler):
    """Hands the stages' messages to a progress display."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self._tell(first_line(record.getMessage()))
