"""Small drawings as inline SVG: two axes, and what stands between them. Knows nothing of rollouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 14, 44
COLOURS = ("#2f6fb2", "#c8622b", "#3d8b54", "#8a56ac", "#b23a48", "#6b7280", "#b08d1e")
"""Told apart on light and dark ground; beyond seven series they repeat."""

QUIET = "#9aa1ab"
"""For what is the ordinary case, or only guides the eye."""

Scale = Literal["linear", "log"]


def colour(index: int) -> str:
    """Return the colour of series ``index``."""
    return COLOURS[index % len(COLOURS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis: what it measures and from where to where."""

    label: str
    low: float
    high: float
    scale: Scale = "linear"
    whole: bool = False
    """What is counted: no ticks between whole numbers."""

    marks: tuple[float, ...] = ()
    """Where the ticks stand, when not at round values: an axis of few values names those."""

    def fraction(self, value: float) -> float:
        """Return where ``value`` lies between the ends, clipped to 0..1."""
        if self.scale == "log":
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Return three to eight round values within the ends; a whole axis of few numbers may have fewer."""
        if self.marks:
            return list(self.marks)
        return self._log_ticks() if self.scale == "log" else self._round_ticks()

    def _round_ticks(self) -> list[float]:
        rough = (self.high - self.low) / 5
        if self.whole:
            few = math.floor(self.high) - math.ceil(self.low) < 8
            rough = 1.0 if few else max(1.0, rough)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        start = math.ceil(self.low / step - 1e-9)
        end = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(start, end + 1)]

    def _log_ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        if last - first > 6:
            return [10.0**p for p in range(first + 1, last, 2)]
        multiples = (1, 2, 5) if last - first < 4 else (1,)
        round_values = [m * 10.0**p for p in range(first, last + 1) for m in multiples]
        found = [v for v in round_values if self.low * 0.999 <= v <= self.high * 1.001]
        return found if len(found) > 1 else self._round_ticks()


def axis_over(
    label: str,
    values: Sequence[float],
    *,
    zero: bool = False,
    headroom: bool = False,
    footroom: bool = False,
    whole: bool = False,
    scale: Scale = "linear",
) -> Axis:
    """Return an axis that shows all of ``values``, with room when they are all the same.

    ``zero`` starts it at 0 or below, ``headroom`` leaves a little above the highest, ``footroom`` below the
    lowest.
    """
    low, high = min(values), max(values)
    if scale == "log":
        low, high = max(low, 1e-9), max(high, 1e-9)
        return Axis(label=label, low=low / 1.3, high=high * 1.3, scale=scale)
    low = min(0.0, low) if zero else low
    if high <= low and whole and not zero:
        low, high = low - 0.5, high + 0.5
    elif high <= low:
        high = low + (abs(low) or 1.0)
    room = 0.06 * (high - low)
    high += room if headroom else 0.0
    low -= room if footroom else 0.0
    return Axis(label=label, low=low, high=high, whole=whole)


@dataclass(kw_only=True, slots=True)
class Plot:
    """A drawing under construction; values are in the units of its axes."""

    x: Axis
    y: Axis
    height: int = HEIGHT
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def px(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return LEFT + self.x.fraction(value) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        """Return the vertical position of a value."""
        return self.height - BOTTOM - self.y.fraction(value) * (self.height - TOP - BOTTOM)

    def name(self, label: str, tint: str) -> None:
        """Add a series to the legend, once."""
        if (label, tint) not in self._legend:
            self._legend.append((label, tint))

    def line(self, points: Sequence[tuple[float, float]], tint: str, *, dashed: bool = False) -> None:
        """Join ``points``."""
        path = " ".join(f"{self.px(a):.1f},{self.py(b):.1f}" for a, b in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{tint}" stroke-width="1.8"{dash}/>'
        )

    def dot(self, x: float, y: float, tint: str, *, title: str = "", radius: float = 3.0) -> None:
        """Put a point."""
        self._parts.append(
            f'<circle cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="{radius}" fill="{tint}" '
            f'fill-opacity="0.8">{_title(title)}</circle>'
        )

    def whisker(self, x: float, low: float, high: float, tint: str, *, opacity: float = 1.0) -> None:
        """Draw an interval upright at ``x``."""
        a, b, c = self.px(x), self.py(low), self.py(high)
        path = f"M{a:.1f} {b:.1f}V{c:.1f}M{a - 4:.1f} {b:.1f}H{a + 4:.1f}M{a - 4:.1f} {c:.1f}H{a + 4:.1f}"
        self._parts.append(
            f'<path d="{path}" stroke="{tint}" stroke-width="1.4" stroke-opacity="{opacity}" fill="none"/>'
        )

    def box(self, x0: float, x1: float, y0: float, y1: float, tint: str, *, title: str = "") -> None:
        """Fill a rectangle; anything narrower than half a pixel is widened to it."""
        left, right = sorted((self.px(x0), self.px(x1)))
        top, bottom = sorted((self.py(y0), self.py(y1)))
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, right - left):.1f}" '
            f'height="{max(0.5, bottom - top):.1f}" fill="{tint}">{_title(title)}</rect>'
        )

    def notch(self, x: float, tint: str, *, title: str = "") -> None:
        """Mark ``x`` with a short line on the horizontal axis."""
        a, base = self.px(x), self.height - BOTTOM
        self._parts.append(
            f'<line x1="{a:.1f}" x2="{a:.1f}" y1="{base - 9}" y2="{base}" stroke="{tint}" '
            f'stroke-width="2.5">{_title(title)}</line>'
        )

    def svg(self) -> str:
        """Return the drawing with axes and legend."""
        legend = "".join(
            f'<span class="key"><span style="background:{tint}"></span>{escape(label)}</span>'
            for label, tint in self._legend
        )
        key = f'<div class="legend">{legend}</div>' if legend else ""
        return (
            f'{key}<svg viewBox="0 0 {WIDTH} {self.height}" role="img">'
            f"{self._frame()}{''.join(self._parts)}</svg>"
        )

    def _frame(self) -> str:
        base, edge = self.height - BOTTOM, WIDTH - RIGHT
        marks = [f'<path class="axis" d="M{LEFT} {TOP}V{base}H{edge}"/>']
        for value in self.x.ticks():
            a = self.px(value)
            marks.append(f'<path class="axis" d="M{a:.1f} {base}v4"/>')
            marks.append(f'<text x="{a:.1f}" y="{base + 16}" text-anchor="middle">{number(value)}</text>')
        for value in self.y.ticks():
            b = self.py(value)
            marks.append(f'<path class="grid" d="M{LEFT} {b:.1f}H{edge}"/>')
            marks.append(f'<text x="{LEFT - 6}" y="{b + 4:.1f}" text-anchor="end">{number(value)}</text>')
        middle = TOP + (base - TOP) / 2
        marks.append(
            f'<text x="{(LEFT + edge) / 2}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.label)}</text>"
        )
        return "".join(marks)


def number(value: float) -> str:
    """Return a number as short as its size allows."""
    if 1000 <= abs(value) < 100000:
        return f"{value:.0f}"
    if value == 0 or 1 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:.2g}"


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
