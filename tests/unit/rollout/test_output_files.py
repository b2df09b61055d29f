"""What a command writes: refused before any work where it cannot be, and never there in part."""

import os
from pathlib import Path
from threading import Thread

import pytest

from rollout.errors import ConfigError
from rollout.output_files import check_apart, output_path, writable, write_result, write_whole


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    path = output_path(str(tmp_path / "a" / "b" / "x.json"), folder=None, name="y.json", setting="bench.out")
    assert path.parent.is_dir()
    assert not path.exists()
    assert output_path(None, folder=str(tmp_path), name="y.json", setting="bench.out") == tmp_path / "y.json"


def test_where_nothing_can_be_written_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^evaluate\.out: cannot make .*; name another file$"):
        writable(tmp_path / "file" / "x.json", "evaluate.out")
    with pytest.raises(ConfigError, match=r"^evaluate\.out: .* is a folder; name a file in it$"):
        writable(tmp_path, "evaluate.out")
    with pytest.raises(ConfigError, match=r"^evaluate\.out: no file given"):
        output_path(None, folder=None, name="x.json", setting="evaluate.out")


def test_two_results_are_never_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^a\.html and a\.out both name"):
        check_apart(tmp_path / "x", "a.html", tmp_path / "y" / ".." / "x", "a.out")
    check_apart(tmp_path / "x", "a.html", tmp_path / "y", "a.out")


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_who_is_interrupted_leaves_the_file_as_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "evaluate.json"
    write_whole(path, "before\n")
    real = getattr(Path, step)

    def interrupted(self: Path, *args: object, **settings: object) -> None:
        if step == "write_text":
            real(self, "aft", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "after\n")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["evaluate.json"]
    assert path.read_text() == "before\n"


def test_a_link_is_written_through_and_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to(tmp_path / "results" / "one.json")
    (tmp_path / "results").mkdir()
    write_whole(tmp_path / "latest.json", "text\n")
    assert (tmp_path / "latest.json").is_symlink()
    assert (tmp_path / "results" / "one.json").read_text() == "text\n"
    pipe, heard = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_whole(writable(pipe, "report.out"), "text\n")
    reader.join()
    assert heard == ["text\n"]
    assert pipe.is_fifo()


def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 250 + ".json"), "text\n")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_after_all_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^verify\.out: cannot write .*/gone/x\.json: "):
        write_result(tmp_path / "gone" / "x.json", "text\n", "verify.out")
