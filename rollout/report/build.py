"""One self-contained HTML page about one run or several: no scripts, no fonts, nothing fetched."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rollout.report.journal import Journal, read_journal
from rollout.report.panels import PANELS, Panel

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.2em;margin:1.6em 0 .4em}h3{font-size:1em;margin:.2em 0}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,560px),1fr));gap:1.2em}
section{border:1px solid #8884;border-radius:8px;padding:.8em 1em;overflow-x:auto}
section.empty{opacity:.7}
svg{width:100%;height:auto}svg text{font-size:11px;fill:currentColor}
.axis{stroke:currentColor;fill:none}.grid{stroke:currentColor;stroke-opacity:.13;fill:none}
.legend{font-size:.85em;display:flex;flex-wrap:wrap;gap:.2em 1.2em}
.key span{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.note{font-size:.88em;opacity:.8;margin:.4em 0 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15em .7em;text-align:right}
tr+tr{border-top:1px solid #8883}
"""


def build(run_dir: Path, out: Path) -> Path:
    """Write the page of one run to ``out`` and return it. Raises ``JournalError``."""
    return build_all([run_dir], out)


def build_all(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one page of several runs, in the order given, to ``out`` and return it."""
    journals = [read_journal(folder) for folder in run_dirs]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(journals), encoding="utf-8")
    return out


def page(journals: Sequence[Journal]) -> str:
    """Return the page as HTML."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>taildraft report</title><style>{STYLE}</style></head><body><h1>taildraft report</h1>",
    ]
    for journal in journals:
        panels = "".join(_section(make(journal)) for make in PANELS)
        parts.append(
            f'<h2>{escape(journal.folder.name)}</h2>{_headline(journal)}<div class="panels">{panels}</div>'
        )
    return "".join([*parts, "</body></html>\n"])


def _section(panel: Panel) -> str:
    kind = ' class="empty"' if panel.empty else ""
    note = f'<p class="note">{escape(panel.note)}</p>'
    return f"<section{kind}><h3>{escape(panel.title)}</h3>{panel.body}{note}</section>"


def _headline(journal: Journal) -> str:
    tokens = sum(int(c["tokens"]) for c in journal.completions)
    facts = [
        f"{len(journal.rounds)} rounds",
        f"{len(journal.completions)} completions, {tokens} tokens",
        f"{len(journal.steps)} trainer steps",
    ]
    drafted = sum(o.gamma for r in journal.rounds for o in r.outcomes)
    if drafted:
        accepted = sum(o.accepted for r in journal.rounds for o in r.outcomes)
        facts.append(f"{accepted} of {drafted} draft tokens accepted ({accepted / drafted:.1%})")
    text = f"<p>{escape('; '.join(facts))}.</p>"
    if journal.summary is None:
        return text
    shown = escape(json.dumps(journal.summary, indent=1))
    return f"{text}<details><summary>Summary of the run</summary><pre>{shown}</pre></details>"
