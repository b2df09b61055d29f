"""Verification: which drafts a round keeps, and the token after them. Pure functions, no engine.

``coupled`` compares drafts with the target's own choices. ``block`` and ``token`` keep drafts at random, so
that what they emit follows the target distribution exactly, whatever distribution the drafts were really
drawn from; they ask a ``Decisions`` for every random outcome, which is how tests integrate over all of them.
Drafts without distributions are verified as certain, which is exact for drafts of any origin: it only keeps
fewer of drafts that were sampled.

In block and token mode all randomness of a round must be fresh, the drafts' own included: a rejected draft
and the uniforms that rejected it were looked at, so they must not return when its position is drawn again.

Shapes: G drafts, V vocabulary; target rows are G + 1, one more than the drafts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.types import DraftError
from rollout.engine import noise
from rollout.engine.target import Choice
from rollout.errors import NumericError
from rollout.tokens import Origin

PROB_SUM_TOLERANCE = 1e-3
"""How far a draft row may be from summing to 1: it covers float32 sums over a large vocabulary."""


class DraftDistributionError(DraftError):
    """A drafter reported a distribution its token cannot have come from."""


class Verdict(NamedTuple):
    """What coupled verification found. Committing may stop after any token; the rest never happened."""

    accepted: int
    """Drafts that equal the target's choice."""

    tokens: list[tuple[Choice, Origin]]
    """``accepted`` drafts, then the target's own choice. A choice that is not finite ends the list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledVerdict:
    """What block or token verification decided. Logprobs come from ``Chooser.score`` afterwards."""

    accepted: int
    tokens: list[tuple[int, Origin]]
    """``accepted`` drafts, then one more token; token i is scored with target row i."""


class Decisions(Protocol):
    """The randomness of one round. Each call is independent of all others."""

    def accept(self, probability: float, *, slot: int) -> bool:
        """Return True with the given probability. ``slot`` counts the round's drafts from 0."""
        ...

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        """Return a token with probability proportional to its weight."""
        ...


class NoiseDecisions:
    """Decisions from counter-based noise, so that a retry of the same round decides the same.

    ``seed`` must belong to this round alone (``rollout.seeds.round_seed``); ``position`` is the absolute
    position of the round's first token.
    """

    def __init__(self, *, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position

    def accept(self, probability: float, *, slot: int) -> bool:
        """Implements ``Decisions.accept``: certain at 1, impossible at 0."""
        return noise.uniform(self._seed, self._position + slot) < probability

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        """Implements ``Decisions.sample`` as the argmax of log weight plus Gumbel noise."""
        key = noise.noise_key(self._seed, self._position + slot, noise.RESIDUAL_STREAM)
        noise_V = noise.gumbel([key], vocab_size=weights_V.shape[0], device=weights_V.device)[0]
        return int((weights_V.to(torch.float64).log() + noise_V).argmax())


def plain_verdict(choice: Choice) -> Verdict:
    """Return the verdict of a sequence without drafts."""
    return Verdict(0, [(choice, "plain")])


def verify_coupled(drafts: Sequence[int], choices: Sequence[Choice]) -> Verdict:
    """Keep the longest prefix of drafts that equals the target's choices, then the target's next choice.

    ``choices`` has one entry per draft and one more; entry i is the target's choice given the drafts before
    i, so entries past the first difference are never used.
    """
    if len(choices) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} choices, got {len(choices)}")
    if not len(drafts):
        return plain_verdict(choices[0])
    kept = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if choice.token != draft or not choice.finite:
            break
        kept += 1
    tokens: list[tuple[Choice, Origin]] = [(choice, "accepted") for choice in choices[:kept]]
    tokens.append((choices[kept], "corrected" if kept < len(drafts) else "bonus"))
    return Verdict(kept, tokens)


def verify_token(
    drafts: Sequence[int], target_probs: Tensor, draft_probs_GV: Tensor | None, decisions: Decisions
) -> SampledVerdict:
    """Token rejection: keep draft i with min(1, target / draft), stop at the first one not kept.

    Leviathan et al. 2023, Algorithm 1 (their p is the target, q the drafter). ``draft_probs_GV`` None treats
    every draft as certain given its prefix. Raises ``DraftDistributionError`` or ``NumericError``.
    """
    target, draft_GV = _checked(drafts, target_probs, draft_probs_GV)
    for slot, (token, ratio) in enumerate(zip(drafts, _ratios(drafts, target, draft_GV), strict=True)):
        if not decisions.accept(min(1.0, ratio), slot=slot):
            residual_V = _residual(1.0, target[slot], None if draft_GV is None else draft_GV[slot], token)
            return _sampled(drafts, slot, _or_target(residual_V, target[slot]), decisions)
    return _sampled(drafts, len(drafts), target[len(drafts)], decisions)


def verify_block(
    drafts: Sequence[int], target_probs: Tensor, draft_probs_GV: Tensor | None, decisions: Decisions
) -> SampledVerdict:
    """Block verification: keep the longest prefix any of whose independent tests passes.

    Sun et al. 2024 (arXiv 2403.10444), Algorithm 2. Keeps at least as many drafts as token rejection in
    expectation. ``draft_probs_GV`` None treats every draft as certain given its prefix. Raises
    ``DraftDistributionError`` or ``NumericError``.
    """
    target, draft_GV = _checked(drafts, target_probs, draft_probs_GV)
    prefix_weights = _prefix_weights(_ratios(drafts, target, draft_GV))
    keep_probs = _keep_probs(drafts, target, draft_GV, prefix_weights)
    # The paper draws every test and takes the last that passes; asking from the last one on is the same law.
    for kept in range(len(drafts), 0, -1):
        if decisions.accept(keep_probs[kept - 1], slot=kept - 1):
            break
    else:
        kept = 0
    if kept == len(drafts):
        return _sampled(drafts, kept, target[kept], decisions)
    row_V = None if draft_GV is None else draft_GV[kept]
    residual_V = _residual(prefix_weights[kept], target[kept], row_V, drafts[kept])
    return _sampled(drafts, kept, _or_target(residual_V, target[kept]), decisions)


def usable_drafts(drafts: Sequence[int], draft_probs_GV: Tensor | None) -> tuple[int, str]:
    """Return how many leading drafts have a sound distribution, and what is wrong with the next one.

    A round may go on with those alone: whether row i is sound depends on the drafts before i and never on
    draft i, so cutting there is exact. Dropping the sound drafts before it as well would not be: it would
    discard them for what they are.
    """
    if draft_probs_GV is None or not len(drafts):
        return len(drafts), ""
    if draft_probs_GV.dim() != 2 or draft_probs_GV.shape[0] != len(drafts):
        return 0, f"draft distributions of shape {tuple(draft_probs_GV.shape)} for {len(drafts)} drafts"
    lowest = draft_probs_GV.amin(-1).tolist()
    sums = draft_probs_GV.sum(-1, dtype=torch.float64).tolist()
    for slot, token in enumerate(drafts):
        if not (lowest[slot] >= 0 and abs(sums[slot] - 1) <= PROB_SUM_TOLERANCE):
            return slot, f"draft row {slot} has minimum {lowest[slot]} and sum {sums[slot]}"
        if not 0 <= token < draft_probs_GV.shape[1]:
            return slot, f"draft {slot} is {token}, outside the vocabulary of {draft_probs_GV.shape[1]}"
        if not float(draft_probs_GV[slot, token]) > 0:
            return slot, f"draft {slot} is token {token}, to which its row gives probability 0"
    return len(drafts), ""


def _last_origin(drafts: Sequence[int]) -> Origin:
    return "bonus" if len(drafts) else "plain"


def _checked(
    drafts: Sequence[int], target_probs: Tensor, draft_probs_GV: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return target and draft rows in float64, draft rows summing to 1; refuse what cannot be right."""
    count = len(drafts)
    if target_probs.dim() != 2 or target_probs.shape[0] != count + 1:
        raise ValueError(f"{count} drafts need {count + 1} target rows, got {tuple(target_probs.shape)}")
    target = target_probs.to(torch.float64)
    if not math.isfinite(float(target.sum())):
        raise NumericError("the target distribution is not finite")
    if not all(0 <= token < target.shape[1] for token in drafts):
        raise ValueError(f"a draft lies outside the vocabulary of {target.shape[1]}: {list(drafts)}")
    if draft_probs_GV is None or not count:
        return target, None
    usable, problem = usable_drafts(drafts, draft_probs_GV)
    if usable < count:
        raise DraftDistributionError(problem)
    if draft_probs_GV.shape[1] != target.shape[1]:
        raise DraftDistributionError(
            f"draft rows have {draft_probs_GV.shape[1]} tokens, the target {target.shape[1]}"
        )
    draft_GV = draft_probs_GV.to(device=target.device, dtype=torch.float64)
    return target, draft_GV / draft_GV.sum(-1, keepdim=True)


def _ratios(drafts: Sequence[int], target: Tensor, draft_GV: Tensor | None) -> list[float]:
    """Return target / draft probability of each draft."""
    if not len(drafts):
        return []
    token_G1 = torch.tensor(list(drafts), dtype=torch.int64, device=target.device).unsqueeze(1)
    target_G1 = target[: len(drafts)].gather(1, token_G1)
    ratio_G1 = target_G1 if draft_GV is None else target_G1 / draft_GV.gather(1, token_G1)
    ratios: list[float] = ratio_G1.squeeze(1).tolist()
    return ratios


def _prefix_weights(ratios: Sequence[float]) -> list[float]:
    """Return the block rule's weight of each prefix, the empty one first: never above 1."""
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def _keep_probs(
    drafts: Sequence[int], target: Tensor, draft_GV: Tensor | None, prefix_weights: Sequence[float]
) -> list[float]:
    """Return the probability of each prefix's test, of one draft up to all of them."""
    count = len(drafts)
    probs: list[float] = []
    if count > 1:
        weight_I1 = torch.tensor(prefix_weights[1:count], dtype=torch.float64, device=target.device)
        if draft_GV is None:
            token_I1 = torch.tensor(list(drafts[1:]), device=target.device).unsqueeze(1)
            rest_I = weight_I1 * (1 - target[1:count].gather(1, token_I1).squeeze(1))
        else:
            rest_I = (weight_I1.unsqueeze(1) * target[1:count] - draft_GV[1:]).clamp_(min=0).sum(-1)
        for rest, weight in zip(rest_I.tolist(), prefix_weights[1:count], strict=True):
            whole = rest + (1.0 - weight)
            probs.append(rest / whole if whole > 0 else 1.0)
    if count:
        probs.append(prefix_weights[count])
    return probs


def _residual(weight: float, target_V: Tensor, draft_V: Tensor | None, token: int) -> Tensor:
    """Return the weights of the token that replaces a draft: what the draft's law did not cover."""
    if draft_V is not None:
        return (weight * target_V - draft_V).clamp_(min=0)
    residual_V = weight * target_V
    residual_V[token] = 0.0  # a certain draft covers all of its own token and nothing else
    return residual_V


def _or_target(residual_V: Tensor, target_V: Tensor) -> Tensor:
    # An empty residual means the draft's law equals the target's, so not keeping the draft had probability
    # 0 up to rounding; the target itself is then the residual's limit.
    return residual_V if float(residual_V.sum()) > 0 else target_V


def _sampled(drafts: Sequence[int], kept: int, weights_V: Tensor, decisions: Decisions) -> SampledVerdict:
    origin: Origin = "corrected" if kept < len(drafts) else _last_origin(drafts)
    tokens: list[tuple[int, Origin]] = [(token, "accepted") for token in drafts[:kept]]
    tokens.append((decisions.sample(weights_V, slot=kept), origin))
    return SampledVerdict(accepted=kept, tokens=tokens)
