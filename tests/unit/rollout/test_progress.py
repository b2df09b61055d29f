"""Progress: short work is silent, long work is alive, and a failure says that it stopped."""

import io
import re
import time

from rollout.progress import Progress


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing() -> None:
    out = io.StringIO()
    with Progress("loading", total=3, stream=out) as progress:
        progress.advance(3)
    assert out.getvalue() == ""


def test_long_work_speaks_while_a_single_call_blocks_and_sums_up_at_the_end() -> None:
    out = io.StringIO()
    with Progress("sweep", total=4, unit="points", stream=out, quiet_s=0.05, every_s=0.05) as progress:
        progress.advance(note="policy")
        time.sleep(0.3)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert re.match(r"sweep: 1/4 points, 0\.\d s \(about \d+ s left\) - policy$", lines[0])
    assert lines[-1].endswith("done")


def test_work_that_fails_is_not_called_done() -> None:
    out = io.StringIO()
    progress = Progress("sweep", stream=out, quiet_s=0.0)
    progress.__enter__()
    progress.__exit__(KeyError, KeyError("x"), None)
    assert out.getvalue().splitlines()[-1].endswith("stopped")


def test_hushed_work_says_nothing_more() -> None:
    out = io.StringIO()
    with Progress("waiting", stream=out, quiet_s=0.05) as progress:
        progress.hush()
        time.sleep(0.1)
    assert out.getvalue() == ""


def test_a_terminal_gets_one_live_line() -> None:
    out = Terminal()
    with Progress("sweep", total=2, stream=out, quiet_s=0.05) as progress:
        time.sleep(0.15)
        progress.advance()
        time.sleep(0.4)
    text = out.getvalue()
    assert "sweep: 1/2 steps" in text
    assert text.rstrip().endswith("done")
