"""The controller's words: what an engine tells it and what it answers. Standard library only.

A ``RoundLoad`` goes in before a round, a ``RoundPlan`` comes out, ``RoundFacts`` come back after the
round was run. None of them holds a tensor, a clock or a handle, so a log of them replays a decision.
"""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, overload

VerifyMode = Literal["coupled", "block", "token"]
Numerics = Literal["exact", "fast"]
InFlight = Literal["drain", "abort", "recompute", "keep"]

AR = "ar"
"""The drafter name of a sequence that decodes without drafts in a round."""

POLICY = "policy"
"""The model part that verifies and decodes; drafters are parts under their own names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShape:
    """What one forward of a model part moves and computes; the cost model's only view of a model."""

    name: str
    """``POLICY`` or a drafter's name."""

    weight_bytes: int
    """Bytes of weights read by one forward, whatever its rows."""

    flops_per_row: float
    """Floating-point operations of one row, attention excluded."""

    kv_bytes_per_token: int
    """Bytes of keys and values read per row and context token."""

    flops_per_context_token: float
    """Attention operations of one row per context token."""

    rows_per_draft_token: int = 1
    """Rows this part computes per draft token; 0 for a drafter that runs no model."""

    reuse_frac: float = 0.0
    """Share of the policy's forward that this part leaves done for each row it drafted from, one per draft
    token: verification goes on from there. 0 where verification computes everything."""

    lane_loops: int = 0
    """Of a pipeline over a looped policy: the loops of a token, one per forward of this part. Its sequences
    get their tokens from as many such forwards in a round, not from the policy's. 0 for every other part."""

    lane_depth: int = 0
    """Loops after which a token proposes the next one, which then travels behind it."""

    lane_passes: int = 0
    """Forwards of a round that computes nothing else, divided among its sequences: see ``passes_of``."""

    def passes_of(self, sequences: int, *, alone: bool) -> int:
        """Return the forwards of a round with so many sequences of a pipeline, ``alone`` in it or not.

        Whoever else is in the round waits for its end, so they are as many as plain decoding takes there. A
        round that is all the pipeline's has more, which spares what rounds cost beside them: fewer for many
        sequences, who share that cost.
        """
        return max(self.lane_loops, self.lane_passes // sequences if alone else 0)

    @property
    def most_lanes(self) -> int:
        """Tokens of one sequence under way in a full pipeline; 1 for a part that is none."""
        return -(-self.lane_loops // self.lane_depth) if self.lane_loops else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraits:
    """What the controller may ask of one drafter."""

    name: str
    max_gamma: int
    switch_tokens_per_sequence: int = 0
    """Tokens a sequence must be caught up by when this drafter is switched on (0: shares the KV)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """What an engine can do. What it cannot do is refused by name, never approximated."""

    engine: str
    verify_modes: tuple[VerifyMode, ...]
    gamma_per_sequence: bool
    drafters: tuple[DrafterTraits, ...]
    numerics: Numerics
    in_flight: tuple[InFlight, ...]
    max_batch: int
    max_context_tokens: int


NOTHING_READY: Mapping[str, int] = {}
"""What drafters have ready that have nothing, or were not asked."""


class SequenceLoad(NamedTuple):
    """One running sequence, as the controller sees it before a round.

    A tuple, like ``SequenceOutcome``: one of each is made per sequence and round, and a frozen dataclass
    takes three times as long to make.
    """

    key: int
    """The engine's number for it; never reused."""

    context_tokens: int
    """Prompt and committed tokens."""

    generated_tokens: int
    remaining_tokens: int
    """Most tokens it may still commit."""

    history_match_tokens: Mapping[str, int] = NOTHING_READY
    """Per drafter that can tell for free: how many draft tokens it has ready for this sequence. Empty in a
    round whose controller did not want to know (``Controller.wants_look_up``)."""


Row = TypeVar("Row", bound=tuple[Any, ...])


class ByColumn(Sequence[Row]):
    """Rows kept by column, each made when somebody asks for it. Equal to any sequence of equal rows.

    In a plain round most sequences just get their next token, so that nothing is made for each of them.
    """

    __slots__ = ()
    _kind: ClassVar[Callable[..., Any]]
    """Of the rows."""

    @abstractmethod
    def columns(self) -> dict[str, list[Any]]:
        """Return the fields of all rows, by name and in their order."""

    def __iter__(self) -> Iterator[Row]:
        return map(self._kind, *self.columns().values())

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to tuples, which hash otherwise

    def __repr__(self) -> str:
        return repr(tuple(self))


class PlainLoads(ByColumn[SequenceLoad]):
    """Sequences that decode plainly, and had no drafter asked what it has ready for them."""

    __slots__ = ("_generated_tokens", "_remaining_tokens", "context_tokens", "keys")
    _kind = SequenceLoad

    def __init__(
        self,
        keys: "array[int]",
        context_tokens: "array[int]",
        generated_tokens: "array[int]",
        remaining_tokens: "array[int]",
    ) -> None:
        self.keys, self.context_tokens = keys, context_tokens
        self._generated_tokens, self._remaining_tokens = generated_tokens, remaining_tokens

    def __len__(self) -> int:
        return len(self.keys)

    def columns(self) -> dict[str, list[Any]]:
        """See ``ByColumn``."""
        return {
            "key": self.keys.tolist(),
            "context_tokens": self.context_tokens.tolist(),
            "generated_tokens": self._generated_tokens.tolist(),
            "remaining_tokens": self._remaining_tokens.tolist(),
            "history_match_tokens": [NOTHING_READY] * len(self),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundLoad:
    """What is about to run: decode sequences, and how much else waits."""

    round_index: int
    policy_version: int
    sequences: Sequence[SequenceLoad]
    """Sequences that decode this round. Sequences still in prefill are not here."""

    prefill_tokens: int = 0
    """Prompt tokens the same forward will compute."""

    waiting: int = 0
    """Requests admitted later."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The sequences, ascending."""
        sequences = self.sequences
        return tuple(
            sorted(sequences.keys if isinstance(sequences, PlainLoads) else [s.key for s in sequences])
        )

    @property
    def context_tokens(self) -> int:
        """Tokens of all sequences that decode."""
        if isinstance(self.sequences, PlainLoads):
            return sum(self.sequences.context_tokens)
        return sum([s.context_tokens for s in self.sequences])


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """How one sequence decodes this round."""

    drafter: str
    gamma: int
    """Draft tokens; 0 with drafter ``AR``."""

    def __post_init__(self) -> None:
        if self.gamma < 0 or (self.gamma == 0) != (self.drafter == AR):
            raise ValueError(f"gamma {self.gamma} does not go with drafter {self.drafter!r}")


AR_ASSIGNMENT = Assignment(drafter=AR, gamma=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """What the engine does next. A sequence without an assignment decodes plainly."""

    assignments: Mapping[int, Assignment]
    """By sequence key."""

    reason: str
    """A short phrase for the log: "batch above break-even"."""

    predicted_s: float = 0.0
    """Seconds the cost model expects the round to take; 0 when no model was asked."""

    predicted_tokens: float = 0.0
    """Tokens it expects the round to commit; 0 as well then."""

    probe: bool = False
    """Whether drafts are only there to keep acceptance observable."""

    @property
    def plain(self) -> bool:
        """Whether everybody decodes plainly."""
        return all(a.gamma == 0 for a in self.assignments.values())

    def of(self, key: int) -> Assignment:
        """Return how sequence ``key`` decodes."""
        return self.assignments.get(key, AR_ASSIGNMENT)


class SequenceOutcome(NamedTuple):
    """What one decode sequence did in a round."""

    key: int
    drafter: str
    gamma: int
    """Draft tokens verified for it (a drafter may offer fewer than were asked for)."""

    accepted: int
    """Draft tokens committed."""

    committed: int
    """All tokens committed, corrected or bonus token included."""

    context_tokens: int
    """Before the round."""

    censored: bool
    """True when a stop or a limit cut the round, so later positions say nothing about the drafter."""

    finished: bool
    judged_singly: bool = False
    """Whether each draft token was judged for itself, those after a wrong one as well: in a pipeline. Their
    place among the others means nothing then."""


class PlainOutcomes(ByColumn[SequenceOutcome]):
    """What sequences did that decoded plainly: each committed a token, or could not and is over."""

    __slots__ = ("_committed", "_context_tokens", "_finished", "_keys")
    _kind = SequenceOutcome

    def __init__(
        self,
        keys: "array[int]",
        context_tokens: "array[int]",
        committed: "array[int]",
        finished: "array[int]",
    ) -> None:
        """``committed`` and ``finished`` are flags."""
        self._keys, self._context_tokens = keys, context_tokens
        self._committed, self._finished = committed, finished

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def committed(self) -> int:
        """Tokens of all rows."""
        return sum(self._committed)

    @property
    def finished(self) -> tuple[SequenceOutcome, ...]:
        """The rows of sequences that are over."""
        return tuple([o for o in self if o.finished]) if any(self._finished) else ()

    def columns(self) -> dict[str, list[Any]]:
        """See ``ByColumn``."""
        rows = len(self)
        return {
            "key": self._keys.tolist(),
            "drafter": [AR] * rows,
            "gamma": [0] * rows,
            "accepted": [0] * rows,
            "committed": self._committed.tolist(),
            "context_tokens": self._context_tokens.tolist(),
            "censored": [not committed for committed in self._committed],
            "finished": [bool(finished) for finished in self._finished],
            "judged_singly": [False] * rows,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """What one drafter spent in a round."""

    drafter: str
    passes: int
    rows: int
    """Rows over all passes."""

    context_tokens: int
    """Context tokens over all rows of all passes."""

    seconds: float
    failures: int = 0
    """Sequences it could not draft for; they decoded plainly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSeconds:
    """Where forwards spent their time, as the first of their threads saw it; its waits count to what they
    wait for."""

    linears_s: float
    """Of the body, with what is fused into their outputs: bias, gate, residual sum."""

    attention_s: float
    head_s: float
    rest_s: float
    """Embedding, norms, rotation, writing keys and values, starting the threads."""

    @property
    def total_s(self) -> float:
        """The whole forward."""
        return self.linears_s + self.attention_s + self.head_s + self.rest_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds:
    """What the forwards of a round, and the choices made from their logits, took."""

    forward_s: float
    """Around the calls, whatever they cost beside the computation included; of calls that also choose, what
    they told of themselves."""

    choose_s: float
    split: ForwardSeconds | None = None
    """None where what computes does not tell, or nothing was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFacts:
    """What a round did and what it took. Times are wall-clock seconds."""

    round_index: int
    policy_version: int
    batch: int
    """Decode sequences."""

    prefill_rows: int
    verify_rows: int
    """Rows of decode sequences in the policy's forward: one each plus their draft tokens. Sequences that
    travel in lanes have none: their rows are in ``drafts``."""

    context_tokens: int
    """Context tokens read by all rows of the policy's forward."""

    draft_s: float
    verify_s: float
    commit_s: float
    total_s: float
    drafts: tuple[DraftCost, ...] = ()
    outcomes: Sequence[SequenceOutcome] = ()
    prefill_committed: int = 0
    """Tokens committed by sequences whose last prompt row was in this round, one each: they count as decode
    sequences from the next round on."""

    policy_pass: PassSeconds | None = None
    """Within ``verify_s``; None where the engine does not say."""

    draft_pass: PassSeconds | None = None
    """Of all drafters that run a model, within ``draft_s``."""

    @property
    def speculated(self) -> bool:
        """Whether any sequence decoded otherwise than plainly: some drafter then spent something."""
        return bool(self.drafts) and any(o.drafter != AR for o in self.outcomes)

    @property
    def telling(self) -> Sequence[SequenceOutcome]:
        """Outcomes that say more than that a sequence went on plainly: it drafted, or is over."""
        if isinstance(self.outcomes, PlainOutcomes):
            return self.outcomes.finished
        return [o for o in self.outcomes if o.gamma > 0 or o.finished]

    @property
    def decoded(self) -> int:
        """Tokens committed by decode sequences: what a plan is judged by."""
        if isinstance(self.outcomes, PlainOutcomes):
            return self.outcomes.committed
        return sum(o.committed for o in self.outcomes)

    @property
    def committed(self) -> int:
        """All tokens committed."""
        return self.decoded + self.prefill_committed
