"""Commands for a thread: posted from any thread, run by the owner when it chooses to."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Inbox:
    """A queue of actions and their futures."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Queue ``action`` for the owner's thread; the future resolves once it ran there."""
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

        self._commands.put(command)
        return future

    def run(self, *, wait_s: float) -> None:
        """Run everything queued, waiting up to ``wait_s`` for a first command."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return
