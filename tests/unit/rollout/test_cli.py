"""The command line: light to start, one clear line for what it does not understand, unique run folders."""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.policies import baseline_problem
from rollout.cli import COMMANDS, MISUSED, OK, main
from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.jobs.compose import compose_job, compose_plain, group_choices
from rollout.jobs.door import bridge, check_trainer
from rollout.run_folder import open_run_folder, save_config
from rollout.settings import load_config, to_plain


def test_help_imports_little_and_nothing_heavy() -> None:
    """How soon it starts is what it imports: some fifty modules of the standard library."""
    code = (
        "import sys; bare = len(sys.modules); from rollout.cli import main; main(['--help']); "
        "assert len(sys.modules) - bare < 150, sorted(sys.modules); "
        "names = {'torch', 'ray', 'transformers', 'hydra', 'omegaconf', 'numpy', 'wandb'}; "
        "heavy = names & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: taildraft COMMAND" in done.stdout


def test_every_command_explains_itself_without_torch() -> None:
    code = (
        "import sys; from rollout.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    main([command, '--help']); print('\\f', end='')\n"
        "assert 'torch' not in sys.modules"
    )
    asked = [sys.executable, "-c", code, *COMMANDS]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command, said in zip(COMMANDS, done.stdout.split("\f"), strict=False):
        assert said.startswith(f"usage: taildraft {command}")
        for line in COMMANDS[command].examples:
            assert line in said


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_the_help_is_understood(command: str) -> None:
    for example in COMMANDS[command].examples:
        name, *overrides = example.split()[1:]
        assert name == command
        compose_job(command, overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; known: run, calibrate, verify, evaluate, bench, report"),
        (["run", "nonsense"], "'nonsense' is not an override"),
        (["run", "engine.decodr=torch"], "did you mean engine.decoder?"),
        (["run", "engine.decodr=torch"], "engine.decodr: unknown setting; known here: decoder, device"),
        (
            ["run", "engine.decoder=fast"],
            "engine.decoder: expected one of 'auto', 'compiled', 'torch', got 'fast'",
        ),
        (["run", "engine.max_batch=0"], "engine.max_batch must be >= 1, got 0"),
        (["run", "engine.max_batch=many"], "engine.max_batch: expected a whole number, got 'many'"),
        (["run", "engine=nativ"], "engine: no choice 'nativ'; known: cuda, native, torch"),
        (["run", "sead=1"], "sead: unknown setting"),
        (["run", "seed=-1"], "seed must be in 0"),
        (["run", "seed=1,2"], "seed: several values"),
        (["run", "task.stop=[a"], "is not an override"),
        (["run", "policy.source=${nowhere}"], "policy.source"),
        (["run", "trainer.lerning_rate=1"], "did you mean trainer.learning_rate?"),
        (["run", "task.kind=chess"], "task.kind: expected one of"),
        (["run", "--verbose"], "unknown option --verbose"),
        (["bench", "workload=marathon"], "bench.workload: expected one of 'drain'"),
        (["run", "workload=drain"], "workload: unknown setting"),
    ],
)
def test_what_is_not_understood_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A45: the line names the key."""
    assert main(arguments) == MISUSED
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""


def test_show_prints_settings_that_load_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--show", "engine.max_batch=7"]) == OK
    job = load_config(yaml.safe_load(capsys.readouterr().out), JobConfig)
    assert job == compose_job("run", ["engine.max_batch=7"])
    assert job.engine.max_batch == 7


def test_a_commands_own_settings_need_no_prefix() -> None:
    job = compose_job("bench", ["workload=fixed", "batches=[1,2]", "out=x.json"])
    assert (job.bench.workload, job.bench.batches, job.bench.out) == ("fixed", (1, 2), "x.json")
    assert compose_job("bench", ["bench.prompts=3"]).bench.prompts == 3
    assert compose_job("verify", ["out=v.json", "hosts=[1]"]).verify.hosts == (1,)


def test_a_cluster_is_joined_by_its_address() -> None:
    assert compose_job("run", ["ray.address=10.0.0.1:6379"]).service.ray_address == "10.0.0.1:6379"


def test_a_setting_no_yaml_mentions_can_be_set_and_a_choice_can_be_refined() -> None:
    job = compose_job("run", ["policy.offgrid=true", "controller=fixed", "controller.gamma=2", "drafter=w4"])
    assert job.policy.offgrid
    assert (job.controller.kind, job.controller.gamma, job.drafter.names) == ("fixed", 2, ("w4",))


STOPS = [
    ('["\n#"]', ["\n#"]),
    ('["a,b","x=y","50%"]', ["a,b", "x=y", "50%"]),
    ('["x@y","#","\u00e9\u5b57"]', ["x@y", "#", "\u00e9\u5b57"]),
    ('[""]', [""]),
    (r'["\${x}"]', ["${x}"]),
    ("['it\\'s']", ["it's"]),
    ('["{a: b}","[c]"," d "]', ["{a: b}", "[c]", " d "]),
    ("50%", "50%"),
]


@pytest.fixture(scope="module")
def stops() -> dict[str, Any]:
    """What becomes of every case, each under a name of its own: they are composed, not checked."""
    overrides = [f"task.stop_{at}={written}" for at, (written, _) in enumerate(STOPS)]
    return compose_plain("run", overrides)["task"]


@pytest.mark.parametrize(("at", "expected"), [(at, expected) for at, (_, expected) in enumerate(STOPS)])
def test_documented_quoting_gives_exactly_the_string(
    at: int, expected: object, stops: dict[str, Any]
) -> None:
    """A45."""
    assert stops[f"stop_{at}"] == expected


def test_the_help_states_the_quoting_rules_that_are_tested(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    text = capsys.readouterr().out
    assert """'task.stop=["a,b","x=y","50%"]'""" in text
    assert """$'task.stop=["\\n#"]'""" in text
    assert """'task.stop=["\\${x}"]'""" in text


def test_a_digits_only_string_is_asked_to_be_quoted() -> None:
    with pytest.raises(ConfigError, match=r"tracker\.name: expected a string, got 123; quote it"):
        compose_job("run", ["tracker.name=123"])
    assert compose_job("run", ["tracker.name='123'"]).tracker.name == "123"


def test_nine_launches_in_one_second_get_nine_folders_and_nine_run_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A43. Names hold the second, so all of them begin alike."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollout.run_folder.time.strftime", lambda _: "20260101-000000")
    with ThreadPoolExecutor(9) as pool:
        folders = list(pool.map(lambda _: open_run_folder("run", output_dir=None, run_id=None), range(9)))
    assert {f.path.name.rpartition("-")[0] for f in folders} == {"20260101-000000"}
    assert len({f.path for f in folders}) == 9
    assert len({f.run_id for f in folders}) == 9
    assert all(f.run_id and f.path.is_dir() and any(f.path.iterdir()) for f in folders)


def test_an_existing_runs_folder_resumes_that_run_and_no_other(tmp_path: Path) -> None:
    first = open_run_folder("run", output_dir=str(tmp_path / "a"), run_id=None)
    again = open_run_folder("run", output_dir=str(tmp_path / "a"), run_id=None)
    assert (first.resumed, again.resumed, again.run_id) == (False, True, first.run_id)
    with pytest.raises(ConfigError, match="holds a run of 'run', not of 'bench'"):
        open_run_folder("bench", output_dir=str(tmp_path / "a"), run_id=None)
    with pytest.raises(ConfigError, match="run_id"):
        open_run_folder("run", output_dir=str(tmp_path / "a"), run_id="another")
    (tmp_path / "a" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="not a run's record"):
        open_run_folder("run", output_dir=str(tmp_path / "a"), run_id=None)


def test_a_folder_that_cannot_be_written_is_a_wrong_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", f"output_dir={tmp_path}/file/run"]) == MISUSED
    assert "output_dir: cannot write there" in capsys.readouterr().err


NOWHERE = [
    *((command, "/no/such/policy") for command in ("run", "verify", "evaluate", "bench", "calibrate")),
    *((command, "some/policy-that-is-nowhere") for command in ("run", "verify")),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What became of each command, one after the other in one fresh process in an empty folder."""
    code = (
        "import contextlib, io, json, os, sys; from rollout.cli import main\n"
        "for command, source in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        verdict = main([command, f'policy.source={source}'])\n"
        "    facts = {'verdict': verdict, 'said': said.getvalue(), 'torch': 'torch' in sys.modules}\n"
        "    print(json.dumps({**facts, 'left': os.listdir()}))\n"
    )
    folder = tmp_path_factory.mktemp("nowhere")
    words = [sys.executable, "-c", code, json.dumps(NOWHERE)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(NOWHERE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("command", "source"), NOWHERE)
def test_a_policy_that_is_nowhere_is_refused_before_anything_heavy_is_loaded(
    command: str, source: str, refusals: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found = refusals[command, source]
    assert found["verdict"] == MISUSED
    assert not found["torch"]
    assert f"taildraft: {command}: policy.source='{source}'" in found["said"]
    if source.startswith("/"):
        assert found["left"] == []


@pytest.mark.parametrize(
    ("command", "setting"),
    [("run", "drafter.names"), ("verify", "verify.drafters"), ("evaluate", "evaluate.drafters")],
)
def test_a_drafter_that_does_not_exist_is_refused_before_anything_is_started(
    command: str,
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, f"{setting}=[w5]"]) == MISUSED
    assert (
        f"{setting}: unknown drafter 'w5'; known: history, shallow_loop_1 to shallow_loop_255, "
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_a_report_opens_no_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == MISUSED  # there is no run
    assert list(tmp_path.iterdir()) == []


def test_saved_settings_are_the_resolved_ones_and_a_resume_keeps_the_first(tmp_path: Path) -> None:
    job = dataclasses.replace(compose_job("run", ["engine.max_batch=5"]), output_dir=str(tmp_path))
    folder = open_run_folder("run", output_dir=str(tmp_path), run_id="r")
    path = save_config(folder, to_plain(job))
    assert load_config(yaml.safe_load(path.read_text()), JobConfig) == job
    again = open_run_folder("run", output_dir=str(tmp_path), run_id="r")
    assert save_config(again, {"seed": 1}).name == "config.resume-1.yaml"
    assert load_config(yaml.safe_load(path.read_text()), JobConfig) == job


def test_settings_cross_a_process_border_as_plain_data_equal_to_the_drivers() -> None:
    """A44."""
    job = compose_job("run", ["policy.source=${oc.env:HOME}", "drafter=history"])
    code = (
        "import json, sys; from rollout.job_config import JobConfig; "
        "from rollout.settings import load_config, to_plain; "
        "job = load_config(json.load(sys.stdin), JobConfig); assert 'omegaconf' not in sys.modules; "
        "json.dump(to_plain(job), sys.stdout)"
    )
    sent = json.dumps(to_plain(job))
    done = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, text=True, check=True
    )
    assert load_config(json.loads(done.stdout), JobConfig) == job
    assert "$" not in job.policy.source


def test_the_door_to_the_trainers_names_what_is_missing() -> None:
    job = compose_job("run", [])
    check_trainer(job)
    with pytest.raises(ConfigError, match=r"trainer\.kind: there is no trainer bridge 'nobody'"):
        bridge(dataclasses.replace(job, trainer={"kind": "nobody"}))
    with pytest.raises(ConfigError, match=r"trainer\.kind: expected the name"):
        bridge(dataclasses.replace(job, trainer={"kind": "os.path"}))


def test_an_experiment_makes_several_choices_and_what_is_asked_beside_it_wins() -> None:
    job = compose_job("run", ["experiment=looped"])
    assert job.policy.source == "looped"
    assert job.drafter.names == ("shallow_loop_2", "shallow_loop_3", "wavefront", "history")
    assert (job.task["kind"], job.controller.kind) == ("exercises", "auto")
    assert job.trainer["loop_distillation_weight"] > 0
    other = compose_job("run", ["experiment=looped", "drafter=none", "trainer.steps=3", "seed=4"])
    assert (other.drafter.names, other.trainer["steps"], other.seed) == ((), 3, 4)
    assert other.policy == job.policy


@pytest.mark.parametrize("name", ["auto", "ar", "fixed", "threshold", "ladder"])
def test_every_controller_fits_the_default_drafters(name: str) -> None:
    assert name in group_choices()["controller"]
    job = compose_job("run", [f"controller={name}"])
    assert job.controller.kind == name
    assert not baseline_problem(job.controller, dict.fromkeys(job.drafter.names, job.drafter.max_gamma))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["controller=fixed", "drafter=none"], "controller.drafter 'w4' is not in the engine (it has: none)"),
        (["controller=fixed", "controller.gamma=9"], "controller.gamma asks for 9, but w4 drafts at most 8"),
    ],
)
def test_a_controller_that_asks_for_what_no_drafter_offers_is_refused_before_any_work(
    overrides: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert main(["run", *overrides, f"output_dir={folder}"]) == 2
    assert named in capsys.readouterr().err
    assert not folder.exists()


def test_every_choice_of_every_group_composes_and_loads() -> None:
    choices = group_choices()
    assert set(choices) == {
        "controller",
        "drafter",
        "engine",
        "experiment",
        "policy",
        "service",
        "task",
        "tracker",
        "trainer",
    }
    assert all(choices.values())
    # One choice of every group at a time; a group with fewer starts again.
    for number in range(max(map(len, choices.values()))):
        picked = {group: names[number % len(names)] for group, names in choices.items()}
        check_trainer(compose_job("run", [f"{group}={name}" for group, name in picked.items()]))
