"""A round in which everybody decodes plainly, by column: no Python runs per sequence.

Drafts, verdicts and assignments have no part in it. Prompt chunks have: a sequence whose last prompt row is
in the round joins the columns before its forward, so that its first token is chosen as all others are.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.types import DraftCost
from rollout.engine.native.choosing import ForwardChooser
from rollout.engine.native.decoder import KVStorage
from rollout.engine.native.plain_batch import PlainBatch
from rollout.engine.native.rows import RowBatch, RowMemory
from rollout.engine.native.scheduler import PromptChunk, Scheduler
from rollout.engine.native.sequence import Phase


@dataclass(kw_only=True, slots=True)
class PlainWork:
    """What a plain round computes: a row of each sequence in the columns, then prompt chunks."""

    chunks: Sequence[PromptChunk]
    keys: "array[int]"
    """Of the sequences that decode: the first rows of the columns. Those after them begin to."""

    lengths: "array[int]"
    """How many tokens those have."""

    context_tokens: int
    """Read by all rows."""

    costs: list[DraftCost] = field(default_factory=list)
    """None: nothing is drafted."""

    @property
    def batch(self) -> int:
        """Sequences that decode."""
        return len(self.keys)

    @property
    def prefill_rows(self) -> int:
        """Prompt rows."""
        return sum([c.end - c.start for c in self.chunks])

    @property
    def verify_rows(self) -> int:
        """Rows of decoding sequences."""
        return self.batch


def reserve_plain(scheduler: Scheduler, *, chunk_tokens: int) -> PlainWork:
    """Take the pages of a round in which everybody decodes plainly, and let in who decodes from now on."""
    plain = scheduler.plain
    if plain.size != scheduler.decoding_count:  # the last round was another kind
        for sequence in scheduler.decoding():
            plain.join(sequence)
    for sequence in plain.full():
        if sequence.phase is not Phase.DECODE:
            continue  # preempted by an elder earlier in this loop
        if scheduler.reserve(sequence, plain.length(sequence), may_preempt=True):
            plain.holds(sequence)
        else:
            scheduler.preempt(sequence)
    keys, lengths, chunks = plain.keys, plain.lengths, scheduler.chunks(chunk_tokens)
    read = sum(lengths)
    for chunk in chunks:
        read += (chunk.end - chunk.start) * (chunk.start + chunk.end + 1) // 2
        if chunk.completes:
            plain.join(chunk.sequence)
    return PlainWork(chunks=chunks, keys=keys, lengths=lengths, context_tokens=read)


def choose_plain(
    work: PlainWork, plain: PlainBatch, memory: RowMemory, choosing: ForwardChooser, storage: KVStorage
) -> None:
    """Compute the round's rows and choose a token after each sequence of the columns, into the columns."""
    plain.aim(vocab_size=choosing.vocab_size)
    if plain.size or work.chunks:
        choosing.choose_plainly(plain.call, plain.columns, _rows(work, plain, memory), storage)


def _rows(work: PlainWork, plain: PlainBatch, memory: RowMemory) -> RowBatch:
    """Return the rows of the forward; heads stand in the order of the columns."""
    if not work.chunks:
        return plain.forward.batch(work.batch)
    tokens, positions, tables = plain.forward.numbers(work.batch)
    heads = list(range(work.batch))
    for chunk in work.chunks:
        chunk.add_rows(tokens, positions, tables, heads)
    return memory.batch(tokens, positions, tables, heads)
