"""Who drafts how much in one round: greedy over (sequence, position) slots, best speed per second.

A slot is one more draft token of one sequence. Worth falls along a sequence, so taking slots by falling
worth always takes prefixes. For every allowed longest draft, all counts of slots are priced at once and the
best ratio of speed to seconds wins.

Speed is tokens per round while requests wait: whoever gets them, the queue moves on. In the tail it is the
batch times the geometric mean of the sequences' tokens: there the last sequence ends the rollout, and a
plan that feeds one lucky sequence while the others crawl has a high sum and a late end. For equal
sequences both are the same.

Shapes in this file: B sequences, P positions, N slots by falling worth, G longest drafts to try.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.candidates import Candidates, positions_to
from controller.cost import CostModel
from controller.types import SequenceLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

WORTH_RANGE = (0.5, 2.0)
"""Bounds of a sequence's weight: a straggler may count four times a newcomer, not more."""

LEAST_EXPECTED_TOKENS = 16.0
"""Remaining work assumed of a sequence that has only begun, so that weights do not explode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One round's sequences as arrays."""

    keys: tuple[int, ...]
    context_B: Floats
    worth_B: Floats
    """Weight of a token of each sequence, 1 on average."""

    room_B: Ints
    """Most draft tokens each sequence can still use: one token of a round is always the target's own."""

    tail: bool = False
    """Whether nothing waits, so that the sequence that ends last is what counts."""

    @property
    def size(self) -> int:
        """Sequences."""
        return len(self.keys)

    def speed(self, gains: Floats) -> Floats:
        """Return the speed that summed slot worths stand for, in tokens per round."""
        return np.asarray(self.size * np.exp(gains / self.size) if self.tail else self.size + gains)

    def worth(self, survival_BP: Floats) -> Floats:
        """Return the worth of every slot, shape BP: expected tokens, or in the tail their logarithm."""
        worth_B1 = self.worth_B[:, None]
        if not self.tail:
            return survival_BP * worth_B1
        tokens_BP = survival_BP.cumsum(1) + 1.0
        return np.log(tokens_BP / (tokens_BP - survival_BP)) * worth_B1

    @property
    def read_tokens(self) -> float:
        """Context tokens, each sequence once."""
        return float(self.context_B.sum())


def batch_of(sequences: Sequence[SequenceLoad], *, tail_weight: float, tail: bool) -> Batch:
    """Return the arrays of a round without prompt rows.

    In the tail (nothing waits) a token weighs more where more work is expected to remain. Response
    lengths have heavy tails, and for those the work left is about as long as the work done, up to the
    limit; nothing better is known before the end comes.
    """
    context = np.asarray([s.context_tokens for s in sequences], dtype=np.float64)
    remaining = np.asarray([s.remaining_tokens for s in sequences], dtype=np.intp)
    worth = np.ones(len(sequences))
    if tail and tail_weight > 0.0 and len(sequences) > 1:
        done = np.asarray([s.generated_tokens for s in sequences], dtype=np.float64)
        expected = np.minimum(remaining, np.maximum(done, LEAST_EXPECTED_TOKENS))
        mean = float(expected.sum()) / len(sequences)
        if mean > 0.0:
            low, high = WORTH_RANGE
            worth = np.minimum(np.maximum(1.0 + tail_weight * (expected / mean - 1.0), low), high)
            worth /= float(worth.sum()) / len(sequences)
    return Batch(
        keys=tuple(s.key for s in sequences),
        context_B=context,
        worth_B=worth,
        room_B=np.maximum(remaining - 1, 0),
        tail=tail,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The best plan for one set of candidates."""

    candidates: Candidates
    gamma_B: Ints
    worth_per_s: float
    """Speed per second, comparable with plain decoding's tokens per second."""

    tokens: float
    """Unweighted tokens expected."""

    seconds: float
    """Of the round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Every slot worth asking about, by falling worth."""

    sequence_N: Ints
    position_N: Ints
    """From 1."""

    worth_N: Floats


def slots_of(batch: Batch, candidates: Candidates, *, least_worth: float) -> Slots:
    """Return the slots within each cap that are worth more than ``least_worth``.

    Ties keep positions in order, so every prefix of the result is a prefix of every sequence.
    """
    positions = candidates.survival_BP.shape[1]
    worth_PB = batch.worth(candidates.survival_BP).T
    position_PB = positions_to(positions)[:, None]
    wanted = ((position_PB <= candidates.cap_B) & (worth_PB > least_worth)).ravel().nonzero()[0]
    worth_N = worth_PB.ravel()[wanted]
    order = (-worth_N).argsort(kind="stable")
    wanted = wanted[order]
    above_N, sequence_N = np.divmod(wanted, batch.size)
    return Slots(sequence_N=sequence_N, position_N=above_N + 1, worth_N=worth_N[order])


def allocate(
    batch: Batch, candidates: Candidates, cost: CostModel, *, longest: Sequence[int], least_worth: float
) -> Allocation | None:
    """Return the best allocation that drafts anything, or None when no slot is worth asking about."""
    slots = slots_of(batch, candidates, least_worth=least_worth)
    if not len(slots.worth_N):
        return None
    all_model, runs_model = candidates.all_model, bool(candidates.model_B.any())
    deepest = int(slots.position_N.max())
    # One longest draft covers all others when positions cost no passes; and none beyond the deepest differ.
    tried = [g for g in longest if g <= deepest] if runs_model else []
    if not tried or tried[-1] < deepest <= longest[-1]:
        tried.append(deepest)
    taken_GN = slots.position_N <= np.asarray(tried, dtype=np.intp)[:, None]
    if not all_model:
        taken_GN |= ~candidates.model_B[slots.sequence_N]  # a free position costs no pass, however deep
    seconds_GN = _seconds(batch, candidates, cost, slots, taken_GN)
    speed_GN = batch.speed((taken_GN * slots.worth_N).cumsum(1))
    ratio_GN = speed_GN / seconds_GN
    best = int(ratio_GN.argmax())
    g, n = divmod(best, len(slots.worth_N))
    chosen = slots.sequence_N[: n + 1][taken_GN[g, : n + 1]]
    gamma_B = np.bincount(chosen, minlength=batch.size)
    kept = positions_to(candidates.survival_BP.shape[1]) <= gamma_B[:, None]
    return Allocation(
        candidates=candidates,
        gamma_B=gamma_B,
        worth_per_s=float(ratio_GN[g, n]),
        tokens=batch.size + float(candidates.survival_BP[kept].sum()),
        seconds=float(seconds_GN[g, n]),
    )


def _seconds(
    batch: Batch, candidates: Candidates, cost: CostModel, slots: Slots, taken_GN: NDArray[np.bool_]
) -> Floats:
    """Return the seconds of the round after each slot, per longest draft."""
    drafted_GN = taken_GN.cumsum(1)
    context_GN = (taken_GN * batch.context_B[slots.sequence_N]).cumsum(1)
    rows_GN = drafted_GN + batch.size
    read = batch.read_tokens
    line, all_model = candidates.line, candidates.all_model
    costs_passes = bool(line.pass_s or line.row_s)
    model_GN = taken_GN
    if costs_passes and not all_model:
        model_GN = taken_GN & candidates.model_B[slots.sequence_N]
    modelled_GN = drafted_GN if model_GN is taken_GN else model_GN.cumsum(1)
    if candidates.reuse_frac:
        modelled_context_GN = context_GN
        if model_GN is not taken_GN:
            modelled_context_GN = (model_GN * batch.context_B[slots.sequence_N]).cumsum(1)
        seconds_GN = cost.reusing_curve_s(
            rows_GN,
            context_GN + read,
            reused_N=modelled_GN,
            reused_context_N=modelled_context_GN,
            reuse_frac=candidates.reuse_frac,
            sequences=batch.size,
            read_tokens=read,
        )
    else:
        seconds_GN = cost.verify_curve_s(rows_GN, context_GN + read, sequences=batch.size, read_tokens=read)
    base_s, per_row_s = cost.other_line_s(speculates=True)
    seconds_GN += rows_GN * per_row_s + (base_s + candidates.free_s)
    if costs_passes:
        passes_GN = np.maximum.accumulate(model_GN * slots.position_N, axis=1)
        seconds_GN += line.pass_s * passes_GN + line.row_s * modelled_GN
        seconds_GN += line.round_s if model_GN is taken_GN else line.round_s * (modelled_GN > 0)
    if candidates.switch_s_B is not None:
        first_GN = taken_GN & (slots.position_N == 1)
        seconds_GN += (first_GN * candidates.switch_s_B[slots.sequence_N]).cumsum(1)
    return seconds_GN


def allocate_uniform(
    batch: Batch, candidates: Candidates, cost: CostModel, *, longest: Sequence[int]
) -> Allocation | None:
    """Return the best single gamma for engines that cannot vary it by sequence."""
    best: Allocation | None = None
    base_s, per_row_s = cost.other_line_s(speculates=True)
    read = batch.read_tokens
    positions = np.arange(1, candidates.survival_BP.shape[1] + 1)
    for gamma in longest:
        gamma_B = np.minimum(candidates.cap_B, gamma)
        passes, drafted = int(gamma_B.max(initial=0)), int(gamma_B.sum())
        if drafted == 0:
            continue
        rows = batch.size + drafted
        drafted_context = np.asarray([float((gamma_B * batch.context_B).sum())])
        verify_s = cost.reusing_curve_s(
            np.asarray([rows], dtype=np.intp),
            drafted_context + read,
            reused_N=np.asarray([drafted], dtype=np.intp),
            reused_context_N=drafted_context,
            reuse_frac=candidates.reuse_frac,
            sequences=batch.size,
            read_tokens=read,
        )
        seconds = float(verify_s[0]) + base_s + rows * per_row_s + candidates.free_s
        line = candidates.line
        seconds += line.pass_s * passes + line.row_s * drafted + line.round_s
        if candidates.switch_s_B is not None:
            seconds += float(candidates.switch_s_B.sum())
        kept_BP = candidates.survival_BP * (positions <= gamma_B[:, None])
        gains = np.where(kept_BP > 0.0, batch.worth(candidates.survival_BP), 0.0).sum()
        speed = float(batch.speed(gains))
        if best is None or speed / seconds > best.worth_per_s:
            best = Allocation(
                candidates=candidates,
                gamma_B=gamma_B,
                worth_per_s=speed / seconds,
                tokens=batch.size + float(kept_BP.sum()),
                seconds=seconds,
            )
    return best
