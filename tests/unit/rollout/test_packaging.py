"""What is installed is ours and whole: foreign packages of our names are refused, wheels are checked."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from rollout.guard import PACKAGES, assert_own_packages
from rollout.paths import cache_dir, config_dir

ROOT = Path(__file__).resolve().parents[3]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_our_own_packages_pass_the_guard() -> None:
    assert_own_packages()


def guard_beside(stray: Path) -> subprocess.CompletedProcess[str]:
    """Run the guard in a process that finds ``stray`` before our own folders, once rollout is imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import rollout.guard; "
        f"sys.path.insert(0, {str(stray)!r}); rollout.guard.assert_own_packages()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=stray, capture_output=True, text=True, check=False
    )


def test_a_stray_controller_is_refused_naming_both_places(tmp_path: Path) -> None:
    (tmp_path / "controller.py").write_text("x = 1\n")
    done = guard_beside(tmp_path)
    assert done.returncode != 0
    assert str(tmp_path / "controller.py") in done.stderr
    assert str(ROOT / "controller") in done.stderr


def test_another_distributions_package_of_our_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "__init__.py").write_text("__dist__ = 'somebody-else'\n")
    assert str(tmp_path / "drafters") in guard_beside(tmp_path).stderr


def test_a_folder_that_is_no_package_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "controller").mkdir()
    assert guard_beside(tmp_path).returncode == 0


def test_the_command_line_refuses_to_run_beside_a_stray_package(tmp_path: Path) -> None:
    (tmp_path / "drafters.py").write_text("x = 1\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
        "from rollout.cli import main; sys.exit(main(['run', '--show']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "drafters" in done.stderr
    assert done.stdout == ""


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("TAILDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "taildraft"


def test_the_configuration_is_found_in_a_checkout() -> None:
    assert (config_dir() / "config.yaml").is_file()


# ---- the wheel ------------------------------------------------------------------------------------


def wheel_with(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def whole() -> set[str]:
    expected: set[str] = load_script("check_wheel").expected_files()
    return expected | {"taildraft-0.dist-info/licenses/LICENSE", "taildraft-0.dist-info/METADATA"}


def test_the_wheel_check_passes_a_whole_wheel(tmp_path: Path) -> None:
    assert load_script("check_wheel").problems_of(wheel_with(tmp_path / "a.whl", whole())) == []


@pytest.mark.parametrize(
    "lost",
    ["rollout/conf/config.yaml", "drafters/kernels/simd.h", "controller/py.typed", "rollout/cli.py"],
)
def test_the_wheel_check_misses_no_lost_file(tmp_path: Path, lost: str) -> None:
    assert lost in whole()
    problems = load_script("check_wheel").problems_of(wheel_with(tmp_path / "a.whl", whole() - {lost}))
    assert f"missing: {lost}" in problems


def test_the_wheel_check_finds_what_does_not_belong(tmp_path: Path) -> None:
    names = whole() | {"tests/unit/test_x.py"}
    problems = load_script("check_wheel").problems_of(wheel_with(tmp_path / "a.whl", names))
    assert problems == ["does not belong: tests/unit/test_x.py"]


# ---- the project file -----------------------------------------------------------------------------


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_core_dependencies_have_lower_bounds_only() -> None:
    table = project()["project"]
    assert isinstance(table, dict)
    for requirement in table["dependencies"]:
        assert ">=" in requirement
        assert not {"<", "==", "~="} & set(requirement.replace(">=", "")), requirement


def test_what_breaks_or_bloats_an_install_is_an_extra() -> None:
    table = project()["project"]
    assert isinstance(table, dict)
    core = " ".join(table["dependencies"])
    extras = table["optional-dependencies"]
    assert set(extras) >= {"trl", "flash", "vllm", "bnb", "report", "dev"}
    assert not [name for name in ("flash-attn", "vllm", "bitsandbytes", "trl>") if name in core]


def test_the_one_console_script_is_ours() -> None:
    table = project()["project"]
    assert isinstance(table, dict)
    assert table["scripts"] == {"taildraft": "rollout.cli:main"}
    assert set(PACKAGES) == {"rollout", "drafters", "controller", "trainers_bridge"}
