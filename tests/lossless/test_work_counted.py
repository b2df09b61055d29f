"""Every (position, loop) is computed once: by what the kernels themselves count, in the calls that serve.

All forwards here are the compiled ones of production: a chain for the drafts of a round, one call for what is
left and its choices, one for the passes of lanes. A position that is committed, or verified and rejected, has
been through each loop at least once, or its bits would be others than plain decoding's, which every case
checks as well. So where rows by loop are as many as positions, none was computed twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pytest

from controller.types import RoundFacts
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.engine import NativeEngine
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_native import (
    Planner,
    ar_plan,
    fixed_plan,
    random_plan,
    requests_for,
    run_engine,
    texts,
    tiny_engine,
)
from rollout.types import Completion, Request, SamplingParams

pytestmark = [
    pytest.mark.lossless,
    pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable())),
]

LOOPS = 4
DEPTHS = (1, 2, 3)
PARAMS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=7, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=21, temperature=1.3, min_p=0.05, ignore_eos=True),
)


class OneCall(CompiledDecoder):
    """Refuses every forward that production does not make for these requests."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a round of these requests is compiled calls alone")

    advance = forward_from = block = forward


class Forgetful(OneCall):
    """Verifies every row from its token, whatever its draft has computed: the same bits, done twice."""

    def run_choosing(self, call: Any, *args: Any) -> Any:
        call.depths = None
        return super().run_choosing(call, *args)


def policy_of() -> TinyPolicy:
    return tiny_looped_policy(loops=LOOPS)


def engine_of(
    names: Sequence[str],
    *,
    kind: type[CompiledDecoder] = OneCall,
    threads: int = 1,
    batch: int = 6,
    chunk: int = 512,
    depth: int = 1,
    passes: int = 32,
) -> NativeEngine:
    policy = policy_of()
    decoder = kind(policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=threads)
    decoder.load(policy.state)
    config = DrafterConfig(wavefront_depth=depth, wavefront_passes=passes)
    return tiny_engine(
        policy,
        [build(name, config) for name in names],
        compiled=True,
        threads=threads,
        decoder=decoder,
        config=EngineConfig(max_batch=batch, max_context_tokens=128, prefill_chunk_tokens=chunk),
    )


def requests_of(count: int, *, seed: int = 5) -> list[Request]:
    return requests_for(vocab=48, prompts=count, params=PARAMS, seed=seed)


Done = dict[tuple[str, int], Completion]


def counted_rounds(
    engine: NativeEngine,
    requests: Sequence[Request],
    plan: Planner,
    done: Done,
    *,
    after: Callable[[], None] = lambda: None,
) -> Iterator[tuple[RoundFacts, DecoderWork]]:
    """Run to the end and yield, per round, what it says of itself and what the kernels counted."""
    for request in requests:
        engine.add(request)
    while engine.busy:
        before = engine._decoder.work
        outcome = engine.run_round(plan(engine.load()))
        done |= {(c.prompt_uid, c.sample_index): c for c in outcome.completions}
        yield outcome.facts, engine._decoder.work - before
        after()


@pytest.fixture(scope="module")
def plain() -> Mapping[int, Any]:
    """Texts of the first 1, 6 and 10 requests, decoded plainly."""
    counts = (1, 6, 10)
    return {
        count: texts(run_engine(tiny_engine(policy_of(), compiled=True), requests_of(count), ar_plan))
        for count in counts
    }


# ---- shallow loops ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_round_takes_every_position_through_every_loop_once(
    depth: int, gamma: int, batch: int, plain: Mapping[int, Any]
) -> None:
    """K drafts and one more row for each of B sequences, in the passes and readouts of the cost law."""
    name = f"shallow_loop_{depth}"
    engine, done, seen = engine_of([name], batch=batch, threads=1 + (gamma == 4)), Done(), 0
    for facts, work in counted_rounds(engine, requests_of(batch), fixed_plan(name, gamma), done):
        assert facts.verify_rows == sum(1 + o.gamma for o in facts.outcomes)
        assert work.rows_by_loop == (facts.prefill_rows + facts.verify_rows,) * LOOPS
        drafted = sum(o.gamma for o in facts.outcomes)
        assert work.head_rows == drafted + facts.verify_rows + facts.prefill_committed
        longest = max((o.gamma for o in facts.outcomes), default=0)
        assert work.passes == depth * longest + LOOPS
        seen += drafted - sum(o.accepted for o in facts.outcomes)
    assert texts(done) == plain[batch]
    assert seen, "some drafts are rejected, or rejected positions are not put to the test"


@pytest.mark.parametrize("threads", [1, 3])
def test_drafts_of_all_depths_plain_rows_and_prompts_in_one_round_too(
    threads: int, plain: Mapping[int, Any]
) -> None:
    names = [f"shallow_loop_{depth}" for depth in DEPTHS]
    engine, done, mixed = engine_of(names, threads=threads, chunk=7), Done(), 0
    plan = random_plan(names, max_gamma=5, seed=2)
    for facts, work in counted_rounds(engine, requests_of(10), plan, done):
        rows = facts.prefill_rows + facts.verify_rows
        assert work.rows_by_loop == (rows,) * LOOPS
        drafted = sum(d.rows for d in facts.drafts)
        assert work.head_rows == drafted + facts.verify_rows + facts.prefill_committed
        mixed += len(facts.drafts) > 1 and facts.prefill_rows > 0
    assert texts(done) == plain[10]
    assert mixed


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_counts_tell_states_that_were_thrown_away(depth: int, plain: Mapping[int, Any]) -> None:
    """A round that goes on from no state gives the same text: nothing but the counts can tell."""
    name = f"shallow_loop_{depth}"
    engine, done, twice = engine_of([name], kind=Forgetful), Done(), 0
    for facts, work in counted_rounds(engine, requests_of(6), fixed_plan(name, 4), done):
        rows, drafted = facts.prefill_rows + facts.verify_rows, sum(d.rows for d in facts.drafts)
        assert work.rows_by_loop == (rows + drafted,) * depth + (rows,) * (LOOPS - depth)
        twice += drafted
    assert texts(done) == plain[6]
    assert twice


# ---- lanes --------------------------------------------------------------------------------------


class Pipeline:
    """One sequence in lanes, worked out from the text it gave and nothing else.

    ``origins`` says of each of its tokens after the first how it was chosen.
    """

    def __init__(self, origins: Sequence[str], *, depth: int, most_lanes: int) -> None:
        self._origins, self._depth, self._most = origins, depth, most_lanes
        self._lanes = [0]
        self._committed = 0
        self.rows_by_loop = [0] * LOOPS
        self.recomputed = 0
        """Row-loops of lanes that fell."""

    @property
    def over(self) -> bool:
        return self._committed == len(self._origins)

    def run_pass(self) -> None:
        if self.over:
            return
        in_text = self._committed + len(self._lanes) < len(self._origins)
        if self._lanes[-1] >= self._depth and len(self._lanes) < self._most and in_text:
            self._lanes.append(0)
        for index, loop in enumerate(self._lanes):
            self.rows_by_loop[loop] += 1
            self._lanes[index] += 1
        if self._lanes[0] == LOOPS:
            self._commit()

    def _commit(self) -> None:
        origin = self._origins[self._committed]
        self._committed += 1
        fallen = self._lanes[1:]
        assert (origin == "plain") == (not fallen)
        self._lanes = fallen
        if origin != "accepted":
            self.recomputed += sum(fallen)
            self._lanes = [0]


def pipelines_of(done: Done, *, depth: int, gamma: int) -> dict[str, Pipeline]:
    most = min(gamma + 1, -(-LOOPS // depth))
    return {
        uid: Pipeline([t.origin for t in c.tokens[1:]], depth=depth, most_lanes=most)
        for (uid, _), c in done.items()
    }


def run_lanes(
    depth: int, gamma: int, *, passes: int, batch: int, forgets: bool = False
) -> tuple[Done, list[tuple[RoundFacts, DecoderWork]]]:
    engine, done = engine_of(["wavefront"], depth=depth, passes=passes, batch=batch), Done()
    after = engine._wavefront.clear if forgets else lambda: None
    rounds = counted_rounds(engine, requests_of(batch), fixed_plan("wavefront", gamma), done, after=after)
    return done, list(rounds)


def in_lanes(rounds: Sequence[tuple[RoundFacts, DecoderWork]]) -> list[tuple[RoundFacts, DecoderWork]]:
    """Leave out prompts' rounds, and check what the others say of themselves."""
    out = []
    for facts, work in rounds:
        if facts.prefill_rows:
            assert work.rows_by_loop == (facts.prefill_rows,) * LOOPS
            continue
        (cost,) = facts.drafts
        assert (work.passes, work.row_loops) == (cost.passes, cost.rows)
        assert work.rows_by_loop[-1] == facts.decoded, "every position ends its way once"
        out.append((facts, work))
    return out


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("passes", [1, 32], ids=["short rounds", "long rounds"])
@pytest.mark.parametrize(("depth", "gamma"), [(1, 8), (1, 2), (1, 1), (2, 8), (3, 8)])
def test_lanes_compute_what_a_pipeline_of_their_text_computes_and_no_more(
    depth: int, gamma: int, passes: int, batch: int, plain: Mapping[int, Any]
) -> None:
    """Only lanes that fell are computed again: those ahead of a fall, and lanes between rounds, stand."""
    done, rounds = run_lanes(depth, gamma, passes=passes, batch=batch)
    assert texts(done) == plain[batch]
    pipelines = pipelines_of(done, depth=depth, gamma=gamma)
    for facts, work in in_lanes(rounds):
        before = [sum(p.rows_by_loop[loop] for p in pipelines.values()) for loop in range(LOOPS)]
        for _ in range(facts.drafts[0].passes):
            for pipeline in pipelines.values():
                pipeline.run_pass()
        after = [sum(p.rows_by_loop[loop] for p in pipelines.values()) for loop in range(LOOPS)]
        assert list(work.rows_by_loop) == [b - a for a, b in zip(before, after, strict=True)]
    assert all(p.over for p in pipelines.values())
    total = sum(sum(p.rows_by_loop) for p in pipelines.values())
    fallen = sum(p.recomputed for p in pipelines.values())
    tokens = sum(len(c.tokens) - 1 for c in done.values())
    assert total == LOOPS * tokens + fallen
    assert fallen, "no lane fell: nothing was put to the test"


def test_the_counts_tell_lanes_that_were_thrown_away(plain: Mapping[int, Any]) -> None:
    done, rounds = run_lanes(1, 8, passes=1, batch=6, forgets=True)
    assert texts(done) == plain[6]
    _, kept = run_lanes(1, 8, passes=1, batch=6)
    assert work_of(rounds) > work_of(kept)


def work_of(rounds: Sequence[tuple[RoundFacts, DecoderWork]]) -> int:
    return sum(work.row_loops for _, work in in_lanes(rounds))
