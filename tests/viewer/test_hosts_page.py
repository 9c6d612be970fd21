"""Page of a run on several hosts: the list of hosts with their events, and the host of each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import OpenPage, until

from benchmarks.synthetic_run import write_run
from titan_rl.core.run_files import read_hosts, work_of
from titan_rl.viewer.timeline import chrome_trace, timeline
from titan_rl.viewer.trace import Traces

in_browser = pytest.mark.asyncio(loop_scope="session")
BEGAN = 1_767_225_600.0
SILENT = "nothing has been heard of it for 3 s"

HOSTS: list[dict[str, Any]] = [
    {
        "name": "node-1",
        "address": "10.0.0.1:22222",
        "state": "in the run",
        "processes": ["rollout-worker-0", "trainer"],
    },
    {
        "name": "node-2",
        "address": "10.0.0.2:22222",
        "state": "draining",
        "reason": "its worker got SIGTERM",
        "processes": ["generator-0", "generator-2"],
    },
    {"name": "node-3", "address": "10.0.0.3:22222", "state": "gone", "reason": SILENT, "processes": []},
    {"name": "", "address": "10.0.0.4:22222", "state": "joining", "processes": []},
]
EVENTS = [
    {"at": BEGAN + 20, "host": "node-3", "what": "joined", "why": ""},
    {"at": BEGAN + 60, "host": "node-3", "what": "lost", "why": SILENT},
    {"at": BEGAN + 90, "host": "node-2", "what": "drains", "why": "its worker got SIGTERM"},
]
PROCESSES = {"controller": "head", "trainer": "node-1", "generator-0": "node-2", "generator-1": "node-3"}
Spans = list[tuple[float, float, str, str]]
SPANS: dict[str, dict[str, Spans]] = {
    "controller": {
        "steps": [(0, 60, "train step", "trainer"), (60, 120, "train step", "trainer")],
        "host node-1": [(0, 120, "in the run", "host")],
        "host node-3": [(20, 50, "in the run", "host"), (50, 120, "gone", "lost")],
    },
    "trainer": {"trainer": [(0, 50, "train", "trainer"), (50, 120, "wait for rollouts", "trainer,idle")]},
    "generator-0": {"engine": [(0, 120, "generating", "generator")]},
    "generator-1": {"engine": [(20, 60, "generating", "generator")]},
}


def write_traces(folder: Path, hosts: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for process, host in hosts.items():
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": process, "host": host}}
        ]
        for number, (lane, spans) in enumerate(SPANS[process].items(), start=1):
            events.append({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": lane}})
            for start, end, name, kind in spans:
                times = {"ts": (BEGAN + start) * 1e6, "dur": (end - start) * 1e6}
                events.append({"cat": kind, "ph": "X", "name": name, "tid": number, **times, "args": {}})
        (folder / f"{process}.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


def write_on_hosts(folder: Path) -> Path:
    write_run(folder, steps=60, rollouts=64)
    (folder / "hosts.json").write_text(json.dumps({"hosts": HOSTS, "events": EVENTS, "answers": {}}))
    write_traces(folder / "trace", PROCESSES)
    return folder


def test_read_hosts_lists_the_work_of_each_host(tmp_path: Path) -> None:
    folder = write_on_hosts(tmp_path / "run")
    found = read_hosts(folder)
    assert found is not None
    assert [host["does"] for host in found["hosts"]] == ["trainer, rollout worker", "2 generators", "", ""]
    assert found["events"] == EVENTS
    one: dict[str, Any] = {"hosts": HOSTS[:1], "answers": {}}
    for text in (json.dumps(one), "{", '{"hosts": 3}'):
        (folder / "hosts.json").write_text(text)
        assert read_hosts(folder) is None
    (folder / "hosts.json").write_text(json.dumps({**one, "events": EVENTS[:1]}))
    assert read_hosts(folder) is not None, "there was an event"


def test_work_of_summarizes_process_names() -> None:
    assert work_of([]) == ""
    assert work_of(["generator-10", "trainer", "generator-2"]) == "trainer, 2 generators"


def test_lanes_name_their_host_with_several_hosts(tmp_path: Path) -> None:
    write_traces(tmp_path / "trace", PROCESSES)
    lanes = timeline(Traces(tmp_path / "trace"))["lanes"]
    assert {lane["process"]: lane["host"] for lane in lanes} == PROCESSES
    assert {lane["kind"] for lane in lanes if lane["lane"].startswith("host")} == {"host"}
    events = json.loads(b"".join(chrome_trace(tmp_path)))["traceEvents"]
    assert "on node-3" in [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    write_traces(tmp_path / "trace", dict.fromkeys(PROCESSES, "head"))
    assert not any("host" in lane for lane in timeline(Traces(tmp_path / "trace"))["lanes"])
    assert b"process_labels" not in b"".join(chrome_trace(tmp_path))


@in_browser
async def test_host_list_shows_states_and_updates(open_page: OpenPage, runs_folder: Path) -> None:
    folder = write_on_hosts(runs_folder / "20250102-000000-hosts")
    page = await open_page(f"#runs={folder.name}")
    card = page.get_by_role("region", name="Hosts", exact=True)
    rows = card.locator("tbody tr")
    assert (await rows.nth(0).inner_text()).split("\t")[:3] == ["node-1", "trainer, rollout worker", "in the run"]
    assert SILENT in await rows.nth(2).inner_text()
    assert await rows.nth(3).locator("th").inner_text() == "10.0.0.4:22222"
    became = [line.split("node-", 1)[1] for line in await card.locator("li").all_inner_texts()]
    assert became == ["2 is drained: its worker got SIGTERM", f"3 was lost: {SILENT}", "3 joined"]
    (folder / "hosts.json").write_text(json.dumps({"hosts": HOSTS[:2], "events": EVENTS[:1]}))
    await until(page, "document.querySelectorAll('.hosts tbody tr').length === 2")


@in_browser
async def test_single_host_run_has_no_host_list(open_page: OpenPage, runs_folder: Path) -> None:
    folder = write_run(runs_folder / "20250103-000000-host", steps=4, rollouts=16)
    (folder / "hosts.json").write_text(json.dumps({"hosts": HOSTS[:1], "answers": {}}))
    page = await open_page(f"#runs={folder.name}")
    await page.locator(".tile").first.wait_for()
    assert await page.locator(".hosts").count() == 0


@in_browser
async def test_lanes_are_grouped_by_host(open_page: OpenPage, runs_folder: Path) -> None:
    folder = write_on_hosts(runs_folder / "20250104-000000-lanes")
    page = await open_page(f"#tab=timeline&runs={folder.name}")
    await until(page, "viewer.view.chart.groups.length")
    groups = await page.evaluate("viewer.view.chart.groups.map(({ label, lanes }) => [label, lanes.length])")
    assert groups == [
        ["Hosts", 2],
        ["Training loop", 1],
        ["node-1 · Trainer", 1],
        ["node-2 · Generators", 1],
        ["node-3 · Generators", 1],
    ]
