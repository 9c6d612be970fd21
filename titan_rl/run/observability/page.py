"""The HTML page around a report: no script, no font and no image from anywhere else."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark;
  --page: #f7f6f3; --card: #ffffff; --ink: #1c1f23; --soft: #666b72; --line: #e4e2dc; --grid: #eceae4;
  --s1: #2a6fd6; --s2: #d9730d; --good: #1a7f4b; --bad: #b3382c; --prompt: #f3f1ec; --answer: #eaf1fc; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15171a; --card: #1d2024; --ink: #e8e6e1; --soft: #9aa0a8; --line: #30343a; --grid: #292d32;
  --s1: #6aa5f8; --s2: #f0a04b; --good: #5cc48d; --bad: #ef8375; --prompt: #25292e; --answer: #1e2b3f; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 36px 0 12px }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px }
.sub, .hint { color: var(--soft); margin: 4px 0 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 12px }
.tile .value { font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; white-space: nowrap }
.tile .name, .tile .note { color: var(--soft); font-size: 13px }
.tile.wide { grid-column: span 2 }
.good { color: var(--good) } .bad { color: var(--bad) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 12px }
.chart { display: block; width: 100%; height: auto }
.chart text { font: 11px system-ui, sans-serif; fill: var(--soft) }
.chart .tick.y { text-anchor: end } .chart .tick.x, .chart .label, .chart .empty { text-anchor: middle }
.chart .grid { stroke: var(--grid) } .chart .axis { stroke: var(--line) }
.chart polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }
.chart .s1 { stroke: var(--s1); --c: var(--s1) } .chart .s2 { stroke: var(--s2); --c: var(--s2) }
.chart .s3 { stroke: var(--s2); --c: var(--s2) }
.chart polyline.faint { stroke-width: 1; opacity: .35 }
.chart polyline.dots { stroke-dasharray: 4 4; stroke-width: 1.4 }
.chart circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5 }
.chart circle.hover { fill: transparent; stroke: none } .chart circle.hover:hover { fill: var(--c) }
.legend { display: flex; gap: 16px; font-size: 12px; color: var(--soft); margin: 0 0 4px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 5px }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; margin-bottom: 12px; align-items: start }
@media (max-width: 760px) { .pair { grid-template-columns: 1fr } .tile.wide { grid-column: auto } }
.meta { display: flex; gap: 10px; flex-wrap: wrap; font-size: 13px; color: var(--soft); margin-bottom: 8px }
.meta b { color: var(--ink) }
.message { border-radius: 7px; padding: 7px 10px; margin-top: 6px; background: var(--prompt) }
.message.assistant { background: var(--answer) }
.message .role { font-size: 11px; color: var(--soft) }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600 }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document. `title` is text, `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def tile(name: str, value: str, note: str = "", css: str = "") -> str:
    """A figure with its name. All but `css` are text."""
    return (
        f'<div class="card tile {css}"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def figure(title: str, chart: str, legend: dict[str, str] | None = None) -> str:
    """A chart with its title. `legend` maps labels to CSS colour variables: `{"mean": "--s1"}`."""
    entries = "".join(
        f'<span><i style="background:var({colour})"></i>{escape(label)}</span>'
        for label, colour in (legend or {}).items()
    )
    return f'<div class="card"><h3>{escape(title)}</h3><div class="legend">{entries}</div>{chart}</div>'


def details(title: str, text: str) -> str:
    """Preformatted text behind a line that opens it."""
    return f'<details class="card"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'
