"""The target distribution: one function makes it, for AR, verification, drafts and logprobs alike.

Shapes: R rows, V vocabulary. A row is one position whose next token is to be chosen.

Exact meaning, the same in every chooser:

1. Edits: repetition penalty (tokens of prompt or output: a positive logit is divided, another multiplied),
   then presence and frequency penalties and logit_bias added as one sum, then bans (``-inf``). Computed in
   double precision and rounded to the dtype of the logits.
2. Temperature. 0 is greedy: the most probable token, ties to the lowest id; filters cannot change that.
3. Filters, each on what the one before kept. All keep a prefix of the tokens in the order (probability
   descending, id ascending): top-k exactly k tokens; top-p, on the distribution renormalised to those, the
   smallest prefix whose mass reaches top_p; min-p those at least min_p times as probable as the first.
4. The token is argmax((logit - max) / temperature + noise) over the kept ones, ties to the lowest id.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from rollout.types import SamplingParams


class TargetRow(NamedTuple):
    """All that shapes one row's target distribution beside its logits, and the key of its noise.

    A tuple, like ``Choice``: one of each is made per head row of a round, and a frozen dataclass takes four
    times as long to make.
    """

    seed: int
    position: int
    """Absolute position of the token being chosen, prompt included."""

    params: SamplingParams
    output_counts: Mapping[int, int] = MappingProxyType({})
    """How often each token stands in the output before this position, drafts before it included.
    Filled only when the params have penalties."""

    prompt_tokens: AbstractSet[int] = frozenset()
    """Tokens of the prompt, for the repetition penalty."""

    banned: tuple[int, ...] = ()
    """Stop ids that min_tokens forbids here."""


class Choice(NamedTuple):
    """The token of one row and its logprobs, as ``TokenRecord`` defines them."""

    token: int
    raw_logprob: float
    scaled_logprob: float
    target_logprob: float
    kept_logmass: float
    finite: bool
    """False when the row's logits held NaN or infinity (or kept no token): then nothing else here counts."""


class Chooser(Protocol):
    """Chooses tokens from logits. Processing order: penalties, logit_bias, bans, temperature, top-k,
    top-p, min-p; filters apply to the scaled distribution and ties are kept by lowest id."""

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return argmax(processed logits + Gumbel noise of (seed, position, token, stream)) per row.

        Greedy rows use no noise. ``stream`` 0 is the coupled noise drafters and target share.
        ``logits_RV`` is not changed. Without ``logprobs`` the logprob fields are 0.
        """
        ...

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the logprobs of given tokens, one per row."""
        ...

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the target distributions, shape RV, summing to 1 over the kept tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitEdits:
    """Sparse changes to one row: new = (old / divisor if old > 0 else old * divisor) + addend."""

    ids: list[int]
    divisors: list[float]
    addends: list[float]


def needs_edits(row: TargetRow) -> bool:
    """Return whether anything changes the row's logits before temperature and filters."""
    params = row.params
    return bool(row.banned or params.logit_bias or params.has_penalties)


def logit_edits(row: TargetRow) -> LogitEdits:
    """Return the row's penalties, bias and bans, each id once."""
    params = row.params
    divisors: dict[int, float] = {}
    addends: dict[int, float] = {}
    if params.repetition_penalty != 1.0:
        for token in (*row.prompt_tokens, *(t for t, n in row.output_counts.items() if n > 0)):
            divisors[token] = params.repetition_penalty
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        for token, count in row.output_counts.items():
            if count > 0:
                addends[token] = -params.presence_penalty - params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        addends[token] = addends.get(token, 0.0) + bias
    for token in row.banned:
        addends[token] = -math.inf
    ids = sorted(divisors.keys() | addends.keys())
    return LogitEdits(
        ids=ids,
        divisors=[divisors.get(t, 1.0) for t in ids],
        addends=[addends.get(t, 0.0) for t in ids],
    )
