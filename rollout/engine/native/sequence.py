"""One request while it lives in the engine: its tokens, its pages, and how far its KV reaches."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from rollout.engine.target import TargetRow
from rollout.seeds import round_seed
from rollout.tokens import TokenLog
from rollout.types import Completion, FinishReason, Provenance, Request, SamplingParams


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    OVER = "over"


@dataclass(kw_only=True, slots=True, eq=False)
class LiveSequence:
    """A request in flight.

    Invariant: positions below ``frontier`` hold policy KV of ``tokens`` on every plane. In ``DECODE`` it
    covers all tokens but the last. Drafts may write beyond it; nothing reads that as the policy's.
    """

    key: int
    request: Request
    tokens: list[int]
    """Prompt, prefix of earlier attempts, then what was committed here."""

    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    max_new_tokens: int
    """Prefix included."""

    added_s: float
    phase: Phase = Phase.WAITING
    frontier: int = 0
    pages: list[int] = field(default_factory=list)
    kv_version: int | None = None
    """Policy version its pages were begun under; after ``keep`` they also hold KV of later ones."""

    slot: int = -1
    """Row of the page table; -1 while it holds none."""

    records: TokenLog = field(default_factory=TokenLog)
    text_end: int | None = None
    """Characters of text before the stop string that ended it; None while none did."""

    output_counts: Counter[int] = field(default_factory=Counter)
    prompt_set: frozenset[int] = frozenset()
    told: int = 0
    """Tokens of ``records`` that were emitted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    verified_rows: int = 0
    preemptions: int = 0
    resumed: bool = False
    """Whether its text was begun elsewhere, under the weights live when it came."""

    admitted_s: float | None = None
    first_token_s: float | None = None

    # Asked several times for every token, so they are no properties.
    params: SamplingParams = field(init=False)
    """How it is sampled."""

    prompt_tokens: int = field(init=False)
    """Length of the prompt."""

    prompt_bytes: bytes = field(init=False)
    """The prompt's ids: equal where prompts are, and hashed once, as a tuple is not."""

    edits_logits: bool = field(init=False)
    """Whether its target distribution is ever more than its logits, temperature and filters."""

    watched: bool = field(init=False)
    """Whether each token must be looked at before the next: it edits logits, or its text may end it."""

    def __post_init__(self) -> None:
        params = self.params = self.request.params
        self.prompt_tokens = len(self.request.prompt_ids)
        self.prompt_bytes = array("i", self.request.prompt_ids).tobytes()
        self.edits_logits = bool(params.min_tokens or params.logit_bias or params.has_penalties)
        self.watched = self.edits_logits or bool(params.stop)

    @property
    def under_way(self) -> bool:
        """Whether its text has begun: an update must not just let it wait."""
        return self.resumed or self.admitted_s is not None

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt, prefix included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Most tokens it may still commit."""
        return self.max_new_tokens + self.prompt_tokens - len(self.tokens)

    @property
    def round_seed(self) -> int:
        """Seed of noise that must not repeat over rounds: a round always moves the length it is keyed by,
        and a resumed prefix continues where the earlier attempt stood."""
        return round_seed(self.request.seed, len(self.tokens))

    def target_row(self, drafts: list[int], *, seed: int | None) -> TargetRow:
        """Return what shapes the choice of the token after ``tokens + drafts``.

        ``seed`` replaces the request's seed where noise must not repeat over rounds.
        """
        params = self.params
        if not self.edits_logits:
            own = self.request.seed if seed is None else seed
            return TargetRow(own, len(self.tokens) + len(drafts), params)
        counts: Counter[int] = self.output_counts
        if drafts and params.has_penalties:
            counts = counts + Counter(drafts)
        banned: tuple[int, ...] = ()
        if params.min_tokens and self.new_tokens + len(drafts) < params.min_tokens:
            banned = tuple(sorted(self.stop_ids | self.eos_ids))
        # In the order of the fields: naming them costs as much again as the row.
        return TargetRow(
            self.request.seed if seed is None else seed,
            len(self.tokens) + len(drafts),
            params,
            counts,
            self.prompt_set,
            banned,
        )

    def completion(
        self,
        *,
        reason: FinishReason,
        error: Exception | None,
        text: str | None,
        host: str,
        fingerprint: str,
        drafter_versions: dict[str, int],
        now_s: float,
    ) -> Completion:
        """Return how it ended."""
        admitted = self.admitted_s if self.admitted_s is not None else now_s
        first = self.first_token_s if self.first_token_s is not None else now_s
        return Completion(
            prompt_uid=self.request.prompt_uid,
            sample_index=self.request.sample_index,
            attempt=self.request.attempt,
            tokens=self.records[:],
            text=text,
            finish_reason=reason,
            error=None if error is None else f"{type(error).__name__}: {error}",
            provenance=Provenance(
                seed=self.request.seed,
                host=host,
                fingerprint=fingerprint,
                drafter_versions=drafter_versions,
                rounds=self.rounds,
                drafted=self.drafted,
                accepted=self.accepted,
                verified_rows=self.verified_rows,
                queued_s=admitted - self.added_s,
                prefill_s=first - admitted,
                decode_s=now_s - first,
                preemptions=self.preemptions,
            ),
        )
