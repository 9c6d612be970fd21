"""Line charts as SVG text. Colours come from the page's CSS, so that they follow its light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
Placement = Callable[[Point], Point]
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34  # margins of the plot, in the chart's units


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. Points that are not finite leave a gap.

    Args:
        label: its name in the legend and the tooltips.
        points: (x, y), in order of x.
        style: `line`, `faint` (a line in the background) or `dots` (large marks joined by a dashed line).
    """

    label: str
    points: Sequence[Point]  # [num_points]
    style: str = "line"


def line_chart(
    series: Sequence[Series], *, y_label: str, x_label: str = "step", width: int = 340, height: int = 190
) -> str:
    """An SVG element with axes, gridlines, axis labels, and a tooltip on every mark.

    A single point is drawn as a mark, and a chart without a finite point says so.

    Example: `line_chart([Series("loss", [(1, 0.5), (2, 0.4)])], y_label="loss")` is `'<svg class="chart" ...</svg>'`.
    """
    points = [point for one in series for point in one.points if _finite(point)]
    title = escape(f"{y_label} by {x_label}")
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    if not points:
        return f'{head}<text class="empty" x="{width / 2}" y="{height / 2}">no data</text></svg>'
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), 6, integers=True)
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points), 4)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = y_ticks[0], y_ticks[-1]
    bottom, right = height - _BOTTOM, width - _RIGHT

    def place(point: Point) -> Point:
        x, y = point
        return (
            round(_LEFT + (x - x_low) / (x_high - x_low) * (right - _LEFT), 1),
            round(bottom - (y - y_low) / (y_high - y_low) * (bottom - _TOP), 1),
        )

    parts = [head]
    for tick in y_ticks:
        _, y = place((x_low, tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 3.5}">{format_number(tick)}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            x, _ = place((tick, y_low))
            parts.append(f'<text class="tick x" x="{x}" y="{bottom + 14}">{format_number(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label" x="{(_LEFT + right) / 2}" y="{height - 4}">{escape(x_label)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text class="label" transform="translate(9 {middle}) rotate(-90)">{escape(y_label)}</text>')
    for number, one in enumerate(series, 1):
        parts += _curve(one, f"s{number} {one.style}", place)
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float, most: int, *, integers: bool = False) -> list[float]:
    """About `most` round numbers, the first at most `low` and the last at least `high`.

    Example: `ticks(0.13, 0.88, 4)` is `[0.0, 0.25, 0.5, 0.75, 1.0]`.
    """
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = (low - margin, high + margin)
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    if integers:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def format_number(value: float) -> str:
    """Short: `12345` is `12.3k`, `0.00025` is `2.5e-4`, `0.5` is `0.5`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"


def _curve(series: Series, css: str, place: Placement) -> list[str]:
    runs: list[list[Point]] = [[]]  # the stretches between gaps
    for point in series.points:
        if _finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    parts: list[str] = []
    for run in runs:
        placed = [place(point) for point in run]
        if len(run) > 1:
            path = " ".join(f"{x:g},{y:g}" for x, y in placed)
            parts.append(f'<polyline class="{css}" points="{path}"/>')
        # A transparent mark on every point of a line carries its tooltip; one alone would else be invisible.
        mark = "mark" if series.style == "dots" or len(run) == 1 else "hover"
        for (x, y), (px, py) in zip(run, placed, strict=True):
            tip = escape(f"{series.label}, step {format_number(x)}: {y:.4g}")
            parts.append(f'<circle class="{css} {mark}" cx="{px:g}" cy="{py:g}" r="4"><title>{tip}</title></circle>')
    return parts


def _finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])
