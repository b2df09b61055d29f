import json
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from controller.types import (
    AR,
    Assignment,
    ForwardSeconds,
    PassSeconds,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceOutcome,
)
from rollout.errors import ConfigError
from rollout.job_config import JobConfig, ReportConfig
from rollout.jobs.report import main, newest_run
from rollout.report.build import build, build_all, page
from rollout.report.drift import acceptance_over_steps, first_drafts, loop_overlap
from rollout.report.journal import Journal, JournalError, read_journal
from rollout.report.panel import Panel, tints
from rollout.report.panels import PANELS
from rollout.report.rounds import acceptance_by_position, decisions, predicted_against_measured, round_parts
from rollout.report.statistics import quantile, wilson, wilson_of_blocks
from rollout.report.steps import makespan, makespan_by_step, mismatch, updates
from rollout.report.stretches import ENOUGH_TRIALS, stretches
from rollout.report.summary import summary_row
from rollout.report.svg import Axis, axis_over, number
from rollout.report.time_split import MOST_ROWS, time_split
from rollout.service.records import RoundRecord
from rollout.tokens import TokenRecord, Tokens
from rollout.tracking.jsonl import JsonlTracker
from rollout.tracking.recorder import RolloutRecorder
from rollout.types import Completion, Provenance

TITLES = (
    "Reward",
    "Wall-clock split",
    "Makespan by rollout step",
    "Acceptance by position",
    "Acceptance over trainer steps",
    "First drafts kept over trainer steps",
    "Agreement of loops over trainer steps",
    "Gamma, drafter and batch over time",
    "Predicted against measured round time",
    "Lengths",
    "Makespan and tail of one rollout step",
    "Weight updates and drafter builds",
    "Train/rollout mismatch",
    "Where a round's time goes",
    "Round time by batch",
)


def _round(index: int, *, version: int, batch: int, gamma: int, rng: random.Random) -> RoundRecord:
    drafter = "w4" if gamma else AR
    outcomes = tuple(
        SequenceOutcome(
            key=k,
            drafter=drafter,
            gamma=gamma,
            accepted=(accepted := rng.randint(0, gamma)),
            committed=accepted + 1,
            context_tokens=30,
            censored=False,
            finished=False,
        )
        for k in range(batch)
    )
    facts = RoundFacts(
        round_index=index,
        policy_version=version,
        batch=batch,
        prefill_rows=0,
        verify_rows=batch * (gamma + 1),
        context_tokens=batch * 30,
        draft_s=0.001 * gamma,
        verify_s=0.004,
        commit_s=0.0002,
        total_s=0.0055 + 0.001 * gamma,
        outcomes=outcomes,
        policy_pass=PassSeconds(
            forward_s=0.0035,
            choose_s=0.00025,
            split=ForwardSeconds(linears_s=0.0025, attention_s=0.0005, head_s=0.00025, rest_s=0.00015),
        ),
        draft_pass=PassSeconds(forward_s=0.0008 * gamma, choose_s=0.0001 * gamma) if gamma else None,
    )
    assignments = {k: Assignment(drafter=drafter, gamma=gamma) for k in range(batch)} if gamma else {}
    plan = RoundPlan(assignments=assignments, reason="below <break-even>", predicted_s=0.005)
    load = RoundLoad(round_index=index, policy_version=version, sequences=())
    return RoundRecord(host="h", at_s=float(index), load=load, plan=plan, facts=facts)


def _completion(uid: str, index: int, *, tokens: int, decode_s: float) -> Completion:
    token = TokenRecord(
        token_id=5,
        raw_logprob=-1.0,
        scaled_logprob=-1.0,
        target_logprob=-1.0,
        kept_logmass=0.0,
        policy_version=1,
        origin="plain",
        drafter=AR,
    )
    return Completion(
        prompt_uid=uid,
        sample_index=index,
        attempt=0,
        tokens=Tokens([token] * tokens),
        text=None,
        finish_reason="stop",
        error=None,
        provenance=Provenance(
            seed=1,
            host="h",
            fingerprint="f",
            drafter_versions={},
            rounds=tokens,
            drafted=0,
            accepted=0,
            verified_rows=tokens,
            queued_s=0.01,
            prefill_s=0.02,
            decode_s=decode_s,
        ),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run as the recorder writes it: three steps, each a batch that drains from AR into SD."""
    folder = tmp_path / "outputs" / "run" / "one"
    tracker = JsonlTracker(folder, run_id="one")
    recorder = RolloutRecorder(tracker)
    rng = random.Random(0)
    for step in range(3):
        recorder.update(version=step + 1, update_s=0.3, drafter_build_s=0.2)
        recorder.rounds(
            _round(i, version=step + 1, batch=8 - i // 3, gamma=0 if i < 12 else 3, rng=rng)
            for i in range(24)
        )
        done = [_completion(f"p{i}", step, tokens=4 + i**2, decode_s=0.1 * (1 + i**2)) for i in range(8)]
        recorder.completions(done, rollout_step=step)
        seconds = {"generate_s": 2.0, "weight_sync_s": 0.3, "mismatch_s": 0.2, "optimize_s": 6.0}
        line = {"step": step + 1, "reward": 0.1 * step, "step_s": 8.5, "tokens": 172, **seconds}
        tracker.record("steps", line)
        found = {"logprob_abs_mean": 0.004, "logprob_abs_max": 0.06, "kl": 2e-5 * (step + 1), "tokens": 40.0}
        charted = {f"trainer/mismatch_{name}": value for name, value in found.items()}
        charted |= {f"trainer/loop_overlap_{depth}": 0.6 + 0.1 * depth + 0.01 * step for depth in (1, 2)}
        tracker.log(charted, clock="trainer/step", at=step + 1)
    recorder.event("run_ended", verdict=0)
    tracker.finish()
    (folder / "run.json").write_text(json.dumps({"schema": 1, "command": "run", "run_id": "one"}))
    return folder


def _panels(folder: Path) -> dict[str, Panel]:
    journal = read_journal(folder)
    return {p.title: p for p in (make(journal) for make in PANELS)}


def test_a_run_gets_every_panel_filled(run_dir: Path) -> None:
    panels = _panels(run_dir)
    assert tuple(panels) == TITLES
    assert [p.title for p in panels.values() if p.empty] == []


def test_the_page_is_one_file_that_fetches_nothing(run_dir: Path) -> None:
    out = build(run_dir, run_dir / "deep" / "report.html")
    text = out.read_text()
    for title in TITLES:
        assert f"<h3>{escape(title)}</h3>" in text
    for fetched in ("<script", "<link", "src=", "href=", "url(", "@import"):
        assert fetched not in text
    assert "below &lt;break-even&gt;" in text
    assert text.isascii()


def test_every_drawing_is_well_formed(run_dir: Path) -> None:
    text = page([read_journal(run_dir)])
    drawings = [part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) >= len(TITLES)
    for drawing in drawings:
        tree = ET.fromstring("<svg" + drawing)
        for element in tree.iter():
            for value in element.attrib.values():
                assert "nan" not in value
                assert "inf" not in value


@pytest.mark.parametrize("written", ["nothing", "steps", "plain rounds"])
def test_what_is_missing_is_said_and_does_not_break_the_page(tmp_path: Path, written: str) -> None:
    tracker = JsonlTracker(tmp_path / "run", run_id="r")
    if written == "steps":
        parts = dict.fromkeys(("step_s", "generate_s", "weight_sync_s", "mismatch_s", "optimize_s"), 0.0)
        tracker.record("steps", {"step": 1, "reward": 0.0, "tokens": 0, **parts})
    if written == "plain rounds":
        record = _round(0, version=1, batch=2, gamma=0, rng=random.Random(0))
        RolloutRecorder(tracker).rounds([replace(record, plan=replace(record.plan, predicted_s=0.0))])
    panels = _panels(tmp_path / "run")
    filled = {
        "nothing": set(),
        "steps": {"Reward", "Wall-clock split"},
        "plain rounds": {
            "Gamma, drafter and batch over time",
            "Round time by batch",
            "Where a round's time goes",
        },
    }[written]
    assert {p.title for p in panels.values() if not p.empty} == filled
    assert all(p.note.startswith("No data: ") for p in panels.values() if p.empty)
    build(tmp_path / "run", tmp_path / "out.html")


def test_acceptance_counts_only_blocks_that_drafted_a_position(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r")
    record = _round(0, version=1, batch=3, gamma=2, rng=random.Random(0))
    first, second, third = record.facts.outcomes
    outcomes = (
        first._replace(gamma=2, accepted=2),
        second._replace(gamma=1, accepted=0),
        third._replace(gamma=2, accepted=1, censored=True),
    )
    RolloutRecorder(tracker).rounds([replace(record, facts=replace(record.facts, outcomes=outcomes))])
    body = acceptance_by_position(read_journal(tmp_path)).body
    assert "w4, position 1: 2 of 3" in body
    assert "w4, position 2: 1 of 1" in body


def _journal_of(folder: Path, outcomes: dict[int, list[SequenceOutcome]]) -> Journal:
    """Return a run of one round per policy version, with these outcomes."""
    recorder = RolloutRecorder(JsonlTracker(folder, run_id="r"))
    for version, found in outcomes.items():
        record = _round(version, version=version, batch=len(found), gamma=2, rng=random.Random(0))
        recorder.rounds([replace(record, facts=replace(record.facts, outcomes=tuple(found)))])
    return read_journal(folder)


def _outcome(
    key: int, *, drafter: str = "w4", gamma: int = 2, accepted: int, **more: bool
) -> SequenceOutcome:
    return SequenceOutcome(
        key=key,
        drafter=drafter,
        gamma=gamma,
        accepted=accepted,
        committed=accepted + 1,
        context_tokens=30,
        censored=more.get("censored", False),
        finished=False,
        judged_singly=more.get("judged_singly", False),
    )


def test_first_drafts_are_told_by_version_and_without_those_a_limit_cut_off(tmp_path: Path) -> None:
    kept = {1: [2] * 20 + [0] * 20, 2: [1] * 38 + [2] * 2}
    journal = _journal_of(
        tmp_path,
        {
            version: [_outcome(key, accepted=n, censored=key == 39) for key, n in enumerate(found)]
            for version, found in kept.items()
        },
    )
    body = first_drafts(journal).body
    assert "w4, version 1: 20 of 39" in body
    assert "w4, version 2: 40 of 40" in body
    assert "<td>0.759 of 79</td>" in body


def test_acceptance_is_told_for_every_drafter_and_what_drafted_little_is_taken_together(
    tmp_path: Path,
) -> None:
    lanes = {"drafter": "wavefront", "judged_singly": True, "gamma": 40}
    journal = _journal_of(
        tmp_path,
        {
            version: [
                _outcome(0, accepted=20 + version, **lanes),
                _outcome(1, accepted=version % 2, drafter="shallow_loop_3", gamma=3),
            ]
            for version in range(1, 17)
        },
    )
    body = acceptance_over_steps(journal).body
    for version in range(1, 10):
        assert f"wavefront, version {version}: {20 + version} of 40" in body
    # 3 draft tokens a version: eleven are needed, and what is left goes to the only point.
    assert re.findall(r"shallow_loop_3, versions? [\d to]*: \d+ of \d+", body) == [
        "shallow_loop_3, versions 1 to 16: 8 of 48"
    ]
    assert body.count(">wavefront<") == body.count(">shallow_loop_3<") == 2  # curve and row
    for cell in ("0.562 of 160", "0.167 of 12", "0.167 of 48"):
        assert f"<td>{cell}</td>" in body
    assert "version 1: 21 of 40" in first_drafts(journal).body


def test_stretches_hold_every_draft_once_and_enough_of_them() -> None:
    rng = random.Random(5)
    for _ in range(50):
        found = {v: [(0, rng.randint(0, 20)) for _ in range(rng.randint(0, 3))] for v in range(1, 30)}
        made, total = stretches(found), sum(t for blocks in found.values() for _, t in blocks)
        assert sum(s.tried for s in made) == total
        assert all(s.tried >= min(total, ENOUGH_TRIALS) for s in made)
        assert all(a.last < b.first for a, b in pairwise(made))
    assert stretches({}) == stretches({3: []}) == []


def test_the_agreement_of_loops_is_drawn_by_depth(run_dir: Path) -> None:
    panel = loop_overlap(read_journal(run_dir))
    assert "step 2: depth 1, 0.710" in panel.body
    assert "depth 1: 0.700 -> 0.720; depth 2: 0.800 -> 0.820" in panel.note


def test_the_tail_starts_when_a_quarter_is_left(run_dir: Path) -> None:
    # Ends of the eight samples: 0.03 + 0.1 * (1 + i^2); the sixth ends at 2.63, the last at 5.03.
    note = makespan(read_journal(run_dir)).note
    assert "8 samples in 5.03 s" in note
    assert "2 samples or fewer left, is 48%" in note


def test_makespans_and_their_tails_are_told_by_step(run_dir: Path) -> None:
    # The same samples in every step: the sixth ends at 2.63 s, the last at 5.03 s.
    note = makespan_by_step(read_journal(run_dir)).note
    assert "3 steps: median 5.03 s" in note
    assert "the tail takes 48%" in note


def test_updates_tell_the_drafters_share_or_that_nobody_told_it(run_dir: Path, tmp_path: Path) -> None:
    assert "drafters built: median 0.200 s; 3 updates" in updates(read_journal(run_dir)).note
    tracker = JsonlTracker(tmp_path / "silent", run_id="r")
    RolloutRecorder(tracker).update(version=1, update_s=0.5)
    note = updates(read_journal(tmp_path / "silent")).note
    assert note == "whole update: median 0.500 s; no host told its drafters' build time; 1 update."


def test_mismatch_is_drawn_from_what_the_trainer_charted(run_dir: Path) -> None:
    panel = mismatch(read_journal(run_dir))
    assert "120 tokens compared; KL estimate: median 4.0e-05" in panel.note
    assert "step 2: largest 6.00e-02" in panel.body


def test_a_drafter_has_one_colour_in_every_panel(run_dir: Path) -> None:
    journal = read_journal(run_dir)
    tint = tints(journal)["w4"]
    for make in (acceptance_by_position, decisions):
        assert f'background:{tint}"></span>w4' in make(journal).body


def test_reasons_that_differ_in_numbers_only_are_one(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, run_id="r")
    for i, reason in enumerate(["w4: gain -2.7%", "w4: gain 3.1%", "all quiet"]):
        record = _round(i, version=1, batch=1, gamma=0, rng=random.Random(0))
        RolloutRecorder(tracker).rounds([replace(record, plan=replace(record.plan, reason=reason))])
    assert "w4: gain N% (67%); all quiet (33%)." in decisions(read_journal(tmp_path)).note


def test_round_times_are_told_by_drafter_and_power_of_two(run_dir: Path) -> None:
    # Batches 8 to 5 decode plainly and 4 to 1 draft, 3 rounds of each in each of 3 steps.
    body = round_parts(read_journal(run_dir)).body
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row)[:3] for row in body.split("<tr>")[2:]]
    assert rows == [["AR", "5-8", "36"], ["w4", "1", "9"], ["w4", "2", "9"], ["w4", "3-4", "18"]]


def test_an_interrupted_run_is_shown_up_to_its_torn_line(run_dir: Path) -> None:
    assert "has not ended" not in page([read_journal(run_dir)])
    for name in ("events", "rounds", "steps", "completions", "metrics"):
        path = run_dir / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
    journal = read_journal(run_dir)
    assert (len(journal.rounds), len(journal.steps), journal.ended) == (71, 2, False)
    text = page([journal])
    assert "This run has not ended" in text
    assert "state: not ended" in text


def test_a_resumed_runs_speed_counts_a_step_done_twice_once(run_dir: Path) -> None:
    assert summary_row(read_journal(run_dir))["tokens/s while generating"] == "86"
    for kind in ("completions", "steps"):
        path = run_dir / f"{kind}.jsonl"
        again = [line for line in path.read_text().splitlines() if json.loads(line).get("step") in (None, 3)]
        path.write_text("\n".join([*path.read_text().splitlines(), *again]) + "\n")
    row = summary_row(read_journal(run_dir))
    assert (row["trainer steps"], row["tokens/s while generating"]) == ("3", "86")


def test_runs_are_compared_with_the_processor_they_ran_on(run_dir: Path) -> None:
    assert summary_row(read_journal(run_dir))["processor"] == "-"
    told = {"cpu": "AMD EPYC", "processor": "AMD EPYC, family 23 model 1"}
    for machine, words in ((told, told["processor"]), ({"cpu": "AMD EPYC"}, "AMD EPYC")):
        (run_dir / "summary.json").write_text(json.dumps({"conditions": {"machine": machine}}))
        journal = read_journal(run_dir)
        assert summary_row(journal)["processor"] == words
        assert page([journal, journal]).count(f'<td class="word">{words}</td>') == 2


def test_prediction_is_summed_up_as_a_ratio(run_dir: Path) -> None:
    # AR rounds take 5.5 ms and SD rounds 8.5 ms where 5 ms were predicted, half of each.
    assert "median 1.40" in predicted_against_measured(read_journal(run_dir)).note


def test_the_reward_panel_repeats_the_summarys_verdict(run_dir: Path) -> None:
    quarter = {"mean": 0.1, "standard_error": 0.02, "steps": 1}
    reward: dict[str, Any] = {
        "improved": False,
        "first_quarter": quarter,
        "last_quarter": quarter,
        "difference": 0.0,
        "difference_standard_error": 0.03,
        "needed_standard_errors": 2.0,
    }
    (run_dir / "summary.json").write_text(json.dumps({"reward": reward}))
    assert "did not rise" in _panels(run_dir)["Reward"].note


def test_a_file_that_is_no_journal_is_named(run_dir: Path) -> None:
    (run_dir / "rounds.jsonl").write_text('{"schema":1,"kind":"rounds","round":7,"facts":{}}\n')
    with pytest.raises(JournalError, match=r"rounds\.jsonl: round 7"):
        read_journal(run_dir)
    (run_dir / "rounds.jsonl").write_text("not json\n")
    with pytest.raises(JournalError, match=r"rounds\.jsonl"):
        read_journal(run_dir)
    with pytest.raises(JournalError, match="no such run folder"):
        read_journal(run_dir / "absent")


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(JobConfig(report=ReportConfig(runs=(str(run_dir),)))) == 0
    assert (run_dir / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    out = tmp_path / "both.html"
    assert main(JobConfig(report=ReportConfig(runs=(str(run_dir), str(run_dir)), out=str(out)))) == 0
    assert out.read_text().count("<h2>one</h2>") == 2
    with pytest.raises(ConfigError, match=r"report\.runs"):
        main(JobConfig(report=ReportConfig(runs=(str(tmp_path / "absent"),))))


def test_the_newest_run_is_taken_and_what_keeps_no_journal_is_none(run_dir: Path) -> None:
    outputs = run_dir.parent.parent
    other = outputs / "bench" / "later"
    other.mkdir(parents=True)
    (other / "run.json").write_text(json.dumps({"schema": 1, "command": "bench", "run_id": "x"}))
    assert newest_run(outputs) == run_dir
    with pytest.raises(ConfigError, match=r"report\.runs"):
        newest_run(outputs / "absent")


def test_several_runs_make_one_page(run_dir: Path, tmp_path: Path) -> None:
    text = build_all([run_dir, run_dir], tmp_path / "x.html").read_text()
    assert text.count("<h3>Reward</h3>") == 2
    assert text.count(">one</td>") == 2  # the table that compares them
    assert "<td>one</td>" not in page([read_journal(run_dir)])


def test_settings_and_summary_are_shown_with_short_numbers(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("policy: {source: <mine>, offgrid: true}\nseed: 0\n")
    (run_dir / "summary.json").write_text(json.dumps({"tokens_per_s": 227.1930140361368}))
    text = page([read_journal(run_dir)])
    assert "policy: &lt;mine&gt; off-grid" in text
    assert "227.2" in text
    assert "227.19" not in text


def test_wilson_agrees_with_its_defining_equation() -> None:
    z = 1.959964
    for hits, trials in ((0, 5), (1, 7), (30, 100), (7, 7)):
        share = wilson(hits, trials)
        for bound in (share.low, share.high):
            if 0 < bound < 1:
                assert (share.value - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / trials)
        assert share.low <= share.value <= share.high
        assert share.high - share.low > 0.1
    with pytest.raises(ValueError, match="trials"):
        wilson(1, 0)


def test_tokens_that_are_kept_together_count_as_their_blocks() -> None:
    together = wilson_of_blocks([(8, 8), (0, 8)] * 50)
    alone = wilson(50, 100)  # a block that is kept or lost whole is one trial
    assert together.low == pytest.approx(alone.low, abs=1e-3)
    assert together.high == pytest.approx(alone.high, abs=1e-3)
    assert (together.hits, together.trials) == (400, 800)
    for spread in ([(1, 2)] * 50, [(1, 1), (0, 1)] * 50):  # no block scatters more than its tokens would
        assert wilson_of_blocks(spread).low == pytest.approx(wilson(50, 100).low, abs=1e-3)
    assert wilson_of_blocks([(4, 4)] * 5).low == wilson(5, 5).low
    assert wilson_of_blocks([(2, 4)]).high == pytest.approx(_half_of_one_trial())
    with pytest.raises(ValueError, match="blocks"):
        wilson_of_blocks([(5, 4)])


def _half_of_one_trial() -> float:
    """The upper end at half a hit in one trial, by the equation that defines it."""
    z2 = 1.959964**2
    return 0.5 + 0.5 * (z2 / (1 + z2)) ** 0.5


def test_acceptance_intervals_hold_the_truth_as_often_as_they_say() -> None:
    # 400 samples of 200 blocks, of 8 drafts each kept until the first loss, around the share of an endless
    # sample. At 95% some 380 intervals hold it; under 350 comes once in a million at 93%.
    rng, kept = random.Random(0), 0.8
    truth = sum(kept**i for i in range(1, 9)) / 8

    def block() -> tuple[int, int]:
        return next((i for i in range(8) if rng.random() > kept), 8), 8

    shares = [wilson_of_blocks([block() for _ in range(200)]) for _ in range(400)]
    assert sum(s.low <= truth <= s.high for s in shares) >= 350
    assert sum(wilson(s.hits, s.trials).low <= truth <= wilson(s.hits, s.trials).high for s in shares) < 350


def _one_round(folder: Path, record: RoundRecord) -> Panel:
    RolloutRecorder(JsonlTracker(folder, run_id="r")).rounds([record])
    return time_split(read_journal(folder))


def _with_drafts(record: RoundRecord, drafter: str, draft_pass: PassSeconds | None) -> RoundRecord:
    outcomes = tuple(o._replace(drafter=drafter) for o in record.facts.outcomes)
    return replace(record, facts=replace(record.facts, outcomes=outcomes, draft_pass=draft_pass))


def test_the_time_of_a_round_is_shown_by_part(tmp_path: Path) -> None:
    # 5.5 ms: 2.5 of linears, 0.5 of attention, and what no part names is Python's.
    panel = _one_round(tmp_path / "ar", _round(0, version=1, batch=4, gamma=0, rng=random.Random(0)))
    assert "none (AR), batch 3-4: linears 45.5%, 2.50 ms" in panel.body
    assert "none (AR), batch 3-4: token choice 4.5%, 0.25 ms" in panel.body
    assert "none (AR), batch 3-4: Python and other 33.6%, 1.85 ms" in panel.body
    assert "drafts:" not in panel.body


def test_what_drafters_did_is_shown_by_part_too(tmp_path: Path) -> None:
    # 7.5 ms with two drafts: 2.0 of drafting, in which 1.0 of linears, 0.2 of choosing, and Python's 0.4.
    record = _round(0, version=1, batch=3, gamma=2, rng=random.Random(0))
    split = ForwardSeconds(linears_s=0.001, attention_s=0.0002, head_s=0.0001, rest_s=0.0001)
    told = PassSeconds(forward_s=0.0014, choose_s=0.0002, split=split)
    panel = _one_round(tmp_path / "sd", _with_drafts(record, "shallow_loop_2", told))
    assert "shallow_loop_2, batch 3-4: linears 33.3%, 2.50 ms" in panel.body
    assert "shallow_loop_2, batch 3-4: drafts: linears 13.3%, 1.00 ms" in panel.body
    assert "shallow_loop_2, batch 3-4: drafts: Python and other 5.3%, 0.40 ms" in panel.body
    for share in ("46.7%", "26.7%"):  # of linears, the policy's and the drafter's; of all by drafters
        assert f"<td>{share}</td>" in panel.body
    assert "token choice is 6.0% of all" in panel.note


def test_a_round_of_lanes_alone_and_one_of_copies_alone_are_told(tmp_path: Path) -> None:
    record = _round(0, version=1, batch=4, gamma=2, rng=random.Random(0))
    lanes = PassSeconds(forward_s=0.0018, choose_s=0.0001)
    record = replace(
        record,
        facts=replace(
            _with_drafts(record, "wavefront", lanes).facts,
            policy_pass=PassSeconds(forward_s=0.0, choose_s=0.0),
            draft_s=0.002,
            verify_s=0.0,
            total_s=0.0025,
        ),
    )
    panel = _one_round(tmp_path / "lanes", record)
    assert "wavefront, batch 3-4: drafts: forward, not split 72.0%, 1.80 ms" in panel.body
    assert "wavefront, batch 3-4: Python and other 20.0%, 0.50 ms" in panel.body
    copied = _with_drafts(_round(0, version=1, batch=1, gamma=2, rng=random.Random(0)), "history", None)
    panel = _one_round(tmp_path / "copied", copied)
    assert "history, batch 1: drafts: Python and other 26.7%, 2.00 ms" in panel.body


def test_of_many_mixes_those_that_took_longest_are_shown(tmp_path: Path) -> None:
    recorder = RolloutRecorder(JsonlTracker(tmp_path, run_id="r"))
    for index in range(MOST_ROWS + 2):
        record = _round(index, version=1, batch=1, gamma=2, rng=random.Random(0))
        record = _with_drafts(record, f"d{index:02}", None)
        recorder.rounds([replace(record, facts=replace(record.facts, total_s=0.01 + 0.001 * index))])
    panel = time_split(read_journal(tmp_path))
    assert panel.body.count('<svg class="bar"') == MOST_ROWS
    assert "d01" not in panel.body
    assert "d02" in panel.body
    assert "2 groups that took least not shown" in panel.note


def test_rounds_with_prompts_are_told_apart_and_those_of_prompts_alone_too(tmp_path: Path) -> None:
    recorder = RolloutRecorder(JsonlTracker(tmp_path, run_id="r"))
    record = _round(0, version=1, batch=3, gamma=0, rng=random.Random(0))
    mixed = replace(record, facts=replace(record.facts, prefill_rows=20))
    alone = replace(record, facts=replace(record.facts, prefill_rows=20, batch=0, outcomes=()))
    recorder.rounds([record, mixed, mixed, alone])
    body = time_split(read_journal(tmp_path)).body
    for what in ("none (AR), batch 3-4", "none (AR), prompts, batch 3-4", "none (AR), prompts, batch 0"):
        assert f"<title>{what}: linears 45.5%" in body
    assert "<td>50.0%</td>" in body  # of all time, where there were two


def test_rounds_that_took_no_time_are_none_to_share_out(tmp_path: Path) -> None:
    record = _round(0, version=1, batch=4, gamma=0, rng=random.Random(0))
    nothing = PassSeconds(forward_s=0.0, choose_s=0.0)
    facts = replace(record.facts, policy_pass=nothing, total_s=0.0, draft_s=0.0, verify_s=0.0, commit_s=0.0)
    assert "No data" in _one_round(tmp_path / "none", replace(record, facts=facts)).note


def test_a_forward_that_was_not_split_is_drawn_whole_and_said_to_be(tmp_path: Path) -> None:
    record = _round(0, version=1, batch=4, gamma=0, rng=random.Random(0))
    whole = PassSeconds(forward_s=0.0044, choose_s=0.0)
    panel = _one_round(tmp_path, replace(record, facts=replace(record.facts, policy_pass=whole)))
    assert "none (AR), batch 3-4: forward, not split 80.0%, 4.40 ms" in panel.body
    assert "linears" not in panel.body
    assert "Not split: the torch decoder" in panel.note


def test_a_journal_from_before_rounds_told_their_parts_still_draws(tmp_path: Path) -> None:
    record = _round(0, version=1, batch=4, gamma=2, rng=random.Random(0))
    RolloutRecorder(JsonlTracker(tmp_path / "run", run_id="r")).rounds([record])
    file = tmp_path / "run" / "rounds.jsonl"
    line = json.loads(file.read_text())
    del line["facts"]["policy_pass"], line["facts"]["draft_pass"]
    file.write_text(json.dumps(line) + "\n")
    assert time_split(read_journal(tmp_path / "run")).note == "No data: no round told what its time went on."
    build(tmp_path / "run", tmp_path / "out.html")


def test_quantiles_interpolate() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], f) for f in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@pytest.mark.parametrize("values", [[0.0, 0.0], [3.0], [-2.0, 5.0], [1e-6, 3e-6], [0, 100000]])
def test_an_axis_shows_its_values_and_a_few_round_ticks(values: list[float]) -> None:
    axis = axis_over("x", values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 8
    assert all(axis.low - 1e-12 <= t <= axis.high * 1.0000001 for t in ticks)


def test_counts_have_no_ticks_between_them() -> None:
    assert axis_over("x", [1.0, 2.0], whole=True).ticks() == [1, 2]
    assert axis_over("x", [7.0], whole=True).ticks() == [7]
    assert axis_over("x", [0.0, 3.0], whole=True).ticks() == [0, 1, 2, 3]


@pytest.mark.parametrize(("low", "high"), [(8.0, 90.0), (2.0, 9.0), (1e-5, 1e-1), (1e-12, 1.0), (3.1, 4.2)])
def test_a_log_axis_has_a_few_ticks_within_its_ends(low: float, high: float) -> None:
    ticks = Axis(label="x", low=low, high=high, scale="log").ticks()
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(ticks)
    assert all(low * 0.998 <= t <= high * 1.002 for t in ticks)


def test_a_folder_that_holds_no_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"report\.runs: .* holds no run; name a folder under outputs/run"):
        main(JobConfig(report=ReportConfig(runs=(str(tmp_path),))))


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_a_damaged_summary_or_settings_file_is_named(run_dir: Path, name: str) -> None:
    (run_dir / name).write_text("{")
    with pytest.raises(JournalError, match=name):
        read_journal(run_dir)


def test_numbers_are_short_and_thousands_are_written_out() -> None:
    found = [number(v) for v in (0.0, 0.000123456, 0.25, 12.5, 999.94, 1000.4, 10000.0, 2.5e6)]
    assert found == ["0", "0.00012", "0.25", "12.5", "999.9", "1000", "10000", "2.5e+06"]


def test_an_axis_of_few_values_names_those_and_no_others() -> None:
    assert Axis(label="x", low=0.7, high=6.0, scale="log", marks=(1.0, 4.0)).ticks() == [1.0, 4.0]
    assert all(float(f"{t:.2g}") == t for t in axis_over("x", [128.0], scale="log").ticks())
