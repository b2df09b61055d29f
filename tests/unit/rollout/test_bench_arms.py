"""Our own arms: fresh state per run, rounds in lockstep, and no result when a token differs."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from drafters.registry import build
from rollout.bench.arms import ArmSpec, EngineArms, Lane, Run, TextDiffersError, TextGuard, Work, arm_specs
from rollout.bench.cell import Cell
from rollout.bench.pairing import Claim, PairedRatio
from rollout.bench.schedule import measure
from rollout.calibration.measure import calibrate
from rollout.config import EngineConfig
from rollout.engine.native.engine import NativeEngine
from rollout.testing import tiny_policy
from rollout.testing_native import tiny_engine

DRAFTERS = ("w4", "history")
SPECS = arm_specs(ControllerConfig(), DRAFTERS, gamma=3)
WORK = Work(
    prompts=tuple(tuple(range(3 + row, 12 + row)) for row in range(4)),
    max_tokens=(20, 6, 13, 3),
    ignore_eos=True,
    temperature=1.0,
    run_seed=0,
)

SHORT = replace(WORK, prompts=WORK.prompts[:2], max_tokens=(5, 2))


def small_engine() -> NativeEngine:
    drafters = [build(name, DrafterConfig()) for name in DRAFTERS]
    config = EngineConfig(max_batch=8, max_context_tokens=128, emit_s=0.0)
    return tiny_engine(tiny_policy(seed=0), drafters, compiled=True, config=config)


@pytest.fixture(scope="module")
def arms() -> EngineArms:
    engine = small_engine()
    calibration = calibrate(engine, ControllerConfig(), key="tiny", budget_s=0.2)
    return EngineArms(engine, calibration, another=small_engine)


def cell_of(arms: EngineArms, *, min_pairs: int = 2, max_pairs: int = 2) -> Cell:
    ratios = [
        PairedRatio(
            Claim(name=f"trace_{name}_over_ar", a=name, b="ar", margin=0.1),
            min_pairs=min_pairs,
            max_pairs=max_pairs,
        )
        for name in ("w4", "auto")
    ]
    specs = {name: SPECS[name] for name in ("ar", "w4", "auto")}
    return Cell(prefix="trace_", arms=arms, specs=specs, work=SHORT, ratios=ratios, seed=0, cap_tokens=32)


def silent(what: str) -> None:
    """Hear and forget."""


def test_every_arm_gives_the_same_text_at_its_own_lengths(arms: EngineArms) -> None:
    guard = TextGuard(where="")
    for spec in (*SPECS.values(), SPECS["ar"]):
        guard.check(spec.name, arms.run(spec, WORK).texts)
    assert guard.lengths == WORK.max_tokens
    assert guard.runs_by_arm == {"ar": 2, "w4": 1, "history": 1, "auto": 1}


def test_plain_decoding_pays_for_no_drafter(arms: EngineArms) -> None:
    run = arms.run(SPECS["ar"], WORK)
    assert arms.engine.traits.drafters == ()
    assert set(run.summary.by_choice) == {"prefill", "ar"}
    assert all(t.rounds for t in run.summary.plain_by_work.values())
    arms.run(SPECS["w4"], WORK)
    assert [d.name for d in arms.engine.traits.drafters] == ["w4"]


def test_arms_in_lockstep_are_never_more_than_a_round_apart(arms: EngineArms) -> None:
    """Steps are taken by who is behind, each on its own clock; texts are those of a run alone."""
    alone = arms.run(SPECS["ar"], WORK)
    specs = [SPECS[name] for name in ("ar", "w4", "history")]
    order: list[tuple[str, int]] = []

    class Noted(Lane):
        def step(self) -> None:
            before = self.committed
            super().step()
            order.append((self._requests[0].prompt_uid.rpartition("/")[0], self.committed - before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.bench.arms.Lane", Noted)
        runs = arms.together(specs, WORK)
    assert {run.texts for run in runs.values()} == {alone.texts}
    assert len({run.timed.lockstep for run in runs.values()}) == 1

    most = max(tokens for _, tokens in order)
    committed = dict.fromkeys((name for name, _ in order), 0)
    total = sum(WORK.max_tokens)
    for name, tokens in order:
        committed[name] += tokens
        unfinished = [n for n in committed.values() if n < total]
        assert max(committed.values()) - min(unfinished, default=total) <= most
    assert set(committed.values()) == {total}


def test_an_unknown_drafter_cannot_be_switched_on(arms: EngineArms) -> None:
    with pytest.raises(ValueError, match="no drafter eagle; there are: w4, history"):
        arms.engine.use_drafters(["eagle"])


def test_a_switched_off_drafter_is_switched_on_again_whole(arms: EngineArms) -> None:
    before = arms.run(SPECS["w4"], WORK).summary.acceptance["w4"]
    arms.run(SPECS["ar"], WORK)
    again = arms.run(SPECS["w4"], WORK).summary.acceptance["w4"]
    assert (again.drafted, again.accepted) == (before.drafted, before.accepted)
    assert again.accepted > 0


def test_history_cannot_see_the_answers_of_an_earlier_run() -> None:
    """Asked again under the same names it does see them, so the names are what keeps runs apart."""
    work = replace(WORK, max_tokens=(40,) * 4)
    fresh = EngineArms(small_engine(), None)
    first, second = (fresh.run(SPECS["history"], work).summary.acceptance for _ in range(2))
    counts = [(a["history"].drafted, a["history"].accepted) for a in (first, second)]
    assert counts[0] == counts[1]

    again = _SameNames(small_engine(), None)
    again.run(SPECS["history"], work)
    seen = again.run(SPECS["history"], work).summary.acceptance["history"]
    assert seen.rate > 0.5 > first["history"].rate


class _SameNames(EngineArms):
    """Forgets to name its prompts anew."""

    def together(self, specs: Sequence[ArmSpec], work: Work) -> dict[str, Run]:
        self._runs = 0
        return super().together(specs, work)


def test_another_text_is_refused_by_row_and_position(arms: EngineArms) -> None:
    guard = TextGuard(where="trace_")
    texts = arms.run(SPECS["ar"], WORK).texts
    guard.check("ar", texts)
    planted = [list(text) for text in texts]
    planted[2][5] += 1
    with pytest.raises(TextDiffersError, match=r"trace_w4: row 2 differs at its new token 5: \d+ instead"):
        guard.check("w4", tuple(map(tuple, planted)))
    with pytest.raises(TextDiffersError, match=r"row 0 differs at its new token 19: the end instead of \d+"):
        guard.check("w4", (texts[0][:-1], *texts[1:]))
    with pytest.raises(TextDiffersError, match="3 rows instead of 4"):
        guard.check("w4", texts[:-1])


def test_a_cell_stops_at_the_first_run_whose_text_differs(arms: EngineArms) -> None:
    cell = cell_of(arms)
    cell.prepare(silent)
    cell.work = replace(SHORT, run_seed=1)
    with pytest.raises(TextDiffersError, match="trace_"):
        cell.repeat(silent)


def test_a_cell_gives_every_open_ratio_one_pair_per_repetition(arms: EngineArms) -> None:
    cell = cell_of(arms)
    cell.prepare(silent)
    cell.repeat(silent)
    assert {name: len(times) for name, times in cell.makespans.items()} == {"ar": 1, "w4": 1, "auto": 1}
    assert [len(r.ratios) + len(r.dropped) for r in cell.ratios] == [1, 1]


class Quick:
    """A foreign engine that takes a millisecond and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []

    def prepare(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, temperature: float
    ) -> dict[str, str]:
        return {"chosen": "the quick way"}

    def replay(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, temperature: float
    ) -> float:
        self.told.append(tuple(lengths))
        return 0.001


def test_the_order_of_arms_is_shuffled_by_seed_and_repetition(arms: EngineArms) -> None:
    def orders(seed: int) -> list[list[str]]:
        cell = replace(cell_of(arms), seed=seed, foreign={"hf": Quick(), "vllm": Quick()})
        found = []
        for number in range(12):
            cell.repetitions = number
            before, ours, after = cell._order({"ar", "w4", "history", "auto", "hf", "vllm"})
            assert {*before, *after} == {"hf", "vllm"}
            found.append([*before, *ours, *after])
        return found

    assert orders(0) == orders(0) != orders(1)
    assert len({tuple(order) for order in orders(0)}) > 6
    assert {order.index("hf") for order in orders(0)} > {0, 5}


def test_a_foreign_arm_is_told_our_lengths_and_paired_with_ours(arms: EngineArms) -> None:
    foreign = Quick()
    claim = Claim(name="trace_ar_over_vllm", a="ar", b="vllm", margin=1.0)
    cell = replace(
        cell_of(arms), foreign={"vllm": foreign}, ratios=[PairedRatio(claim, min_pairs=2, max_pairs=2)]
    )
    cell.prepare(silent)
    cell.repeat(silent)
    assert foreign.told == [SHORT.max_tokens]
    assert cell.pilot["vllm"] == {"chosen": "the quick way"}
    assert cell.makespans["vllm"] == [0.001]
    (ratio,) = cell.ratios
    assert len(ratio.ratios) + len(ratio.dropped) == 1


def test_measuring_ends_when_all_pairs_are_run_and_says_why(arms: EngineArms) -> None:
    cell = cell_of(arms, max_pairs=2)
    said: list[str] = []
    heard: list[str] = []
    ending = measure(
        [cell],
        limit_s=0.0,
        clock=iter(range(10**6)).__next__,
        note=said.append,
        before_repetition=lambda: heard.append("before"),
        after_repetition=lambda: heard.append("after"),
    )
    assert ending in ("max_pairs", "settled")
    assert not cell.open
    assert heard == ["before", "after"] * cell.repetitions
    assert said[0] == "trace_: reference text"


def test_no_repetition_starts_that_would_outlast_the_limit(arms: EngineArms) -> None:
    """A clock that jumps ten seconds per look: every repetition seems to take ten."""
    cell = cell_of(arms, min_pairs=50, max_pairs=50)
    ending = measure(
        [cell],
        limit_s=65.0,
        clock=iter(range(0, 10**6, 10)).__next__,
        note=silent,
        before_repetition=lambda: None,
        after_repetition=lambda: None,
    )
    assert ending == "max_minutes"
    assert cell.repetitions == 3


def test_rows_that_enter_one_by_one_get_the_same_texts_and_every_stream_is_told(arms: EngineArms) -> None:
    together = arms.run(SPECS["ar"], WORK)
    one_by_one = arms.run(SPECS["ar"], replace(WORK, rows_at_once=1))
    assert one_by_one.texts == together.texts
    assert set(one_by_one.summary.plain_by_batch) == {1}
    assert max(together.summary.plain_by_batch) > 1
    tokens = sum(WORK.max_tokens)
    for run in (together, one_by_one):
        told = run.streams.told()
        assert (told["rows"], told["events"], run.streams.tokens) == (4, tokens, tokens)
        assert run.memory.kv_used > 0
    # A row waits for its place outside, where no time counts: their times to the first token do not overlap.
    assert sum(one_by_one.streams.first_token_s) <= one_by_one.timed.makespan_s


def test_a_named_row_keeps_its_text_in_other_work(arms: EngineArms) -> None:
    names = tuple(f"row{i}" for i in range(4))
    whole = arms.run(SPECS["ar"], replace(WORK, names=names))
    part = replace(WORK, prompts=WORK.prompts[2:], max_tokens=WORK.max_tokens[2:], names=names[2:])
    assert arms.run(SPECS["ar"], part).texts == whole.texts[2:]
    unnamed = replace(part, names=())
    assert arms.run(SPECS["ar"], unnamed).texts != whole.texts[2:]
