"""The native engine: a round drafts, verifies and commits once for everything that runs.

``run_round`` is the whole story; each line of it is one method below. The engine decides nothing about
speculation (the plan does), owns no thread and knows no Ray.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from controller.types import (
    AR,
    POLICY,
    Assignment,
    DraftCost,
    EngineTraits,
    InFlight,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)
from drafters.types import DraftRequest
from rollout.config import EngineConfig
from rollout.engine.native.commit import Detokenizer, commit_token, final_text
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.door import admit_request
from rollout.engine.native.drafting import Drafted, Drafting
from rollout.engine.native.judging import Judge, Verdict
from rollout.engine.native.numerics import fingerprint
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.scheduler import PromptChunk, Scheduler
from rollout.engine.native.sequence import LiveSequence, Phase
from rollout.engine.native.timing import time_forward
from rollout.engine.native.view import EngineState, NativeDraftModel, NativePolicyView
from rollout.engine.protocol import Emission, RoundOutcome, UpdateManifest
from rollout.engine.target import Chooser
from rollout.errors import AbortedError, NoProgressError, NumericError, UnsupportedError, WeightUpdateError
from rollout.policy.weights import WeightStage
from rollout.types import Completion, FinishReason, Request

log = logging.getLogger(__name__)

IN_FLIGHT: tuple[InFlight, ...] = ("drain", "abort", "recompute", "keep")


@dataclass(kw_only=True, slots=True)
class Work:
    """What one round computes: prompt chunks first, then each decoding sequence with its drafts."""

    chunks: list[PromptChunk]
    decoding: list[LiveSequence]
    assignments: dict[int, Assignment]
    drafted: dict[int, Drafted] = field(default_factory=dict)
    costs: list[DraftCost] = field(default_factory=list)
    context_tokens: int = 0

    def drafts_of(self, sequence: LiveSequence) -> Drafted:
        """Return the drafts to verify for ``sequence``; empty when it decodes plainly."""
        return self.drafted.get(sequence.key) or Drafted()

    @property
    def choosing(self) -> list[LiveSequence]:
        """Sequences that get at least one token, in the order of their head rows."""
        return [c.sequence for c in self.chunks if c.completes] + self.decoding


class NativeEngine:
    """Implements ``rollout.engine.protocol.Engine``."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        chooser: Chooser,
        drafting: Drafting,
        config: EngineConfig,
        numerics_exact: bool,
        decoder_description: str,
        detokenizer: Detokenizer | None,
        policy_version: int,
        weights_checksum: str,
        host: str = "local",
    ) -> None:
        self.policy_version = policy_version
        self.host = host
        self._config = config
        self._decoder = decoder
        self._chooser = chooser
        self._drafting = drafting
        self._detokenizer = detokenizer
        self._description = decoder_description
        self._numerics = "exact" if numerics_exact else "fast"
        self._context_limit = min(config.max_context_tokens, decoder.spec.max_positions)
        pages = self._pool_pages()
        self._storage: KVStorage = decoder.new_storage(pages)
        self._scheduler = Scheduler(
            max_batch=config.max_batch,
            max_pages_per_sequence=pages_for(self._context_limit),
            pool=PagePool(pages),
            prefix_cache=config.prefix_cache,
        )
        state = EngineState(
            decoder=decoder,
            storage=self._storage,
            scheduler=self._scheduler,
            chooser=chooser,
            verify=config.verify,
        )
        self._state = state
        self._judge = Judge(chooser, config.verify)
        self._stage: WeightStage | None = None
        self._update_mode: InFlight = "drain"
        self._update_s = 0.0
        self._next_key = 0
        self._round_index = 0
        self.fingerprint = self._fingerprint(weights_checksum)
        drafting.rebuild_all(NativePolicyView(state, policy_version=policy_version))

    # ---- what it can do -------------------------------------------------------------------------

    @property
    def traits(self) -> EngineTraits:
        """What the controller may plan with."""
        return EngineTraits(
            engine="native",
            verify_modes=("coupled", "block", "token"),
            gamma_per_sequence=True,
            drafters=self._drafting.traits(),
            numerics="exact" if self._numerics == "exact" else "fast",
            in_flight=IN_FLIGHT,
            max_batch=self._config.max_batch,
            max_context_tokens=self._context_limit,
        )

    def part_shapes(self) -> Mapping[str, PartShape]:
        """Return the cost shapes of the policy and of each drafter."""
        spec = self._decoder.spec
        params = spec.body_linear_params * spec.loops + spec.head_params
        kv_bytes = 2 * spec.planes * spec.kv_heads * spec.head_dim * 2
        attention_flops = 4.0 * spec.planes * spec.query_heads * spec.head_dim

        def shape(name: str, weight_bytes: int, rows: int) -> PartShape:
            return PartShape(
                name=name,
                weight_bytes=weight_bytes,
                flops_per_row=2.0 * params,
                kv_bytes_per_token=kv_bytes,
                flops_per_context_token=attention_flops,
                rows_per_draft_token=rows,
            )

        shapes = {POLICY: shape(POLICY, 2 * params, 1)}
        for name, slot in self._drafting.slots.items():
            weight_bytes = slot.drafter.weight_bytes
            shapes[name] = shape(name, weight_bytes, 1 if weight_bytes else 0)
        return shapes

    # ---- requests -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises a ``RequestError`` for this item alone."""
        sequence = admit_request(
            request,
            key=self._next_key,
            spec=self._decoder.spec,
            context_limit=self._context_limit,
            pool_pages=self._scheduler.pool.total,
            live=self._scheduler.find(request.key),
            has_tokenizer=self._detokenizer is not None,
            now_s=time.monotonic(),
        )
        self._next_key += 1
        self._scheduler.add(sequence)

    def abort(self, key: tuple[str, int], *, reason: str = "") -> Completion | None:
        """End a request now with what it has; None when it is unknown or already over."""
        sequence = self._scheduler.find(key)
        if sequence is None:
            return None
        return self._end(sequence, "aborted", AbortedError(reason or "aborted by the caller"))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def running(self) -> int:
        """Sequences that hold KV."""
        return len(self._scheduler.running)

    def load(self) -> RoundLoad:
        """Admit what fits and say what the next round will decode."""
        self._scheduler.admit(self.policy_version, time.monotonic())
        chunks = self._scheduler.chunks(self._config.prefill_chunk_tokens)
        return RoundLoad(
            round_index=self._round_index,
            policy_version=self.policy_version,
            sequences=tuple(self._sequence_load(s) for s in self._scheduler.decoding()),
            prefill_tokens=sum(c.end - c.start for c in chunks),
            waiting=len(self._scheduler.waiting),
        )

    def _sequence_load(self, sequence: LiveSequence) -> SequenceLoad:
        ready: dict[str, int] = {}
        for name, slot in self._drafting.slots.items():
            if slot.enabled:
                gamma = min(slot.drafter.max_gamma, max(0, sequence.remaining_tokens - 1))
                count = slot.drafter.ready(_draft_request(sequence, gamma))
                if count is not None:
                    ready[name] = count
        return SequenceLoad(
            key=sequence.key,
            context_tokens=len(sequence.tokens),
            generated_tokens=sequence.new_tokens,
            remaining_tokens=sequence.remaining_tokens,
            history_match_tokens=ready,
        )

    # ---- the round ------------------------------------------------------------------------------

    def run_round(self, plan: RoundPlan) -> RoundOutcome:
        """Draft, verify and commit once for the running batch, with prompt chunks mixed in."""
        started = time.perf_counter()
        work = self._reserve(plan)
        self._draft(work)
        drafted = time.perf_counter()
        logits_RV = self._forward(work)
        verdicts = self._judge.judge(work.choosing, work.drafts_of, logits_RV)
        verified = time.perf_counter()
        outcome = self._commit(work, verdicts)
        done = time.perf_counter()
        facts = self._facts(work, outcome, times=(started, drafted, verified, done))
        self._round_index += 1
        return RoundOutcome(
            facts=facts, emissions=tuple(outcome.emissions), completions=tuple(outcome.completions)
        )

    def _reserve(self, plan: RoundPlan) -> Work:
        """Take the pages this round needs. Drafts are optional: they give way before anyone is preempted."""
        assignments: dict[int, Assignment] = {}
        for sequence in self._scheduler.decoding():
            if sequence.phase is not Phase.DECODE:
                continue  # preempted by an elder while this loop ran
            wanted = plan.of(sequence.key)
            gamma = min(wanted.gamma, sequence.remaining_tokens - 1)
            length = len(sequence.tokens)
            if gamma > 0 and not self._scheduler.reserve(sequence, length + gamma, may_preempt=False):
                gamma = 0
            if not self._scheduler.reserve(sequence, length, may_preempt=True):
                self._scheduler.preempt(sequence)
                continue
            assignments[sequence.key] = (
                Assignment(drafter=wanted.drafter, gamma=gamma)
                if gamma > 0
                else Assignment(drafter=AR, gamma=0)
            )
        decoding = [s for s in self._scheduler.decoding() if s.key in assignments]
        chunks = self._scheduler.chunks(self._config.prefill_chunk_tokens)
        return Work(chunks=chunks, decoding=decoding, assignments=assignments)

    def _draft(self, work: Work) -> None:
        """Ask each assigned drafter once. With gamma 0 everywhere no drafter runs at all."""
        by_drafter: dict[str, list[DraftRequest]] = {}
        for sequence in work.decoding:
            assignment = work.assignments[sequence.key]
            if assignment.gamma > 0:
                request = _draft_request(sequence, assignment.gamma)
                by_drafter.setdefault(assignment.drafter, []).append(request)
        for name, requests in by_drafter.items():
            drafted, cost = self._drafting.propose(name, requests)
            work.drafted.update(drafted)
            work.costs.append(cost)

    def _forward(self, work: Work) -> Tensor:
        """Compute prompt chunks and every draft in one pass of the policy; logits in ``choosing`` order."""
        tokens: list[int] = []
        positions: list[int] = []
        tables: list[int] = []
        heads: list[int] = []
        for chunk in work.chunks:
            sequence = chunk.sequence
            tokens += sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            tables += [sequence.slot] * (chunk.end - chunk.start)
            if chunk.completes:
                heads.append(len(tokens) - 1)
        for sequence in work.decoding:
            drafts = work.drafts_of(sequence).tokens
            start = len(sequence.tokens) - 1
            heads += range(len(tokens), len(tokens) + 1 + len(drafts))
            tokens.append(sequence.tokens[-1])
            tokens += drafts
            positions += range(start, start + 1 + len(drafts))
            tables += [sequence.slot] * (1 + len(drafts))
        if not tokens:
            return torch.empty(0, self._decoder.spec.vocab_size)
        work.context_tokens = sum(positions) + len(positions)
        batch = RowBatch(
            token_ids_M=torch.tensor(tokens, dtype=torch.int32),
            positions_M=torch.tensor(positions, dtype=torch.int32),
            table_M=torch.tensor(tables, dtype=torch.int32),
            page_table_SP=torch.from_numpy(self._scheduler.page_table),
            head_rows_R=torch.tensor(heads, dtype=torch.int32),
        )
        return self._decoder.forward(batch, self._storage).logits_RV

    def _commit(self, work: Work, verdicts: list[Verdict]) -> "_Committed":
        """Hand every verified token to ``commit_token``, one by one, and move the frontiers."""
        outcome = _Committed()
        for chunk in work.chunks:
            chunk.sequence.frontier = chunk.end
            self._scheduler.publish(chunk.sequence, self.policy_version)
        decoding = {s.key for s in work.decoding}
        for sequence, verdict in zip(work.choosing, verdicts, strict=True):
            if sequence.key in decoding:
                self._commit_decoded(sequence, verdict, work, outcome)
            else:
                sequence.phase = Phase.DECODE
                sequence.first_token_s = time.monotonic()
                self._commit_tokens(sequence, verdict, AR, outcome)
        if work.decoding and not (outcome.emissions or outcome.completions):
            raise NoProgressError(
                f"round {self._round_index} decoded {len(work.decoding)} and committed nothing"
            )
        return outcome

    def _commit_decoded(
        self, sequence: LiveSequence, verdict: Verdict, work: Work, outcome: "_Committed"
    ) -> None:
        drafts = work.drafts_of(sequence).tokens
        drafter = work.assignments[sequence.key].drafter if drafts else AR
        context = len(sequence.tokens)
        sequence.rounds += 1
        sequence.drafted += len(drafts)
        sequence.verified_rows += 1 + len(drafts)
        committed = self._commit_tokens(sequence, verdict, drafter, outcome)
        accepted = sum(
            1 for r in sequence.records[len(sequence.records) - committed :] if r.origin == "accepted"
        )
        sequence.accepted += accepted
        outcome.sequences.append(
            SequenceOutcome(
                key=sequence.key,
                drafter=drafter,
                gamma=len(drafts),
                accepted=accepted,
                committed=committed,
                context_tokens=context,
                censored=committed < len(verdict.tokens),
                finished=sequence.phase is Phase.OVER,
            )
        )

    def _commit_tokens(
        self, sequence: LiveSequence, verdict: Verdict, drafter: str, outcome: "_Committed"
    ) -> int:
        """Commit until something ends the sequence; return how many tokens were committed."""
        first = sequence.new_tokens
        reason: FinishReason | None = None
        error: Exception | None = None
        for choice, origin in verdict.tokens:
            if not choice.finite:
                reason = "failed"
                error = NumericError(f"the policy's logits at position {len(sequence.tokens)} are not finite")
                break
            reason = commit_token(
                sequence,
                choice,
                origin=origin,
                drafter=drafter,
                policy_version=self.policy_version,
                detokenizer=self._detokenizer,
            )
            if reason is not None:
                break
        committed = sequence.new_tokens - first
        if committed:
            sequence.frontier = len(sequence.tokens) - 1
            outcome.emissions.append(
                Emission(
                    key=sequence.request.key,
                    attempt=sequence.request.attempt,
                    first_index=first,
                    tokens=tuple(sequence.records[-committed:]),
                )
            )
            self._tell_drafters(sequence, finished=reason in ("stop", "length"))
        if reason is not None:
            outcome.completions.append(self._end(sequence, reason, error))
        return committed

    def _tell_drafters(self, sequence: LiveSequence, *, finished: bool) -> None:
        request = _draft_request(sequence, 0)
        for slot in self._drafting.slots.values():
            slot.drafter.committed(request, finished=finished)

    def _end(self, sequence: LiveSequence, reason: FinishReason, error: Exception | None) -> Completion:
        self._scheduler.remove(sequence)
        for slot in self._drafting.slots.values():
            slot.drafter.forget(sequence.key)
        return sequence.completion(
            reason=reason,
            error=error,
            text=final_text(sequence, self._detokenizer),
            host=self.host,
            fingerprint=self.fingerprint,
            drafter_versions={n: s.drafter.drafter_version for n, s in self._drafting.slots.items()},
            now_s=time.monotonic(),
        )

    def _facts(
        self, work: Work, outcome: "_Committed", *, times: tuple[float, float, float, float]
    ) -> RoundFacts:
        started, drafted, verified, done = times
        return RoundFacts(
            round_index=self._round_index,
            policy_version=self.policy_version,
            batch=len(work.decoding),
            prefill_rows=sum(c.end - c.start for c in work.chunks),
            verify_rows=sum(1 + len(work.drafts_of(s).tokens) for s in work.decoding),
            context_tokens=work.context_tokens,
            draft_s=drafted - started,
            verify_s=verified - drafted,
            commit_s=done - verified,
            total_s=done - started,
            drafts=tuple(work.costs),
            outcomes=tuple(outcome.sequences),
        )

    # ---- weights --------------------------------------------------------------------------------

    def begin_update(self, manifest: UpdateManifest, *, in_flight: InFlight) -> None:
        """Open a weight update. Until it is committed or discarded, ``drain`` admits nobody new."""
        if in_flight not in IN_FLIGHT:
            raise UnsupportedError(f"in_flight={in_flight!r} is not one of {', '.join(IN_FLIGHT)}")
        if self._stage is not None:
            raise WeightUpdateError(f"an update is already open; version {self.policy_version} is live")
        self._stage = WeightStage(self._decoder.spec, self._config.dtype, self.policy_version, manifest)
        self._update_mode = in_flight
        self._scheduler.admitting = in_flight != "drain"

    def stage(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take one bucket of the open update."""
        self._open_stage().add(tensors)

    def commit_update(self) -> int:
        """Check, switch, clear caches of the old version, rebuild drafters; return the live version."""
        stage = self._open_stage()
        if self._update_mode == "drain" and self._scheduler.running:
            raise WeightUpdateError(f"{self.running} sequences still run and in_flight=drain waits for them")
        started = time.perf_counter()
        try:
            state = stage.finish()
        except WeightUpdateError:
            self.discard_update()
            raise
        self._decoder.load(state)
        self._close_update()
        self.policy_version = stage.manifest.version
        self.fingerprint = self._fingerprint(stage.manifest.checksum)
        self._scheduler.prefix.clear()
        self._drafting.rebuild_all(NativePolicyView(self._state, policy_version=self.policy_version))
        self._update_s = time.perf_counter() - started
        log.info("policy version %d is live (%.2f s)", self.policy_version, self._update_s)
        return self.policy_version

    def settle_running(self) -> list[Completion]:
        """Do to running sequences what the open update's mode asks, before it is committed.

        ``abort`` ends them (returned), ``recompute`` sends them back to prefill, ``keep`` leaves their KV:
        their later tokens attend to keys of two versions, and each token's version says so.
        """
        self._open_stage()
        running = list(self._scheduler.running.values())
        if self._update_mode == "abort":
            error = AbortedError("ended by a weight update with in_flight=abort")
            return [self._end(s, "aborted", error) for s in running]
        if self._update_mode == "recompute":
            for sequence in reversed(running):
                self._scheduler.preempt(sequence)
        return []

    def discard_update(self) -> None:
        """Drop an open update; the live version is untouched."""
        self._close_update()

    def _open_stage(self) -> WeightStage:
        if self._stage is None:
            raise WeightUpdateError("no update is open: begin_update comes first")
        return self._stage

    def _close_update(self) -> None:
        self._stage = None
        self._scheduler.admitting = True

    def _fingerprint(self, weights: str) -> str:
        return fingerprint(
            decoder=self._description, numerics=self._numerics, verify=self._config.verify, weights=weights
        )

    # ---- the rest -------------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return loggable numbers."""
        scheduler = self._scheduler
        return {
            "engine/policy_version": float(self.policy_version),
            "engine/running": float(len(scheduler.running)),
            "engine/waiting": float(len(scheduler.waiting)),
            "engine/kv_pages_used": float(scheduler.pool.total - scheduler.pool.free),
            "engine/kv_pages_total": float(scheduler.pool.total),
            "engine/preemptions": float(scheduler.preemptions),
            "engine/prefix_hit_tokens": float(scheduler.prefix.hit_tokens),
            "engine/prefix_lookup_tokens": float(scheduler.prefix.lookup_tokens),
            "engine/update_s": self._update_s,
            **self._drafting.gauges(),
        }

    def time_forward(self, part: str, *, rows: int, context_tokens: int, sequences: int = 0) -> float:
        """Return the seconds of one forward of the policy or of a drafter that runs a model."""
        assert not self._scheduler.running, "time_forward only when idle: it borrows pages and processor time"
        return time_forward(
            self._decoder_of(part),
            self._storage,
            self._scheduler.pool,
            rows=rows,
            context_tokens=context_tokens,
            sequences=sequences or rows,
        )

    def _decoder_of(self, part: str) -> Decoder:
        if part == POLICY:
            return self._decoder
        slot = self._drafting.slots.get(part)
        model = slot.drafter.model if slot is not None else None
        if not isinstance(model, NativeDraftModel):
            raise UnsupportedError(f"{part!r} runs no forward that could be timed")
        return model.decoder

    def close(self) -> None:
        """Free everything; running requests are dropped."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running.values()):
            self._scheduler.remove(sequence)
        self._scheduler.prefix.clear()

    def _pool_pages(self) -> int:
        wanted = self._config.kv_tokens or self._config.max_batch * self._context_limit
        spec = self._decoder.spec
        bytes_per_token = 2 * spec.planes * spec.kv_heads * spec.head_dim * 2
        capped = wanted if self._config.kv_tokens else min(wanted, self._config.kv_bytes // bytes_per_token)
        return max(1, pages_for(capped))


@dataclass(kw_only=True, slots=True)
class _Committed:
    """What a round's commits produced."""

    emissions: list[Emission] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    sequences: list[SequenceOutcome] = field(default_factory=list)


def _draft_request(sequence: LiveSequence, gamma: int) -> DraftRequest:
    return DraftRequest(
        key=sequence.key,
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        gamma=gamma,
        prompt_uid=sequence.request.prompt_uid,
    )
