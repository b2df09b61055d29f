"""From choices, or logits, and drafts to verdicts: which tokens each sequence may commit, in order.

Coupled verification needs one choice per row, wherever it was made: by a call of the chooser for all rows, or
with the forward (``choosing.py``). Block and token verification ask it for whole distributions, decide with
noise that belongs to the round, and score what they kept.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from controller.types import VerifyMode
from rollout.engine.native.drafts.view import noise_seed
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.native.work import Work
from rollout.engine.target import Choice, Chooser, TargetRow, needs_edits
from rollout.engine.verify import (
    Decisions,
    NoiseDecisions,
    SampledVerdict,
    Verdict,
    plain_verdict,
    verify_block,
    verify_coupled,
    verify_token,
)
from rollout.errors import NumericError

NOT_FINITE = Choice(
    token=-1,
    raw_logprob=0.0,
    scaled_logprob=0.0,
    target_logprob=0.0,
    kept_logmass=0.0,
    finite=False,
)
"""Stands where the policy's distribution cannot be formed; committing it fails its request."""


class _Span(NamedTuple):
    """The head rows of one sequence: ``start`` up to and including ``start + len(drafts)``."""

    sequence: LiveSequence
    drafts: list[int]
    probs: Tensor | None
    start: int
    rows: list[TargetRow]

    @property
    def indices(self) -> range:
        return range(self.start, self.start + len(self.rows))


ChoicesOf = Callable[[list[TargetRow]], list[Choice]]
"""The choice of each head row, given what shapes it."""

DecisionsOf = Callable[[LiveSequence], Decisions]
"""The randomness of one sequence's round in block and token mode."""


def noise_decisions(sequence: LiveSequence) -> Decisions:
    """Return decisions from noise that belongs to the sequence's current round."""
    return NoiseDecisions(seed=sequence.round_seed, position=len(sequence.tokens))


class Judge:
    """Applies one verification mode. Keeps no state between rounds."""

    def __init__(
        self, chooser: Chooser, mode: VerifyMode, decisions_of: DecisionsOf = noise_decisions
    ) -> None:
        self._chooser = chooser
        self._mode = mode
        self._decisions_of = decisions_of

    def judge(self, work: Work, logits_RV: Tensor) -> list[Verdict]:
        """Return one verdict per sequence of ``work.choosing``; ``logits_RV`` holds their rows in order."""
        if not work.choosing:
            return []
        if self._mode == "coupled":
            return self.judge_chosen(work, partial(self._chooser.choose, logits_RV))
        spans = self._spans(work)
        rule = verify_block if self._mode == "block" else verify_token
        verdicts = dict(self._plain([s for s in spans if not s.drafts], logits_RV))
        verdicts.update(self._drafted([s for s in spans if s.drafts], logits_RV, rule))
        return [verdicts[s.start] for s in spans]

    def judge_chosen(self, work: Work, choose: ChoicesOf) -> list[Verdict]:
        """Return coupled verdicts, one per sequence of ``work.choosing``; ``choose`` is called once."""
        if not work.drafted:
            rows = [s.target_row([], seed=None) for s in work.choosing]
            return list(map(plain_verdict, choose(rows)))
        spans = self._spans(work)
        choices = choose([row for span in spans for row in span.rows])
        return [verify_coupled(s.drafts, choices[s.start : s.start + len(s.rows)]) for s in spans]

    def _spans(self, work: Work) -> list[_Span]:
        spans: list[_Span] = []
        start = 0
        for sequence in work.choosing:
            drafted = work.drafts_of(sequence)
            seed = noise_seed(sequence, self._mode)
            rows = _rows(sequence, drafted.tokens, seed=seed)
            spans.append(_Span(sequence, drafted.tokens, drafted.probs, start, rows))
            start += len(rows)
        return spans

    def _plain(self, spans: list[_Span], logits_RV: Tensor) -> list[tuple[int, Verdict]]:
        """Sequences without drafts: the same choice as AR, with this round's noise."""
        if not spans:
            return []
        picked_RV = logits_RV[torch.tensor([s.start for s in spans])]
        choices = self._chooser.choose(picked_RV, [s.rows[0] for s in spans])
        return [(s.start, verify_coupled([], [c])) for s, c in zip(spans, choices, strict=True)]

    def _drafted(
        self, spans: list[_Span], logits_RV: Tensor, rule: Callable[..., SampledVerdict]
    ) -> list[tuple[int, Verdict]]:
        if not spans:
            return []
        picked_RV = logits_RV[torch.tensor([i for s in spans for i in s.indices])]
        rows = [row for s in spans for row in s.rows]
        probs_RV = self._chooser.probs(picked_RV, rows)
        verdicts: list[tuple[int, Verdict]] = []
        at = 0
        for span in spans:
            here = slice(at, at + len(span.rows))
            at += len(span.rows)
            try:
                sampled = rule(span.drafts, probs_RV[here], span.probs, self._decisions_of(span.sequence))
            except NumericError:
                verdicts.append((span.start, Verdict(accepted=0, tokens=[(NOT_FINITE, "plain")])))
                continue
            verdicts.append((span.start, self._scored(span, sampled, picked_RV[here])))
        return verdicts

    def _scored(self, span: _Span, sampled: SampledVerdict, logits_RV: Tensor) -> Verdict:
        """Attach the target's own logprobs to what was kept."""
        tokens = [token for token, _ in sampled.tokens]
        choices = self._chooser.score(logits_RV[: len(tokens)], span.rows[: len(tokens)], tokens)
        origins = [origin for _, origin in sampled.tokens]
        return Verdict(accepted=sampled.accepted, tokens=list(zip(choices, origins, strict=True)))


def _rows(sequence: LiveSequence, drafts: list[int], *, seed: int | None) -> list[TargetRow]:
    """Return what shapes the choice after the last token, and after each draft."""
    first = sequence.target_row([], seed=seed)
    if sequence.edits_logits and needs_edits(first):
        rows = [sequence.target_row(drafts[:i], seed=seed) for i in range(1, len(drafts) + 1)]
        return [first, *rows]
    # Nothing that later tokens could change: the rows differ in their positions alone.
    own_seed, start, params, counts, prompt, banned = first
    end = start + len(drafts) + 1
    return [TargetRow(own_seed, at, params, counts, prompt, banned) for at in range(start, end)]
