"""The drafters' words: what the engine asks of a drafter, and what a drafter may see of the policy.

Shapes in this folder: R rows, B sequences, V vocabulary, N out features, K in features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

SCREEN = "screen"
"""Name of a head in fewer bits beside the head: it ranks all tokens, and the head looks at the first few."""


class DraftError(Exception):
    """A drafter could not propose. The sequences concerned decode plainly this round: as exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequest:
    """One sequence to draft for. Its KV covers all of ``tokens`` but the last."""

    key: int
    """The engine's number for the sequence."""

    tokens: Sequence[int]
    """Prompt and committed tokens, oldest first. Read it, never keep or change it."""

    prompt_tokens: int
    """How many of ``tokens`` are prompt."""

    gamma: int
    """Most draft tokens wanted."""

    prompt_uid: str
    """Shared by the samples of one prompt, over trainer steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Draft tokens per request, in the order asked; a shorter or empty list is a valid answer."""

    tokens: list[list[int]]

    probs: list[Tensor] | None
    """Per request the rows (len(tokens), V) its tokens were really drawn from, float64 or float32.
    None when every token is certain given its prefix (point mass), or when coupled noise chose it."""

    passes: int
    rows: int
    context_tokens: int
    problem: str = ""
    """What stopped drafting early, if anything failed. The drafts before it are sound and must be kept:
    dropping them for what came after them would not be lossless in block and token mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftStep:
    """One token per row, chosen as the target would: same processing, under ``coupled`` the same noise."""

    tokens: list[int]
    probs: list[Tensor] | None
    """Per row the distribution (V,) the token was drawn from; None under coupled noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftChain:
    """What several passes chose in one go."""

    tokens: list[list[int]]
    """Per request its drafts, at most its gamma of them."""

    problem: str = ""
    """What stopped drafting early, if anything failed; drafts before it are sound."""


class DraftModel(Protocol):
    """A forward of the policy's architecture with other linears, over the policy's own KV pages."""

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> DraftChain | None:
        """Draft ``gammas[i]`` tokens for each request in one go: the tokens that ``step`` gives, but for
        a few in ten thousand where a screen ranks for the head.

        None, and nothing has happened, where passes must be run one by one: in a model that cannot do
        otherwise, and for requests of which somebody must know a draft before the next (penalties, bans,
        distributions to report).
        """
        ...

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        """Run one row per request and choose the next token of each.

        Row i's input is ``drafts[i][-1]``, or the last committed token when ``drafts[i]`` is empty;
        its position follows. It writes provisional KV there, beyond the frontier.
        """
        ...


class LinearWeight(Protocol):
    """One linear of the live policy (fused as the engine runs it: qkv, o, gate_up, down, head)."""

    name: str
    out_features: int
    in_features: int

    def rows(self) -> Tensor:
        """Return the weight as an (N, K) tensor; a copy where the engine keeps it packed."""
        ...

    @property
    def panels(self) -> Tensor | None:
        """The weight in the compiled engine's panel layout, without a copy; None elsewhere."""
        ...


class QuantizedLinear(Protocol):
    """A drafter's own version of one linear. Its buffers keep their addresses: engines record them."""

    name: str
    out_features: int
    in_features: int
    bits: int

    @property
    def weight_bytes(self) -> int:
        """Bytes one forward reads."""
        ...

    def apply(self, x_RK: Tensor) -> Tensor:
        """Return x W^T, shape (R, N), in the dtype of ``x_RK``."""
        ...


class PolicyView(Protocol):
    """What a drafter may see of the policy. Valid until the next weight update."""

    policy_version: int
    vocab_size: int
    compiled: bool
    """Whether the engine runs compiled kernels, which take packed linears."""
    chains: bool
    """Whether ``DraftModel.chain`` ever drafts: compiled, ``verify=coupled``. Nothing else reads a screen."""

    loops: int
    """How often one pass runs the body; more than 1 for a looped policy."""

    def linears(self) -> Iterator[LinearWeight]:
        """Yield every linear of the body, then the head (named "head")."""
        ...

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> DraftModel:
        """Return a forward in which ``linears``, by name, replace the policy's own; others stay shared.

        One named ``SCREEN`` replaces nothing; only a compiled engine takes it.
        """
        ...

    def shallow(self, depth: int) -> DraftModel:
        """Return a forward of the policy's own first ``depth`` loops and head, fewer than all loops.

        What it computes is the policy's: verification goes on from there and computes the other loops only.
        Raises ``ValueError`` for a depth the policy does not have.
        """
        ...


class Drafter(Protocol):
    """Anything that can propose tokens. It can only cost time.

    Whatever a call raises, or answers that makes no sense, is a failure; ``DraftError`` is a foreseen one.
    """

    name: str
    drafter_version: int
    """The policy version it was last rebuilt from; -1 before the first."""

    model: DraftModel | None
    """The forward it runs; None before the first rebuild, and for a drafter that runs none."""

    max_gamma: int
    """Most draft tokens per round it can offer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes one draft pass reads; 0 when it runs no model."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of weights it keeps beside the policy's; 0 when it runs no model, or the policy's own."""
        ...

    @property
    def switch_tokens_per_sequence(self) -> int:
        """Tokens a sequence must be caught up by when it is switched on; 0 when it shares the KV."""
        ...

    def rebuild(self, view: PolicyView) -> None:
        """Rebuild from the live policy, into the same buffers. Called at start and at every version."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Draft up to ``gamma`` tokens per request. Raises ``DraftError``."""
        ...

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return per request how many draft tokens are ready for free, None when only drafting can tell."""
        ...

    def finished(self, request: DraftRequest) -> None:
        """Hear that a sequence ended whole: ``request.tokens`` are all of its text. ``forget`` follows.

        Nobody is told of the tokens before: whoever is asked to draft sees them in its request, and rounds
        that decode plainly pay for nobody.
        """
        ...

    def forget(self, key: int) -> None:
        """Drop what is kept for one sequence (aborted, failed or finished)."""
        ...
