"""Terminal output: the layout of the live display, its content, and messages about long operations."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from titan_rl.cluster.hosts.lifecycle import HostStatus
from titan_rl.core.console import ConsoleLines, Verbosity
from titan_rl.generation.router.pool import ReplicaStatus
from titan_rl.generation.types import GaugeSummary
from titan_rl.run.observability.progress import Operations, Progress, ShownStep
from titan_rl.run.observability.summary import RunSummary, show_summary
from titan_rl.run.terminal.live_display import SLOT_STYLES, LiveLines, RunLook, View, flow, layout
from titan_rl.testing.clock import ManualClock

WAITING = GaugeSummary(10, {"waiting_requests": 26.0}, {}, {})
LOOK = RunLook(
    {**dict.fromkeys(SLOT_STYLES, 0), "generating": 12, "in the environment": 3, "finished": 1},
    [
        ReplicaStatus("generator-0", True, 11, 0, 40, None),
        ReplicaStatus("generator-1", True, 12, 0, 38, None, WAITING),
        ReplicaStatus("generator-2", False, None, 0, 0, "it died: exit code -9"),
    ],
    12,
)
VIEW = View(
    "step",
    25,
    100,
    75.2,
    30.0,
    ("reward", [0.1, 0.2, 0.4], 0.4, " (trained on 0.3)"),
    {"tokens/s": "21034", "staleness": "0.8"},
    LOOK,
    ["validating at step 25, 12.0 s: 3 of 64 groups"],
)


def drawn(view: View, width: int = 100, height: int = 30, *, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in layout(view, width, height, ascii_only=ascii_only)]


def test_wide_terminal_shows_everything():
    assert drawn(VIEW) == [
        "step 25/100 ━━━━━━━━━─────────────────────────── 1 min 15 s left, 30.0 s so far",
        "reward 0.400 ▁▃█ (trained on 0.3)   tokens/s 21034   staleness 0.8",
        "slots ████████████▓▓▓▬  █ 12 generating  ▓ 3 in the environment  ▬ 1 finished",
        "⠋ validating at step 25, 12.0 s: 3 of 64 groups",
        "● generator-0  v11  40 requests",
        "● generator-1  v12  38 requests, 3 waiting",
        "✗ generator-2  starting  0 requests  it died: exit code -9",
    ]


def test_narrow_terminal_stacks_the_parts_of_the_display():
    lines = drawn(VIEW, 40, 20)
    assert max(map(len, lines)) < 40
    assert lines[0] == "step 25/100 ━━───────── 1 min 15 s left"
    assert "tokens/s 21034   staleness 0.8" in lines
    assert any("finished" in line for line in lines)
    assert any(line.endswith("…") for line in lines)


def test_replicas_out_of_service_come_first_when_space_is_short():
    many = [ReplicaStatus(f"generator-{n}", n != 7, 3, 0, 10, None if n != 7 else "it hangs") for n in range(16)]
    lines = drawn(View("step", 0, 10, float("nan"), 0.0, look=RunLook({}, many, 3)), height=6)
    assert lines[1].startswith("✗ generator-7")
    assert lines[-1] == "  13 more: 13 serve, 130 requests"
    assert len(lines) == 5


def test_few_hosts_are_listed_and_many_are_summarized():
    hosts = [
        HostStatus("h1", "10.0.0.1:22222", "in the run", "", ("trainer", "rollout-worker-0")),
        HostStatus("h2", "10.0.0.2:22222", "in the run", "", ("generator-0", "generator-1")),
        HostStatus("h3", "10.0.0.3:22222", "gone", "nothing has been heard of it for 3 s"),
    ]
    look = RunLook({}, [], 3, hosts)
    assert drawn(View("step", 0, 10, float("nan"), 0.0, look=look), 110)[1:] == [
        "hosts  ✗ h3 gone: nothing has been heard of it for 3 s  ● h1 trainer, rollout worker  ● h2 2 generators"
    ]
    many = [HostStatus(f"n{number}", "", "in the run") for number in range(62)]
    look = RunLook({}, [], 3, [*many, hosts[2]])
    assert drawn(View("step", 0, 10, float("nan"), 0.0, look=look))[1:] == [
        "hosts  ✗ h3 gone: nothing has been heard of it for 3 s  62 of 63 hosts are in the run"
    ]


def test_ascii_terminal_gets_no_unicode():
    text = "\n".join(drawn(VIEW, ascii_only=True))
    assert text.isascii()
    assert "slots ############eee=" in text


@given(
    width=st.integers(1, 220),
    height=st.integers(1, 60),
    slots=st.lists(st.integers(0, 500), min_size=len(SLOT_STYLES), max_size=len(SLOT_STYLES)),
    num_replicas=st.integers(0, 40),
    ascii_only=st.booleans(),
    text=st.text(max_size=60),
)
def test_display_never_exceeds_the_terminal_size(
    width: int, height: int, slots: list[int], num_replicas: int, ascii_only: bool, text: str
):
    look = RunLook(
        dict(zip(SLOT_STYLES, slots, strict=True)),
        [
            ReplicaStatus(f"generator-{number}", number % 3 > 0, number, 0, number, text, WAITING)
            for number in range(num_replicas)
        ],
        3,
        [HostStatus(text, "", state, text) for state in ("in the run", "gone", "draining")],
    )
    view = View("step", 3, 10, 10.0, 5.0, ("reward", [0.1, float("nan")], 0.1, text), {"tokens/s": text}, look, [text])
    lines = layout(view, width, height, ascii_only=ascii_only)
    assert len(lines) <= max(height - 1, 1)
    assert all(line.cell_len <= max(width - 1, 1) for line in lines)
    assert all(line.plain.isprintable() for line in lines), "error texts contain no control characters"


def test_flow_wraps_items_into_lines():
    assert [line.plain for line in flow([Text("aa"), Text("bb"), Text("cc")], 7)] == ["aa   bb", "cc"]
    assert flow([], 7) == []


def test_long_operation_is_reported_periodically_and_at_its_end():
    console = ConsoleLines()
    clock = ManualClock()
    operations = Operations(console, clock)
    operations.shows_lines = True
    with operations.running("starting 2 generators"):
        for clock.seconds in (1.0, 9.0, 10.0, 12.0, 29.0, 31.0, 45.0, 61.0):
            operations.tick()
        clock.seconds = 70.2
    with operations.running("opening the tasks"):
        clock.seconds = 72.0
        operations.tick()
    assert console == [
        "still starting 2 generators, 10.0 s",
        "still starting 2 generators, 31.0 s",
        "still starting 2 generators, 1 min 1 s",
        "starting 2 generators took 1 min 10 s",
    ]


def test_concurrent_operations_are_reported_with_their_notes():
    console = ConsoleLines()
    clock = ManualClock()
    operations = Operations(console, clock)
    operations.shows_lines = True
    done = 0
    with operations.running("validating", lambda: f"{done} of 64 groups"):
        clock.seconds = 5.0
        with operations.running("writing the checkpoint"):
            done, clock.seconds = 3, 11.0
            operations.tick()
            clock.seconds = 16.0
            operations.tick()
    assert console[:2] == ["still validating, 11.0 s: 3 of 64 groups", "still writing the checkpoint, 11.0 s"]
    assert [work.text for work, _ in operations.shown(0.0)] == []


def test_failed_operation_does_not_report_its_duration():
    console = ConsoleLines()
    clock = ManualClock()
    operations = Operations(console, clock)
    operations.shows_lines = True
    with pytest.raises(ValueError, match="no"), operations.running("starting"):  # noqa: PT012
        clock.seconds = 12.0
        operations.tick()
        raise ValueError("no")
    assert console == ["still starting, 12.0 s"]


class Terminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


STEP = ShownStep(1, 1.0, ("reward", 0.5, ""), {"tokens/s": "   100", "staleness": "0.0"})


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_prints_and_messages_scroll_above_the_display(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", terminal)
    with Progress(10, terminal) as progress:
        progress.step(STEP)
        progress.message("a message of the run")
        print("a print of the user's code")
        progress.refresh()
        shown = plain(terminal.getvalue())
    assert shown.index("a message of the run") < shown.rindex("step 1/10")
    assert shown.index("a print of the user's code") < shown.rindex("step 1/10")
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor is shown again"


def test_print_to_a_pipe_bypasses_the_display(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    with Progress(10, terminal):
        print("a result")
    assert pipe.getvalue() == "a result\n"
    assert "a result" not in terminal.getvalue()


def test_narrowed_terminal_is_redrawn_without_leftover_rows(terminal: Terminal):
    console = Console(file=terminal, force_terminal=True, width=100, height=30)

    class Wide:
        def lines(self) -> list[Text]:
            return [Text("x" * 99), Text("y" * 30)]

    live = LiveLines(console, Wide())
    live.start(refresh=True)
    try:
        terminal.truncate(0)
        console.width = 40
        live.refresh()
        assert re.match(r"\D*?(\x1b\[2K\x1b\[1A){3}\x1b\[2K(?!\x1b\[1A)", terminal.getvalue()), "99 cells are 3 rows"
    finally:
        live.stop()


async def test_generation_status_is_hidden_once_it_is_over(terminal: Terminal):
    looked = asyncio.Event()

    class Run:
        def look(self) -> RunLook:
            looked.set()
            return LOOK

    with Progress(10, terminal) as progress:
        following = asyncio.create_task(progress.follow(Run()))
        await looked.wait()
        progress.refresh()
        assert "generator-0" in plain(terminal.getvalue())
        following.cancel()
        await asyncio.wait([following])
        terminal.truncate(0)
        progress.refresh()
    assert "generator-0" not in plain(terminal.getvalue())


def test_long_paths_are_not_broken_into_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout", terminal)
    path = "/a/folder/of/runs/" + "x/" * 30
    with Progress(10, terminal) as progress:
        progress.message(f"run directory: {path}")
        progress.warning(f"look at {path}")
        print(f"printed: {path}")
    show_summary(RunSummary(0.1, 0.2, 1, 1, 1.0, Path(path)), terminal)
    lines = plain(terminal.getvalue()).replace("\r", "").splitlines()
    for text in (f"run directory: {path}", f"look at {path}", f"printed: {path}", f"{path}report.html"):
        assert any(line.endswith(text) for line in lines), text


def test_summary_has_a_line_for_each_adapter(terminal: Terminal) -> None:
    first = RunSummary(0.1, 0.25, 1, 10, 1.0, Path("run/adapters/first"))
    second = RunSummary(None, None, 20, 3000, 1.0, Path("run/adapters/second"))
    show_summary(RunSummary.of_adapters({"first": first, "second": second}, Path("run"), 75.0), terminal)
    rows = [line.split(maxsplit=2) for line in plain(terminal.getvalue()).splitlines() if line.startswith("adapter")]
    assert rows == [
        ["adapter", "first", "1 step; validation reward 0.100 before, 0.250 after (+0.150)"],
        ["adapter", "second", "20 steps; validation reward off (validation.num_prompts = 0)"],
    ]
    assert "run/adapters/NAME/export" in terminal.getvalue()


def test_display_shows_a_long_operation_until_it_ends(terminal: Terminal):
    clock = ManualClock()
    with Progress(10, terminal, clock=clock) as progress:
        with progress.working("starting 2 generators"):
            clock.seconds = 0.2
            progress.message("early")
            assert "starting 2 generators" not in terminal.getvalue()
            clock.seconds = 12.0
            terminal.truncate(0)
            progress.refresh()
            assert "starting 2 generators, 12.0 s" in plain(terminal.getvalue())
        terminal.truncate(0)
        progress.refresh()
        assert "starting 2 generators" not in terminal.getvalue()


def test_no_color_variable_disables_colors(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    with Progress(10, terminal) as progress:
        progress.step(STEP)
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    without = Terminal()
    with Progress(10, without) as progress:
        progress.step(STEP)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", without.getvalue())


@pytest.mark.parametrize("on_terminal", [True, False])
def test_quiet_run_shows_only_warnings(terminal: Terminal, on_terminal: bool):
    file = terminal if on_terminal else io.StringIO()
    with Progress(10, file, verbosity=Verbosity.QUIET) as progress:
        progress.message("run directory: runs/1")
        with progress.working("starting"):
            progress.step(STEP)
        progress.warning("rollout train-0/1 ended in ValueError")
    assert plain(file.getvalue()) == "rollout train-0/1 ended in ValueError\n"


def test_verbose_run_shows_log_records():
    import logging

    logger, file = logging.getLogger("titan_rl.run.controller"), io.StringIO()
    level = logging.getLogger("titan_rl").level
    logging.getLogger("titan_rl").setLevel(logging.INFO)
    try:
        for verbosity in (Verbosity.NORMAL, Verbosity.VERBOSE):
            with Progress(10, file, verbosity=verbosity):
                logger.info("generator-0 pulled version %d", 3)
    finally:
        logging.getLogger("titan_rl").setLevel(level)
    assert file.getvalue() == "info: generator-0 pulled version 3\n"


def test_operations_thread_ends_with_the_display():
    with Progress(10, io.StringIO()):
        assert "operations" in {thread.name for thread in threading.enumerate()}
    assert "operations" not in {thread.name for thread in threading.enumerate()}
