"""The documents refer to what exists: commands, scripts, settings, files."""

import re
import shlex
from pathlib import Path

import pytest

from rollout.cli import COMMANDS
from rollout.jobs.compose import compose_job
from rollout.jobs.door import check_trainer

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(ROOT.glob("*.md"))
TOOLS = {
    "cd",
    "git",
    "export",
    "source",
    "python",
    "python3",
    "pip",
    "ray",
    "wandb",
    "trackio",
    "tensorboard",
}


def commands_of(document: Path) -> list[str]:
    """Return the commands of the fenced shell blocks, continued lines joined, comments left out."""
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", document.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.strip().startswith("#")
    ]


def check_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "bash":
        assert (ROOT / rest[0]).is_file(), f"no script {rest[0]}"
    elif Path(program).name == "taildraft":
        check_taildraft(rest)
    elif program.startswith(".venv/bin/"):
        assert Path(program).name in {"python", "pytest", "ruff", "mypy", "lint-imports"}, program
        for word in rest:
            if word.startswith(("tests/", "scripts/", "rollout/", "conf/")):
                assert (ROOT / word.partition("::")[0]).exists(), f"no file {word}"
    else:
        assert program in TOOLS or (ROOT / program).is_file(), f"unknown command {program}"


def check_taildraft(words: list[str]) -> None:
    if words and words[0].startswith("--"):
        assert words[0] in ("--help", "--version")
        return
    command, *overrides = words
    assert command in COMMANDS
    settings = [w for w in overrides if w not in ("--help", "--show", "|", "less")]
    check_trainer(compose_job(command, settings))


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_command_of_a_document_is_understood(document: Path) -> None:
    for line in commands_of(document):
        check_command(line)


@pytest.mark.parametrize("line", ["bash scripts/nothing.sh", "taildraft fly", "frobnicate x"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_file_a_document_links_to_exists(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_documents_a_newcomer_looks_for_are_there() -> None:
    wanted = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"}
    assert wanted <= {p.name for p in ROOT.iterdir()}
