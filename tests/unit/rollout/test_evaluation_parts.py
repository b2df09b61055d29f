"""The evaluation's pure parts: echoes, distances, the cost law, what fits the time, goals, fits of laws."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from controller.types import POLICY, DrafterTraits, EngineTraits, PartShape
from drafters.config import DrafterConfig
from rollout.bench.pairing import Claim, PairedRatio, Timed
from rollout.bench.streams import StreamTimes
from rollout.bench.summary import Totals
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.errors import ConfigError
from rollout.evaluation.cost_law import RoundWork, lane_law, predict
from rollout.evaluation.echo import FEWEST_RUNS, RUN_TOKENS, echo_of, repeated_shares
from rollout.evaluation.forward_times import ForwardTimes, timed_rows
from rollout.evaluation.goals import Measured, goals_of
from rollout.evaluation.laws import Drawn, fit_of, judged, law_findings, spread_over
from rollout.evaluation.spread import EXACT, limits_of, spread
from rollout.evaluation.subject import drafters_of
from rollout.evaluation.sweep import Spot, draft_lengths, plan_spots
from rollout.job_config import EvaluateConfig
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_native import tiny_decoder, tiny_engine

LOOPS = 4
PROMPT = tuple(range(100, 140))


# ---- echoes ---------------------------------------------------------------------------------------


def test_a_text_that_repeats_its_prompt_is_an_echo() -> None:
    assert echo_of(PROMPT, PROMPT[3:35]) == "repeats its prompt"


def test_a_text_that_goes_in_circles_is_an_echo() -> None:
    assert echo_of(PROMPT, (1, 2, 3, 4, 5) * 8) == "goes in circles"


def test_a_text_that_quotes_a_little_is_none() -> None:
    text = (*PROMPT[:12], *range(40))
    assert echo_of(PROMPT, text) is None
    in_prompt, in_itself = repeated_shares(PROMPT, text)
    assert 0 < in_prompt < 0.5
    assert in_itself == 0


def test_a_short_text_is_not_judged() -> None:
    assert echo_of(PROMPT, (7,) * (RUN_TOKENS + FEWEST_RUNS - 2)) is None
    assert echo_of(PROMPT, (7,) * (RUN_TOKENS + FEWEST_RUNS - 1)) == "goes in circles"


# ---- distances ------------------------------------------------------------------------------------


def test_exact_numerics_allow_no_bit_and_others_what_was_agreed() -> None:
    one = torch.ones(4)
    assert spread(one, one).within(EXACT.states)
    apart = spread(one + torch.tensor([0, 0, 0, 2e-5]), one)
    assert apart.rms == pytest.approx(1e-5, rel=0.01)
    assert not apart.within(EXACT.states)
    assert apart.within(limits_of("fast", "float32").states)
    assert limits_of("exact", "bfloat16") == EXACT


def test_nan_is_within_no_limit_and_shapes_must_agree() -> None:
    assert not spread(torch.tensor([math.nan]), torch.zeros(1)).within(1e9)
    with pytest.raises(ValueError, match="shapes differ"):
        spread(torch.zeros(2), torch.zeros(1))


# ---- the cost law ---------------------------------------------------------------------------------


def shape(name: str, *, lanes: int = 0, rows: int = 1) -> PartShape:
    return PartShape(
        name=name,
        weight_bytes=1,
        flops_per_row=1.0,
        kv_bytes_per_token=1,
        flops_per_context_token=1.0,
        rows_per_draft_token=rows,
        lane_loops=LOOPS if lanes else 0,
        lane_depth=lanes,
    )


SHAPES = {
    name: shape(name, lanes=name == "wavefront", rows=name != "history")
    for name in (POLICY, "shallow_loop_1", "w4", "wavefront", "history")
}


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return tiny_engine(tiny_policy(vocab=40), config=EngineConfig(max_batch=2, max_context_tokens=32))


def times_of(engine: NativeEngine, seconds: dict[str, float]) -> ForwardTimes:
    """Return forwards that cost the same at any rows, the first in a round as those after it unless named."""
    seconds = {**{f"{part}/first": s for part, s in seconds.items()}, **seconds}
    times = ForwardTimes(
        engine, tiny_decoder(tiny_policy(vocab=40)), concurrency=1, context_tokens=8, rows=(1, 9)
    )
    times.seconds = {(part, rows): [s, 9.0, s] for part, s in seconds.items() for rows in (1, 9)}
    return times


def work(*, tokens: float, drafted: float = 0.0, passes: float = 0.0, token_s: float = 1.0) -> RoundWork:
    return RoundWork(
        batch=1.0,
        tokens=tokens,
        drafted=drafted,
        passes=passes,
        lanes=1.0,
        overhead_s=0.0,
        token_s=token_s,
        passes_per_token=passes / tokens,
    )


def test_where_only_loops_cost_anything_the_prediction_is_the_laws(engine: NativeEngine) -> None:
    """S = D (1 + a) / (d (K + 1) + D - d), with one second a loop."""
    parts = {"shallow_loop_1": 1.0, "shallow_loop_1/fill": 1.0, "shallow_loop_1/deep": LOOPS - 1.0}
    times = times_of(engine, {POLICY: LOOPS, **parts})
    found = predict(
        "arm",
        "shallow_loop_1",
        3,
        plain=work(tokens=1.0, token_s=4.0),
        work=work(tokens=2.5, drafted=3.0, token_s=3.0),
        shapes=SHAPES,
        times=times,
        loops=LOOPS,
    )
    law = LOOPS * 2.5 / (1 * (3 + 1) + LOOPS - 1)
    assert found.ideal == pytest.approx(law)
    assert found.predicted == pytest.approx(law)
    assert found.measured == pytest.approx(4.0 / 3.0)
    assert found.error_frac == pytest.approx(law / (4 / 3) - 1)


@pytest.mark.parametrize(("drafter", "round_s"), [("w4", 2 * 1.5 + 4.0), ("history", 4.0)])
def test_drafts_that_leave_nothing_done_are_verified_whole(
    drafter: str, round_s: float, engine: NativeEngine
) -> None:
    found = predict(
        "arm",
        drafter,
        2,
        plain=work(tokens=1.0),
        work=work(tokens=2.0, drafted=2.0),
        shapes=SHAPES,
        times=times_of(engine, {POLICY: 4.0, "w4": 1.5}),
        loops=1,
    )
    assert found.predicted == pytest.approx(4.0 / (round_s / 2.0))
    assert found.ideal is None


def test_lanes_cost_their_passes_and_the_ideal_is_loops_over_passes_per_token(engine: NativeEngine) -> None:
    found = predict(
        "arm",
        "wavefront",
        3,
        plain=work(tokens=1.0),
        work=work(tokens=2.0, passes=4.0),
        shapes=SHAPES,
        times=times_of(engine, {POLICY: 4.0, "wavefront": 1.25}),
        loops=LOOPS,
    )
    assert found.predicted == pytest.approx(4.0 / (4 * 1.25 / 2.0))
    assert found.ideal == pytest.approx(2.0)


@pytest.mark.parametrize(("drafted", "draft_s"), [(1.0, 3.0), (4.0, 3.0 + 3 * 1.0), (0.5, 1.5)])
def test_a_rounds_first_draft_is_priced_as_one_that_finds_nothing_in_the_caches(
    drafted: float, draft_s: float, engine: NativeEngine
) -> None:
    parts = {"shallow_loop_1": 1.0, "shallow_loop_1/first": 3.0, "shallow_loop_1/fill": 1.0}
    found = predict(
        "arm",
        "shallow_loop_1",
        4,
        plain=work(tokens=1.0),
        work=work(tokens=1.5, drafted=drafted),
        shapes=SHAPES,
        times=times_of(engine, {POLICY: 4.0, **parts, "shallow_loop_1/deep": 3.0}),
        loops=LOOPS,
    )
    assert found.predicted == pytest.approx(4.0 / ((draft_s + 1.0 + 3.0) / 1.5))


def test_a_rounds_first_pass_of_lanes_is_priced_so_too(engine: NativeEngine) -> None:
    found = predict(
        "arm",
        "wavefront",
        3,
        plain=work(tokens=1.0),
        work=work(tokens=2.0, passes=4.0),
        shapes=SHAPES,
        times=times_of(engine, {POLICY: 4.0, "wavefront": 1.0, "wavefront/first": 2.0}),
        loops=LOOPS,
    )
    assert found.predicted == pytest.approx(4.0 / ((2.0 + 3 * 1.0) / 2.0))


def test_passes_per_token_follow_from_acceptance() -> None:
    law = lane_law("arm", depth=1, loops=LOOPS, alpha=0.8, work=work(tokens=2.0, passes=3.2))
    assert law.predicted == pytest.approx(0.8 * 1 + 0.2 * 4)
    assert law.error_frac == pytest.approx(0.0)


def test_averages_of_rounds_are_over_those_that_decode() -> None:
    totals = Totals(
        rounds=10, seconds=5.0, sequences=20, decoded=40, drafted=60, draft_passes=30, draft_rows=60,
        sequence_passes=60, forward_s=4.0,
    )  # fmt: skip
    found = RoundWork.of(totals)
    assert (found.batch, found.tokens, found.drafted, found.passes) == (2.0, 2.0, 3.0, 3.0)
    assert found.overhead_s == pytest.approx(0.1)
    assert (found.lanes, found.passes_per_token, found.token_s) == (1.0, 1.5, 0.125)
    with pytest.raises(ValueError, match="committed"):
        RoundWork.of(Totals())


def test_forwards_are_timed_at_the_rows_rounds_have(engine: NativeEngine) -> None:
    assert timed_rows(8, (1, 4), most_lanes=2) == (1, 4, 8, 16, 40)
    decoder = tiny_decoder(tiny_looped_policy(vocab=40, layers=1))
    times = ForwardTimes(engine, decoder, concurrency=2, context_tokens=4, rows=(1, 4), arms=3)
    times.sample([POLICY, "shallow_loop_1", "wavefront"])
    anywhere = (POLICY, "shallow_loop_1/deep", "wavefront", "wavefront/first")
    one_row = {(f"shallow_loop_1{which}", 1) for which in ("", "/first", "/fill")}
    assert set(times.seconds) == {(part, rows) for part in anywhere for rows in (1, 4)} | one_row
    assert all(min(taken) > 0 for taken in times.seconds.values())
    counts = {key: len(taken) for key, taken in times.seconds.items()}
    in_a_row = {("shallow_loop_1", 1), ("wavefront", 1), ("wavefront", 4)}
    assert {key for key, count in counts.items() if count == 12} == in_a_row, (
        "three more in each of four turns"
    )
    assert {count for key, count in counts.items() if key not in in_a_row} == {4}
    assert min(times.forward_s(part, 3) for part in (POLICY, "shallow_loop_1", "wavefront")) > 0
    with pytest.raises(KeyError):
        times.forward_s("nobody", 1)


# ---- plans ----------------------------------------------------------------------------------------


def test_what_does_not_fit_the_time_is_cut_by_rows_and_then_left_out_dearest_first() -> None:
    config = EvaluateConfig(concurrencies=(1, 8), lengths=(32, 96), rows=8, trials=4)

    def planned(within_s: float) -> tuple[list[tuple[int, int, int]], int]:
        spots, left = plan_spots(config, token_s=lambda c: 0.01 / c, arms=10, within_s=within_s)
        return [(s.concurrency, s.length, s.rows) for s in spots], len(left)

    assert planned(1e6) == ([(1, 32, 8), (8, 32, 8), (1, 96, 8), (8, 96, 8)], 0)
    fewer = [(1, 32, 2), (8, 32, 8), (1, 96, 2), (8, 96, 8)]
    assert planned(300.0) == (fewer, 0)
    assert planned(170.0) == (fewer, 0)  # not every trial, but some
    assert planned(100.0) == ([(1, 32, 2), (8, 32, 8), (8, 96, 8)], 1)
    assert planned(0.001) == ([(8, 32, 8)], 3)


def test_draft_lengths_stop_at_what_a_drafter_takes_and_lanes_at_a_full_pipeline() -> None:
    traits = EngineTraits(
        engine="native",
        verify_modes=("coupled",),
        gamma_per_sequence=True,
        drafters=tuple(DrafterTraits(name=n, max_gamma=6) for n in ("w4", "wavefront")),
        numerics="exact",
        in_flight=("drain",),
        max_batch=8,
        max_context_tokens=64,
    )
    assert draft_lengths("w4", (1, 4, 8, 12), traits=traits, most_lanes=4) == (1, 4, 6)
    assert draft_lengths("wavefront", (1, 2, 4, 8), traits=traits, most_lanes=4) == (1, 2, 3)


def test_a_policy_is_evaluated_with_the_drafters_it_can_have() -> None:
    config, drafter = EvaluateConfig(), DrafterConfig()
    assert drafters_of(1, drafter, config) == ("w4", "history")
    assert drafters_of(3, drafter, config) == ("shallow_loop_1", "shallow_loop_2", "wavefront")
    assert drafters_of(24, drafter, config) == (
        "shallow_loop_1",
        "shallow_loop_2",
        "shallow_loop_3",
        "wavefront",
    )
    assert drafters_of(1, drafter, EvaluateConfig(drafters=("w4",))) == ("w4",)
    assert drafters_of(9, drafter, EvaluateConfig(drafters=("shallow_loop_8",))) == ("shallow_loop_8",)
    with pytest.raises(ConfigError, match=r"evaluate\.drafters: a policy of 8 loops has no shallow_loop_8"):
        drafters_of(8, drafter, EvaluateConfig(drafters=("shallow_loop_8",)))
    with pytest.raises(
        ConfigError, match=r"evaluate\.drafters: a policy that runs its block once has no wave"
    ):
        drafters_of(1, drafter, EvaluateConfig(drafters=("wavefront", "w4")))


# ---- goals, fits, streams -------------------------------------------------------------------------


def measured(ratios: dict[str, list[float]]) -> Measured:
    built = {}
    for arm, values in ratios.items():
        ratio = PairedRatio(Claim(name=arm, a=arm, b="ar", margin=0.1), min_pairs=2, max_pairs=5)
        for value in values:
            ratio.add(Timed(makespan_s=1.0, pace_s=1.0), Timed(makespan_s=value, pace_s=1.0))
        built[arm] = ratio
    return Measured(
        spot=Spot(concurrency=1, length=96, rows=8),
        ratios=built,
        drafters={arm: arm.rpartition("_k")[0] for arm in ratios},
        predictions=[],
        lane_laws=[],
    )


def test_a_goal_is_met_by_the_lower_end_of_the_best_arms_interval() -> None:
    found = measured(
        {
            "shallow_loop_1_k2": [1.5, 1.51, 1.5],
            "shallow_loop_2_k1": [1.2, 1.2, 1.21],
            "wavefront_k3": [1.5, 2.2, 1.8],
        }
    )
    verdicts = {goal.name: (goal.verdict, goal.found) for goal in goals_of(found)}
    assert verdicts["c1_t96_shallow_loop_over_ar"][0] == "met"
    assert "shallow_loop_1_k2, the best of 2" in verdicts["c1_t96_shallow_loop_over_ar"][1]
    assert verdicts["c1_t96_wavefront_over_ar"][0] == "undecided"


def test_without_two_pairs_no_goal_is_decided() -> None:
    (goal,) = goals_of(measured({"wavefront_k3": [2.0]}))
    assert goal.verdict == "undecided"


def test_counts_fit_their_own_law_and_no_other() -> None:
    law = {(0,): 0.5, (1,): 0.25, (2,): 0.249, (3,): 0.001}
    fair = Counter({(0,): 1010, (1,): 480, (2,): 508, (3,): 2})
    assert fit_of(fair, law).passed
    assert not fit_of(Counter({(0,): 800, (1,): 600, (2,): 600}), law).passed
    forbidden = fit_of(Counter({(0,): 1000, (1,): 500, (2,): 498, (4,): 2}), law)
    assert (forbidden.forbidden, forbidden.passed) == (2, False)


def test_laws_are_drawn_of_a_policy_deep_enough_for_every_drafter() -> None:
    settings = DrafterConfig(max_gamma=2)
    finding = next(
        law_findings(
            ("shallow_loop_5",), settings, looped=True, draws=100, seeds=1, seed=0, note=lambda _: None
        )
    )
    assert finding.measures["drafted"] > 0
    assert finding.passed


def test_streams_of_several_runs_are_told_as_one() -> None:
    runs = [
        StreamTimes(first_token_s=[1.0], end_to_end_s=[4.0], events=2, tokens=6),
        StreamTimes(first_token_s=[3.0], end_to_end_s=[6.0], events=1, tokens=3),
    ]
    told = StreamTimes.merged(runs).told()
    assert (told["rows"], told["first_token_p50_s"], told["end_to_end_p50_s"]) == (2, 2.0, 5.0)
    assert told["tokens_per_event"] == 3.0
    assert StreamTimes().told()["first_token_p50_s"] is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gammas": (2, 2)}, r"evaluate\.gammas must name something, each once"),
        ({"parts": ()}, r"evaluate\.parts must name something"),
        ({"trials": 1}, r"evaluate\.trials must be >= 2"),
        ({"concurrencies": (0,)}, r"evaluate\.concurrencies\[0\]"),
        ({"max_minutes": 0.0}, r"evaluate\.max_minutes"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvaluateConfig(**settings)  # type: ignore[arg-type]


def test_draws_are_spread_over_all_seeds_and_none_is_lost() -> None:
    assert spread_over(3, 6000) == [2000, 2000, 2000]
    assert spread_over(3, 100) == [34, 33, 33]
    assert spread_over(1, 7) == [7]


def test_a_seed_that_is_wrong_alone_is_found_where_all_together_pass() -> None:
    law = {(0,): 0.5, (1,): 0.25, (2,): 0.25}
    fair = Drawn(counts=Counter({(0,): 1000, (1,): 500, (2,): 500}), drafted=9, accepted=5)
    wrong = replace(fair, counts=Counter({(0,): 1160, (1,): 420, (2,): 420}))
    assert fit_of(fair.counts + fair.counts + wrong.counts, law).passed
    found = judged("any", "plain", law, [fair, fair, wrong])
    assert not found.passed
    assert found.compared == 6000
    assert found.measures["largest_over_limit"] > 1 > found.measures["chi_square"] / found.measures["limit"]


def test_a_finding_says_the_odds_of_all_its_comparisons() -> None:
    """Each is e^-14, once in 1.2 million: one seed makes one, three seeds make four with all together."""
    law = {(0,): 0.5, (1,): 0.5}
    fair = Drawn(counts=Counter({(0,): 1000, (1,): 1000}), drafted=9, accepted=5)
    for seeds, odds in ((1, "1,202,604"), (3, "300,651")):
        found = judged("any", "plain", law, [fair] * seeds)
        assert found.passed
        assert f"less than once in {odds})" in found.detail
    copied = judged("any", "plain", law, [replace(fair, accepted=0)])
    assert not copied.passed, "nothing was put to the test"
