"""Who runs: admission, page reservation, prompt chunks, preemption. No logits.

Whoever asks for running sequences gets them with all their tokens: those that decode plainly are given
theirs first (``plain_batch.py``). A sequence that loses its pages goes back to waiting with every committed
token and computes its KV again; in exact numerics its text is the same. Room for a round is taken before
anything is drafted, so no sequence is ever preempted between draft and verification.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine.native.pages import PagePool, PrefixIndex, pages_for
from rollout.engine.native.plain_batch import PlainBatch
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.sequence import LiveSequence, Phase
from rollout.engine.native.waiting import WaitingLine


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """Rows of one sequence's prompt in one round: positions ``start`` to ``end - 1``."""

    sequence: LiveSequence
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the sequence gets its first token in this round."""
        return self.end == len(self.sequence.tokens)

    def add_rows(self, tokens: list[int], positions: list[int], tables: list[int], heads: list[int]) -> None:
        """Append its rows to a forward's, and the number of the last to the heads where it completes."""
        tokens += self.sequence.tokens[self.start : self.end]
        positions += range(self.start, self.end)
        tables += [self.sequence.slot] * (self.end - self.start)
        if self.completes:
            heads.append(len(tokens) - 1)


class Scheduler:
    """Owns the waiting line, the running set and the page table."""

    def __init__(
        self,
        *,
        max_batch: int,
        max_pages_per_sequence: int,
        pool: PagePool,
        prefix_cache: bool,
    ) -> None:
        self.pool = pool
        self.prefix = PrefixIndex(pool)
        self.prefix_cache = prefix_cache
        self.waiting = WaitingLine()
        self._begun = WaitingLine()  # those of the waiting that are under way
        self._running: dict[int, LiveSequence] = {}
        self._prefilling: dict[int, LiveSequence] = {}
        self._live: dict[tuple[str, int], LiveSequence] = {}  # by the caller's key
        self.page_table: NDArray[np.int32] = np.zeros((max_batch, max_pages_per_sequence), np.int32)
        self.page_table_address = self.page_table.ctypes.data
        self.plain = PlainBatch(capacity=max_batch, page_table_SP=self.page_table)
        """The sequences that decoded plainly in the last round."""

        self.admitting = True
        self.preemptions = 0
        self._free_slots = list(range(max_batch - 1, -1, -1))

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence."""
        self._live[sequence.request.key] = sequence
        self.waiting.append(sequence)
        if sequence.under_way:
            self._begun.append(sequence)

    @property
    def running(self) -> dict[int, LiveSequence]:
        """The sequences that hold pages, by key, in order of admission."""
        self.plain.settle()
        return self._running

    @property
    def running_count(self) -> int:
        """How many there are."""
        return len(self._running)

    @property
    def decoding_count(self) -> int:
        """How many of them decode."""
        return len(self._running) - len(self._prefilling)

    def find(self, key: tuple[str, int]) -> LiveSequence | None:
        """Return the live sequence a caller knows by ``key``."""
        self.plain.settle()
        return self._live.get(key)

    @property
    def under_way(self) -> list[LiveSequence]:
        """Sequences whose text has begun, preempted and resumed ones included."""
        return [*self.running.values(), *self._begun]

    @property
    def under_way_count(self) -> int:
        """How many there are."""
        return len(self._running) + len(self._begun)

    def decoding(self) -> list[LiveSequence]:
        """Return the sequences that decode, in order of admission."""
        return [s for s in self.running.values() if s.phase is Phase.DECODE]

    def begin_decoding(self, sequence: LiveSequence, now_s: float) -> None:
        """Note that a sequence's prompt is computed, and its next token chosen."""
        sequence.phase = Phase.DECODE
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        del self._prefilling[sequence.key]

    def admit(self, version: int, now_s: float) -> None:
        """Move waiting sequences to the running set while slots and pages allow.

        While not ``admitting``, only sequences that are under way come in.
        """
        if not self.waiting or not self._free_slots:
            return
        line = self.waiting if self.admitting else self._begun
        held = self._prompts_being_written()
        admitted: list[LiveSequence] = []
        for sequence in line.in_turn(held):
            if not self._start(sequence, version, now_s):
                break
            admitted.append(sequence)
            if self.prefix_cache and _writes_for_others(sequence):
                held.add(sequence.prompt_bytes)
            if not self._free_slots:
                break
        for sequence in admitted:
            self._stop_waiting(sequence)

    def _prompts_being_written(self) -> set[bytes]:
        """Return the prompts with pages that are worth waiting for."""
        if not self.prefix_cache:
            return set()
        return {s.prompt_bytes for s in self._prefilling.values() if _writes_for_others(s)}

    def _stop_waiting(self, sequence: LiveSequence) -> None:
        self.waiting.remove(sequence)
        if sequence in self._begun:
            self._begun.remove(sequence)

    def _start(self, sequence: LiveSequence, version: int, now_s: float) -> bool:
        shared = self.prefix.match(version, sequence.tokens) if self.prefix_cache else []
        sequence.pages, sequence.kv_version = shared, version
        sequence.frontier = len(shared) * PAGE_TOKENS
        need = pages_for(len(sequence.tokens) + 1) - len(shared)
        running_alone = not self._running
        if not self._take(sequence, need, may_preempt=False):
            assert not running_alone, "requests larger than the pool are refused at the door"
            self.pool.release(sequence.pages)
            sequence.pages, sequence.frontier = [], 0
            return False
        sequence.slot = self._free_slots.pop()
        self.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        sequence.phase = Phase.PREFILL
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
        self._running[sequence.key] = self._prefilling[sequence.key] = sequence
        return True

    def reserve(self, sequence: LiveSequence, tokens: int, *, may_preempt: bool) -> bool:
        """Make sure the sequence's pages hold ``tokens`` tokens; False when they cannot."""
        if tokens <= PAGE_TOKENS * len(sequence.pages):
            return True
        need = pages_for(tokens) - len(sequence.pages)
        if not self._take(sequence, need, may_preempt=may_preempt):
            return False
        self.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        return True

    def _take(self, sequence: LiveSequence, need: int, *, may_preempt: bool) -> bool:
        while (taken := self.pool.take(need)) is None:
            if self.prefix.evict(need - self.pool.free) > 0:
                continue
            victim = self._victim(sequence) if may_preempt else None
            if victim is None:
                return False
            self.preempt(victim)
        sequence.pages.extend(taken)
        return True

    def _victim(self, asking: LiveSequence) -> LiveSequence | None:
        """Return the youngest running sequence that came after ``asking``: the eldest always advances."""
        younger = [s for s in self._running.values() if s.key > asking.key and s.pages]
        return max(younger, key=lambda s: s.key, default=None)

    def preempt(self, sequence: LiveSequence) -> None:
        """Take a sequence's pages; it waits, first in line, with all its committed tokens."""
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
        self._begun.appendleft(sequence)

    def chunks(self, budget_tokens: int) -> list[PromptChunk]:
        """Return the prompt rows of the next round, eldest first, within the budget."""
        out: list[PromptChunk] = []
        for sequence in self._prefilling.values():
            if budget_tokens <= 0:
                break
            end = min(len(sequence.tokens), sequence.frontier + budget_tokens)
            out.append(PromptChunk(sequence=sequence, start=sequence.frontier, end=end))
            budget_tokens -= end - sequence.frontier
        return out

    def publish(self, sequence: LiveSequence, version: int) -> None:
        """Make the prompt's full pages known to others. Call after the forward that finished them.

        Pages begun under another version are never shared: not all they hold is of ``version``.
        """
        if self.prefix_cache and sequence.kv_version == version:
            written = min(sequence.prompt_tokens, sequence.frontier)
            self.prefix.publish(version, sequence.tokens[:written], sequence.pages)

    def remove(self, sequence: LiveSequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds. Harmless when repeated."""
        if sequence.phase is Phase.OVER:
            return
        if sequence.phase is Phase.WAITING:
            self._stop_waiting(sequence)
        self._leave(sequence)
        del self._live[sequence.request.key]
        sequence.phase = Phase.OVER

    def _leave(self, sequence: LiveSequence) -> None:
        self.plain.leave(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.frontier = [], 0
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        self._running.pop(sequence.key, None)
        self._prefilling.pop(sequence.key, None)


def _writes_for_others(sequence: LiveSequence) -> bool:
    """Whether it has yet to compute a page that samples of the same prompt will share.

    The last token of a prompt is everybody's own to compute, and with it what stands on its page.
    """
    shared = PAGE_TOKENS * ((sequence.prompt_tokens - 1) // PAGE_TOKENS)
    return sequence.phase is Phase.PREFILL and sequence.frontier < shared
