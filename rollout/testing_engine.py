"""A small engine that speaks the real protocol, for tests of everything around an engine.

Its text is a hash of (weights, prompt, seed, position): equal on every host, under any plan, after any
retry, and different once other weights are live. Faults can be ordered by round and host.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from controller.decide import Controller
from controller.log import Record
from controller.types import (
    AR,
    POLICY,
    Assignment,
    DraftCost,
    DrafterTraits,
    EngineTraits,
    InFlight,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)
from controller.watchdog import WatchdogAction
from rollout.engine.protocol import Emission, Engine, LookUp, RoundOutcome, always
from rollout.errors import (
    AbortedError,
    DuplicateRequestError,
    EmptyPromptError,
    NumericError,
    PromptTooLongError,
    TokenRangeError,
    UnsupportedError,
    WeightUpdateError,
)
from rollout.policy.manifest import UpdateManifest
from rollout.seeds import sample_seed
from rollout.tokens import TokenLog
from rollout.types import Completion, FinishReason, Provenance, Request, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHAPES: dict[str, tuple[int, ...]] = {"model.bias": (64,), "model.weight": (64, 64)}
"""Weights that shape the text, by name: small enough to send by hundreds."""

BALLAST = "model.ballast"
"""A float32 tensor that shapes nothing and only weighs."""

EOS_ID = 0
ECHO = "echo"
"""The one drafter: it costs nothing and is always right."""


def scripted_weights(
    seed: int, *, dtype: torch.dtype | None = None, ballast_floats: int = 0
) -> dict[str, Tensor]:
    """Return a state dict for ``ScriptedEngine``, bfloat16 by default; other seeds, other text."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kind = dtype or torch.bfloat16
    state = {name: torch.randn(shape, generator=generator).to(kind) for name, shape in SHAPES.items()}
    if ballast_floats:
        state[BALLAST] = torch.zeros(ballast_floats)
    return state


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What goes wrong, and where. Rounds count from 0 on each host."""

    only_host: str | None = None
    """Name of the one host concerned; None: all. A restarted host has another name."""

    round_s: float = 0.0
    """Seconds every round takes."""

    long_round: int | None = None
    long_round_s: float = 0.0
    """That one round takes so long."""

    nan_uid: str | None = None
    """Requests of this prompt end with a ``NumericError`` at their third token."""

    exit_at_round: int | None = None
    """The process dies."""

    raise_at_round: int | None = None
    stall_at_round: int | None = None
    """The round commits nothing."""

    refuse_stage: bool = False
    crash_stage: bool = False
    """The engine breaks while weights are staged."""

    refuse_commit: bool = False
    other_numerics: bool = False
    """The host computes the same text under another fingerprint."""

    fail_build: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedSpec:
    """Recipe of a host that runs a ``ScriptedEngine``."""

    vocab_size: int = 211
    max_batch: int = 8
    max_context_tokens: int = 256
    gamma: int = 0
    """Draft tokens in every round of every sequence."""

    can_sleep: bool = False
    weights_seed: int = 0
    ballast_floats: int = 0
    faults: Faults = field(default_factory=Faults)
    host: str = "local"

    def for_host(self, *, host: str, threads: int) -> ScriptedSpec:
        """Return the recipe of one host; faults ordered for another host are dropped."""
        elsewhere = self.faults.only_host not in (None, host)
        return replace(self, host=host, faults=Faults() if elsewhere else self.faults)

    def build(self) -> tuple[Engine, Controller]:
        """Return the engine and a controller that always plans ``gamma``."""
        if self.faults.fail_build:
            raise RuntimeError("the scripted host was told not to start")
        engine = SleepingScriptedEngine(self) if self.can_sleep else ScriptedEngine(self)
        return engine, FixedController(self.gamma)


class FixedController:
    """Plans the same gamma for everyone, and remembers what it was told."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.versions: list[int] = []
        self.built: list[tuple[str, int]] = []
        self.actions: list[WatchdogAction] = []
        """What ``take_actions`` will ask for next."""

        self.observed = 0

    def wants_look_up(self, load: RoundLoad) -> bool:
        """Whether anything that is ready would change the plan."""
        return False

    def decide(self, load: RoundLoad, *, now_s: float) -> RoundPlan:
        """Assign ``gamma`` echo drafts to every sequence."""
        if self.gamma == 0:
            return RoundPlan(assignments={}, reason="scripted: plain")
        assignment = Assignment(drafter=ECHO, gamma=self.gamma)
        return RoundPlan(assignments={s.key: assignment for s in load.sequences}, reason="scripted: echo")

    def observe(self, facts: RoundFacts) -> None:
        """Count the round."""
        self.observed += 1

    def policy_changed(self, version: int) -> None:
        """Remember the version."""
        self.versions.append(version)

    def drafter_built(self, drafter: str, version: int) -> None:
        """Remember the drafter."""
        self.built.append((drafter, version))

    def take_actions(self) -> tuple[WatchdogAction, ...]:
        """Return what was put into ``actions``."""
        actions, self.actions = tuple(self.actions), []
        return actions

    def decision_record(self) -> Record:
        """Return nothing worth replaying."""
        return {"event": "decision"}

    def controller_record(self) -> Record:
        """Return what it was built from."""
        return {"event": "controller", "gamma": self.gamma}

    def gauges(self) -> dict[str, float]:
        """Return how many rounds were observed."""
        return {"controller/rounds": float(self.observed)}


@dataclass(kw_only=True, slots=True)
class _Sequence:
    number: int
    request: Request
    limit: int
    resumed: bool
    prefilled: bool = False
    records: TokenLog = field(default_factory=TokenLog)
    rounds: int = 0
    drafted: int = 0

    @property
    def new_tokens(self) -> int:
        return len(self.request.prefix_ids) + len(self.records)


class ScriptedEngine:
    """Implements ``rollout.engine.protocol.Engine``. A prompt takes one round, then tokens follow."""

    def __init__(self, spec: ScriptedSpec) -> None:
        self._spec, self._faults = spec, spec.faults
        self.traits = EngineTraits(
            engine="scripted",
            verify_modes=("coupled",),
            gamma_per_sequence=True,
            drafters=(DrafterTraits(name=ECHO, max_gamma=8),),
            numerics="exact",
            in_flight=("drain", "abort", "keep"),
            max_batch=spec.max_batch,
            max_context_tokens=spec.max_context_tokens,
        )
        self.policy_version = self._drafter_version = 0
        self.rebuilds = 0
        self._take_salt(f"start-{spec.weights_seed}")
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._manifest: UpdateManifest | None = None
        self._mode: InFlight = "drain"
        self._staged: dict[str, Tensor] = {}
        self._numbers = 0
        self._round_index = 0

    # ---- requests ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Sequences admitted or resumed, and not over."""
        return len(self._under_way())

    def _under_way(self) -> list[_Sequence]:
        return [*self._running, *(s for s in self._waiting if s.resumed)]

    def add(self, request: Request, *, resumed: bool = False) -> None:
        """Queue a request."""
        if self._find(request.key) is not None:
            raise DuplicateRequestError(f"request {request.key} is already running")
        if not request.prompt_ids:
            raise EmptyPromptError(f"request {request.key} has an empty prompt")
        outside = [t for t in request.prompt_ids if not 0 <= t < self._spec.vocab_size]
        if outside:
            raise TokenRangeError(f"ids {outside[:5]} are outside the vocabulary")
        room = self._spec.max_context_tokens - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLongError(f"prompt of {len(request.prompt_ids)} tokens leaves no room")
        limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        self._waiting.append(_Sequence(number=self._numbers, request=request, limit=limit, resumed=resumed))
        self._numbers += 1

    def abort(self, key: tuple[str, int], *, reason: str = "") -> Completion | None:
        """End a request now with what it has."""
        sequence = self._find(key)
        if sequence is None:
            return None
        return self._end(sequence, "aborted", AbortedError(reason or "aborted by the caller"))

    def load(self, *, look_up: LookUp = always) -> RoundLoad:
        """Admit what fits and describe it."""
        draining = self._manifest is not None and self._mode == "drain"
        for sequence in [s for s in self._waiting if s.resumed or not draining]:
            if len(self._running) < self._spec.max_batch:
                self._waiting.remove(sequence)
                self._running.append(sequence)
        return RoundLoad(
            round_index=self._round_index,
            policy_version=self.policy_version,
            sequences=tuple(
                SequenceLoad(
                    key=s.number,
                    context_tokens=len(s.request.prompt_ids) + s.new_tokens,
                    generated_tokens=s.new_tokens,
                    remaining_tokens=s.limit - s.new_tokens,
                )
                for s in self._running
                if s.prefilled
            ),
            prefill_tokens=sum(len(s.request.prompt_ids) for s in self._running if not s.prefilled),
            waiting=len(self._waiting),
        )

    def _find(self, key: tuple[str, int]) -> _Sequence | None:
        return next((s for s in (*self._running, *self._waiting) if s.request.key == key), None)

    # ---- the round --------------------------------------------------------------------------------

    def run_round(self, plan: RoundPlan) -> RoundOutcome:
        """Commit one token per sequence, or gamma + 1 where drafts were planned."""
        started_s = time.perf_counter()
        self._misbehave()
        emissions: list[Emission] = []
        completions: list[Completion] = []
        outcomes: list[SequenceOutcome] = []
        prefill_rows = 0
        for sequence in list(self._running):
            if not sequence.prefilled:
                sequence.prefilled = True
                prefill_rows += len(sequence.request.prompt_ids)
                continue
            if self._faults.stall_at_round == self._round_index:
                continue
            outcomes.append(self._advance(sequence, plan.of(sequence.number), emissions, completions))
        facts = RoundFacts(
            round_index=self._round_index,
            policy_version=self.policy_version,
            batch=len(outcomes),
            prefill_rows=prefill_rows,
            verify_rows=sum(1 + o.gamma for o in outcomes),
            context_tokens=sum(o.context_tokens * (1 + o.gamma) for o in outcomes),
            draft_s=0.0,
            verify_s=0.0,
            commit_s=0.0,
            total_s=time.perf_counter() - started_s,
            drafts=(DraftCost(drafter=ECHO, passes=0, rows=0, context_tokens=0, seconds=0.0),),
            outcomes=tuple(outcomes),
        )
        self._round_index += 1
        return RoundOutcome(facts=facts, emissions=tuple(emissions), completions=tuple(completions))

    def _misbehave(self) -> None:
        faults, index = self._faults, self._round_index
        time.sleep(faults.long_round_s if index == faults.long_round else faults.round_s)
        if index == faults.exit_at_round:
            os._exit(1)
        if index == faults.raise_at_round:
            raise RuntimeError(f"the scripted engine was told to fail in round {index}")

    def _advance(
        self,
        sequence: _Sequence,
        assignment: Assignment,
        emissions: list[Emission],
        completions: list[Completion],
    ) -> SequenceOutcome:
        first = len(sequence.records)
        before = len(sequence.request.prompt_ids) + sequence.new_tokens
        gamma = min(assignment.gamma, sequence.limit - sequence.new_tokens - 1)
        sequence.rounds += 1
        sequence.drafted += gamma
        ended: tuple[FinishReason, Exception | None] | None = None
        while ended is None and len(sequence.records) - first <= gamma:
            ended = self._commit(sequence, assignment, gamma - (len(sequence.records) - first))
        if len(sequence.records) > first:
            emissions.append(
                Emission(
                    key=sequence.request.key,
                    attempt=sequence.request.attempt,
                    first_index=first,
                    tokens=sequence.records[first:],
                )
            )
        if ended is not None:
            completions.append(self._end(sequence, *ended))
        committed = len(sequence.records) - first
        return SequenceOutcome(
            key=sequence.number,
            drafter=assignment.drafter if gamma else AR,
            gamma=gamma,
            accepted=min(gamma, committed),
            committed=committed,
            context_tokens=before,
            censored=ended is not None,
            finished=ended is not None,
        )

    def _commit(
        self, sequence: _Sequence, assignment: Assignment, drafts_left: int
    ) -> tuple[FinishReason, Exception | None] | None:
        """Append one token; return how the sequence is over, or None when it goes on."""
        request, params = sequence.request, sequence.request.params
        if request.prompt_uid == self._faults.nan_uid and sequence.new_tokens == 2:
            return "failed", NumericError("logits of this sequence are not finite")
        token = self._token(request, sequence.new_tokens)
        speculated = assignment.gamma > 0
        logprob = -1.0 - token / 1024
        sequence.records.add(
            token,
            (logprob, logprob, logprob, 0.0),
            policy_version=self.policy_version,
            origin=("accepted" if drafts_left else "bonus") if speculated else "plain",
            drafter=ECHO if speculated else AR,
        )
        ends = token in params.stop_ids or (token == EOS_ID and not params.ignore_eos)
        if ends and sequence.new_tokens > params.min_tokens:
            return "stop", None
        return ("length", None) if sequence.new_tokens >= sequence.limit else None

    def _token(self, request: Request, index: int) -> int:
        position = len(request.prompt_ids) + index
        key = f"{self._salt}/{request.prompt_ids}/{request.seed}/{position}"
        return int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "big") % self._spec.vocab_size

    def _end(self, sequence: _Sequence, reason: FinishReason, error: Exception | None) -> Completion:
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        origins = Counter(s.origin for s in sequence.records.sources)
        return Completion(
            prompt_uid=sequence.request.prompt_uid,
            sample_index=sequence.request.sample_index,
            attempt=sequence.request.attempt,
            tokens=sequence.records[:],
            text=None,
            finish_reason=reason,
            error=None if error is None else f"{type(error).__name__}: {error}",
            provenance=Provenance(
                seed=sequence.request.seed,
                host=self._spec.host,
                fingerprint=self.fingerprint,
                drafter_versions=dict(self.drafter_versions()),
                rounds=sequence.rounds,
                drafted=sequence.drafted,
                accepted=origins["accepted"],
                verified_rows=len(sequence.records),
                queued_s=0.0,
                prefill_s=0.0,
                decode_s=0.0,
            ),
        )

    # ---- weights ----------------------------------------------------------------------------------

    def begin_update(self, manifest: UpdateManifest, *, in_flight: InFlight) -> None:
        """Open an update. With ``drain`` nobody new is admitted until it closes."""
        if self._manifest is not None:
            raise WeightUpdateError("an update is already open")
        if manifest.version <= self.policy_version:
            raise WeightUpdateError(f"version {manifest.version} is not newer than {self.policy_version}")
        names = {t.name: t.shape for t in manifest.tensors}
        shapes = self._shapes()
        wrong = sorted(name for name in names.keys() | shapes.keys() if names.get(name) != shapes.get(name))
        if wrong:
            raise WeightUpdateError(f"tensors missing, extra or of another shape: {', '.join(wrong)}")
        self._manifest, self._mode, self._staged = manifest, in_flight, {}

    def stage(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep a copy of each tensor."""
        if self._manifest is None:
            raise WeightUpdateError("no update is open")
        if self._faults.refuse_stage:
            raise WeightUpdateError(f"host {self._spec.host} was told to refuse")
        if self._faults.crash_stage:
            raise RuntimeError(f"host {self._spec.host} was told to break")
        import torch

        for name, value in tensors:
            if not bool(torch.isfinite(value).all()):
                raise WeightUpdateError(f"{name} holds NaN or infinity")
            self._staged[name] = value.clone()

    def check_update(self) -> None:
        """Check that everything came as announced."""
        from rollout.policy.weights import checksum

        manifest, staged = self._manifest, self._staged
        if manifest is None:
            raise WeightUpdateError("no update is open")
        if staged.keys() != self._shapes().keys() or checksum(staged) != manifest.checksum:
            self.discard_update()
            raise WeightUpdateError("the checksum of what arrived differs from what was announced")

    def settle_running(self) -> list[Completion]:
        """End what is under way when the mode is ``abort``."""
        if self._mode != "abort":
            return []
        error = AbortedError("ended by a weight update with in_flight=abort")
        return [self._end(s, "aborted", error) for s in self._under_way()]

    def commit_update(self) -> int:
        """Switch."""
        manifest, staged = self._manifest, self._staged
        if manifest is None:
            raise WeightUpdateError("no update is open")
        assert self._mode != "drain" or not self.running, "drain commits when nothing runs"
        self.discard_update()
        if self._faults.refuse_commit:
            raise WeightUpdateError(f"host {self._spec.host} was told to refuse")
        self.policy_version = self._drafter_version = manifest.version
        self._take_weights(staged)
        return self.policy_version

    def discard_update(self) -> None:
        """Drop an open update."""
        self._manifest, self._staged = None, {}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        ballast = self._spec.ballast_floats
        return {**SHAPES, BALLAST: (ballast,)} if ballast else SHAPES

    def _take_weights(self, state: Mapping[str, Tensor]) -> None:
        import torch

        digest = blake2b(digest_size=8)
        for name in sorted(SHAPES):
            digest.update(state[name].to(torch.float32).numpy().tobytes())
        self._take_salt(digest.hexdigest())

    def _take_salt(self, salt: str) -> None:
        self._salt = salt
        numerics = f"scripted-{self._spec.host}" if self._faults.other_numerics else "scripted"
        self.fingerprint = f"{numerics}/{self._salt}"

    # ---- the rest ---------------------------------------------------------------------------------

    def drafter_versions(self) -> Mapping[str, int]:
        """Return the echo drafter's version."""
        return {ECHO: self._drafter_version}

    def rebuild_drafter(self, name: str) -> None:
        """Count the rebuild."""
        self.rebuilds += 1

    def part_shapes(self) -> Mapping[str, PartShape]:
        """Return shapes of nothing much."""
        shape = PartShape(
            name=POLICY,
            weight_bytes=2 * 64 * 65,
            flops_per_row=2.0 * 64 * 64,
            kv_bytes_per_token=0,
            flops_per_context_token=0.0,
        )
        return {POLICY: shape, ECHO: replace(shape, name=ECHO, weight_bytes=0, rows_per_draft_token=0)}

    def time_forward(self, part: str, *, rows: int, context_tokens: int, sequences: int = 0) -> float:
        """There is no forward to time."""
        raise UnsupportedError("the scripted engine runs no forward")

    def untold(self) -> tuple[Emission, ...]:
        """Nothing: every round tells all of its tokens."""
        return ()

    def gauges(self) -> Mapping[str, float]:
        """Return the queue lengths."""
        return {"engine/running": float(len(self._running)), "engine/waiting": float(len(self._waiting))}

    def close(self) -> None:
        """Drop everything."""
        self._running.clear()
        self._waiting.clear()


class SleepingScriptedEngine(ScriptedEngine):
    """One that can also sleep."""

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to take."""


def scripted_requests(prompts: int, *, n: int = 1, tokens: int = 24, tag: str = "p") -> list[Request]:
    """Return requests that never stop early, so that their length is known; same arguments, same seeds."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Request(
            prompt_uid=f"{tag}{i}",
            sample_index=j,
            prompt_ids=(1 + i, 2, 3),
            params=params,
            seed=sample_seed(run_seed=0, trainer_step=0, prompt_uid=str(i), sample_index=j),
        )
        for i in range(prompts)
        for j in range(n)
    ]
