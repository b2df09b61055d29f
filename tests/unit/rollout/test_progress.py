"""Progress: short work is silent, long work is alive, and a failure says that it stopped."""

import io
import re
import time
from collections.abc import Callable

from rollout.progress import Progress

PATIENCE_S = 60.0
"""Until what another thread should do is given up: as slow as a machine may be."""


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.005)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing() -> None:
    out = io.StringIO()
    with Progress("loading", total=3, stream=out, quiet_s=PATIENCE_S) as progress:
        progress.advance(3)
    assert out.getvalue() == ""


def test_long_work_speaks_while_a_single_call_blocks_and_sums_up_at_the_end() -> None:
    out = io.StringIO()
    with Progress("sweep", total=4, unit="points", stream=out, quiet_s=0.05, every_s=0.05) as progress:
        progress.advance(note="policy")
        until(lambda: out.getvalue().count("policy\n") >= 2)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert re.match(r"sweep: 1/4 points, \d+\.\d s \(about \d+ s left\) - policy$", lines[-2])
    assert lines[-1].endswith("done")


def test_work_that_goes_on_estimates_what_is_left_from_its_own_pace() -> None:
    progress = Progress("sweep", total=300, done=200, stream=io.StringIO())
    progress._start_s -= 10.0
    assert re.match(r"sweep: 200/300 steps, 10\.\d s$", progress.line())  # no pace yet
    progress.advance(20)
    assert re.match(r"sweep: 220/300 steps, 10\.\d s \(about 40 s left\)$", progress.line())


def test_work_that_fails_is_not_called_done() -> None:
    out = io.StringIO()
    progress = Progress("sweep", stream=out, quiet_s=0.0)
    progress.__enter__()
    progress.__exit__(KeyError, KeyError("x"), None)
    assert out.getvalue().splitlines()[-1].endswith("stopped")


def test_hushed_work_says_nothing_more() -> None:
    out = io.StringIO()
    with Progress("waiting", stream=out, quiet_s=0.01, every_s=0.01) as progress:
        until(lambda: out.getvalue() != "")
        progress.hush()
        assert progress._thread is not None
        progress._thread.join(PATIENCE_S)  # it ends, and may end a line before
        said = out.getvalue()
    assert out.getvalue() == said, "not that it is done either"
    assert "done" not in said


def test_a_terminal_gets_one_live_line() -> None:
    out = Terminal()
    with Progress("sweep", total=2, stream=out, quiet_s=0.05) as progress:
        until(lambda: "sweep: 0/2 steps" in out.getvalue())
        progress.advance()
        until(lambda: "sweep: 1/2 steps" in out.getvalue())
    text = out.getvalue()
    assert text.rstrip().endswith("done")
