"""The evaluation as one self-contained HTML page, drawn from its JSON alone."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from rollout.report.build import document, section
from rollout.report.panel import Panel, no_data
from rollout.report.summary import processor_of
from rollout.report.svg import QUIET, Axis, Plot, axis_over, colour
from rollout.report.table import table

Data = Mapping[str, Any]

ENDINGS = {
    "done": "all that was asked for",
    "settled": "every ratio is known as well as was asked for",
    "max_pairs": "all trials were run",
    "max_minutes": "the time allowed was up before all trials were run",
    "another text": "an arm gave another text, and the sweep was stopped",
}
"""What the result's ``ending`` means to a reader."""

DEPTH = "Depth: loops of the policy after which drafts are read out."
"""What a drafter's depth means to a reader."""

SPREAD_K = 0.07
"""Drafters beside each other are drawn so far apart, in draft tokens: else intervals hide each other."""


def evaluation_page(data: Data) -> str:
    """Return the page as HTML."""
    panels = [
        goals(data),
        speed(data),
        lanes(data),
        questions(data),
        predicted_against_measured(data),
        latency(data),
        work(data),
        phases(data),
    ]
    checks = [findings(data), chains(data), generation(data)]
    body = (
        f"<p>{escape(_headline(data))}</p><h2>Checks</h2>"
        + "".join(section(panel) for panel in checks)
        + f'<h2>Speed</h2><div class="panels">{"".join(section(panel) for panel in panels)}</div>'
        + _conditions(data)
    )
    return document("taildraft evaluate", body)


def _headline(data: Data) -> str:
    failed = sum(not f["passed"] for f in data["findings"])
    count = len(data["findings"])
    verdict = f"DIFFERENT: {failed} of {count} checks failed" if failed else f"Equal: {count} checks passed"
    verdict = verdict if count else "NOT RUN: nothing could be checked"
    ended = ENDINGS.get(data["ending"], data["ending"]) if data["complete"] else "NOT COMPLETE"
    policy = data["conditions"]["config"]["policy"]["source"]
    return f"{policy}: {verdict}. {data['seconds']:.0f} s: {ended}."


# ---- checks ---------------------------------------------------------------------------------------


def findings(data: Data) -> Panel:
    """Every check and its verdict."""
    rows = [
        ["ok" if f["passed"] else "FAIL", f["part"], f["name"], f["detail"], f["seconds"]]
        for f in data["findings"]
    ]
    if not rows:
        return no_data("Verdicts", "no part with a verdict was run.")
    body = table(("verdict", "part", "check", "found", "s"), rows, failed="FAIL")
    return Panel(title="Verdicts", body=body, note="The exit code is 0 when every line says ok.")


def chains(data: Data) -> Panel:
    """Differences on fixed chains by loop."""
    title = "Reused drafts against a serial forward of full depth"
    if not data["chains"]:
        return no_data(
            title, "no drafter of this run reuses what it computed, or the part was not asked for."
        )
    rows = []
    for report in data["chains"]:
        planes = [p[side] for p in report["planes"] for side in ("keys", "values")]
        states = zip(report["states"], report["states_seen"], strict=True)
        rows.append(
            [
                f"{report['drafter']}, K {report['gamma']}",
                report["depth"],
                report["path"],
                report["positions"],
                "; ".join(f"{s['largest']:.3g} / {s['rms']:.3g} ({n})" if s else "-" for s, n in states),
                f"{max(p['largest'] for p in planes):.3g} / {max(p['rms'] for p in planes):.3g}",
                f"{report['logits']['largest']:.3g} / {report['logits']['rms']:.3g}",
                report["argmax_mismatches"],
                report["drafts_kept"],
                ", ".join(f"{rows / report['positions']:.3g}" for rows in report["rows_by_loop"]),
            ]
        )
    columns = (
        "drafter",
        "depth",
        "run in",
        "positions",
        "states by loop, max / rms (seen)",
        "worst KV plane, max / rms",
        "logits, max / rms",
        "argmax mismatches",
        "drafts kept",
        "times computed, by loop",
    )
    note = (
        "Every choice is forced to a given chain. Compiled calls are what serves: of the states they leave "
        "those that can be looked at are, and keys, values and logits of all positions; times computed are "
        "what their kernels counted. Pass by pass every state is seen. "
        f"{DEPTH} Each KV plane by itself is in the JSON."
    )
    if data["exit_gate"] is not None:
        shares = ", ".join(f"{share:.3f}" for share in data["exit_gate"]["leaves_after"])
        note += (
            f" The exit gate, which nobody obeys, would let a token of these chains go after "
            f"{data['exit_gate']['mean_loops']:.2f} loops on average; by loop {shares}."
        )
    return Panel(title=title, body=table(columns, rows), note=note)


def generation(data: Data) -> Panel:
    """Free texts against plain decoding."""
    title = "Free generation against plain decoding"
    if not data["generation"]:
        return no_data(title, "the part was not asked for.")
    rows = []
    for report in data["generation"]:
        first = report["first"]
        where = "-" if first is None else f"{first['difference']['position']}"
        margin = None if first is None else first["difference"]["margin"]
        rows.append(
            [
                f"{report['drafter']}, K {report['gamma']}",
                report["depth"] or "-",
                report["batch"],
                f"{report['identical']} of {report['texts']}",
                f"{report['accepted']} of {report['drafted']}",
                where,
                margin,
                "-" if first is None else first["agrees_with"],
            ]
        )
    columns = (
        "drafter",
        "depth",
        "batch",
        "identical",
        "drafts kept",
        "first divergence at",
        "margin there",
        "replay agrees with",
    )
    note = f"Identical: every id and, where numerics are exact, every bit of all logprobs. {DEPTH}"
    return Panel(title=title, body=table(columns, rows), note=note)


# ---- speed ----------------------------------------------------------------------------------------


NAMES = "c8_t96: 8 texts at once, of 96 tokens each; k4: 4 draft tokens."
"""How results are named."""


def _spots(data: Data) -> dict[str, dict[str, Any]]:
    """Return the measured ratios by cell and arm, in the result's order."""
    spots: dict[str, dict[str, Any]] = {}
    for name, ratio in data["ratios"].items():
        concurrency, length, arm = name.removesuffix("_over_ar").split("_", 2)
        if ratio["values"]:
            spots.setdefault(f"{concurrency}_{length}_", {})[arm] = ratio
    return spots


def _at_depth(data: Data, drafter: str) -> str:
    """Name a drafter of the sweep with the depth its numbers have, where it has one."""
    depth = data["depths"].get(drafter)
    return f"{drafter} (depth {depth})" if depth else drafter


def _spot_name(prefix: str) -> str:
    concurrency, length = prefix.rstrip("_").split("_")
    return f"{concurrency[1:]} at once, {length[1:]} tokens"


def speed(data: Data) -> Panel:
    """Speed over plain decoding by drafter and K, a drawing per cell."""
    title = "Speed over plain decoding"
    spots = _spots(data)
    if not spots:
        return no_data(title, "nothing was swept.")
    drawings = []
    for prefix, ratios in spots.items():
        by_drafter: dict[str, list[tuple[int, Any]]] = {}
        for arm, ratio in ratios.items():
            drafter, _, gamma = arm.rpartition("_k")
            by_drafter.setdefault(drafter, []).append((int(gamma), ratio))
        gammas = [g for points in by_drafter.values() for g, _ in points]
        intervals = {arm: r["ci90"] or (r["min"], r["max"]) for arm, r in ratios.items()}
        ends = [end for r in ratios.values() for end in (r["min"], r["max"])]
        ends += [end for interval in intervals.values() for end in interval]
        plot = Plot(
            x=Axis(label="draft tokens (K)", low=min(gammas) - 0.5, high=max(gammas) + 0.5, whole=True),
            y=axis_over("times plain decoding", [*ends, 1.0], headroom=True, footroom=True),
            height=220,
        )
        plot.line([(plot.x.low, 1.0), (plot.x.high, 1.0)], QUIET, dashed=True)
        for index, (drafter, points) in enumerate(by_drafter.items()):
            tint, shift = colour(index), SPREAD_K * (index - (len(by_drafter) - 1) / 2)
            plot.name(_at_depth(data, drafter), tint)
            plot.line([(g + shift, r["median"]) for g, r in points], tint)
            for g, r in points:
                low, high = intervals[f"{drafter}_k{g}"]
                plot.whisker(g + shift, low, high, tint)
                plot.dot(g + shift, r["median"], tint, title=f"{drafter}, K {g}: {r['median']:.3f}")
        plot.name("plain decoding", QUIET)
        drawings.append(f"<div><p>{escape(_spot_name(prefix))}</p>{plot.svg()}</div>")
    note = (
        "Medians of paired, interleaved trials of the same texts, prompts included; with 90% intervals. Of "
        "wavefront, K is the lanes beyond the first."
    )
    return Panel(title=title, body=f'<div class="drawings">{"".join(drawings)}</div>', note=note, wide=True)


def predicted_against_measured(data: Data) -> Panel:
    """The cost law beside what was measured."""
    title = "Cost law: predicted against measured speed-up"
    points = [(prefix, p) for prefix, costs in data["costs"].items() for p in costs["predictions"]]
    if not points:
        return no_data(title, "nothing was swept.")
    values = [p[side] for _, p in points for side in ("predicted", "measured")]
    axis = axis_over("", values, headroom=True, footroom=True)
    plot = Plot(
        x=Axis(label="predicted, times plain decoding", low=axis.low, high=axis.high),
        y=Axis(label="measured, times plain decoding", low=axis.low, high=axis.high),
    )
    plot.line([(axis.low, axis.low), (axis.high, axis.high)], QUIET, dashed=True)
    for index, prefix in enumerate(data["costs"]):
        plot.name(_spot_name(prefix), colour(index))
        for p in data["costs"][prefix]["predictions"]:
            plot.dot(p["predicted"], p["measured"], colour(index), title=p["arm"])
    plot.name("as predicted", QUIET)
    rows = [
        [_spot_name(prefix), p["arm"], p["accepted_per_round"], p["ideal"], p["predicted"], p["measured"],
         f"{p['error_frac']:+.1%}"]
        for prefix, p in points
    ]  # fmt: skip
    columns = ("cell", "arm", "accepted / round", "ideal", "predicted", "measured", "error")
    note = (
        "Rounds without prompt rows. Ideal: D (1 + a) / (d (K + 1) + D - d), every loop at one price and "
        "nothing else at any; predicted: with forwards timed alone at these rows, and rounds' own overhead."
    )
    return Panel(title=title, body=plot.svg() + table(columns, rows), note=note, wide=True)


def lanes(data: Data) -> Panel:
    """Passes per token of lanes."""
    title = "Passes per token in lanes"
    rows = [
        [_spot_name(prefix), law["arm"], law["depth"], law["alpha"], law["predicted"], law["measured"],
         f"{law['error_frac']:+.1%}"]
        for prefix, costs in data["costs"].items()
        for law in costs["lanes"]
    ]  # fmt: skip
    if not rows:
        return no_data(title, "wavefront was not swept with a full pipeline.")
    columns = ("cell", "arm", "depth d", "alpha", "alpha d + (1 - alpha) D", "measured", "error")
    return Panel(title=title, body=table(columns, rows), note="alpha: share of proposals that were kept.")


def goals(data: Data) -> Panel:
    """Goals of speed, met or not."""
    rows = [[g["name"], g["wanted"], g["found"], g["verdict"]] for g in data["goals"]]
    if not rows:
        return no_data("Goals of speed", "they are a looped policy's, and need the sweep.")
    body = table(("goal", "wanted", "found", "verdict"), rows)
    note = f"They decide nothing: the verdict is that of the checks. {NAMES}"
    return Panel(title="Goals of speed", body=body, note=note, wide=True)


def _measured_arms(data: Data) -> dict[str, Any]:
    return {name: arm for name, arm in data["arms"].items() if arm["makespan_s"]}


def latency(data: Data) -> Panel:
    """Throughput and what streams see."""
    arms = _measured_arms(data)
    if not arms:
        return no_data("Throughput and latency", "nothing was swept.")
    rows = [
        [
            name,
            arm["tokens_per_s"],
            *(
                None if arm["streams"][key] is None else 1000 * arm["streams"][key]
                for key in ("first_token_p50_s", "first_token_p95_s", "end_to_end_p50_s", "end_to_end_p95_s")
            ),
            arm["streams"]["tokens_per_event"],
        ]
        for name, arm in arms.items()
    ]
    columns = (
        "arm",
        "committed tokens/s",
        "first token p50, ms",
        "first token p95, ms",
        "end to end p50, ms",
        "end to end p95, ms",
        "tokens / event",
    )
    note = (
        "From a text's submission to a free place of the engine; an event is what a round commits for a "
        f"text. {NAMES}"
    )
    return Panel(title="Throughput and latency", body=table(columns, rows), note=note, wide=True)


def work(data: Data) -> Panel:
    """What rounds did, and the memory they took."""
    arms = _measured_arms(data)
    if not arms:
        return no_data("Work and memory", "nothing was swept.")
    rows = []
    for name, arm in arms.items():
        totals, memory = data["rounds"][name], arm["memory_bytes"]
        per_sequence = totals["decoded"] / max(1, totals["sequences"])
        rows.append(
            [
                name,
                totals["rounds"],
                per_sequence - 1.0,
                totals["rows"],
                totals["draft_rows"],
                totals["rows"] / max(1, totals["decoded"]),
                memory["kv_used"] / 2**20,
                memory["scratch"] / 2**20,
                memory["weights"] / 2**20,
            ]
        )
    columns = (
        "arm",
        "rounds",
        "accepted / round",
        "verified rows",
        "draft rows",
        "verified rows / token",
        "KV at its peak, MiB",
        "buffers, MiB",
        "weights, MiB",
    )
    note = "Rounds without prompt rows, all trials together. Rows in lanes are draft rows."
    return Panel(title="Work and memory", body=table(columns, rows), note=note, wide=True)


def phases(data: Data) -> Panel:
    """Where rounds spend their time."""
    arms = _measured_arms(data)
    if not arms:
        return no_data("Where time goes", "nothing was swept.")
    rows = []
    for name, arm in arms.items():
        whole_s = sum(arm["makespan_s"])
        parts = [arm["seconds"][part] / whole_s for part in ("draft", "verify", "commit", "outside_rounds")]
        rows.append([name, whole_s, *(f"{share:.1%}" for share in parts)])
    columns = ("arm", "s, all trials", "draft", "verify", "commit", "outside rounds")
    note = "Shares of the runs' time."
    return Panel(title="Where time goes", body=table(columns, rows), note=note, wide=True)


def questions(data: Data) -> Panel:
    """Which texts were measured and which were not."""
    asked, title = data["questions"], "What was asked"
    if asked is None:
        return no_data(title, "nothing was swept.")
    rows = [
        [f"{length} tokens", len(names), asked["too_short"][length]]
        for length, names in asked["asked"].items()
    ]
    body = table(("texts of", "asked", "end before"), rows)
    echoes = asked["echoes"]
    if echoes:
        body += table(("left out as echo", "how"), [[e["name"], e["how"]] for e in echoes])
    left = data["left_out"]
    if left:
        body += table(
            ("not measured", "why"),
            [[f"{spot['concurrency']} at once, {spot['length']} tokens", spot["reason"]] for spot in left],
        )
    note = f"{asked['considered']} texts considered, {len(echoes)} times one was left out as an echo."
    return Panel(title=title, body=body, note=note)


def _conditions(data: Data) -> str:
    shown = escape(json.dumps(data["conditions"], indent=1))
    told = escape(f"Conditions: {processor_of(data['conditions'])}")
    return f"<details><summary>{told}</summary><pre>{shown}</pre></details>"
