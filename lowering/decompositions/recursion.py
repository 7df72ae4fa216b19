"""For decompositions into the op itself: what it has been decomposed into stays whole."""

from __future__ import annotations

import threading


class Ours(threading.local):
    """Within it, an op is what one has been decomposed into (`is_done`)."""

    is_done = False

    def __enter__(self) -> None:
        self.is_done = True

    def __exit__(self, *_: object) -> None:
        self.is_done = False
