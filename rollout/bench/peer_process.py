"""A foreign engine in a process and an environment of its own, spoken to in JSON lines.

The child idles while others are measured: it waits for a line, and the processor time it takes meanwhile is
counted, so that a result can say so. It ends when this process does, because its input then ends.
"""

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError

LAST_WORDS_BYTES = 4000
"""Of the child's log, read for the reason when it dies."""


class PeerError(RolloutError):
    """A foreign engine cannot be started, or did not do what it was told."""


class PeerProcess:
    """One child. Not thread-safe: one call at a time."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], name: str) -> None:
        """Start ``command`` with ``environment`` over this process's own. Raises ``PeerError``."""
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        try:
            self._child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{name}: cannot start {command[0]}: {error}") from error
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"{name}-answers", daemon=True).start()
        self.idle_s = self.idle_cpu_s = 0.0
        """Seconds between calls, and the processor time the child took in them."""
        self._idle_since: tuple[float, float] | None = None

    def ask(self, call: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send one call and return its answer. Raises ``PeerError`` on an error, a death, or silence."""
        self._end_idle()
        assert self._child.stdin is not None, "opened with a pipe"
        try:
            self._child.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self._name}: gone before {call}: {self._last_words()}") from error
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._child.kill()
            self.close()
            raise PeerError(f"{self._name}: no answer to {call} within {timeout_s:g} s") from None
        answer = self._decoded(line, call)
        if "error" in answer:
            raise PeerError(f"{self._name}: {call} failed: {_first_line(answer['error'])}")
        self._idle_since = (time.monotonic(), self._cpu_s())
        return answer

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def idle_cpu_frac(self) -> float | None:
        """Processors the child kept busy between calls, on average; None where that cannot be told."""
        self._end_idle()
        return self.idle_cpu_s / self.idle_s if self.idle_s > 0 and self._cpu_s() > 0 else None

    def close(self) -> None:
        """End the child; whatever it was doing is dropped."""
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if not self._log.closed:
            self._log.close()

    def _read(self) -> None:
        assert self._child.stdout is not None, "opened with a pipe"
        for line in self._child.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _decoded(self, line: str, call: str) -> dict[str, Any]:
        if not line:
            raise PeerError(f"{self._name}: died in {call}: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"{self._name}: answered {call} with {line[:80]!r}, which is no JSON object")
        return answer

    def _last_words(self) -> str:
        """Return the last thing the dead child said, for a person to read."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        if self._log.closed:
            return "it was ended"
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "it said nothing"
        return f"exit code {self._child.poll()}, {said}"

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            since_s, cpu_s = self._idle_since
            self.idle_s += time.monotonic() - since_s
            self.idle_cpu_s += self._cpu_s() - cpu_s
            self._idle_since = (time.monotonic(), self._cpu_s())

    def _cpu_s(self) -> float:
        """Return the processor seconds of the child so far, all threads; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "without a word"
