"""What the service's parts tell each other beside requests and completions. Plain data only."""

from dataclasses import dataclass, field
from typing import Literal

from controller.log import Record
from controller.types import EngineTraits, RoundFacts, RoundLoad, RoundPlan
from rollout.engine.protocol import Emission
from rollout.types import Completion, Request

LoopState = Literal["running", "paused", "asleep", "crashed", "closed"]
SlotState = Literal["starting", "ready", "dead", "retired"]
"""``dead``: a successor is on its way; ``retired``: there will be none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What must be equal for the same seed to give the same text."""

    policy_version: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedBack:
    """Requests a host did not take: their prefix was made under other weights than it serves by now."""

    identity: Identity
    """Of the host, now."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvents:
    """What one host's requests did since the last report, in order."""

    emissions: tuple[Emission, ...] = ()
    completions: tuple[Completion, ...] = ()
    """Over the process border their ``tokens`` are empty: the emissions carried them."""

    crashed: str | None = None
    """Why the engine will run no further round. Everything it held is in ``completions``, or, where its
    thread came to an end, was held by nobody any more and may be sent elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopStatus:
    """How an engine loop is doing, as of its last round boundary."""

    state: LoopState
    policy_version: int
    fingerprint: str
    rounds: int
    live: int
    """Requests that have not ended."""

    in_round_s: float
    """How long the current round, or the command between two, has been running; 0 while there is none."""

    records_dropped: int = 0
    """Round records nobody fetched in time."""

    error: str | None = None
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReady:
    """A host's first words."""

    traits: EngineTraits
    policy_version: int
    fingerprint: str
    pid: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One decision and what came of it: a line of the round log."""

    host: str
    at_s: float
    """Of the host's monotonic clock, when the decision was made."""

    load: RoundLoad
    plan: RoundPlan
    facts: RoundFacts
    events: tuple[Record, ...] = ()
    """What the controller heard between the previous decision's facts and this decision, in order, as
    ``controller.log`` records. The first round of a loop starts with what the controller was built from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotHealth:
    """One host, as the service sees it."""

    host: str
    state: SlotState
    restarts: int
    pid: int | None
    policy_version: int | None
    fingerprint: str | None
    in_flight: int
    loop: LoopStatus | None = None
    """Its last answer; None before the first."""

    last_error: str | None = None
    """Why it, or its predecessor, ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceHealth:
    """Whether rollouts are being served, and by whom."""

    ok: bool
    """At least one host is ready."""

    policy_version: int
    paused: bool
    asleep: bool
    queued: int
    """Requests no host has yet."""

    hosts: tuple[SlotHealth, ...]
