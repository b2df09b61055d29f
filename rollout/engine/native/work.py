"""What one round computes, and the rows of its single forward."""

from dataclasses import dataclass, field

from controller.types import AR, AR_ASSIGNMENT, Assignment, DraftCost, RoundPlan
from drafters.types import DraftRequest
from rollout.engine.native.drafts.drafting import NO_DRAFTS, Drafted, Drafting
from rollout.engine.native.lanes.wavefront import Wavefront
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch, RowMemory
from rollout.engine.native.scheduler import PromptChunk, Scheduler
from rollout.engine.native.sequence import LiveSequence, Phase
from rollout.engine.verify import Verdict


@dataclass(kw_only=True, slots=True)
class Work:
    """Prompt chunks first, then each decoding sequence with its drafts, then those that decode in lanes."""

    chunks: list[PromptChunk]
    decoding: list[LiveSequence]
    """Sequences of the policy's forward."""

    assignments: dict[int, Assignment]
    """By key; none where everybody decodes plainly."""

    in_lanes: list[LiveSequence] = field(default_factory=list)
    """Sequences that decode in passes of their own, loop by loop."""

    lane_passes: int = 0
    """Most of those passes."""

    drafted: dict[int, Drafted] = field(default_factory=dict)
    costs: list[DraftCost] = field(default_factory=list)
    context_tokens: int = 0
    """Read by all rows of the policy's forward."""

    def drafts_of(self, sequence: LiveSequence) -> Drafted:
        """Return the drafts to verify for ``sequence``; empty when it decodes plainly."""
        return self.drafted.get(sequence.key, NO_DRAFTS)

    @property
    def choosing(self) -> list[LiveSequence]:
        """Sequences that get a token from the policy's forward, in the order of their head rows."""
        return [c.sequence for c in self.chunks if c.completes] + self.decoding

    @property
    def batch(self) -> int:
        """Sequences that decode, whichever way."""
        return len(self.decoding) + len(self.in_lanes)

    @property
    def prefill_rows(self) -> int:
        """Prompt rows."""
        return sum(c.end - c.start for c in self.chunks)

    @property
    def verify_rows(self) -> int:
        """Rows of decoding sequences in the policy's forward."""
        drafts = sum([len(self.drafts_of(s).tokens) for s in self.decoding]) if self.drafted else 0
        return len(self.decoding) + drafts


def reserve_work(scheduler: Scheduler, plan: RoundPlan, wavefront: Wavefront, *, chunk_tokens: int) -> Work:
    """Take the pages a round needs. Drafts are optional: they give way before anyone is preempted."""
    if plan.plain:
        return _reserve_plain(scheduler, chunk_tokens=chunk_tokens)
    assignments: dict[int, Assignment] = {}
    lane_passes = _lane_passes(scheduler, plan, wavefront)
    for sequence in scheduler.decoding():
        if sequence.phase is not Phase.DECODE:
            continue  # preempted by an elder earlier in this loop
        wanted = plan.of(sequence.key)
        length = len(sequence.tokens)
        # The target's own choice follows the drafts, so the last allowed token is never worth a draft.
        most = sequence.remaining_tokens - 1
        gamma = reach = min(wanted.gamma, most)
        if wavefront.takes(wanted):
            # It may be under way already: the last token as well is found in lanes.
            gamma, reach = wanted.gamma, min(wavefront.reach(wanted, lane_passes), most)
            if not scheduler.reserve(sequence, length + reach, may_preempt=False):
                lane_passes = wavefront.passes(1, alone=False)
                reach = min(wavefront.reach(wanted, lane_passes), most)
        reserved = reach > 0 and scheduler.reserve(sequence, length + reach, may_preempt=False)
        if reach > 0 and not reserved:
            gamma = 0
        if not reserved and not scheduler.reserve(sequence, length, may_preempt=True):
            scheduler.preempt(sequence)
            continue
        assignments[sequence.key] = _shortened(wanted, gamma)
    decoding = [s for s in scheduler.decoding() if s.key in assignments]
    work = Work(
        chunks=scheduler.chunks(chunk_tokens),
        decoding=[s for s in decoding if not wavefront.takes(assignments[s.key])],
        assignments=assignments,
        in_lanes=[s for s in decoding if wavefront.takes(assignments[s.key])],
    )
    alone = not work.chunks and not work.decoding
    work.lane_passes = lane_passes if alone else wavefront.passes(1, alone=False)
    return work


def _shortened(wanted: Assignment, gamma: int) -> Assignment:
    """Return what was planned with this gamma, which is the planned one most of the time."""
    if gamma == wanted.gamma:
        return wanted
    return Assignment(drafter=wanted.drafter, gamma=gamma) if gamma > 0 else AR_ASSIGNMENT


def _lane_passes(scheduler: Scheduler, plan: RoundPlan, wavefront: Wavefront) -> int:
    """Return the passes of a round's lanes as planned.

    Whoever decodes otherwise, or is in prefill, waits for their end; a stop string is found only then.
    """
    in_lanes = [s for s in scheduler.decoding() if wavefront.takes(plan.of(s.key))]
    alone = len(in_lanes) == len(scheduler.running) and not any(s.params.stop for s in in_lanes)
    return wavefront.passes(len(in_lanes), alone=alone)


def _reserve_plain(scheduler: Scheduler, *, chunk_tokens: int) -> Work:
    """Take the pages of a round in which everybody decodes plainly."""
    decoding = scheduler.decoding()
    full = [s for s in decoding if len(s.tokens) > PAGE_TOKENS * len(s.pages)]
    for sequence in full:
        if sequence.phase is not Phase.DECODE:
            continue  # preempted by an elder earlier in this loop
        if not scheduler.reserve(sequence, len(sequence.tokens), may_preempt=True):
            scheduler.preempt(sequence)
    if full:
        decoding = scheduler.decoding()
    return Work(chunks=scheduler.chunks(chunk_tokens), decoding=decoding, assignments={})


def draft_work(work: Work, drafting: Drafting) -> None:
    """Ask each assigned drafter once. With gamma 0 everywhere no drafter runs at all."""
    if not work.assignments:
        return
    by_drafter: dict[str, list[DraftRequest]] = {}
    for sequence in work.decoding:
        assignment = work.assignments[sequence.key]
        if assignment.drafter != AR:
            request = draft_request(sequence, assignment.gamma)
            by_drafter.setdefault(assignment.drafter, []).append(request)
    for name, requests in by_drafter.items():
        drafted, cost = drafting.propose(name, requests)
        work.drafted.update(drafted)
        work.costs.append(cost)


def run_lanes(work: Work, wavefront: Wavefront) -> list[Verdict]:
    """Run the passes of the sequences in lanes and return their verdicts, in their order."""
    verdicts, drafted, cost = wavefront.run(work.in_lanes, work.assignments, passes=work.lane_passes)
    work.drafted.update(drafted)
    if cost is not None:
        work.costs.append(cost)
    return verdicts


def row_batch(work: Work, memory: RowMemory) -> RowBatch:
    """Return the rows of the round's forward; head rows stand in ``work.choosing`` order."""
    if not work.chunks and not work.drafted:
        return _plain_rows(work, memory)
    tokens: list[int] = []
    positions: list[int] = []
    tables: list[int] = []
    heads: list[int] = []
    for chunk in work.chunks:
        chunk.add_rows(tokens, positions, tables, heads)
    for sequence in work.decoding:
        start = len(sequence.tokens) - 1
        heads.append(len(tokens))
        tokens.append(sequence.tokens[-1])
        positions.append(start)
        tables.append(sequence.slot)
        drafts = work.drafts_of(sequence).tokens
        if drafts:
            heads += range(len(tokens), len(tokens) + len(drafts))
            tokens += drafts
            positions += range(start + 1, start + 1 + len(drafts))
            tables += [sequence.slot] * len(drafts)
    work.context_tokens = sum(positions) + len(positions)
    return memory.batch(tokens, positions, tables, heads)


def _plain_rows(work: Work, memory: RowMemory) -> RowBatch:
    """Return the rows of a round in which everybody decodes plainly: their last tokens, each with a head."""
    decoding = work.decoding
    positions = [len(s.tokens) - 1 for s in decoding]
    work.context_tokens = sum(positions) + len(positions)
    last, slots = [s.tokens[-1] for s in decoding], [s.slot for s in decoding]
    return memory.batch(last, positions, slots, range(len(decoding)))


def draft_request(sequence: LiveSequence, gamma: int) -> DraftRequest:
    """Return what a drafter may know of ``sequence``."""
    return DraftRequest(
        key=sequence.key,
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        gamma=gamma,
        prompt_uid=sequence.request.prompt_uid,
    )
