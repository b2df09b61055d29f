"""The result of workload ``steps`` drawn: tokens per second over batch and over context. Measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.bench.cliffs import AXES, Axis
from rollout.bench.step_result import cliff_line
from rollout.output_files import write_result
from rollout.report.build import document, section
from rollout.report.panel import Panel, no_data
from rollout.report.svg import Plot, axis_over, colour

HEIGHT = 380
CLIFF = "#d11a2a"

_FIELD = {"batch": "batch", "context": "context_tokens"}
_LABEL = {"batch": "sequences", "context": "tokens of context per sequence"}


def write_page(data: Mapping[str, Any], out: Path) -> None:
    """Write the page of a result."""
    write_result(out, step_page(data), "bench.html")


def step_page(data: Mapping[str, Any]) -> str:
    """Return the page of a result as HTML: one self-contained file."""
    left = [f"batch {s['batch']} at {s['context_tokens']}: {s['reason']}" for s in data["left_out"]]
    panels = "".join(section(speeds_panel(data, axis)) for axis in AXES)
    body = f'<div class="panels">{panels}</div>'
    if left:
        body += section(Panel(title="Left out", body="", note="; ".join(left) + "."))
    return document("taildraft bench: what a round costs", body)


def speeds_panel(data: Mapping[str, Any], axis: Axis) -> Panel:
    """Return plain decoding's tokens per second over ``axis``, a line per value of the other."""
    other: Axis = "context" if axis == "batch" else "batch"
    title = f"Tokens per second over {axis}"
    points: Sequence[Mapping[str, Any]] = data["speeds"]
    if not points:
        return no_data(title, "no plain round was timed.")
    values = sorted({float(p[_FIELD[axis]]) for p in points})
    plot = Plot(
        x=replace(axis_over(_LABEL[axis], values, scale="log"), marks=tuple(values)),
        y=axis_over(
            "tokens/s", [p[k] for p in points for k in ("tokens_per_s", "bound_tokens_per_s")], scale="log"
        ),
        height=HEIGHT,
    )
    for i, value in enumerate(sorted({p[_FIELD[other]] for p in points})):
        line = sorted((p for p in points if p[_FIELD[other]] == value), key=lambda p: float(p[_FIELD[axis]]))
        plot.name(f"{other} {value}", colour(i))
        for key, dashed in (("tokens_per_s", False), ("bound_tokens_per_s", True)):
            plot.line([(p[_FIELD[axis]], p[key]) for p in line], colour(i), dashed=dashed)
        for p in line:
            said = (
                f"batch {p['batch']}, context {p['context_tokens']}: {p['tokens_per_s']:.1f} tokens/s, "
                f"bound {p['bound_tokens_per_s']:.1f}"
            )
            plot.dot(p[_FIELD[axis]], p["tokens_per_s"], colour(i), title=said)
    cliffs = [cliff for cliff in data["cliffs"] if cliff["axis"] == axis]
    for cliff in cliffs:
        _mark(plot, cliff, points, axis)
    if cliffs:
        plot.name("cliff: a drop of more than 10% that the bounds do not explain", CLIFF)
    note = "Dashed: what bytes and arithmetic allow, measured in the same minutes. "
    note += "; ".join(cliff_line(cliff) for cliff in cliffs) or "No cliff between neighbours"
    return Panel(title=title, body=plot.svg(), note=f"{note}.")


def _mark(plot: Plot, cliff: Mapping[str, Any], points: Sequence[Mapping[str, Any]], axis: Axis) -> None:
    """Draw a cliff over the line it stands on, from its first neighbour to its second."""
    spots = zip(cliff["batch"], cliff["context_tokens"], strict=True)
    speed = {(p["batch"], p["context_tokens"]): p["tokens_per_s"] for p in points}
    ends = [({"batch": b, "context": c}[axis], speed[b, c]) for b, c in spots]
    plot.line(ends, CLIFF)
    for x, y in ends:
        plot.dot(x, y, CLIFF, title=cliff_line(cliff), radius=5.0)
