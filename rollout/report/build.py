"""One self-contained HTML page about one run or several: no scripts, no fonts, nothing fetched."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rollout.output_files import writable, write_result
from rollout.report.journal import Journal, read_journal
from rollout.report.panel import Panel
from rollout.report.panels import PANELS
from rollout.report.summary import summary_row
from rollout.report.table import table

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.2em;margin:1.6em 0 .4em}h3{font-size:1em;margin:.2em 0}
.panels{columns:2 520px;column-gap:1.2em}
section{border:1px solid #8884;border-radius:8px;padding:.8em 1em;margin:0 0 1.2em;overflow-x:auto}
section{break-inside:avoid}
section.empty{opacity:.7}section.whole{column-span:all}
.drawings{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:0 1.5em}
svg{width:100%;max-width:760px;height:auto}svg text{font-size:11px;fill:currentColor}
svg.bar{display:block;width:15em;height:1em}
.axis{stroke:currentColor;fill:none}.grid{stroke:currentColor;stroke-opacity:.13;fill:none}
.legend{font-size:.85em;display:flex;flex-wrap:wrap;gap:.2em 1.2em}
.key span{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.note{font-size:.88em;opacity:.8;margin:.4em 0 0}
table{border-collapse:collapse;font-size:.92em;font-variant-numeric:tabular-nums}
td,th{padding:.15em .5em;text-align:right}
td:not(.word){white-space:nowrap}
td.word,th.word{text-align:left}td.loud{color:#d11a2a;font-weight:bold}
td:first-child,th:first-child{text-align:left;white-space:nowrap}
th{font-size:.88em;vertical-align:bottom}
tr+tr{border-top:1px solid #8883}.wide{overflow-x:auto}pre{white-space:pre-wrap}summary{margin:.4em 0}
@media(max-width:640px){svg text{font-size:16px}td.word+td.word{min-width:11em}}
"""


def build(run_dir: Path, out: Path) -> Path:
    """Write the page of one run to ``out`` and return it. Raises as ``build_all``."""
    return build_all([run_dir], out)


def build_all(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one page of several runs, in the order given, to ``out`` and return it.

    Raises ``JournalError`` for a run that cannot be read, ``ConfigError`` where nothing can be written.
    """
    journals = [read_journal(folder) for folder in run_dirs]
    write_result(writable(out, "report.out"), page(journals), "report.out")
    return out


def page(journals: Sequence[Journal]) -> str:
    """Return the page as HTML."""
    parts = []
    if len(journals) > 1:
        parts.append(_comparison(journals))
    for journal in journals:
        panels = "".join(section(make(journal)) for make in PANELS)
        parts.append(
            f'<h2>{escape(journal.folder.name)}</h2>{_headline(journal)}<div class="panels">{panels}</div>'
        )
    return document("taildraft report", "".join(parts))


def document(title: str, body: str) -> str:
    """Return a whole page around ``body``, which is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{body}</body></html>\n"
    )


def section(panel: Panel) -> str:
    """Return a panel as HTML, with its title and note."""
    kind = ' class="empty"' if panel.empty else ' class="whole"' if panel.wide else ""
    note = f'<p class="note">{escape(panel.note)}</p>'
    return f"<section{kind}><h3>{escape(panel.title)}</h3>{panel.body}{note}</section>"


def _headline(journal: Journal) -> str:
    facts = [f"{name}: {value}" for name, value in summary_row(journal).items()]
    text = f"<p>{escape('; '.join(facts))}.</p>"
    if not journal.ended:
        text += "<p><strong>This run has not ended: it still goes on or was interrupted.</strong></p>"
    for title, content in (("Summary", journal.summary), ("Settings", journal.settings)):
        if content:
            shown = escape(json.dumps(_rounded(content), indent=1))
            text += f"<details><summary>{title} of the run</summary><pre>{shown}</pre></details>"
    return text


def _comparison(journals: Sequence[Journal]) -> str:
    """Return a table with one row per run."""
    rows = [{"run": journal.folder.name, **summary_row(journal)} for journal in journals]
    return table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _rounded(value: Any) -> Any:
    """Return plain data with its numbers as short as a reader wants them."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
