"""The book of every sample the service has promised: who holds it, what it has, that it ends once.

Pure bookkeeping: no Ray, no tasks, no clock of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rollout.engine.protocol import Emission
from rollout.errors import DuplicateRequestError, EngineCrashError, HostLostError
from rollout.service.live import Key, failed_completion
from rollout.service.records import Identity
from rollout.tokens import TokenLog
from rollout.types import Completion, Request


class Sink(Protocol):
    """Whoever waits for a sample."""

    streamed: bool
    """Whether it hands tokens on as they come, so that none can be taken back."""

    def tokens(self, emission: Emission) -> None:
        """Take new tokens; ``first_index`` counts over all attempts."""
        ...

    def ended(self, completion: Completion) -> None:
        """Take the ending, with all tokens. Called once."""
        ...


@dataclass(kw_only=True, slots=True)
class AbortNote:
    """One call's wish to end samples that hosts hold: it holds wherever they move before it is done."""

    reason: str
    ended: int = 0
    """How many ended by this note, their host having lost them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A request from the door to its end."""

    asked: Request
    """As the caller sent it."""

    sink: Sink
    admitted_s: float
    request: Request
    """As last sent to a host."""

    records: TokenLog = field(default_factory=TokenLog)
    """What it has, over all attempts."""

    attempt_start: int = 0
    """How many of ``records`` came from earlier attempts."""

    sent: int = 0
    serial: int = 0
    """Of its last send; see ``Ledger``."""

    host: str | None = None
    """Who holds it; None while it is queued."""

    identity: Identity | None = None
    """Of the host it was last sent to, as last known: what the last of ``records`` was made under, unless
    that names a later version or the host is held to have ended it by an update."""

    abort: AbortNote | None = None
    """Its end was asked for, and its host told."""

    at_end: Callable[[], object] | None = None
    """Called once it has ended."""

    def remaining_tokens(self, context_tokens: int) -> int:
        """Most tokens it may still commit."""
        room = context_tokens - len(self.asked.prompt_ids)
        limit = self.asked.params.max_tokens
        have = len(self.asked.prefix_ids) + len(self.records)
        return max(0, (room if limit is None else min(room, limit)) - have)


class Ledger:
    """All samples that have not ended, by (prompt uid, sample index).

    A key may be asked for again as soon as it has ended here, while a host still works on the old sample. So
    every send has a serial of its own, later ones higher, and hosts know a request by that. It travels as
    the request's ``attempt``, and comes back in emissions and completions, where it is undone.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, Sample] = {}
        self._serials = itertools.count(1)
        self._keys_of_host: dict[str, set[Key]] = {}
        self.late_results = 0
        """Tokens and endings of attempts nobody waits for any more: dropped."""

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, key: Key) -> Sample | None:
        """Return a sample that has not ended."""
        return self._samples.get(key)

    @property
    def keys(self) -> list[Key]:
        """Keys of everything that has not ended."""
        return list(self._samples)

    def open(self, request: Request, sink: Sink, *, now_s: float) -> Sample:
        """Take a request. Raises ``DuplicateRequestError`` while its key is in use."""
        live = self._samples.get(request.key)
        if live is not None:
            raise DuplicateRequestError(
                f"request {request.key} is alive in attempt {live.asked.attempt}; a retry needs a later one"
            )
        sample = Sample(asked=request, sink=sink, admitted_s=now_s, request=request)
        self._samples[request.key] = sample
        return sample

    def send(
        self, sample: Sample, host: str, identity: Identity, *, now_s: float, allow_other: bool
    ) -> Request:
        """Assign a sample to a host and return what to send. Raises ``HostLostError`` (see ``resend``)."""
        request = sample.request if sample.sent == 0 else resend(sample, identity, allow_other=allow_other)
        if sample.asked.deadline_s is not None:
            left_s = sample.asked.deadline_s - (now_s - sample.admitted_s)
            # A deadline already over is the host's to end: it alone knows how to end a request.
            request = replace(request, deadline_s=max(1e-3, left_s))
        sample.request, sample.host, sample.identity = request, host, identity
        sample.attempt_start = len(sample.records)
        sample.sent += 1
        sample.serial = next(self._serials)
        self._keys_of_host.setdefault(host, set()).add(request.key)
        return replace(request, attempt=sample.serial)

    def emission(self, host: str, emission: Emission) -> None:
        """Take tokens from a host and pass the new ones on.

        Raises ``EngineCrashError`` when they do not follow what the sample has; nothing is taken then.
        """
        sample = self._current(host, emission.key, emission.attempt)
        if sample is None:
            return
        known = len(sample.records) - sample.attempt_start
        if emission.first_index != known:
            told = f"{host} told tokens at {emission.first_index} after {known}"
            raise EngineCrashError(f"{emission.key}: {told}")
        first_index = len(sample.records)
        sample.records.extend(emission.tokens)
        sample.sink.tokens(emission._replace(first_index=first_index, attempt=sample.request.attempt))

    def completion(self, host: str, completion: Completion) -> None:
        """Take an ending from a host and pass it on with all tokens."""
        key = (completion.prompt_uid, completion.sample_index)
        sample = self._current(host, key, completion.attempt)
        if sample is not None:
            self.end(sample, completion)

    def end(self, sample: Sample, completion: Completion) -> None:
        """End a sample, whoever says so. Its tokens are those of all attempts."""
        del self._samples[sample.asked.key]
        self._leave(sample)
        attempt = sample.request.attempt
        sample.sink.ended(replace(completion, attempt=attempt, tokens=sample.records[:]))
        if sample.at_end is not None:
            sample.at_end()

    def fail(self, sample: Sample, error: Exception) -> None:
        """End a sample as failed."""
        self.end(sample, failed_completion(sample.request, error))

    def abort(self, sample: Sample, error: Exception) -> None:
        """End a sample as aborted, without asking its host."""
        self.end(sample, replace(failed_completion(sample.request, error), finish_reason="aborted"))

    def queued(self) -> list[Sample]:
        """Return the samples no host holds."""
        return [sample for sample in self._samples.values() if sample.host is None]

    def held_by(self, host: str) -> list[Sample]:
        """Return the unfinished samples of one host."""
        return [self._samples[key] for key in self._keys_of_host.get(host, ())]

    def lost(self, host: str, identity: Identity | None, *, carried_since: int = 0) -> list[Sample]:
        """Take all unfinished samples from a dead host; ``identity`` is the last it was known by.

        ``carried_since``: version of the last update that carried no text over. Tokens from before it were
        ended by it on the host, whose word of that is lost: they are not of what it is known by now.
        """
        samples = self.held_by(host)
        for sample in samples:
            self._leave(sample)
            made_under = sample.records[-1].policy_version if sample.records else carried_since
            if identity is not None and not made_under < carried_since <= identity.policy_version:
                sample.identity = identity
        self._keys_of_host.pop(host, None)
        return samples

    def handed_back(self, requests: Sequence[Request]) -> list[Sample]:
        """Take samples from a host that did not take these sends."""
        samples = []
        for request in requests:
            sample = self._samples.get(request.key)
            if sample is not None and sample.serial == request.attempt:
                self._leave(sample)
                sample.sent -= 1
                samples.append(sample)
        return samples

    def _current(self, host: str, key: Key, serial: int) -> Sample | None:
        sample = self._samples.get(key)
        if sample is None or sample.host != host or sample.serial != serial:
            self.late_results += 1
            return None
        return sample

    def _leave(self, sample: Sample) -> None:
        if sample.host is not None:
            self._keys_of_host[sample.host].discard(sample.asked.key)
        sample.host = None


def resend(sample: Sample, identity: Identity, *, allow_other: bool) -> Request:
    """Return the next attempt of a sample whose host died.

    On a host of the same identity it goes on after the tokens it has: the text is the one it would have
    had. Elsewhere tokens of two makers would meet in one sample, so it starts again when nobody has seen
    its tokens and only the weights moved, and fails with ``HostLostError`` otherwise, unless mixing is
    allowed: then each token's version and the completion's fingerprint tell.
    """
    last = sample.identity
    later = replace(sample.request, attempt=sample.request.attempt + 1)
    moved = last is not None and last.policy_version != identity.policy_version
    if last is not None and sample.records and sample.records[-1].policy_version > last.policy_version:
        last, moved = replace(last, policy_version=sample.records[-1].policy_version), True
    if last in (None, identity) or not sample.records or allow_other:
        return replace(later, prefix_ids=sample.asked.prefix_ids + sample.records.ids)
    assert last is not None
    if moved and not sample.sink.streamed:
        sample.records.clear()
        return replace(later, prefix_ids=sample.asked.prefix_ids)
    raise HostLostError(
        f"its host died after {len(sample.records)} tokens of version {last.policy_version} "
        f"({last.fingerprint}); what is left serves version {identity.policy_version} "
        f"({identity.fingerprint})"
    )
