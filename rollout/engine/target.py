"""The target distribution: one function makes it, for AR, verification, drafts and logprobs alike.

Shapes: R rows, V vocabulary. A row is one position whose next token is to be chosen.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRow:
    """All that shapes one row's target distribution beside its logits, and the key of its noise."""

    seed: int
    position: int
    """Absolute position of the token being chosen, prompt included."""

    params: SamplingParams
    output_counts: Mapping[int, int] = field(default_factory=dict)
    """How often each token stands in the output before this position, drafts before it included.
    Filled only when the params have penalties."""

    prompt_tokens: AbstractSet[int] = frozenset()
    """Tokens of the prompt, for the repetition penalty."""

    banned: tuple[int, ...] = ()
    """Stop ids that min_tokens forbids here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
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
