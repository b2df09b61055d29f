"""The command ``taildraft``. Its exit code is the verdict: 0 yes, 1 no, 2 not understood, 130 interrupted.

Arguments are read before anything heavy is imported, and every job is imported only when it is asked for.
"""

import dataclasses
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.errors import ConfigError, RolloutError
from rollout.progress import say

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command: what it says of itself."""

    summary: str
    details: str
    examples: tuple[str, ...]
    own_folder: bool = True
    """Whether each start opens a folder under outputs/."""


COMMANDS = {
    "run": Command(
        summary="train the policy with rollouts from the service",
        details="Starts the hosts, hands the service to the trainer named by trainer.kind, and writes every\n"
        "number to the run's folder. With output_dir=FOLDER of an earlier run, that run is resumed.",
        examples=(
            "taildraft run",
            "taildraft run experiment=looped",
            "taildraft run controller=ar tracker=wandb",
            "taildraft run service=two_hosts ray.address=auto",
        ),
    ),
    "calibrate": Command(
        summary="measure this machine and save its cost model",
        details="Times forwards of the policy and of each drafter, and saves the result for this machine\n"
        "and this policy. Jobs do it themselves when there is none.",
        examples=("taildraft calibrate", "taildraft calibrate policy.source=FOLDER out=calibration.json"),
    ),
    "verify": Command(
        summary="prove on this machine that speculation changes no token",
        details="Compares plain decoding with every drafter, draft length, batch and number of hosts.\n"
        "Exit code 0: all the same; 1: a difference was found and is shown.",
        examples=("taildraft verify policy=smollm2", "taildraft verify cut=true out=verify.json"),
    ),
    "evaluate": Command(
        summary="compare drafts with plain decoding: exactness, laws, speed",
        details="Reused states against a serial forward, free texts, sampling laws, then a sweep of draft\n"
        "length, concurrency and length in interleaved trials; one JSON and one HTML page. Exit code 0: all\n"
        "equal; 1: a difference was found and is shown. Speed stands beside its goals and decides nothing.",
        examples=(
            "taildraft evaluate policy=looped",
            "taildraft evaluate policy=looped parts=[sweep] drafters=[wavefront] concurrencies=[1]",
            "taildraft evaluate policy=smollm2 out=evaluate.json html=evaluate.html max_minutes=10",
        ),
    ),
    "bench": Command(
        summary="measure against plain decoding and other engines",
        details="Arms are interleaved and compared pair by pair; out=FILE writes one JSON with all\n"
        "results and the conditions they were measured under.",
        examples=(
            "taildraft bench workload=drain out=drain.json",
            "taildraft bench workload=fixed batches=[1,2]",
            "taildraft bench workload=steps max_minutes=8",
            "taildraft bench workload=peers batches=[1,4] max_minutes=8",
        ),
    ),
    "report": Command(
        summary="write one self-contained HTML page about a run",
        details="Reads the run's JSONL. Without runs=[...] the newest run under outputs is taken; without\n"
        "out=FILE the page is written beside the run's numbers. Several runs are compared on one page.",
        examples=("taildraft report", "taildraft report runs=[outputs/run/FOLDER] out=report.html"),
        own_folder=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Writes nothing to stdout but results and help."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return OK if arguments else MISUSED
    if arguments[0] == "--version":
        sys.stdout.write(f"taildraft {_version()}\n")
        return OK
    command, overrides = arguments[0], arguments[1:]
    if command not in COMMANDS:
        return _refuse(f"unknown command {command!r}; known: {', '.join(COMMANDS)}")
    try:
        if {"-h", "--help"} & set(overrides):
            sys.stdout.write(_help(command))
            return OK
        return _run(command, overrides)
    except ConfigError as error:
        return _refuse(f"{command}: {error}")
    except RolloutError as error:
        say(f"taildraft {command}: {type(error).__name__}: {error}")
        return FAILED
    except KeyboardInterrupt:
        say(f"taildraft {command}: interrupted")
        return INTERRUPTED


def _run(command: str, overrides: Sequence[str]) -> int:
    from rollout.guard import assert_own_packages

    assert_own_packages()  # before anything is imported from the packages it is about
    from controller.policies import baseline_problem
    from drafters.registry import check_names
    from rollout.jobs.compose import compose_job
    from rollout.jobs.door import check_trainer
    from rollout.policy.place import check_source
    from rollout.run_folder import open_run_folder, save_config
    from rollout.settings import to_plain

    show = "--show" in overrides
    options = [o for o in overrides if o.startswith("-") and o != "--show"]
    if options:
        raise ConfigError(f"unknown option {options[0]}; known: --help, --show; settings are name=value")
    job = compose_job(command, [o for o in overrides if o != "--show"])
    check_trainer(job)
    if show:
        import yaml

        sys.stdout.write(yaml.safe_dump(to_plain(job), sort_keys=False, allow_unicode=True))
        return OK
    _configure_logging()
    if COMMANDS[command].own_folder:
        try:
            check_names(job.drafter.names)
            check_names(job.verify.drafters, path="verify.drafters")
            check_names(job.evaluate.drafters, path="evaluate.drafters")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if command == "run":  # the only one that decodes as the controller settings say
            problem = baseline_problem(
                job.controller, dict.fromkeys(job.drafter.names, job.drafter.max_gamma)
            )
            if problem:
                raise ConfigError(problem)
        check_source(job.policy)
        folder = open_run_folder(command, output_dir=job.output_dir, run_id=job.run_id)
        job = dataclasses.replace(job, output_dir=str(folder.path), run_id=folder.run_id)
        save_config(folder, to_plain(job))
        say(f"taildraft {command}: {'resuming' if folder.resumed else 'writing to'} {_short(folder.path)}")
    verdict = importlib.import_module(f"rollout.jobs.{command}").main(job)
    return int(verdict)


def _configure_logging() -> None:
    level = os.environ.get("TAILDRAFT_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"TAILDRAFT_LOG: no level {level!r}; known: DEBUG, INFO, WARNING, ERROR")
    # Other libraries' bars would tear our live line, and their advice is for whoever calls them.
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    for name in ("rollout", "drafters", "controller", "trainers_bridge"):
        logging.getLogger(name).setLevel(level)


def _overview() -> str:
    lines = [
        "taildraft: lossless speculative rollouts for reinforcement learning",
        "",
        "usage: taildraft COMMAND [SETTING=VALUE ...]",
        "",
        *(f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()),
        "",
        "  taildraft COMMAND --help   what it does, its own settings, examples",
        "  taildraft COMMAND --show   print the resolved settings and stop",
        "  taildraft --version",
        "",
        "exit code: 0 yes, 1 no, 2 not understood, 130 interrupted. TAILDRAFT_LOG=INFO says more.",
    ]
    return "\n".join(lines) + "\n"


QUOTING = r"""
Settings are Hydra overrides: GROUP=CHOICE picks a file of conf/GROUP, NAME.NAME=VALUE sets one value.
Quote for the shell first, then for Hydra; strings in double quotes inside single ones are taken as they are:
  'task.stop=["a,b","x=y","50%"]'    a list of strings; "" is the empty one
  $'task.stop=["\n#"]'               a real newline: the shell writes it, Hydra has no escapes for it
  'task.stop=["\${x}"]'              a dollar brace; without the backslash it names another setting
  "tracker.name='123'"               a string of digits
"""


def _help(command: str) -> str:
    """Say what a command does and which settings it has. Imports settings only, which are light."""
    about = COMMANDS[command]
    text = [f"usage: taildraft {command} [SETTING=VALUE ...]", "", about.details, ""]
    own = _own_settings(command)
    if own:
        text += ["its own settings (no prefix needed) and their defaults:", *own, ""]
    text += ["groups (GROUP=CHOICE):", *_groups(), "", "examples:", *(f"  {e}" for e in about.examples)]
    return "\n".join(text) + "\n" + QUOTING


def _own_settings(command: str) -> list[str]:
    from rollout.job_config import JobConfig
    from rollout.settings import setting_names, to_plain

    if command not in setting_names(JobConfig):
        return []
    return [f"  {name}={_as_value(value)}" for name, value in to_plain(getattr(JobConfig(), command)).items()]


def _groups() -> list[str]:
    from rollout.paths import config_dir

    folder = config_dir()
    groups = sorted(g for g in folder.iterdir() if g.is_dir())
    return [f"  {g.name}: {', '.join(sorted(p.stem for p in g.glob('*.yaml')))}" for g in groups]


def _as_value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("taildraft")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _short(path: os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def _refuse(message: str) -> int:
    say(f"taildraft: {message}")
    return MISUSED


if __name__ == "__main__":
    sys.exit(main())
