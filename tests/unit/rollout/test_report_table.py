"""Tables a reader can take in: words to the left, numbers to the right and short, failures loud."""

import re

from rollout.report.table import table


def cells(html: str) -> list[list[tuple[str, str]]]:
    """Return class and text of every cell, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r'<t[dh](?: class="([^"]*)")?>(.*?)</t[dh]>', row) for row in rows]


def test_a_column_with_a_word_in_it_stands_to_the_left_and_numbers_to_the_right() -> None:
    rows = [["plain", 1, "3 of 4", "+1.5%", None], ["w4", 2.5, "10 of 12", "-3%", "late"]]
    head, *body = cells(table(("arm", "x", "kept", "error", "why"), rows))
    assert [kind for kind, _ in head] == ["word", "", "", "", "word"]
    assert all([kind for kind, _ in row] == ["word", "", "", "", "word"] for row in body)
    assert body[0][-1] == ("word", "-")


def test_numbers_have_the_digits_a_reader_needs() -> None:
    rows = [[0.35753, 1541.32, 62.2701, 0.0, 1e-12, 907]]
    (_, row) = cells(table(tuple("abcdef"), rows))
    assert [text for _, text in row] == ["0.358", "1541", "62.3", "0", "1e-12", "907"]


def test_what_failed_is_loud_and_text_is_escaped() -> None:
    (_, ok, bad) = cells(table(("verdict", "found"), [["ok", "a < b"], ["FAIL", "x"]], failed="FAIL"))
    assert ok == [("word", "ok"), ("word", "a &lt; b")]
    assert bad[0] == ("word loud", "FAIL")


def test_a_wide_table_scrolls_by_itself() -> None:
    assert table(("a",), [[1]]).startswith('<div class="wide"><table>')
