"""Free generation: every drafter and gamma against plain decoding of each request alone.

Where a text leaves plain decoding's, three things are told: where, by how much plain decoding's choice led
there, and what the policy says when exactly that prefix is computed again, alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollout.engine.native.engine import NativeEngine
from rollout.evaluation.spread import Limits
from rollout.evaluation.ways import DraftWay
from rollout.proof.compare import Texts, difference_of
from rollout.proof.finding import Difference
from rollout.proof.margin import with_margin
from rollout.proof.steering import Drive, Steering, drive
from rollout.testing_native import ar_plan, fixed_plan
from rollout.tokens import Tokens
from rollout.types import Completion, Request

Side = Literal["plain", "speculative", "neither"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first place where a text is another, and what a replay of the prefix before it says."""

    difference: Difference
    replayed_id: int | None
    """What the policy chooses there, the prefix computed alone in one forward; None where plain decoding had
    ended."""

    agrees_with: Side

    def line(self) -> str:
        """Return it in one line."""
        said = "" if self.replayed_id is None else f"; replayed: id {self.replayed_id}, {self.agrees_with}"
        return f"{self.difference.line()}{said}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeReport:
    """The texts of one drafter, depth and gamma against plain decoding's."""

    drafter: str
    depth: int
    """Loops after which drafts are read out; 0 for those that are no readout of the policy."""

    gamma: int
    batch: int
    texts: int
    identical: int
    tolerated: int
    """Others, each of which first differs where plain decoding's choice led by no more than is allowed."""

    drafted: int
    accepted: int
    rounds: int
    first: Divergence | None

    @property
    def passed(self) -> bool:
        """Whether drafts were put to the test and no text is another."""
        return self.identical + self.tolerated == self.texts and self.accepted > 0

    def line(self) -> str:
        """Return what was found, in words."""
        kept = f"{self.accepted} of {self.drafted} drafts kept"
        if not self.accepted:
            kept += ", so nothing was put to the test"
        if self.first is None:
            return f"{self.identical} of {self.texts} identical, {kept}"
        allowed = f", {self.tolerated} within the margin" if self.tolerated else ""
        return f"{self.identical} of {self.texts} identical{allowed}, {kept}; {self.first.line()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTexts:
    """What every text is held against."""

    requests: Sequence[Request]
    texts: Texts

    @property
    def problem(self) -> str:
        """Why nothing can be held against it; nothing where it can."""
        failed = [c.error for c in self.texts.values() if c.error is not None]
        if failed:
            return failed[0]
        different = len({c.token_ids for c in self.texts.values()})
        return "" if different > 1 or len(self.requests) == 1 else "all texts are the same"


def plain_texts(engine: NativeEngine, requests: Sequence[Request]) -> PlainTexts:
    """Decode each request alone, without drafts."""
    run = drive(engine, requests, Steering(plan=ar_plan), batch=1)
    return PlainTexts(requests=requests, texts=run.completions)


def free_report(
    engine: NativeEngine, plain: PlainTexts, way: DraftWay, gamma: int, *, batch: int, limits: Limits
) -> FreeReport:
    """Generate every text, at most ``batch`` at once, and compare. ``engine`` drafts that ``way``."""
    # Names of their own, so that ``history`` cannot look an earlier run's text up.
    sent = [replace(r, prompt_uid=f"{way.name}-{gamma}/{r.prompt_uid}") for r in plain.requests]
    run = drive(engine, sent, Steering(plan=fixed_plan(way.drafter, gamma)), batch=batch)
    found = {one.key: run.completions[other.key] for one, other in zip(plain.requests, sent, strict=True)}
    return _compared(engine, plain, found, run, way=way, gamma=gamma, batch=batch, limits=limits)


def _compared(
    engine: NativeEngine,
    plain: PlainTexts,
    found: Mapping[tuple[str, int], Completion],
    run: Drive,
    *,
    way: DraftWay,
    gamma: int,
    batch: int,
    limits: Limits,
) -> FreeReport:
    differences = []
    for request in plain.requests:
        difference = _difference(request, plain.texts[request.key], found[request.key], limits)
        if difference is not None:
            ids = plain.texts[request.key].token_ids
            differences.append((request, with_margin(difference, engine, request, ids)))
    tolerated = [d for _, d in differences if _tolerable(d, limits)]
    told = next((both for both in differences if both[1] not in tolerated), None) or (
        differences[0] if differences else None
    )
    return FreeReport(
        drafter=way.drafter,
        depth=way.depth,
        gamma=gamma,
        batch=batch,
        texts=len(plain.requests),
        identical=len(plain.requests) - len(differences),
        tolerated=len(tolerated),
        drafted=run.drafted,
        accepted=run.accepted,
        rounds=run.rounds,
        first=None if told is None else _replayed(engine, *told, plain.texts[told[0].key].token_ids),
    )


def _difference(
    request: Request, expected: Completion, found: Completion, limits: Limits
) -> Difference | None:
    """Return the first difference: in ids and in every bit of the logprobs, or in ids where bits may move."""
    if limits.margin > 0:
        expected, found = _without_logprobs(expected), _without_logprobs(found)
    return difference_of(request, expected, found)


def _without_logprobs(completion: Completion) -> Completion:
    tokens = (
        replace(token, raw_logprob=0.0, scaled_logprob=0.0, target_logprob=0.0, kept_logmass=0.0)
        for token in completion.tokens
    )
    return replace(completion, tokens=Tokens(tokens))


def _tolerable(difference: Difference, limits: Limits) -> bool:
    return (
        limits.margin > 0
        and difference.kind == "token"
        and difference.margin is not None
        and difference.margin <= limits.margin
    )


def _replayed(
    engine: NativeEngine, request: Request, difference: Difference, plain_ids: Sequence[int]
) -> Divergence:
    """Compute the prefix alone and choose its next token as the engine would."""
    if difference.index >= len(plain_ids):
        return Divergence(difference=difference, replayed_id=None, agrees_with="neither")
    chosen = replayed_choice(engine, request, plain_ids[: difference.index])
    sides: dict[int | None, Side] = {difference.found_id: "speculative", difference.expected_id: "plain"}
    return Divergence(difference=difference, replayed_id=chosen, agrees_with=sides.get(chosen, "neither"))


def replayed_choice(engine: NativeEngine, request: Request, before: Sequence[int]) -> int | None:
    """Return the token the idle engine gives a request that already has ``before``: its prefix is computed
    anew, in one forward of its own. None where it ends without one.
    """
    again = replace(request, prefix_ids=(*request.prefix_ids, *before))
    engine.add(again)
    while engine.busy:
        outcome = engine.run_round(ar_plan(engine.load()))
        for emission in outcome.emissions:
            engine.abort(again.key, reason="the replay is over")
            return emission.tokens[0].token_id
    return None
