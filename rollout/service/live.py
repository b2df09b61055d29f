"""The requests an engine loop has taken and not yet ended, and what is to be told about them.

Invariant: every request ends once, and the tokens emitted for it, in order, are its completion's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.engine.protocol import Emission
from rollout.errors import EngineCrashError
from rollout.service.records import HostEvents
from rollout.tokens import Tokens
from rollout.types import Completion, Request

Key = tuple[str, int]
Targets = Mapping[Key, int]
"""Requests to end, and the latest send meant (its serial): a later one is somebody else's."""


@dataclass(kw_only=True, slots=True)
class Live:
    """A request that has not ended."""

    request: Request
    tokens: Tokens = field(default_factory=Tokens)
    """What it has committed so far."""


class LiveRequests:
    """Book of one loop. Not thread-safe."""

    def __init__(self) -> None:
        self._live: dict[Key, Live] = {}
        self._deadlines_s: dict[Key, float] = {}
        """Of those that have one: they are looked at before every round."""

        self._emissions: list[Emission] = []
        self._completions: list[Completion] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    @property
    def keys(self) -> list[Key]:
        """Keys of everything alive."""
        return list(self._live)

    def attempt(self, key: Key) -> int | None:
        """Return which attempt of a sample is alive, if one is."""
        live = self._live.get(key)
        return None if live is None else live.request.attempt

    def open(self, request: Request, *, now_s: float) -> None:
        """Take a request the engine accepted."""
        self._live[request.key] = Live(request=request)
        if request.deadline_s is not None:
            self._deadlines_s[request.key] = now_s + request.deadline_s

    def refuse(self, request: Request, error: Exception) -> None:
        """Report a request that was never taken as failed."""
        self._completions.append(failed_completion(request, error))

    def emit(self, emission: Emission) -> None:
        """Take tokens of a round."""
        live = self._live.get(emission.key)
        if live is None or emission.first_index != len(live.tokens):
            raise EngineCrashError(f"tokens out of place for {emission.key} at {emission.first_index}")
        live.tokens += emission.tokens
        self._emissions.append(emission)

    def end(self, completion: Completion) -> None:
        """Take an ending. What was not emitted before is emitted now, so that streams miss nothing."""
        key = (completion.prompt_uid, completion.sample_index)
        live = self._live.pop(key, None)
        if live is None:
            raise EngineCrashError(f"request {key} ended twice")
        self._deadlines_s.pop(key, None)
        known = len(live.tokens)
        rest = completion.tokens[known:]
        if rest:
            self._emissions.append(
                Emission(key=key, attempt=completion.attempt, first_index=known, tokens=rest)
            )
        self._completions.append(completion)

    def fail_all(self, error: Exception) -> None:
        """End everything alive as failed, with the tokens it had."""
        for live in self._live.values():
            self._completions.append(failed_completion(live.request, error, tokens=live.tokens))
        self._live.clear()
        self._deadlines_s.clear()

    def expired(self, now_s: float) -> list[Request]:
        """Return the requests whose deadline has passed."""
        return [self._live[key].request for key, at_s in self._deadlines_s.items() if at_s <= now_s]

    def next_deadline_s(self) -> float:
        """Return when the next deadline passes; infinity without any."""
        return min(self._deadlines_s.values(), default=float("inf"))

    def take_events(self, *, crashed: str | None) -> HostEvents | None:
        """Return what happened since the last call; None for nothing."""
        if not (self._emissions or self._completions or crashed):
            return None
        events = HostEvents(
            emissions=tuple(self._emissions), completions=tuple(self._completions), crashed=crashed
        )
        self._emissions, self._completions = [], []
        return events


def failed_completion(request: Request, error: Exception, *, tokens: Tokens | None = None) -> Completion:
    """Return the ending of a request that failed outside a round."""
    return Completion(
        prompt_uid=request.prompt_uid,
        sample_index=request.sample_index,
        attempt=request.attempt,
        tokens=Tokens() if tokens is None else tokens[:],
        text=None,
        finish_reason="failed",
        error=f"{type(error).__name__}: {error}",
        provenance=None,
    )
