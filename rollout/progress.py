"""Shows that long work is alive: one live line on a terminal, plain lines elsewhere, nothing if it is short.

Output goes to stderr; results go to stdout. A plain line comes after ``QUIET_S`` and then every ``EVERY_S``,
from a thread of its own, so a single long call shows progress as well as a loop does.
"""

import sys
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

QUIET_S = 2.0
"""Work shorter than this says nothing: a line nobody has time to read is noise."""

EVERY_S = 10.0
"""Between plain lines. In a log file more of them would bury what matters."""


def say(line: str, *, stream: TextIO | None = None) -> None:
    """Write one line for people to stderr, at once."""
    out = stream or sys.stderr
    out.write(line + "\n")
    out.flush()


class Progress(AbstractContextManager["Progress"]):
    """One piece of long work, shown while the ``with`` block runs. ``advance`` may come from any thread."""

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        done: int = 0,
        unit: str = "steps",
        stream: TextIO | None = None,
        quiet_s: float = QUIET_S,
        every_s: float = EVERY_S,
    ) -> None:
        """``done``: of ``total``, before this began; what is left is estimated without them."""
        self._title, self._total, self._unit = title, total, unit
        self._stream = stream or sys.stderr
        self._quiet_s, self._every_s = quiet_s, every_s
        self._done, self._note = done, ""
        self._before = done
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = time.monotonic()
        self._spoke = self._hushed = False

    def advance(self, count: int = 1, *, note: str | None = None) -> None:
        """Count ``count`` more units as done and show ``note`` beside them."""
        with self._lock:
            self._done += count
            if note is not None:
                self._note = note

    def note(self, text: str) -> None:
        """Show ``text`` beside the count."""
        self.advance(0, note=text)

    def hush(self) -> None:
        """Say nothing more: what was waited for has come."""
        self._hushed = True
        self._over.set()

    def line(self) -> str:
        """Return what is shown now: title, count, elapsed and estimated remaining seconds, note."""
        with self._lock:
            done, note = self._done, self._note
        elapsed_s = time.monotonic() - self._start_s
        parts = [f"{self._title}:"]
        if self._total is not None:
            parts.append(f"{done}/{self._total} {self._unit},")
        elif done:
            parts.append(f"{done} {self._unit},")
        parts.append(f"{elapsed_s:.1f} s")
        if self._total and self._before < done < self._total:
            left_s = elapsed_s / (done - self._before) * (self._total - done)
            parts.append(f"(about {left_s:.0f} s left)")
        return " ".join([*parts, f"- {note}"] if note else parts)

    def __enter__(self) -> "Progress":
        self._start_s = time.monotonic()
        work = self._live if self._stream.isatty() else self._plain
        self._thread = threading.Thread(target=work, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._hushed:
            return
        if self._spoke or time.monotonic() - self._start_s >= self._quiet_s:
            say(f"{self.line()} - {'done' if kind is None else 'stopped'}", stream=self._stream)

    def _plain(self) -> None:
        wait_s = self._quiet_s
        while not self._over.wait(wait_s):
            say(self.line(), stream=self._stream)
            self._spoke, wait_s = True, self._every_s

    def _live(self) -> None:
        if self._over.wait(min(0.3, self._quiet_s)):
            return
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        spinner: Any = Spinner("dots", text=self.line())
        with Live(spinner, console=Console(file=self._stream), transient=True, refresh_per_second=8):
            while not self._over.wait(0.2):
                spinner.update(text=self.line())
