"""``taildraft evaluate``: what it writes about tiny policies, and that a wrong engine turns its verdict."""

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from controller.types import AR
from drafters.config import DrafterConfig
from rollout.bench.questions import PROMPTS_FILE
from rollout.cli import MISUSED
from rollout.cli import main as cli
from rollout.config import EngineConfig, PolicyConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.lanes.wavefront import Wavefront
from rollout.engine.native.rows import RowBatch
from rollout.evaluation.generation import free_report, plain_texts, replayed_choice
from rollout.evaluation.questions import select_questions
from rollout.evaluation.spread import EXACT, Limits
from rollout.evaluation.ways import DraftWay
from rollout.job_config import EvaluateConfig, EvaluationPart, JobConfig
from rollout.jobs import evaluate
from rollout.proof import faults
from rollout.proof.tiny_checks import engine_for
from rollout.testing import save_tiny_folder, tiny_looped_policy
from rollout.testing_native import ar_plan, requests_for, run_engine
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

SHALLOW = DraftWay(drafter="shallow_loop_1", depth=1, gammas=(4,))
SMALL = {
    "cut": True,
    "gammas": (1, 4),
    "concurrencies": (1, 2),
    "lengths": (8,),
    "rows": 2,
    "texts": 4,
    "draws": 200,
    "max_minutes": 60.0,  # as slow as a machine may be, nothing is left out
}


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("looped")
    save_tiny_folder(path, "ouro")
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dense")
    save_tiny_folder(path, "smollm2")
    return path


def job_of(folder: Path, tmp_path: Path, **settings: Any) -> JobConfig:
    return JobConfig(
        policy=PolicyConfig(source=str(folder)),
        engine=EngineConfig(threads=1),
        evaluate=EvaluateConfig(**{**SMALL, **settings}),
        output_dir=str(tmp_path),
    )


def result_of(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "evaluate.json").read_text())


# ---- the whole, on a looped policy ----------------------------------------------------------------


@pytest.fixture(scope="module")
def written(looped: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The result and the page of a small evaluation of every part."""
    folder = tmp_path_factory.mktemp("out")
    names = ("shallow_loop_1", "shallow_loop_3", "wavefront")
    assert evaluate.main(job_of(looped, folder, drafters=names)) == 0
    return result_of(folder), (folder / "evaluate.html").read_text()


def test_the_verdict_is_that_of_every_part(written: tuple[Any, str]) -> None:
    data, _ = written
    assert (data["verdict"], data["complete"], data["workload"]) == ("equal", True, "evaluate")
    assert {f["part"] for f in data["findings"]} == {"chains", "generation", "laws", "sweep"}
    assert all(f["passed"] for f in data["findings"])


def test_reused_drafts_leave_the_bits_of_a_serial_forward_by_loop_and_plane(written: tuple[Any, str]) -> None:
    data, _ = written
    assert [(r["drafter"], r["depth"], r["gamma"], r["path"]) for r in data["chains"]] == [
        (drafter, depth, gamma, path)
        for drafter, depth, gammas in (
            ("shallow_loop_1", 1, (1, 4)),
            ("shallow_loop_3", 3, (1, 4)),
            ("wavefront", 1, (1, 3)),
        )
        for gamma in gammas
        for path in ("compiled calls", "pass by pass")
    ]
    for report in data["chains"]:
        seen = report["states_seen"]
        assert [s and s["largest"] for s in report["states"]] == [0.0 if n else None for n in seen]
        every = report["positions"]
        if report["path"] == "pass by pass":
            assert seen == [every] * 4
        elif report["drafter"] == "wavefront":
            assert 0 < seen[-1] < every, "where lanes end; those that stand between rounds come and go"
        else:
            assert [loop for loop, n in enumerate(seen, 1) if n] == [report["depth"], 4]
            assert seen[report["depth"] - 1] >= report["drafts_kept"]
        assert {(p["loop"], p["layer"]) for p in report["planes"]} == {
            (t, i) for t in range(4) for i in range(2)
        }
        assert all(p[side]["largest"] == 0.0 for p in report["planes"] for side in ("keys", "values"))
        assert report["logits"]["largest"] == report["argmax_mismatches"] == 0
        assert report["drafts_kept"] > 0
        assert report["rows_by_loop"] == [every] * 4
        assert report["most_often"] == (1 if report["path"] == "pass by pass" else None)


def test_what_the_exit_gate_says_is_told(written: tuple[Any, str]) -> None:
    data, page = written
    told = data["exit_gate"]
    assert told["positions"] == data["chains"][0]["positions"]
    assert len(told["leaves_after"]) == 4
    assert sum(told["leaves_after"]) == pytest.approx(1.0, abs=1e-5)
    assert 1.0 < told["mean_loops"] < 4.0
    assert f"after {told['mean_loops']:.2f} loops on average" in page


def test_every_arm_is_told_by_speed_latency_work_phases_and_memory(written: tuple[Any, str]) -> None:
    data, _ = written
    gammas = {"shallow_loop_1": (1, 4), "shallow_loop_3": (1, 4), "wavefront": (1, 3)}
    arms = {AR, *(f"{name}_k{g}" for name, each in gammas.items() for g in each)}
    assert set(data["arms"]) == {f"c{c}_t8_{arm}" for c in (1, 2) for arm in arms}
    for name, arm in data["arms"].items():
        streams, totals = arm["streams"], data["rounds"][name]
        assert arm["tokens_per_s"] > 0
        assert len(arm["makespan_s"]) == 2
        assert streams["rows"] == 4
        assert 0 < streams["first_token_p50_s"] <= streams["first_token_p95_s"] <= streams["end_to_end_p95_s"]
        assert streams["tokens_per_event"] >= 1
        assert arm["memory_bytes"]["kv_used"] > 0
        assert set(arm["seconds"]) == {"draft", "verify", "commit", "outside_rounds"}
        assert totals["decoded"] == 4 * 7  # a text's first token comes with its prompt
        assert (totals["draft_rows"] > 0) == (not name.endswith(AR))
    for ratio in data["ratios"].values():
        assert ratio["pairs"] == 2
        assert ratio["ci90"][0] <= ratio["median"] <= ratio["ci90"][1]


def test_one_sequence_gets_one_event_a_round_and_plain_decoding_one_token_an_event(
    written: tuple[Any, str],
) -> None:
    data, _ = written
    assert data["arms"]["c1_t8_ar"]["streams"]["tokens_per_event"] == 1
    assert data["arms"]["c1_t8_shallow_loop_3_k4"]["streams"]["tokens_per_event"] > 1.5


def test_costs_and_goals_stand_beside_what_was_measured(written: tuple[Any, str]) -> None:
    data, _ = written
    for costs in data["costs"].values():
        assert len(costs["predictions"]) == 6
        assert all(p["predicted"] > 0 and p["measured"] > 0 and p["ideal"] > 0 for p in costs["predictions"])
        (lane,) = costs["lanes"]
        assert lane["arm"] == "wavefront_k3"
        assert 1 <= lane["measured"] <= 4
    names = {goal["name"] for goal in data["goals"]}
    assert {"c1_t8_shallow_loop_over_ar", "c1_t8_wavefront_over_ar", "c2_t8_cost_law"} <= names
    assert data["conditions"]["peak_resident_bytes"] > 0
    assert data["questions"]["considered"] >= 2


class _Outside(HTMLParser):
    """Collects what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.found.append(tag)
        self.found += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_names_every_arm(written: tuple[Any, str]) -> None:
    data, page = written
    outside = _Outside()
    outside.feed(page)
    assert outside.found == []
    assert page.count("<svg") == 3  # a drawing per cell, and the cost law
    assert all(f">{name}<" in page for name in data["arms"])
    assert "Equal: " in page


def test_lanes_are_tested_at_the_depth_that_is_set_and_at_the_least(looped: Path, tmp_path: Path) -> None:
    job = job_of(looped, tmp_path, parts=("chains", "generation", "sweep"), drafters=("wavefront",))
    assert evaluate.main(replace(job, drafter=DrafterConfig(wavefront_depth=2))) == 0
    data, page = result_of(tmp_path), (tmp_path / "evaluate.html").read_text()
    lengths = [(2, 1), (1, 1), (1, 3)]  # two lanes at depth 2, four at depth 1
    assert [(r["depth"], r["gamma"]) for r in data["generation"]] == lengths
    assert [(r["depth"], r["gamma"]) for r in data["chains"][::2]] == lengths
    assert all(r["accepted"] > 0 for r in data["generation"])
    assert data["depths"] == {"wavefront": 2}
    assert {law["depth"] for costs in data["costs"].values() for law in costs["lanes"]} == {2}
    assert "wavefront (depth 2)" in page
    names = [f["name"] for f in data["findings"]]
    assert "wavefront at depth 1, K 3, compiled calls" in names
    assert "wavefront at depth 2, K 1, batch 2" in names


# ---- a wrong engine -------------------------------------------------------------------------------


@contextmanager
def states_not_used() -> Iterator[None]:
    """Let the call that serves compute every row from its token, whatever drafts have left: the same bits."""

    def wrong(run_choosing: Any) -> Any:
        def running(self: CompiledDecoder, call: Any, *args: Any) -> Any:
            call.depths = None
            return run_choosing(self, call, *args)

        return running

    with faults.swapped(CompiledDecoder, "run_choosing", wrong):
        yield


@contextmanager
def states_turned_in_calls() -> Iterator[None]:
    """Let the call that serves read the states of other rows: Python, pass by pass, has them right."""

    def wrong(run_choosing: Any) -> Any:
        def running(self: CompiledDecoder, call: Any, batch: RowBatch, *args: Any) -> Any:
            if call.depths:
                numbers = (ctypes.c_int32 * batch.rows).from_address(call.numbers)
                numbers[:] = numbers[::-1]
            return run_choosing(self, call, batch, *args)

        return running

    with faults.swapped(CompiledDecoder, "run_choosing", wrong):
        yield


@contextmanager
def lanes_dropped() -> Iterator[None]:
    """Begin all lanes again in every round."""

    def wrong(run: Any) -> Any:
        def running(self: Wavefront, *args: Any, **named: Any) -> Any:
            self.clear()
            return run(self, *args, **named)

        return running

    with faults.swapped(Wavefront, "run", wrong):
        yield


@pytest.mark.parametrize(
    ("drafter", "plant", "said", "paths"),
    [
        (
            "shallow_loop_1",
            states_not_used,
            r"loop 1 was run for \d+ rows of \d+ positions",
            {"compiled calls"},
        ),
        ("shallow_loop_1", states_turned_in_calls, "differ", {"compiled calls"}),
        (
            "wavefront",
            lanes_dropped,
            r"loop 1 was run for \d+|computed 4 times",
            {"compiled calls", "pass by pass"},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_chains_find_what_is_wrong_in_the_calls_that_serve(
    drafter: str,
    plant: Callable[[], AbstractContextManager[None]],
    said: str,
    paths: set[str],
    looped: Path,
    tmp_path: Path,
) -> None:
    """Also what is right pass by pass, and what changes not one bit of any text."""
    job = job_of(looped, tmp_path, parts=("chains",), drafters=(drafter,), gammas=(4,))
    with plant():
        assert evaluate.main(replace(job, drafter=DrafterConfig(wavefront_passes=1))) == 1
    findings = result_of(tmp_path)["findings"]
    failed = [f for f in findings if not f["passed"]]
    assert {f["name"].split(", ")[-1] for f in failed} == paths
    assert all(re.search(said, f["detail"]) for f in failed)


WRONG: list[tuple[str, Callable[[], AbstractContextManager[None]], str]] = [
    ("chains", faults.states_of_another_row, "differ"),
    ("chains", faults.keys_one_off, ""),
    ("generation", faults.coupled_bonus_after_rejection, "replayed"),
    ("generation", faults.noise_by_round, "replayed"),
    ("laws", faults.coupled_bonus_after_rejection, "chi-square"),
    ("sweep", faults.coupled_bonus_after_rejection, "differs at its new token"),
]


@pytest.mark.parametrize(
    ("part", "plant", "said"), WRONG, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_wrong_engine_turns_the_verdict(
    part: str,
    plant: Callable[[], AbstractContextManager[None]],
    said: str,
    looped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("shallow_loop_1",)
    job = job_of(looped, tmp_path, parts=(part,), drafters=names, gammas=(4,), draws=1500, texts=8)
    with plant():
        assert evaluate.main(job) == 1
    data = result_of(tmp_path)
    assert data["verdict"] == "different"
    failed = [f for f in data["findings"] if not f["passed"]]
    assert failed
    assert said in failed[0]["detail"]
    told = capsys.readouterr().out
    assert "DIFFERENT: " in told
    assert "DIFFERENT: " in (tmp_path / "evaluate.html").read_text()


def test_what_was_found_before_an_interrupt_is_kept_and_called_incomplete(
    looped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "law_findings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(job_of(looped, tmp_path, parts=("chains", "laws"), drafters=("shallow_loop_1",)))
    data = result_of(tmp_path)
    assert not data["complete"]
    assert {f["part"] for f in data["findings"]} == {"chains"}
    assert [p.name for p in tmp_path.iterdir()] == ["evaluate.json"]


# ---- a policy whose block runs once ---------------------------------------------------------------


def test_a_dense_policy_has_no_chains_and_says_so(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(job_of(dense, tmp_path, gammas=(4,), concurrencies=(2,))) == 0
    data = result_of(tmp_path)
    assert not [f for f in data["findings"] if f["part"] == "chains"]
    assert "chains: not run, for no drafter evaluated here leaves" in capsys.readouterr().err
    assert set(data["arms"]) == {f"c2_t8_{arm}" for arm in ("ar", "w4_k4", "history_k4")}
    assert data["goals"] == []
    assert [f["name"] for f in data["findings"] if f["part"] == "laws" and "w4" in f["name"]]


# ---- free texts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> NativeEngine:
    return engine_for(tiny_looped_policy())


def test_a_divergence_tells_where_by_how_much_and_what_a_replay_says(tiny: NativeEngine) -> None:
    requests = requests_for(vocab=48, prompts=4, params=(SamplingParams(max_tokens=16, ignore_eos=True),))
    plain = plain_texts(tiny, requests)
    with faults.coupled_bonus_after_rejection():
        wrong = free_report(tiny, plain, SHALLOW, 4, batch=4, limits=EXACT)
    assert not wrong.passed
    assert wrong.first is not None
    assert wrong.first.agrees_with == "plain"
    assert wrong.first.difference.margin is not None
    right = free_report(tiny, plain, SHALLOW, 4, batch=4, limits=EXACT)
    assert (right.passed, right.identical, right.first) == (True, 4, None)


def test_where_bits_may_move_a_choice_that_led_by_little_is_tolerated_and_any_other_is_not(
    tiny: NativeEngine,
) -> None:
    requests = requests_for(vocab=48, prompts=4, params=(SamplingParams(max_tokens=16, ignore_eos=True),))
    plain = plain_texts(tiny, requests)
    with faults.coupled_bonus_after_rejection():
        reports = {
            margin: free_report(
                tiny, plain, SHALLOW, 4, batch=4, limits=Limits(states=1, logits=1, margin=margin)
            )
            for margin in (1e-12, 1e9)
        }
    assert not reports[1e-12].passed
    assert reports[1e9].passed
    assert reports[1e9].tolerated == 4 - reports[1e9].identical > 0


def test_a_replayed_prefix_gives_the_token_it_gave(tiny: NativeEngine) -> None:
    (request,) = requests_for(vocab=48, prompts=1, params=(SamplingParams(max_tokens=12, ignore_eos=True),))
    ids = run_engine(tiny, [request], ar_plan)[request.key].token_ids
    assert [replayed_choice(tiny, request, ids[:n]) for n in (0, 3, 11)] == [ids[0], ids[3], ids[11]]
    assert not tiny.busy


# ---- what is asked --------------------------------------------------------------------------------


def test_texts_that_end_early_or_echo_are_not_asked_and_counted(tiny: NativeEngine) -> None:
    prompts = [tuple(range(3, 20)), tuple(range(20, 44))]
    found = select_questions(tiny, prompts, lengths=(4, 12), wanted=3, temperature=1.0, seed=0)
    assert len(found.by_length[4]) == 3
    assert all(len(q.text) >= 12 for q in found.by_length[12])
    assert found.too_short[4] <= found.too_short[12] < found.considered
    greedy = select_questions(tiny, prompts, lengths=(90,), wanted=99, temperature=0.0, seed=0)
    assert len(greedy.by_length[90]) + len(greedy.echoes) + greedy.too_short[90] == greedy.considered


def test_a_policys_own_prompts_are_asked_where_its_folder_has_some(looped: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    save_tiny_folder(own, "ouro")
    (own / PROMPTS_FILE).write_text("".join(f"sum {n} 2\n" for n in range(4)))
    job = job_of(own, tmp_path, parts=("sweep",), drafters=("wavefront",), concurrencies=(1,))
    assert evaluate.main(job) == 0
    asked = result_of(tmp_path)["questions"]["asked"]["8"]
    assert {name.split("/")[1] for name in asked} <= {"0", "1", "2", "3"}


@pytest.mark.parametrize("part", ["chains", "sweep"])
def test_where_nothing_can_be_checked_the_verdict_is_no_yes(
    looped: Path, tmp_path: Path, part: EvaluationPart
) -> None:
    """Copies leave no states to compare, and few texts of the tiny policy are this long."""
    job = job_of(looped, tmp_path, parts=(part,), drafters=("history",), concurrencies=(4,), lengths=(200,))
    assert evaluate.main(job) == 1
    data = result_of(tmp_path)
    assert (data["verdict"], data["findings"]) == ("not run", [])
    reasons = [spot["reason"] for spot in data["left_out"]]
    assert len(reasons) == (part == "sweep")
    assert all(re.fullmatch(r"too few texts, \d, have 200 tokens and do not echo", r) for r in reasons)


# ---- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gamas=[1]", "gamas: unknown setting"),
        ("evaluate.gamas=[1]", "did you mean evaluate.gammas?"),
        ("drafters=[w5]", "evaluate.drafters: unknown drafter 'w5'"),
        ("parts=[speed]", "evaluate.parts[0]: expected one of 'chains'"),
        ("engine.verify=block", "gives other texts by drafter"),
        ("drafters=[shallow_loop_1]", "a policy that runs its block once has no shallow_loop_1"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_exit_code_2(
    override: str, said: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", f"policy.source={dense}", f"output_dir={tmp_path / 'run'}", override]
    assert cli(words) == MISUSED
    assert said in capsys.readouterr().err
