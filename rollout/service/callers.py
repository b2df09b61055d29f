"""Notices callers whose process is gone, so that nothing runs on for nobody.

A client makes one call that never ends and sends the reference to it along with its requests. Ray resolves
a reference with an error once the process that owns it is gone, however it went: no clock, no heartbeat that
a busy caller could miss. It takes Ray a few seconds.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

CallerRef = list[Any]
"""One reference a caller owns and never fulfils, in a list: Ray would wait for a bare one."""


class Callers:
    """What runs for each caller. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endings: dict[str, list[Callable[[], object]]] = {}

    @contextmanager
    def watching(self, caller: CallerRef | None, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end``, on another thread, if the caller's process is gone before this is left."""
        if caller is None:
            yield
            return
        (reference,) = caller
        name = reference.hex()
        with self._lock:
            known = name in self._endings
            self._endings.setdefault(name, []).append(end)
        if not known:  # one watch per caller, not per call: it stays as long as the caller does
            reference.future().add_done_callback(lambda _: self._gone(name))
        try:
            yield
        finally:
            with self._lock:
                endings = self._endings.get(name, [])
                if end in endings:
                    endings.remove(end)

    def _gone(self, name: str) -> None:
        with self._lock:
            endings = self._endings.pop(name, [])
        if endings:
            log.warning("a caller's process is gone: %d of its calls are ended", len(endings))
        for end in endings:
            end()
