"""Live display on a terminal: its console, its lines, and the formats of numbers in these lines."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from titan_rl.cluster.hosts.lifecycle import HostStatus
from titan_rl.core.plain_data import terminal_text
from titan_rl.core.run_files import work_of
from titan_rl.run.terminal.standard_streams import silence

if TYPE_CHECKING:  # commands without a run need no router
    from titan_rl.generation.router.pool import ReplicaStatus

logger = logging.getLogger(__name__)


class ForgivingConsole(Console):
    """Console that stops writing if the reader is gone or the disk is full, so that the run continues. Control
    characters in printed text are escaped; only the console's own reach the terminal."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file=file, highlight=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(terminal_text(segment.text), segment.style)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self._fall_silent(error)

    def on_broken_pipe(self) -> None:
        self._fall_silent(BrokenPipeError("the reader of the output has closed it"))

    def _fall_silent(self, error: OSError) -> None:
        self.quiet = True
        logger.warning("the output cannot be written; the run continues without it: %r", error)
        for stream in (sys.stdout, sys.stderr):
            if self.file is stream:
                silence(stream)


REFRESHES_PER_S = 4


class Display(Protocol):
    """Source of live lines."""

    def lines(self) -> Sequence[Text]:
        """Return the lines to draw now. This is called in a thread of the display."""
        ...


class LiveLines(Live):
    """Lines at the bottom of a terminal. Other output scrolls above them, including output of code that does not know
    about them. `stop` draws the lines for the last time.

    If a terminal becomes narrower, its lines are broken into more rows than were drawn. All of these rows are replaced.

    Args:
        vanish: Whether to remove the lines at the end.
    """

    def __init__(self, console: Console, display: Display, *, vanish: bool = False) -> None:
        self._display = display
        self._next_lines: Sequence[Text] = ()
        self._drawn: Sequence[Text] = ()
        self._width = console.width
        super().__init__(
            console=console,
            transient=vanish,
            refresh_per_second=REFRESHES_PER_S,
            get_renderable=self._lines,
            redirect_stdout=sys.stdout.isatty(),  # piped output stays in the pipe
            redirect_stderr=sys.stderr.isatty(),
        )

    def _lines(self) -> Group:
        self._next_lines = self._display.lines()
        return Group(*self._next_lines)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = self.console.width
        drawn = self._live_render
        if width < self._width and drawn._shape is not None:
            rows = sum(max(1, ceil(line.cell_len / width)) for line in self._drawn)
            drawn._shape = (width, max(rows, 1))
        self._width = width
        processed = super().process_renderables(renderables)
        self._drawn = self._next_lines
        return processed


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks of eight heights, averaged into at most `width` blocks. A mean that is not finite is a
    space.

    Example: `sparkline([0, 1, 2, 3], 4)` is `"▁▃▆█"`.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        buckets = [values[low:high] for low, high in pairwise(edges)]
    else:
        buckets = [[value] for value in values]
    means = [fmean(bucket) for bucket in buckets]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BLOCKS[math.floor((mean - low) / span * (len(_BLOCKS) - 1) + 0.5)] if math.isfinite(mean) else " "
        for mean in means
    )


def format_seconds(seconds: float) -> str:
    """Format a duration: `75.2` is `"1 min 15 s"`, `8.25` is `"8.2 s"`, `7260` is `"2 h 1 min"`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


BAR = 36
SPARKS = 16
NARROW = 60  # cells
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINS_PER_S = 4
MOST_HOSTS = 6
"""Largest number of hosts to show individually."""

SLOT_STYLES: Mapping[str, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "generating": ("█", "green"),
    "in the environment": ("▓", "cyan"),
    "scoring": ("▒", "magenta"),
    "suspended": ("░", "yellow"),
    "finished": ("▬", "blue"),
    "training": ("━", "bright_black"),
}
"""Sign and colour of a slot in each state. The signs alone distinguish the states if there are no colours."""
ASCII_SIGNS = ".#e$~=-"
"""Signs for terminals with ASCII only."""


@dataclass(frozen=True, slots=True)
class RunLook:
    """Snapshot of generation.

    Args:
        slots: Number of slots in each state of `SLOT_STYLES`.
        version: Version of the trainer.
        hosts: Hosts of the run, if it has several.
    """

    slots: Mapping[str, int]
    replicas: Sequence[ReplicaStatus]
    version: int
    hosts: Sequence[HostStatus] = ()

    def describe_slots(self) -> str:
        """Text such as "12 generating, 3 in the environment"; "" if no slot is held."""
        return ", ".join(f"{count} {state}" for state, count in self.slots.items() if count)


@dataclass(frozen=True, slots=True)
class View:
    """Content of the live display.

    Args:
        unit: Name of a counted unit, such as "step".
        total: Number of units; 0 if nothing is counted.
        curve: Name, values so far, value to show, and a note of the most important figure.
        left_s: Estimated seconds until the end; NaN if not yet known.
        works: Lines about long operations.
    """

    unit: str
    done: int
    total: int
    left_s: float
    elapsed_s: float
    curve: tuple[str, Sequence[float], float, str] | None = None
    figures: Mapping[str, str] = field(default_factory=dict[str, str])
    look: RunLook | None = None
    works: Sequence[str] = ()


def layout(view: View, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
    """Lay out the lines of the display, cut to the size of the terminal.

    Args:
        width, height: Size of the terminal in cells.
        ascii_only: Whether the terminal shows only ASCII.
    """
    room = max(width - 1, 1)  # a full last column makes some terminals wrap
    spinner = "*" if ascii_only else SPINNER[int(view.elapsed_s * SPINS_PER_S) % len(SPINNER)]
    bar = [_bar_line(view, room, ascii_only)] if view.total else []
    first = [*bar, *_figure_lines(view, room, ascii_only)]
    works = [Text.assemble((f"{spinner} ", "cyan"), text) for text in view.works]
    lines = [*first, *works]
    if view.look is not None:
        lines[len(first) : len(first)] = _slot_lines(view.look, room, ascii_only)
        lines += _host_lines(view.look, room, ascii_only)
        lines += _replica_lines(view.look, max(height - 1 - len(lines), 1), ascii_only)
    for line in lines:
        line.plain = "".join(sign if sign.isprintable() else " " for sign in line.plain)  # e.g. in errors
        line.no_wrap = True
        line.truncate(room, overflow="crop" if ascii_only else "ellipsis")
    return lines[: max(height - 1, 1)]


def flow(items: Sequence[Text], width: int, gap: int = 3) -> list[Text]:
    """Lay out items next to each other, in as many lines as they need."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + gap + item.cell_len <= width:
            lines[-1].append(" " * gap).append_text(item)
        else:
            lines.append(item.copy())
    return lines


def _bar_line(view: View, room: int, ascii_only: bool) -> Text:
    left = f"{format_seconds(view.left_s)} left" if math.isfinite(view.left_s) else "starting"
    if room > NARROW:
        left += f", {format_seconds(view.elapsed_s)} so far"
    count = f"{view.unit} {view.done}/{view.total}"
    size = max(min(BAR, room - len(count) - len(left) - 2), 0)
    filled = size * min(view.done, view.total) // max(view.total, 1)
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble(
        (count, "bold"), " ", (full * filled, "green"), (empty * (size - filled), "dim"), " ", (left, "dim")
    )


def _figure_lines(view: View, room: int, ascii_only: bool) -> list[Text]:
    items: list[Text] = []
    if view.curve is not None:
        name, values, value, note = view.curve
        trend = "" if ascii_only else f" {sparkline(values, SPARKS)}"
        items.append(Text.assemble((f"{name} ", "dim"), (f"{value:.3f}", "bold"), (trend, "green"), (note, "dim")))
    items += [Text.assemble((f"{label} ", "dim"), figure.strip()) for label, figure in view.figures.items()]
    return flow(items, room)


def _slot_lines(look: RunLook, room: int, ascii_only: bool) -> list[Text]:
    held = {state: count for state, count in look.slots.items() if count}
    if not held:
        return []
    signs = dict(
        zip(SLOT_STYLES, ASCII_SIGNS if ascii_only else [sign for sign, _ in SLOT_STYLES.values()], strict=True)
    )
    total = sum(held.values())
    size = min(total, BAR, max(room // 3, 8))
    bar, drawn, seen = Text(), 0, 0
    for state, count in held.items():
        seen += count
        end = round(seen / total * size)
        bar.append(signs[state] * (end - drawn), SLOT_STYLES[state][1])
        drawn = end
    legend = [
        Text.assemble((f"{signs[state]} ", SLOT_STYLES[state][1]), f"{count} ", (state, "dim"))
        for state, count in held.items()
    ]
    return flow([Text.assemble(("slots ", "dim"), bar), *legend], room, gap=2)


def _host_lines(look: RunLook, room: int, ascii_only: bool) -> list[Text]:
    """Lines about hosts. Hosts that are not in the run come first. If there are many hosts, only those are named."""
    if not look.hosts:
        return []
    up, other = ("+", "x") if ascii_only else ("●", "✗")
    present = [host for host in look.hosts if host.state == "in the run"]
    rest = [host for host in look.hosts if host.state != "in the run"]
    shown = [*rest[:MOST_HOSTS], *(present if len(look.hosts) <= MOST_HOSTS else ())]
    items = [
        Text.assemble(
            (f"{up} ", "green") if host in present else (f"{other} ", "yellow" if host.state != "gone" else "bold red"),
            host.name or host.address,
            (f" {work_of(host.processes)}" if host.processes else "", "dim"),
            (f" {host.state}" if host in rest else "", "yellow"),
            (f": {host.reason}" if host.reason else "", "dim"),
        )
        for host in shown
    ]
    count = Text(f"{len(present)} of {len(look.hosts)} hosts are in the run", style="dim")
    return flow([Text("hosts", style="dim"), *items, *([count] if len(shown) < len(look.hosts) else [])], room, gap=2)


def _replica_lines(look: RunLook, most: int, ascii_only: bool) -> list[Text]:
    """Lines about replicas, one for each. If there is no room for all, replicas that do not serve come first."""
    up, down = ("+", "x") if ascii_only else ("●", "✗")
    replicas = look.replicas if len(look.replicas) <= most else sorted(look.replicas, key=lambda one: one.serving)
    shown = replicas if len(replicas) <= most else replicas[: most - 1]
    widest = max((len(replica.name) for replica in shown), default=0)
    lines = [
        Text.assemble(
            (f"{up if replica.serving else down} ", "green" if replica.serving else "bold red"),
            f"{replica.name:<{widest}}",
            ("  starting" if replica.version is None else f"  v{replica.version}", "dim"),
            f"  {replica.num_requests} requests",
            ("" if replica.mean_waiting < 0.5 else f", {replica.mean_waiting:.0f} waiting", "yellow"),
            (f"  {replica.last_error}" if replica.last_error else "", "red"),
        )
        for replica in shown
    ]
    if rest := replicas[len(shown) :]:
        serving = sum(replica.serving for replica in rest)
        requests = sum(replica.num_requests for replica in rest)
        lines.append(Text(f"  {len(rest)} more: {serving} serve, {requests} requests", style="dim"))
    return lines
