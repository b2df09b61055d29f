"""Checks what a built wheel holds: every file that must ship, and none that must not.

python scripts/check_wheel.py dist/taildraft-*.whl
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout", "drafters", "controller", "trainers_bridge")
SHIPPED = (".py", ".h", ".cpp", ".typed", ".json", ".txt", ".html", ".css", ".js")


def main(wheels: list[str]) -> int:
    """Return 0 when every wheel is whole, else say what is wrong and return 1."""
    problems = [f"{wheel}: {problem}" for wheel in wheels for problem in problems_of(Path(wheel))]
    for problem in problems or [f"{', '.join(Path(w).name for w in wheels)}: complete"]:
        print(problem)
    return 1 if problems or not wheels else 0


def problems_of(wheel: Path) -> list[str]:
    """Return what is missing from, or does not belong in, a wheel built from this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = expected_files()
    found = {n for n in names if not n.partition("/")[0].endswith(".dist-info")}
    missing = [f"missing: {n}" for n in sorted(expected - found)]
    extra = [f"does not belong: {n}" for n in sorted(found - expected)]
    required = [f"{p}/py.typed" for p in PACKAGES] + ["rollout/conf/config.yaml"]
    absent = [f"required: {n}" for n in required if n not in found]
    licence = [] if any(n.endswith("licenses/LICENSE") for n in names) else ["required: the licence"]
    return [*missing, *extra, *absent, *licence]


def expected_files() -> set[str]:
    """Return the files of the four packages, and the configuration under ``rollout/conf``."""
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in SHIPPED and "__pycache__" not in path.parts
    }
    settings = {
        "rollout/conf/" + path.relative_to(ROOT / "conf").as_posix()
        for path in (ROOT / "conf").rglob("*.yaml")
    }
    return sources | settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
