"""The native engine: a round drafts, verifies and commits once for everything that runs.

``run_round`` is the whole story: each of its lines is one function of ``work``, ``judging`` or
``committer``. The engine decides nothing about speculation (the plan does), owns no thread, knows no Ray.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from controller.types import (
    NOTHING_READY,
    POLICY,
    EngineTraits,
    InFlight,
    PartShape,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
)
from drafters.wavefront import WAVEFRONT
from rollout.config import EngineConfig
from rollout.engine.native.choosing import forward_chooser
from rollout.engine.native.commit import Detokenizer
from rollout.engine.native.committer import Committed, Committer
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.depths import forward_from, standing_of
from rollout.engine.native.door import admit_request
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.drafts.view import EngineState, NativeDraftModel, NativePolicyView
from rollout.engine.native.facts import RoundTimes, round_facts
from rollout.engine.native.judging import DecisionsOf, Judge, noise_decisions
from rollout.engine.native.kv_pool import context_limit, pool_pages
from rollout.engine.native.lanes.wavefront import Wavefront
from rollout.engine.native.memory import EngineMemory
from rollout.engine.native.numerics import fingerprint
from rollout.engine.native.pages import PagePool, pages_for
from rollout.engine.native.pass_clock import NOTHING_RUN, PassClock, TimedChooser
from rollout.engine.native.plain_round import PlainWork, choose_plain, reserve_plain
from rollout.engine.native.rows import RowBatch, RowMemory
from rollout.engine.native.scheduler import Scheduler
from rollout.engine.native.sequence import LiveSequence, Phase
from rollout.engine.native.shapes import part_shapes
from rollout.engine.native.teacher import logits_after
from rollout.engine.native.timing import make_up_prompts, time_forward
from rollout.engine.native.work import (
    Work,
    draft_request,
    draft_work,
    reserve_work,
    row_batch,
    run_lanes,
)
from rollout.engine.protocol import Emission, LookUp, RoundOutcome, always
from rollout.engine.target import Chooser
from rollout.engine.verify import Verdict
from rollout.errors import AbortedError, UnsupportedError, WeightUpdateError
from rollout.policy.manifest import UpdateManifest
from rollout.policy.weights import WeightStage, checksum
from rollout.types import Completion, Request

log = logging.getLogger(__name__)

IN_FLIGHT: tuple[InFlight, ...] = ("drain", "abort", "recompute", "keep")


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
        decisions_of: DecisionsOf = noise_decisions,
    ) -> None:
        self.policy_version = policy_version
        self.host = host
        self._config = config
        self._decoder = decoder
        self._drafting = drafting
        self._detokenizer = detokenizer
        self._description = decoder_description
        self._exact = numerics_exact
        self._context_limit = context_limit(config, decoder.spec)
        pages = pool_pages(config, decoder.spec)
        self._scheduler = Scheduler(
            max_batch=config.max_batch,
            max_pages_per_sequence=pages_for(self._context_limit),
            pool=PagePool(pages),
            prefix_cache=config.prefix_cache,
        )
        self._clock = PassClock()
        timed_chooser = TimedChooser(chooser, self._clock)
        self._state = EngineState(
            decoder=decoder,
            storage=decoder.new_storage(pages),
            scheduler=self._scheduler,
            chooser=timed_chooser,
            verify=config.verify,
            clock=self._clock,
        )
        self._row_memory = RowMemory(self._scheduler.page_table)
        self._choosing = forward_chooser(decoder, timed_chooser, verify=config.verify, clock=self._clock)
        self._wavefront = Wavefront(self._state, drafting)
        self._judge = Judge(timed_chooser, config.verify, decisions_of)
        self.fingerprint = self._fingerprint(weights_checksum)
        self._committer = Committer(
            self._scheduler,
            drafting,
            detokenizer=detokenizer,
            host=host,
            fingerprint=lambda: self.fingerprint,
            emit_s=config.emit_s,
        )
        self._stage: WeightStage | None = None
        self._checked_state: Mapping[str, Tensor] | None = None
        self._update_mode: InFlight = "drain"
        self._update_s = 0.0
        self._next_key = 0
        self._round_index = 0
        self._reused_row_loops = 0
        drafting.rebuild_all(NativePolicyView(self._state, policy_version=policy_version))

    # ---- what it can do -------------------------------------------------------------------------

    @property
    def traits(self) -> EngineTraits:
        """What the controller may plan with."""
        return EngineTraits(
            engine="native",
            verify_modes=("coupled", "block", "token"),
            gamma_per_sequence=True,
            drafters=self._drafting.traits(),
            numerics="exact" if self._exact else "fast",
            in_flight=IN_FLIGHT,
            max_batch=self._config.max_batch,
            max_context_tokens=self._context_limit,
        )

    def part_shapes(self) -> Mapping[str, PartShape]:
        """Return the cost shapes of the policy and of each drafter."""
        return part_shapes(self._decoder.spec, [slot.drafter for slot in self._drafting.slots.values()])

    def use_drafters(self, names: Collection[str]) -> None:
        """Switch every other drafter off, until the next weight update; only when idle.

        What is off is not in ``traits`` and costs nothing, so arms of a comparison can share an engine.
        Raises ``ValueError`` for an unknown name.
        """
        assert not self.busy, "drafters are switched between runs, not while sequences rely on them"
        self._drafting.use_only(names)

    # ---- requests -------------------------------------------------------------------------------

    def add(self, request: Request, *, resumed: bool = False) -> None:
        """Queue a request; ``resumed``: under way. Raises a ``RequestError`` for this item alone."""
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
        sequence.resumed = resumed
        self._next_key += 1
        self._scheduler.add(sequence)

    def abort(self, key: tuple[str, int], *, reason: str = "") -> Completion | None:
        """End a request now with what it has; None when it is unknown or already over."""
        sequence = self._scheduler.find(key)
        if sequence is None:
            return None
        self._wavefront.drop((sequence.key,))
        return self._committer.end(sequence, "aborted", AbortedError(reason or "aborted by the caller"))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._scheduler.waiting or self._scheduler.running_count)

    @property
    def running(self) -> int:
        """Sequences under way: those that hold KV, preempted ones, and resumed ones that wait."""
        return self._scheduler.under_way_count

    def load(self, *, look_up: LookUp = always) -> RoundLoad:
        """Admit what fits and say what the next round will decode."""
        scheduler = self._scheduler
        scheduler.admit(self.policy_version, time.monotonic())
        count = scheduler.decoding_count
        if scheduler.plain.size == count:
            load = self._load_of(scheduler.plain.loads())
        else:
            load = self._load_of(_loads(scheduler.decoding(), [NOTHING_READY] * count))
        if not count or not self._drafting.any_enabled or not look_up(load):
            return load
        decoding = scheduler.decoding()
        useful = [draft_request(s, max(0, s.remaining_tokens - 1)) for s in decoding]
        return self._load_of(_loads(decoding, self._drafting.ready(useful)))

    def _load_of(self, sequences: Sequence[SequenceLoad]) -> RoundLoad:
        chunks = self._scheduler.chunks(self._config.prefill_chunk_tokens)
        return RoundLoad(
            round_index=self._round_index,
            policy_version=self.policy_version,
            sequences=sequences,
            prefill_tokens=sum([c.end - c.start for c in chunks]),
            waiting=len(self._scheduler.waiting),
        )

    # ---- the round ------------------------------------------------------------------------------

    def run_round(self, plan: RoundPlan) -> RoundOutcome:
        """Draft, verify and commit once for the running batch, with prompt chunks mixed in."""
        started = time.perf_counter()
        self._clock.take()  # whatever a round that failed left behind
        plain = self._choosing is not None and plan.plain
        work, committed, times = self._plain_round(started) if plain else self._mixed_round(plan, started)
        facts = round_facts(
            work, committed, times, round_index=self._round_index, policy_version=self.policy_version
        )
        self._round_index += 1
        return RoundOutcome(
            facts=facts, emissions=tuple(committed.emissions), completions=tuple(committed.completions)
        )

    def untold(self) -> Sequence[Emission]:
        """Return what plain rounds committed and kept, see ``EngineConfig.emit_s``."""
        return self._committer.untold()

    def _plain_round(self, started_s: float) -> tuple[PlainWork, Committed, RoundTimes]:
        """Decode plainly, by column."""
        assert self._choosing is not None
        plain = self._scheduler.plain
        self._wavefront.clear()
        try:
            work = reserve_plain(self._scheduler, chunk_tokens=self._config.prefill_chunk_tokens)
            reserved = time.perf_counter()
            choose_plain(work, plain, self._row_memory, self._choosing, self._state.storage)
        except BaseException:
            plain.clear()  # columns may be half a round further than their sequences
            raise
        policy_pass = self._clock.take()
        chosen = time.perf_counter()
        committed = self._committer.commit_plain(work, policy_version=self.policy_version)
        times = RoundTimes(
            started_s=started_s,
            drafted_s=reserved,
            verified_s=chosen,
            done_s=time.perf_counter(),
            draft_pass=NOTHING_RUN,
            policy_pass=policy_pass,
        )
        return work, committed, times

    def _mixed_round(self, plan: RoundPlan, started_s: float) -> tuple[Work, Committed, RoundTimes]:
        """Draft, verify and commit as planned, sequence by sequence."""
        self._scheduler.plain.clear()
        chunk_tokens = self._config.prefill_chunk_tokens
        work = reserve_work(self._scheduler, plan, self._wavefront, chunk_tokens=chunk_tokens)
        try:
            draft_work(work, self._drafting)
            in_lanes = run_lanes(work, self._wavefront)
            draft_pass = self._clock.take()
            drafted = time.perf_counter()
            verdicts = self._verdicts(work) + in_lanes
        finally:
            self._state.draft_states.clear()
        policy_pass = self._clock.take()
        verified = time.perf_counter()
        committed = self._committer.commit(work, verdicts, policy_version=self.policy_version)
        self._wavefront.drop(o.key for o in committed.sequences if o.finished)
        times = RoundTimes(
            started_s=started_s,
            drafted_s=drafted,
            verified_s=verified,
            done_s=time.perf_counter(),
            draft_pass=draft_pass,
            policy_pass=policy_pass,
        )
        return work, committed, times

    def _verdicts(self, work: Work) -> list[Verdict]:
        """Judge prompt chunks, last tokens and drafts, computed as far as no draft has computed them already.

        Forward and choice are one call where decoder and chooser can do that.
        """
        if not work.chunks and not work.decoding:
            return []
        batch, storage = row_batch(work, self._row_memory), self._state.storage
        standing = standing_of(work, self._state.draft_states)
        self._reused_row_loops += standing.spared if standing else 0
        if self._choosing is not None:
            return self._judge.judge_chosen(work, partial(self._choosing.choose, batch, storage, standing))
        if standing is None:
            logits_RV = self._clock.forward(self._decoder, batch, storage, states=False).logits_RV
        else:
            logits_RV = forward_from(self._decoder, batch, storage, standing, clock=self._clock)
        return self._judge.judge(work, logits_RV)

    # ---- weights --------------------------------------------------------------------------------

    def begin_update(self, manifest: UpdateManifest, *, in_flight: InFlight) -> None:
        """Open a weight update. Until it is committed or discarded, ``drain`` admits nobody new."""
        if in_flight not in IN_FLIGHT:
            raise UnsupportedError(f"in_flight={in_flight!r} is not one of {', '.join(IN_FLIGHT)}")
        if self._stage is not None:
            raise WeightUpdateError(f"an update is already open; version {self.policy_version} is live")
        with self._refusing():
            self._stage = WeightStage(self._decoder.spec, self._config.dtype, self.policy_version, manifest)
        self._update_mode = in_flight
        self._scheduler.admitting = in_flight != "drain"

    def stage(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take one bucket of the open update."""
        with self._refusing():
            self._open_stage().add(tensors)

    def settle_running(self) -> list[Completion]:
        """Do to sequences under way what the open update's mode asks, before it is committed.

        ``abort`` ends them (returned), ``recompute`` sends them back to prefill, ``keep`` leaves their KV:
        their later tokens attend to keys of two versions, and each token's version says so. What is still in
        prefill begins it again also with ``keep``: pages it shares would be of two versions, unlabelled.
        """
        self._open_stage()
        self._wavefront.clear()
        if self._update_mode == "abort":
            error = AbortedError("ended by a weight update with in_flight=abort")
            return [self._committer.end(s, "aborted", error) for s in self._scheduler.under_way]
        for sequence in reversed(list(self._scheduler.running.values())):
            if self._update_mode == "recompute" or sequence.phase is Phase.PREFILL:
                self._scheduler.preempt(sequence)
        return []

    def check_update(self) -> None:
        """Check all that was staged. Raises ``WeightUpdateError``, which closes the update."""
        with self._refusing():
            self._checked_state = self._open_stage().finish()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Until the commit nothing live is touched, so whatever goes wrong ends the open update alone."""
        try:
            yield
        except Exception as error:
            self.discard_update()
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"the update was refused: {type(error).__name__}: {error}") from error

    def commit_update(self) -> int:
        """Switch, clear caches of the old version, rebuild drafters; return the live version.

        Nothing can fail after the check, so an update is live whole or not at all.
        """
        stage = self._open_stage()
        if self._update_mode == "drain" and self.running:
            raise WeightUpdateError(f"{self.running} sequences are under way and in_flight=drain waits")
        started = time.perf_counter()
        if self._checked_state is None:
            self.check_update()
        assert self._checked_state is not None
        fingerprint = self._fingerprint(checksum(self._checked_state))
        self._decoder.load(self._checked_state)
        self.fingerprint = fingerprint
        self.discard_update()
        self._scheduler.plain.settle()  # what the old version chose is told as its own
        self.policy_version = stage.manifest.version
        self._scheduler.prefix.clear()
        self._wavefront.clear()
        self._drafting.rebuild_all(NativePolicyView(self._state, policy_version=self.policy_version))
        self._update_s = time.perf_counter() - started
        log.info("policy version %d is live (%.2f s)", self.policy_version, self._update_s)
        return self.policy_version

    def discard_update(self) -> None:
        """Close an open update; the live version is untouched."""
        self._stage = None
        self._checked_state = None
        self._scheduler.admitting = True

    def _open_stage(self) -> WeightStage:
        if self._stage is None:
            raise WeightUpdateError("no update is open: begin_update comes first")
        return self._stage

    def _fingerprint(self, weights: str) -> str:
        return fingerprint(
            decoder=self._description,
            numerics="exact" if self._exact else "fast",
            verify=self._config.verify,
            weights=weights,
        )

    # ---- drafters and memory --------------------------------------------------------------------

    def drafter_versions(self) -> Mapping[str, int]:
        """Return the policy version each working drafter was last built from."""
        return {name: slot.version for name, slot in self._drafting.slots.items() if slot.enabled}

    def rebuild_drafter(self, name: str) -> None:
        """Build one drafter anew from the live policy; one that refuses is switched off, and said so."""
        self._drafting.rebuild(name)

    def sleep(self) -> None:
        """Give the KV memory back. Running sequences go back to waiting and compute their KV again later."""
        for sequence in reversed(list(self._scheduler.running.values())):
            self._scheduler.preempt(sequence)
        self._scheduler.prefix.clear()
        self._state.storage = self._decoder.new_storage(1)
        # torch would keep the memory for itself. Does nothing where CUDA is not used.
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the KV memory again."""
        self._state.storage = self._decoder.new_storage(self._scheduler.pool.total)

    def memory(self) -> EngineMemory:
        """Return what is kept in memory now."""
        pool, storage = self._scheduler.pool, self._state.storage
        drafters = [slot.drafter for slot in self._drafting.slots.values()]
        models = [d.model.decoder for d in drafters if isinstance(d.model, NativeDraftModel)]
        decoders = {id(decoder): decoder for decoder in (self._decoder, *models)}
        return EngineMemory(
            weights=self._decoder.weight_bytes,
            drafters=sum(d.held_bytes for d in drafters),
            kv_used=(pool.total - pool.free) * storage.bytes_per_page,
            scratch=sum(decoder.scratch_bytes for decoder in decoders.values()),
        )

    # ---- the rest -------------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Return loggable numbers."""
        scheduler = self._scheduler
        return {
            "engine/policy_version": float(self.policy_version),
            "engine/running": float(scheduler.running_count),
            "engine/waiting": float(len(scheduler.waiting)),
            "engine/kv_pages_used": float(scheduler.pool.total - scheduler.pool.free),
            "engine/kv_pages_total": float(scheduler.pool.total),
            "engine/preemptions": float(scheduler.preemptions),
            "engine/prefix_hit_tokens": float(scheduler.prefix.hit_tokens),
            "engine/prefix_lookup_tokens": float(scheduler.prefix.lookup_tokens),
            "engine/update_s": self._update_s,
            "engine/computed_row_loops": float(self._decoder.work.row_loops),
            "engine/reused_row_loops": float(self._reused_row_loops),
            "engine/lanes": float(self._wavefront.lanes),
            **self._drafting.gauges(),
        }

    def time_forward(self, part: str, *, rows: int, context_tokens: int, sequences: int = 0) -> float:
        """Return the seconds of one forward of the policy or of a drafter that runs a model."""
        assert not self._scheduler.running_count, (
            "time_forward only when idle: it borrows pages and processor time"
        )
        run: Callable[[RowBatch], float] | None = None
        if part == WAVEFRONT and part in self._drafting.slots:
            run = self._wavefront.time_pass
        elif (model := self._model_of(part)) is not None:
            run = model.time_pass
        return time_forward(
            self._decoder,
            self._state.storage,
            self._scheduler.pool,
            rows=rows,
            context_tokens=context_tokens,
            sequences=sequences or rows,
            run=run,
        )

    def make_up_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Let prompts start without being computed, for benchmarks of cost: their texts mean nothing.

        Needs ``engine.prefix_cache``, and ends with ``close``. Raises ``CapacityError``.
        """
        scheduler = self._scheduler
        make_up_prompts(
            scheduler.prefix, self._state.storage, scheduler.pool, prompts, version=self.policy_version
        )

    @property
    def chooser(self) -> Chooser:
        """What chooses tokens here, so that a benchmark can time it on logits of its own."""
        return self._state.chooser

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Return the policy's logits (V,) after ``tokens``, computed alone. Raises ``CapacityError``."""
        return logits_after(self._decoder, self._state.storage, self._scheduler.pool, tokens)

    def _model_of(self, part: str) -> NativeDraftModel | None:
        """Return what a drafter runs, None for the policy."""
        if part == POLICY:
            return None
        slot = self._drafting.slots.get(part)
        model = slot.drafter.model if slot is not None else None
        if not isinstance(model, NativeDraftModel):
            raise UnsupportedError(f"{part!r} runs no forward that could be timed")
        return model

    def close(self) -> None:
        """Free everything; running requests are dropped."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running.values()):
            self._scheduler.remove(sequence)
        self._wavefront.clear()
        self._scheduler.prefix.clear()


def _loads(decoding: Sequence[LiveSequence], ready: Sequence[Mapping[str, int]]) -> tuple[SequenceLoad, ...]:
    return tuple(
        [
            # In the order of the fields: naming them costs as much again.
            SequenceLoad(s.key, len(s.tokens), s.new_tokens, s.remaining_tokens, told)
            for s, told in zip(decoding, ready, strict=True)
        ]
    )
