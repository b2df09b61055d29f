"""One thread that owns an engine and its controller: commands in, rounds run, events out.

Everything that touches the engine happens here, at a round boundary: requests are added and aborted,
weights are staged and switched, deadlines end. Callers on other threads post commands and get futures.
Knows no Ray and no asyncio.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

from controller.decide import Controller
from controller.log import Record, drafter_built_record, policy_changed_record
from controller.types import InFlight, RoundLoad
from rollout.engine.protocol import Engine
from rollout.errors import (
    DeadlineError,
    DuplicateRequestError,
    EngineCrashError,
    NoProgressError,
    RequestError,
    RolloutError,
    UnsupportedError,
)
from rollout.policy.manifest import UpdateManifest
from rollout.service.inbox import Inbox
from rollout.service.live import Key, LiveRequests, Targets
from rollout.service.records import (
    HandedBack,
    HostEvents,
    Identity,
    LoopState,
    LoopStatus,
    RoundRecord,
)
from rollout.service.updates import WeightUpdates
from rollout.types import Request

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""Longest sleep of an idle loop. Commands wake it at once; this only bounds how stale its status gets."""

GAUGES_EVERY_S = 0.2
"""Gauges are read at most this often: they are for people and trackers, and rounds can take a millisecond."""

T = TypeVar("T")


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its KV memory back while nothing runs."""

    def sleep(self) -> None:
        """Free the KV memory."""
        ...

    def wake(self) -> None:
        """Take it again, empty."""
        ...


@runtime_checkable
class DrafterKeeper(Protocol):
    """An engine whose drafters can be rebuilt on request."""

    def drafter_versions(self) -> Mapping[str, int]:
        """Return the policy version each working drafter was last built from."""
        ...

    def rebuild_drafter(self, name: str) -> None:
        """Build one drafter anew from the live policy. A failure costs time only, and is the engine's."""
        ...


NextTurn = Literal["round", "wait", "stuck"]


def next_turn(load: RoundLoad, *, admitting: bool) -> NextTurn:
    """Return what a loop with this load does: ``stuck`` is a bug of the engine, never a state to wait in."""
    if load.sequences or load.prefill_tokens:
        return "round"
    return "stuck" if load.waiting and admitting else "wait"


class EngineLoop:
    """Runs rounds while there is work. ``turn`` is one round boundary and at most one round."""

    def __init__(
        self,
        engine: Engine,
        controller: Controller,
        *,
        host: str,
        deliver: Callable[[HostEvents], None],
        clock: Callable[[], float] = time.monotonic,
        record_limit: int = 4096,
    ) -> None:
        self.engine, self.controller, self.host = engine, controller, host
        self._deliver, self._clock = deliver, clock
        self._inbox = Inbox()
        self._live = LiveRequests()
        self._updates = WeightUpdates(
            engine, self._live, needed_first=self._needed_first, switched=self._switched
        )
        self._paused = self._asleep = self._closed = False
        self._error: str | None = None
        self._crash_told = False
        self._rounds = 0
        self._records: deque[RoundRecord] = deque(maxlen=record_limit)
        self._records_dropped = 0
        self._events: list[Record] = [controller.controller_record()]
        """What the next round record tells beside its round."""

        self._work_started_s: float | None = None
        """When the command or round under way began; None while there is nothing to do."""

        self._gauges: dict[str, float] = {}
        self._gauges_at_s = float("-inf")
        self._tell_drafter_versions()
        self._publish()

    # ---- from any thread --------------------------------------------------------------------------

    def add(
        self, requests: Sequence[Request], *, begun: Mapping[Key, Identity] | None = None
    ) -> Future[HandedBack | None]:
        """Queue requests; a refused one comes back as a failed completion, the others are untouched.

        ``begun`` says under what the prefixes were made that must go on under the same: those run as if they
        had never left, also through an open update, and are handed back where something else is live by now.
        Raises ``EngineCrashError``, and takes none, when the engine runs no more.
        """
        return self._post(lambda: self._add(requests, begun or {}))

    def abort(self, targets: Targets | None, reason: str) -> Future[int]:
        """End requests (None: all) with what they have; resolves to how many were still alive."""
        return self._post(lambda: self._abort(targets, reason))

    def begin_update(self, manifest: UpdateManifest, in_flight: InFlight) -> Future[None]:
        """Open a weight update."""
        return self._post(lambda: self._updates.begin(manifest, in_flight))

    def stage(self, tensors: Sequence[tuple[str, Tensor]]) -> Future[None]:
        """Take one bucket of the open update; rounds go on between buckets."""
        return self._post(lambda: self._updates.stage(tensors))

    def check_update(self) -> Future[None]:
        """Check all that was staged; a refusal closes the update."""
        return self._post(self._updates.check)

    def drained(self) -> Future[None]:
        """Resolves when the open update may be committed: at once, or when ``drain`` has nothing running."""
        return self._wait(self._updates.wait_drained)

    def commit_update(self) -> Future[int]:
        """Switch to the staged weights between two rounds; resolves to the version now live.

        With ``drain`` it waits for what was resumed here since the drain ended; refused while halted.
        """
        return self._wait(self._updates.wait_commit)

    def discard_update(self) -> Future[None]:
        """Drop the open update, if any. Idempotent."""
        return self._post(self._updates.discard)

    def pause(self) -> Future[None]:
        """Run no round until ``resume``; requests keep what they have. Idempotent."""
        return self._post(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        """Undo ``pause``. Idempotent."""
        return self._post(lambda: self._set_paused(False))

    def sleep(self) -> Future[None]:
        """Free the KV memory; refused while requests are alive. Raises ``UnsupportedError``."""
        return self._post(self._sleep)

    def wake(self) -> Future[None]:
        """Undo ``sleep``. Idempotent."""
        return self._post(self._wake)

    def close(self) -> Future[None]:
        """End the loop and the engine; what is alive ends as aborted. Idempotent."""
        posted = self._post(self._close)
        return _resolved() if self._inbox.closed else posted

    def status(self) -> LoopStatus:
        """Return the state as of the last round boundary, without waiting for the next one."""
        started_s = self._work_started_s
        in_round_s = 0.0 if started_s is None else max(0.0, self._clock() - started_s)
        return replace(self._status, in_round_s=in_round_s)

    def take_records(self) -> list[RoundRecord]:
        """Return the round records since the last call; each is handed out once."""
        taken: list[RoundRecord] = []
        while True:
            try:
                taken.append(self._records.popleft())
            except IndexError:
                return taken

    # ---- the turn ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until closed. The thread that calls this owns the engine."""
        ran = True
        try:
            while not self._closed:
                ran = self.turn(wait_s=0.0 if ran else self._idle_wait_s())
        finally:
            self._inbox.close()  # who asked while it ended must not wait for ever

    def turn(self, *, wait_s: float = 0.0) -> bool:
        """Take commands (waiting up to ``wait_s`` for the first), run at most one round, tell what happened.

        Returns whether a round ran.
        """
        self._inbox.run(wait_s=wait_s)
        ran = False
        if self._error is None and not self._closed:
            self._work_started_s = self._clock()
            try:
                ran = self._advance()
            except Exception as error:
                log.exception("host %s: the engine failed in round %d", self.host, self._rounds)
                self._crash(error)
        self._work_started_s = None
        self._publish()
        self._tell()
        return ran

    def _advance(self) -> bool:
        """End what is overdue, answer who waits for a drain, and run a round if there is one to run."""
        now_s = self._clock()
        self._expire(now_s)
        self._updates.answer()
        if self._halted or not self.engine.busy:
            return False
        # Admits, which nothing may while halted.
        load = self.engine.load(look_up=self.controller.wants_look_up)
        turn = next_turn(load, admitting=not self._updates.draining)
        if turn == "stuck":
            raise NoProgressError(f"{load.waiting} requests wait, nothing runs, and none is admitted")
        if turn == "round":
            self._round(load, now_s)
            self._updates.answer()
        return turn == "round"

    def _round(self, load: RoundLoad, now_s: float) -> None:
        events, self._events = tuple(self._events), []
        plan = self.controller.decide(load, now_s=now_s)
        outcome = self.engine.run_round(plan)
        self.controller.observe(outcome.facts)
        self._mend_drafters()
        self._rounds += 1
        self._records_dropped += len(self._records) == self._records.maxlen
        self._records.append(
            RoundRecord(host=self.host, at_s=now_s, load=load, plan=plan, facts=outcome.facts, events=events)
        )
        for emission in outcome.emissions:
            self._live.emit(emission)
        for completion in outcome.completions:
            self._live.end(completion)
        if load.sequences and not outcome.facts.decoded and not outcome.completions:
            raise NoProgressError(
                f"round {load.round_index} committed nothing for {len(load.sequences)} sequences"
            )

    def _mend_drafters(self) -> None:
        """Do what the controller's watchdog asks. It plans around a drafter that is off by itself."""
        for action in self.controller.take_actions():
            log.warning(
                "ALARM host %s: drafter %s %s: %s", self.host, action.drafter, action.action, action.reason
            )
            if action.action == "rebuild" and isinstance(self.engine, DrafterKeeper):
                self.engine.rebuild_drafter(action.drafter)
                self._tell_drafter_versions()

    def _tell_drafter_versions(self) -> None:
        if isinstance(self.engine, DrafterKeeper):
            for name, version in self.engine.drafter_versions().items():
                self.controller.drafter_built(name, version)
                self._events.append(drafter_built_record(name, version))

    def _post(self, action: Callable[[], T]) -> Future[T]:
        def guarded() -> T:
            self._work_started_s = self._clock()
            try:
                result = action()
            except RolloutError:
                raise
            except Exception as error:
                # Anything else leaves the engine in a state nobody knows.
                log.exception("host %s: a command failed", self.host)
                self._crash(error)
                raise EngineCrashError(f"{type(error).__name__}: {error}") from error
            self._publish()  # who waits for a command sees what it changed
            return result

        return self._inbox.post(guarded)

    def _wait(self, action: Callable[[Future[T]], None]) -> Future[T]:
        """Post an action that keeps the future it is given and resolves it at some later boundary."""
        waiting: Future[T] = Future()
        waiting.set_running_or_notify_cancel()  # who gives up waiting must not make answering it an error

        def refuse(posted: Future[None]) -> None:
            error = posted.exception()
            if error is not None:
                waiting.set_exception(error)

        self._post(lambda: action(waiting)).add_done_callback(refuse)
        return waiting

    # ---- requests ---------------------------------------------------------------------------------

    def _add(self, requests: Sequence[Request], begun: Mapping[Key, Identity]) -> HandedBack | None:
        if self._error is not None or self._closed:
            # They were part of nothing that failed: whoever sent them may send them elsewhere.
            raise EngineCrashError(self._error or "the host is closed")
        live = Identity(policy_version=self.engine.policy_version, fingerprint=self.engine.fingerprint)
        back = []
        for request in requests:
            if begun.get(request.key, live) != live:
                back.append(request)
            else:
                self._take(request, resumed=request.key in begun)
        return HandedBack(identity=live, requests=tuple(back)) if back else None

    def _take(self, request: Request, *, resumed: bool) -> None:
        try:
            self._make_way(request)
            self.engine.add(request, resumed=resumed)
            self._live.open(request, now_s=self._clock())
        except RequestError as error:
            self._live.refuse(request, error)
        except Exception as error:
            # Nothing has run yet, so it is this request that is odd, not the engine.
            log.exception("host %s: a request could not be taken", self.host)
            self.engine.abort(request.key, reason="it could not be taken")
            self._live.refuse(request, RequestError(f"{type(error).__name__}: {error}"))

    def _make_way(self, request: Request) -> None:
        """End an older attempt of the same sample, which ``request`` stands in for."""
        alive = self._live.attempt(request.key)
        if alive is None:
            return
        if alive >= request.attempt:
            raise DuplicateRequestError(f"request {request.key} is alive in attempt {alive}")
        self._abort({request.key: alive}, f"attempt {request.attempt} stands in for it")

    def _abort(self, targets: Targets | None, reason: str) -> int:
        keys = [
            key
            for key in self._live.keys
            if targets is None or (key in targets and (self._live.attempt(key) or 0) <= targets[key])
        ]
        ended = [c for key in keys if (c := self.engine.abort(key, reason=reason)) is not None]
        for completion in ended:
            self._live.end(completion)
        return len(ended)

    def _expire(self, now_s: float) -> None:
        for request in self._live.expired(now_s):
            completion = self.engine.abort(request.key, reason="deadline")
            assert completion is not None, f"{request.key} is alive here and unknown to the engine"
            error = DeadlineError(f"{request.deadline_s} s passed")
            self._live.end(replace(completion, error=f"{type(error).__name__}: {error}"))

    def _switched(self, version: int) -> None:
        """Hear that other weights are live."""
        self.controller.policy_changed(version)
        self._events.append(policy_changed_record(version))
        self._tell_drafter_versions()
        self._gauges_at_s = float("-inf")  # who waits for the update asks next what building drafters took
        self._publish()  # and, before that, which weights are live

    # ---- states -----------------------------------------------------------------------------------

    @property
    def _halted(self) -> bool:
        return self._paused or self._asleep

    def _needed_first(self) -> str | None:
        """Return what must be done before rounds run; None while they do."""
        if not self._halted:
            return None
        return "wake it" if self._asleep else "resume it"

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        if paused:
            self._emit_untold()

    def _emit_untold(self) -> None:
        """Take tokens that no round may be there to tell for a while."""
        for emission in self.engine.untold():
            self._live.emit(emission)

    def _sleep(self) -> None:
        if not isinstance(self.engine, Sleeper):
            raise UnsupportedError(f"the {self.engine.traits.engine} engine cannot sleep")
        if self._live:
            raise UnsupportedError(f"{len(self._live)} requests are alive: abort them or let them end first")
        if not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            assert isinstance(self.engine, Sleeper)
            self.engine.wake()
            self._asleep = False

    def _close(self) -> None:
        if self._closed:
            return
        if self._error is None:
            self._updates.discard()
            self._abort(None, "the host was closed")
        self._closed = True
        self.engine.close()

    def _crash(self, error: Exception) -> None:
        """Fail everything alive and run no further round: what the engine holds cannot be trusted."""
        self._error = f"{type(error).__name__}: {error}"
        try:
            self._emit_untold()
        except Exception:
            log.exception("host %s: tokens that were not told yet are lost", self.host)
        self._live.fail_all(error if isinstance(error, NoProgressError) else EngineCrashError(self._error))
        self._updates.crash(self._error)

    def _tell(self) -> None:
        crashed = self._error if not self._crash_told else None
        self._crash_told = self._error is not None
        events = self._live.take_events(crashed=crashed)
        if events is not None:
            self._deliver(events)

    def _publish(self) -> None:
        running = self._error is None and not self._closed
        if running and self._clock() - self._gauges_at_s >= GAUGES_EVERY_S:
            self._gauges = {**self.engine.gauges(), **self.controller.gauges()}
            self._gauges_at_s = self._clock()
        self._status = LoopStatus(
            state=self._state(),
            policy_version=self.engine.policy_version,
            fingerprint=self.engine.fingerprint,
            rounds=self._rounds,
            live=len(self._live),
            in_round_s=0.0,
            records_dropped=self._records_dropped,
            error=self._error,
            gauges=self._gauges,
        )

    def _state(self) -> LoopState:
        if self._error is not None:
            return "crashed"
        if self._closed:
            return "closed"
        if self._asleep:
            return "asleep"
        return "paused" if self._paused else "running"

    def _idle_wait_s(self) -> float:
        return min(IDLE_WAIT_S, max(0.001, self._live.next_deadline_s() - self._clock()))


def _resolved() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
