"""The weight update of one engine loop: opened, staged, checked, and committed between two rounds.

Runs on the thread that owns the engine. At most one update is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.types import InFlight
from rollout.engine.protocol import Engine
from rollout.errors import EngineCrashError, RolloutError, UnsupportedError, WeightUpdateError
from rollout.policy.manifest import UpdateManifest
from rollout.service.live import LiveRequests

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class _Update:
    """An open weight update."""

    in_flight: InFlight
    drained: Future[None] | None = None
    """Resolved once it may be committed; set when somebody waits for it."""

    commit: Future[int] | None = None
    """Resolved by the commit; set when one was asked for that must wait."""

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that it will not be."""
        waiting: tuple[Future[None] | Future[int] | None, ...] = (self.drained, self.commit)
        for future in waiting:
            if future is not None:
                future.set_exception(error)
        self.drained = self.commit = None


class WeightUpdates:
    """What a loop does with weights; every method is a command's action, or part of a turn."""

    def __init__(
        self,
        engine: Engine,
        live: LiveRequests,
        *,
        needed_first: Callable[[], str | None],
        switched: Callable[[int], None],
    ) -> None:
        """``needed_first`` says what must be done before rounds run, None while they do.

        ``switched`` hears of a commit before whoever waits for it.
        """
        self._engine, self._live = engine, live
        self._needed_first, self._switched = needed_first, switched
        self._open: _Update | None = None
        self._crashed: str | None = None

    @property
    def draining(self) -> bool:
        """Whether an open update lets nobody new in."""
        return self._open is not None and self._open.in_flight == "drain"

    def begin(self, manifest: UpdateManifest, in_flight: InFlight) -> None:
        """Open an update."""
        if self._crashed is not None:
            raise EngineCrashError(self._crashed)
        offered = self._engine.traits.in_flight
        if in_flight not in offered:
            raise UnsupportedError(f"in_flight={in_flight!r}: this engine offers {', '.join(offered)}")
        self._engine.begin_update(manifest, in_flight=in_flight)
        self._open = _Update(in_flight=in_flight)

    def stage(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take one bucket."""
        self._opened()
        self._engine.stage(tensors)

    def check(self) -> None:
        """Check all that was staged; a refusal closes the update."""
        self._opened()
        try:
            self._engine.check_update()
        except WeightUpdateError:
            self.discard()
            raise

    def wait_drained(self, waiting: Future[None]) -> None:
        """Resolve ``waiting`` once the update may be committed."""
        self._unhalted().drained = waiting

    def wait_commit(self, waiting: Future[int]) -> None:
        """Commit, now or once that may be, and resolve ``waiting`` with the live version."""
        update = self._unhalted()
        if self._may_commit(update):
            waiting.set_result(self._commit())
        else:
            update.commit = waiting

    def answer(self) -> None:
        """Answer who waits for the open update, once it may be committed."""
        update = self._open
        if update is None or not self._may_commit(update):
            return
        if update.drained is not None:
            update.drained.set_result(None)
            update.drained = None
        commit, update.commit = update.commit, None
        if commit is None:
            return
        try:
            version = self._commit()
        except Exception as error:
            commit.set_exception(error)
            if not isinstance(error, RolloutError):
                raise  # as for any command: the engine is in a state nobody knows
        else:
            commit.set_result(version)

    def discard(self) -> None:
        """Drop the open update, if any."""
        update, self._open = self._open, None
        if update is None:
            return
        update.fail(WeightUpdateError("the update was discarded"))
        self._engine.discard_update()

    def crash(self, error: str) -> None:
        """Hear that the engine runs no more: that, and no word about weights, is told from now on."""
        self._crashed = error
        update, self._open = self._open, None
        if update is not None:
            update.fail(EngineCrashError(error))

    def _opened(self) -> _Update:
        if self._crashed is not None:
            raise EngineCrashError(self._crashed)
        if self._open is None:
            raise WeightUpdateError("no update is open")
        return self._open

    def _unhalted(self) -> _Update:
        """Return the open update. Raises ``WeightUpdateError`` where its drain could not end."""
        update = self._opened()
        cure = self._needed_first()
        if cure is not None and not self._may_commit(update):
            raise WeightUpdateError(f"in_flight=drain cannot end while the engine is halted: {cure} first")
        return update

    def _may_commit(self, update: _Update) -> bool:
        return update.in_flight != "drain" or not self._engine.running

    def _commit(self) -> int:
        self._opened()
        self._open = None
        try:
            for completion in self._engine.settle_running():
                self._live.end(completion)
            version = self._engine.commit_update()
        except WeightUpdateError:
            self._engine.discard_update()
            raise
        self._switched(version)
        return version
