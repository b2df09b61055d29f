"""What the layout promises: docstring-only packages, light settings, one file per heavy thing, plain text."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rollout.errors
from rollout.errors import RolloutError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "drafters", "controller", "trainers_bridge")
SOURCES = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".h", ".cpp", ".txt", ".json", ".typed", ""}


def ours() -> Iterator[Path]:
    """Yield every text file of the project."""
    folders = [ROOT / name for name in (*PACKAGES, "conf", "tests", "scripts", ".ci")]
    found = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    found += [p for p in ROOT.iterdir() if p.is_file()]
    for path in sorted(found):
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts and path.name != ".git":
            yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {p.parent for p in SOURCES}
    assert not [name_of(f) for f in folders if not (f / "__init__.py").is_file()]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=name_of)
def test_a_packages_init_is_a_docstring_and_imports_nothing(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    assert body, "a docstring at least"
    first = body[0]
    assert isinstance(first, ast.Expr)
    assert isinstance(first.value, ast.Constant)
    assert isinstance(first.value.value, str)
    marker = [ast.unparse(node) for node in body[1:]]
    top = path.parent.parent == ROOT
    assert marker == (["__dist__ = 'taildraft'"] if top else [])


def test_every_package_is_typed() -> None:
    assert not [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()]


def test_no_package_hides_behind_a_name_that_says_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "core", "misc"}
    assert not [name_of(p) for p in SOURCES if p.stem in empty or p.parent.name in empty]


def test_tests_are_no_package_and_shadow_none() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


SETTINGS = [
    "controller.config",
    "controller.types",
    "drafters.config",
    "rollout.config",
    "rollout.job_config",
    "rollout.jobs.door",
    "rollout.settings",
    "rollout.types",
    "rollout.errors",
    "trainers_bridge.config",
]


def test_settings_import_nothing_heavy() -> None:
    """In one process: what one of them imported would still be there after the others."""
    code = (
        "import importlib, sys\n"
        "names = {'torch', 'ray', 'vllm', 'transformers', 'trl', 'hydra', 'wandb', 'numpy'}\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    heavy = names & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{module} imported {sorted(heavy)}')\n"
    )
    command = [sys.executable, "-c", code, *SETTINGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ONE_FILE = {
    "hydra": ["rollout/jobs/compose.py"],
    "wandb": ["rollout/tracking/wandb_run.py"],
    "trackio": ["rollout/tracking/trackio_run.py"],
    "tensorboard": ["rollout/tracking/tensorboard_run.py"],
    "pyarrow": ["rollout/tracking/parquet.py"],
    "trl": ["trainers_bridge/trl.py"],
    "bitsandbytes": ["drafters/int4/nf4.py"],
}


@pytest.mark.parametrize("package", ONE_FILE)
def test_a_heavy_dependency_lives_in_one_file(package: str) -> None:
    importers = [name_of(p) for p in SOURCES if imports(p, package)]
    assert importers == [name for name in ONE_FILE[package] if (ROOT / name).exists()]


@cache
def text_of(path: Path) -> str:
    """Return what is in a file."""
    return path.read_text()


def imports(path: Path, package: str) -> bool:
    """Tell whether a file imports a package; most do not even name it, and are not parsed."""
    return package in text_of(path) and package in imported_by(path)


@cache
def imported_by(path: Path) -> set[str]:
    """Return the top-level packages a file imports, anywhere in it; torch's tensorboard counts as such."""
    found = set()
    for node in ast.walk(ast.parse(text_of(path))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        for name in names:
            found.add("tensorboard" if name == "torch.utils.tensorboard" else name.partition(".")[0])
    return found


def test_only_the_door_leads_up_to_the_trainers() -> None:
    lower = [p for p in SOURCES if p.relative_to(ROOT).parts[0] != "trainers_bridge"]
    assert not [name_of(p) for p in lower if imports(p, "trainers_bridge")]
    by_name = [name_of(p) for p in lower if re.search(r"import_module\(.*trainers_bridge", text_of(p))]
    assert by_name == ["rollout/jobs/door.py"]


ERRORS = [
    value
    for value in vars(rollout.errors).values()
    if isinstance(value, type) and issubclass(value, RolloutError)
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_every_error_crosses_a_process_border_as_itself(error: type[RolloutError]) -> None:
    there_and_back = pickle.loads(pickle.dumps(error("what was wrong")))
    assert type(there_and_back) is error
    assert str(there_and_back) == "what was wrong"


# ---- plain text -----------------------------------------------------------------------------------


def test_all_text_is_ascii() -> None:
    assert not [name_of(p) for p in ours() if not p.read_bytes().isascii()]


def test_a_promise_of_later_work_has_a_number() -> None:
    word = "TO" + "DO"
    bare = re.compile(rf"\b{word}\b(?!\(#\d+\))|\bFIX" + r"ME\b")
    assert not [name_of(p) for p in ours() if p.name != "test_architecture.py" and bare.search(p.read_text())]


MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:work|root|home|tmp|opt|mnt|Users)/\w")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|huggingface\.co|hf\.co/|download\.pytorch|anaconda\.org|ghcr\.io"
)


def test_no_file_names_a_place_on_one_machine_or_a_registry() -> None:
    here = Path(__file__).name
    hits = [
        f"{name_of(p)}: {match.group()}"
        for p in ours()
        if p.name != here
        for match in [MACHINE_PATH.search(p.read_text()), REGISTRY.search(p.read_text())]
        if match
    ]
    assert not hits


@pytest.mark.parametrize("text", ["see /tmp/x", 'Path("/home/me")', "at /work/a"])
def test_the_search_for_machine_paths_finds_one(text: str) -> None:
    assert MACHINE_PATH.search(text)
    assert not MACHINE_PATH.search("a share/tmp/x or $HOME/tmp/y")


@pytest.mark.slow
def test_every_module_can_be_imported_or_names_the_extra_it_needs() -> None:
    optional = {"trackio", "tensorboard", "pyarrow", "trl", "datasets", "vllm", "bitsandbytes", "flash_attn"}
    wanting = {}
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            wanting[module] = str(error.name).partition(".")[0]
    assert not {module: name for module, name in wanting.items() if name not in optional}
