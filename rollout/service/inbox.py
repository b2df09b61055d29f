"""Commands for a thread: posted from any thread, run by the owner when it chooses to."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollout.errors import EngineCrashError

T = TypeVar("T")


class Inbox:
    """A queue of actions and their futures."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._posting = threading.Lock()
        self.closed = False

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Queue ``action`` for the owner's thread; the future resolves once it ran there.

        After ``close`` it holds an ``EngineCrashError`` at once: nobody would ever run it.
        """
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 - handed to whoever posted, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._posting:
            if not self.closed:
                self._commands.put(command)
                return future
        future.set_exception(EngineCrashError("the host is closed"))
        return future

    def close(self) -> None:
        """Run what is still queued, on the owner's thread, and take nothing more."""
        with self._posting:
            self.closed = True
        self.run(wait_s=0.0)

    def run(self, *, wait_s: float) -> None:
        """Run everything queued, waiting up to ``wait_s`` for a first command.

        What is posted meanwhile waits for the next time: rounds go on whoever floods the host.
        """
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            for _ in range(self._commands.qsize()):
                command()
                command = self._commands.get_nowait()
            command()
        except queue.Empty:
            return
