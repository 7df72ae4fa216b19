"""A call in a thread of its own, watched from outside."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from npu_iree.transfers import Ledger, Transfer, record_transfers


class Call:
    """A call in a thread of its own, whose first host wait can be awaited."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.is_waiting = threading.Event()
        self.ledger = Ledger(_Announced(self.is_waiting))
        self._result: Any = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, function, args))
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: Any) -> None:
        try:
            with record_transfers(self.ledger):
                self._result = function(*args)
        except BaseException as error:
            self._error = error
            self.is_waiting.set()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


class _Announced(list[Transfer]):
    """Ledger entries that set an event when the host is about to wait."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, entry: Transfer) -> None:
        super().append(entry)
        if entry.kind == "wait":
            self._event.set()
