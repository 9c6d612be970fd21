"""API of `titan-rl view`: answers about run folders, access control, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from background import HANG_S

from benchmarks.synthetic_run import line, metric_records, write_run
from titan_rl.core.errors import ConfigError
from titan_rl.core.files import MAX_LINE_BYTES
from titan_rl.core.run_files import LOST
from titan_rl.viewer.app import ViewerApp, make_viewer
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.runs import Runs


@contextlib.asynccontextmanager
async def asking(app: ViewerApp) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8484") as client:
        yield client


@contextlib.asynccontextmanager
async def viewing(*folders: Path) -> AsyncGenerator[httpx.AsyncClient]:
    with contextlib.closing(Runs(folders)) as runs:
        async with asking(make_viewer(runs)) as client:
            yield client


async def get(client: httpx.AsyncClient, path: str, **parameters: Any) -> Any:
    return (await client.get(path, params=parameters)).raise_for_status().json()


async def test_finds_runs_and_evaluations(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "20260101-000000-a", steps=4, rollouts=8)
    write_run(tmp_path / "runs" / "20260102-000000-b", steps=2, rollouts=8, state="failed")
    (tmp_path / "runs" / "latest").symlink_to("20260102-000000-b")
    evaluation = tmp_path / "runs" / "evaluations" / "20260103-000000-c" / "step-80"
    evaluation.mkdir(parents=True)
    tasks = {"sort": {"unreached_success": "no sample reached success = 1"}, "count": {"unreached_success": None}}
    results = {"policy": "step 80", "version": 80, "is_complete": True, "seconds": 9.0, "tasks": tasks}
    (evaluation / "results.json").write_text(json.dumps(results))
    async with viewing(tmp_path / "runs") as client:
        runs = {run["id"]: run for run in (await get(client, "/api/runs"))["runs"]}
        assert list(runs) == ["step-80", "20260102-000000-b", "20260101-000000-a"]
        first = runs["20260101-000000-a"]
        described = {name: first[name] for name in ("state", "steps", "steps_planned", "kind", "tasks", "began")}
        assert described == {
            "state": "finished",
            "steps": 4,
            "steps_planned": 4,
            "kind": "train",
            "tasks": ["sort", "countdown"],
            "began": 1767225600.0,
        }
        assert runs["20260102-000000-b"]["state"] == "failed"
        assert "the loss is nan" in runs["20260102-000000-b"]["reason"]
        evaluated = runs["step-80"]
        summary = await get(client, "/api/runs/step-80/summary")
        assert summary["warnings"] == ["sort: no sample reached success = 1"]
        assert (evaluated["kind"], evaluated["state"], evaluated["steps"], evaluated["seconds"]) == (
            "evaluation",
            "finished",
            80,
            9.0,
        )
        write_run(tmp_path / "runs" / "20260104-000000-d", steps=1, rollouts=0)
        assert len((await get(client, "/api/runs"))["runs"]) == 4, "a run that starts later is found, too"


async def test_does_not_follow_symlinks_out_of_a_run(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", steps=4, rollouts=8)
    (elsewhere / "trace").mkdir(exist_ok=True)
    event = {"ph": "X", "name": "secret", "tid": 1, "ts": 0, "dur": 5}
    (elsewhere / "trace" / "controller.jsonl").write_text(f"{json.dumps(event)}\n")
    run = tmp_path / "run"
    run.mkdir()
    links = ("status.json", "config.toml", "metrics.jsonl", "rollouts.jsonl", "trace")
    for name in links:
        (run / name).symlink_to(elsewhere / name)
    (tmp_path / "named").symlink_to(run)
    async with viewing(tmp_path / "named") as client:
        (described,) = (await get(client, "/api/runs"))["runs"]
        assert (described["steps"], described["tasks"], described["reason"]) == (0, [], LOST)
        summary = await get(client, "/api/runs/run/summary")
        assert (summary["config"], summary["settings"], summary["tiles"]) == ("", {}, [])
        assert [warning.split()[0] for warning in summary["warnings"]] == [*links]
        assert (await get(client, "/api/runs/run/metrics"))["metrics"] == []
        assert (await get(client, "/api/runs/run/rollouts"))["total"] == 0
        assert (await get(client, "/api/runs/run/trace.json"))["traceEvents"] == []
        (run / "trace").unlink()
        (run / "trace").mkdir()
        (run / "trace" / "controller.jsonl").symlink_to(elsewhere / "trace" / "controller.jsonl")
        assert (await get(client, "/api/runs/run/timeline"))["lanes"] == []
        os.mkfifo(run / "results.json")  # opening it would block forever
        assert len((await get(client, "/api/runs"))["runs"]) == 1


async def test_summary_gives_processes_held_and_process_hours(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, rollouts=0)
    settings = "[training]\ndata_parallel = 2\n[generation]\nnum_generators = 3\ntensor_parallel_size = 2\n"
    (folder / "config.toml").write_text(settings)
    with contextlib.closing(Runs([folder])) as runs:
        async with asking(make_viewer(runs)) as client:
            (run,) = (await get(client, "/api/runs"))["runs"]
            tiles = {tile["label"]: tile for tile in (await get(client, "/api/runs/run/summary"))["tiles"]}
    assert tiles["Processes held"]["value"] == f"8 for {run['seconds']:.0f} s"
    hours = f"{run['seconds'] * 8 / 3600:.2f} process hours"
    assert tiles["Processes held"]["note"] == f"2 trainer ranks, 3 engines of 2; {hours}"
    assert run["seconds"] > 0


async def test_summary_splits_step_time_by_phase(tmp_path: Path) -> None:
    step = {"time/step_s": 8.0, "time/train_s": 3.0, "time/wait_for_rollouts_s": 5.0, "time/validation_s": 2.0}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': i, **step})}\n" for i in (1, 2)))
    async with viewing(tmp_path) as client:
        summary = await get(client, f"/api/runs/{tmp_path.name}/summary")
    assert summary["time"] == [
        {"name": "generation", "seconds": 10.0, "share": 0.5},
        {"name": "training", "seconds": 6.0, "share": 0.3},
        {"name": "validation", "seconds": 4.0, "share": 0.2},
    ]
    assert "generation takes 50% of a step" in summary["bottleneck"]["sentence"]
    assert not [tile for tile in summary["tiles"] if "%" in tile["value"] + tile["note"]]


async def test_summary_has_the_waterfall_of_a_mean_step(tmp_path: Path) -> None:
    seconds = {"available_s": 10.0, "engine_steps_s": 2.0, "generators_s": 3.0, "controller_s": 1.0}
    step = {f"processor/{name}": value for name, value in seconds.items()}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': i, **step})}\n" for i in (1, 2)))
    async with viewing(tmp_path) as client:
        summary = await get(client, f"/api/runs/{tmp_path.name}/summary")
    assert summary["cores"] == [
        {"name": "engine steps", "seconds": 2.0, "share": 0.2},
        {"name": "generators, besides steps", "seconds": 1.0, "share": 0.1},
        {"name": "controller", "seconds": 1.0, "share": 0.1},
        {"name": "idle, or used by other programs", "seconds": 6.0, "share": 0.6},
    ]


def prompt_line(step: int, group: str, reward: float | None, prompt: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{reward}"}]
    status = "error_parse" if reward == 0.0 else "completed"
    record = {"step": step, "phase": "validation", "task": "sort", "group_id": group, "messages": messages}
    return line({**record, "rollout_id": f"{group}/0", "status": status, "reward": reward, **more})


async def test_repeated_prompts_are_shown_by_their_median_rollout(tmp_path: Path) -> None:
    prompts = {"validation-0": ("easy", 0.1), "validation-1": ("middling", 0.0), "validation-2": ("hard", -0.3)}
    with (tmp_path / "rollouts.jsonl").open("wb") as file:
        for step in (0, 5, 10):
            for group, (prompt, more) in prompts.items():
                for reward in (0.0, 0.5 + step / 30 + more, 0.95, None):
                    file.write(prompt_line(step, group, reward, prompt))
            file.write(prompt_line(step, "validation-9", 0.4, f"asked once, at step {step}"))
            file.write(prompt_line(step, "validation-0", 0.4, "easy", dropped="reward_failed"))
            file.write(prompt_line(step, "train-7", 0.3, "easy", phase="train"))
    async with viewing(tmp_path) as client:
        run = f"/api/runs/{tmp_path.name}"
        found = await get(client, f"{run}/prompts")
        assert found["same"]
        assert [one["group_id"] for one in found["prompts"]] == [*prompts]
        assert found["prompts"][found["median"]]["group_id"] == "validation-1"
        for one, (prompt, more) in zip(found["prompts"], prompts.values(), strict=True):
            assert [at["step"] for at in one["steps"]] == [0, 5, 10]
            for at in one["steps"]:
                record = await get(client, f"{run}/rollouts/{at['index']}")
                assert (record["step"], record["messages"][0]["content"]) == (at["step"], prompt)
                assert record["reward"] == at["reward"] == pytest.approx(0.5 + at["step"] / 30 + more)
                assert (at["lowest"], at["highest"], at["count"]) == (0.0, 0.95, 4)


async def test_prompts_without_repeats_are_not_marked_the_same(tmp_path: Path) -> None:
    with (tmp_path / "rollouts.jsonl").open("wb") as file:
        for step in (1, 2, 3):
            for sibling, reward in enumerate((0.2, 0.4, 0.9)):
                file.write(prompt_line(step, f"g{step}", reward, f"prompt {step}", phase="train", sibling=sibling))
    async with viewing(tmp_path) as client:
        found = await get(client, f"/api/runs/{tmp_path.name}/prompts")
        assert not found["same"]
        (only,) = found["prompts"]
        assert [(at["step"], at["reward"]) for at in only["steps"]] == [(1, 0.4), (2, 0.4), (3, 0.4)]
        assert found["median"] == 0


async def test_runs_of_the_same_name_have_distinct_ids(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "run", steps=steps, rollouts=0) for place, steps in (("a", 1), ("b", 2))]
    async with viewing(*folders) as client:
        runs = (await get(client, "/api/runs"))["runs"]
        assert len({run["id"] for run in runs}) == 2
        for run in runs:
            curves = await get(client, f"/api/runs/{run['id']}/curves", names="train/loss")
            assert len(curves["curves"]["train/loss"]["steps"]) == run["steps"]


async def test_run_state_follows_its_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, rollouts=0, state="running")
    async with viewing(folder) as client:
        (killed,) = (await get(client, "/api/runs"))["runs"]
        assert (killed["state"], "killed" in killed["reason"]) == ("failed", True)
        assert "killed" in (await get(client, "/api/runs/run/summary"))["failure"]
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert (await get(client, "/api/runs"))["runs"][0]["state"] == "running"
            assert (await get(client, "/api/runs/run/summary"))["failure"] is None


async def test_curves_equal_the_metrics_within_the_requested_points(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=100, rollouts=0)
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    async with viewing(folder) as client:
        (whole,) = (await get(client, "/api/runs/run/curves", names="train/loss,no/such"))["curves"].values()
        assert whole == {"steps": [float(step) for step in range(1, 101)], "values": losses}
        (part,) = (await get(client, "/api/runs/run/curves", names="train/loss", **{"from": 11, "to": 20}))[
            "curves"
        ].values()
        assert part["values"] == losses[10:20]
        (small,) = (await get(client, "/api/runs/run/curves", names="train/loss", points=10))["curves"].values()
        assert len(small["steps"]) == 10
        assert min(small["low"]) == min(losses)
        assert max(small["high"]) == max(losses)
        assert small["values"][0] == pytest.approx(sum(losses[:10]) / 10)
        metrics = (await get(client, "/api/runs/run/metrics"))["metrics"]
        (loss,) = [metric for metric in metrics if metric["name"] == "train/loss"]
        assert loss["help"]
        assert loss["group"] == "Optimization"


async def test_skipped_steps_are_counted_across_a_resume(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, rollouts=8)

    async def tile() -> dict[str, str] | None:
        async with viewing(folder) as client:
            tiles = (await get(client, "/api/runs/run/summary"))["tiles"]
        return next((tile for tile in tiles if tile["label"] == "Skipped steps"), None)

    assert await tile() is None
    with (folder / "metrics.jsonl").open("a") as file:
        for step, count in enumerate((0, 1, 2, 0, 1, 1), 3):
            file.write(json.dumps({"step": step, "train/skipped_steps": count}) + "\n")
    found = await tile()
    assert found is not None
    assert (found["value"], found["tone"]) == ("3", "bad")


def test_non_finite_value_leaves_a_gap_in_the_curve() -> None:
    columns = MetricColumns()
    for step, value in ((1, 0.5), (2, None), (4, 0.25), (3, "x"), (3, 1e999)):
        columns.add({"step": step, "train/loss": value})
    assert columns.curve("train/loss", points=10) == {"steps": [1, 2, 3, 4], "values": [0.5, None, None, 0.25]}
    assert columns.values("train/loss") == [0.5, 0.25]


async def test_appended_records_show_and_truncated_records_disappear(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10, rollouts=80)
    async with viewing(folder) as client:

        async def seen() -> tuple[int, int]:
            curves = await get(client, "/api/runs/run/curves", names="train/loss")
            return len(curves["curves"]["train/loss"]["steps"]), (await get(client, "/api/runs/run/rollouts"))["total"]

        assert await seen() == (10, 80)
        first = await client.get("/api/runs/run/rollouts/0")
        for name, keeps in (("metrics.jsonl", 6), ("rollouts.jsonl", 40)):
            fresh = (folder / name).with_suffix(".tmp")
            fresh.write_bytes(b"".join((folder / name).read_bytes().splitlines(keepends=True)[:keeps]))
            os.replace(fresh, folder / name)
        assert await seen() == (5, 40), "step 0 has no loss"
        assert (await client.get("/api/runs/run/rollouts/40")).status_code == 404
        assert (await client.get("/api/runs/run/rollouts/0")).content == first.content
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(b'broken\n{"step": 6, "train/loss": 1.0}\n{"step": 7, "train/l')
        assert await seen() == (6, 40)


async def test_non_finite_metrics_do_not_hide_the_rest_of_their_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6, rollouts=8)
    wide = ", ".join(f'"task/t{number}/reward_mean": 0.123456789' for number in range(3000))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "train/loss": NaN, "train/lr": Infinity, "time_s": 9.5, "train/kl": 0.5}\nbroken\n')
        file.write(f'{{"step": 8, "train/kl": 0.6, {wide}}}\n'.encode())
    async with viewing(folder) as client:
        found = (await get(client, "/api/runs/run/curves", names="train/loss,train/lr,train/kl"))["curves"]
        warnings = (await get(client, "/api/runs/run/summary"))["warnings"]
        (described,) = (await get(client, "/api/runs"))["runs"]
    assert [found[name]["values"][-1] for name in ("train/loss", "train/lr")] == [None, None]
    assert (found["train/kl"]["steps"][-2:], found["train/kl"]["values"][-2:]) == ([7, 8], [0.5, 0.6])
    assert "1 line cannot be read, and is left out of metrics.jsonl" in warnings
    assert described["steps"] == 8, "even though the line is long"


async def test_rollout_record_is_the_line_of_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, rollouts=24)
    lines = (folder / "rollouts.jsonl").read_bytes().splitlines()
    async with viewing(folder) as client:
        for row in (await get(client, "/api/runs/run/rollouts", status="completed", sort="reward"))["rows"]:
            answer = await client.get(f"/api/runs/run/rollouts/{row['index']}")
            assert answer.content == lines[row["index"]]
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["rollout_id"] == row["rollout_id"]


async def test_non_finite_numbers_are_null_in_every_answer(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nlr = inf\nbetas = [nan]\n")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/loss": NaN}\n')
    records = [{"rollout_id": "g/0", "reward": reward, "turns": [{"logprobs": [reward]}]} for reward in (0.5, math.nan)]
    (tmp_path / "rollouts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    async with viewing(tmp_path) as client:
        run = f"/api/runs/{tmp_path.name}"
        record = json.loads((await client.get(f"{run}/rollouts/1")).text, parse_constant=pytest.fail)
        assert record == {"rollout_id": "g/0", "reward": None, "turns": [{"logprobs": [None]}]}
        found = await get(client, f"{run}/rollouts", sort="reward")
        assert [row["reward"] for row in found["rows"]] == [0.5, None]
        assert found["ranges"]["reward"] == [0.5, 0.5]
        curves = (await get(client, f"{run}/curves", names="train/loss"))["curves"]
        assert curves["train/loss"] == {"steps": [1, 2], "values": [0.5, None]}
        summary = await get(client, f"{run}/summary")
        assert summary["settings"] == {"training.lr": "inf", "training.betas": [None]}
        assert summary["warnings"] == []


async def test_overlong_line_is_skipped(tmp_path: Path) -> None:
    with (tmp_path / "rollouts.jsonl").open("wb") as file:
        file.write(b'{"rollout_id": "g/0"}\n')
        file.truncate(MAX_LINE_BYTES + 100)  # a hole, which takes no disk space
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"rollout_id": "g/1"}\n')
    async with viewing(tmp_path) as client:
        run = f"/api/runs/{tmp_path.name}"
        while (found := await get(client, f"{run}/rollouts"))["indexed"] < 1:
            pass
        assert [row["rollout_id"] for row in found["rows"]] == ["g/0", "g/1"]
        assert (await get(client, f"{run}/rollouts/1")) == {"rollout_id": "g/1"}
        assert (await get(client, f"{run}/summary"))["warnings"] == [
            "1 line cannot be read, and is left out of rollouts.jsonl"
        ]


@pytest.mark.parametrize(
    "last",
    [
        b'{"step": 3, "time_s": 4.5, "train/loss": NaN}\n',
        b'{"step": 3, "time_s": 4.5, "x": "%s"}\n' % (b"x" * 200_000),
        b'{"step": 3, "time_s": 4.5}\nbroken\n{"step"',
    ],
    ids=["not a number", "wide", "broken"],
)
async def test_run_steps_come_from_the_last_record(tmp_path: Path, last: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 2, "time_s": 3.0}\n' + last)
    async with viewing(tmp_path) as client:
        (run,) = (await get(client, "/api/runs"))["runs"]
        assert (run["steps"], run["seconds"]) == (3, 4.5)
        warnings = (await get(client, f"/api/runs/{run['id']}/summary"))["warnings"]
        assert warnings == (["1 line cannot be read, and is left out of metrics.jsonl"] if b"broken" in last else [])


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/api/runs/no-such-run/summary", 404, None),
        ("/api/runs/..%2Fsecret/summary", 404, None),
        ("/api/runs/run/rollouts/99", 404, None),
        ("/api/runs/run/rollouts/-1", 400, "index"),
        ("/api/runs/run/rollouts/config.toml", 400, "index"),
        ("/api/runs/run/rollouts?limit=0x10", 400, "limit"),
        ("/api/runs/run/rollouts?colour=red", 400, "colour"),
        ("/api/runs/run/curves?points=1", 400, "points"),
        ("/api/runs/run/curves?from=a", 400, "from"),
        ("/api/nothing", 404, None),
        ("/static/../app.py", 404, None),
        ("/static/%2e%2e/app.py", 404, None),
        ("/static//etc/passwd", 404, None),
    ],
)
async def test_invalid_request_error_names_the_field(tmp_path: Path, path: str, status: int, field: str | None) -> None:
    (tmp_path / "secret").mkdir()
    async with viewing(write_run(tmp_path / "run", steps=1, rollouts=8)) as client:
        answer = await client.get(path)
        assert answer.status_code == status
        error = answer.json()
        assert error["error"]
        assert error.get("field") == field


async def test_write_methods_are_rejected(tmp_path: Path) -> None:
    async with viewing(write_run(tmp_path / "run", steps=1, rollouts=8)) as client:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert (await client.request(method, "/api/runs")).status_code == 405


async def test_rejects_foreign_hosts_and_missing_keys(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, rollouts=8)
    with contextlib.closing(Runs([folder])) as runs:
        app = make_viewer(runs, key="secret")
        async with asking(app) as client:
            elsewhere = await client.get("/api/runs", headers={"host": "evil.example:8484"})
            assert elsewhere.status_code == 403, "a foreign host name that resolves to this address"
            assert (await client.get("/api/runs")).status_code == 403
            assert (await client.get("/", params={"key": "guess"})).status_code == 403
            opened = await client.get("/", params={"key": "secret"})
            assert (opened.status_code, opened.headers["location"]) == (303, "/")
            assert {"HttpOnly", "SameSite=strict"} <= set(opened.headers["set-cookie"].split("; "))
            assert (await client.get("/api/runs")).status_code == 200
            page = await client.get("/")
            assert page.status_code == 200
        for answer in (page, elsewhere):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]


async def test_event_stream_reports_changed_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, rollouts=8)
    with contextlib.closing(Runs([folder])) as runs:
        app = make_viewer(runs, look_s=0.01)
        async with asking(app) as client:
            await get(client, "/api/runs/run/summary")
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def send(message: Any) -> None:
            for text in message.get("body", b"").decode().splitlines():
                if text.startswith("data: "):
                    heard.put_nowait(json.loads(text.removeprefix("data: ")))

        async def receive() -> Any:
            return await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/events",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
        }
        async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(app(scope, receive, send))
            assert await heard.get() == {"run": "", "changed": []}, "changes are reported from now on"
            with (folder / "metrics.jsonl").open("ab") as file:
                file.writelines(line(record) for record in metric_records(3, 3, Random(0)))
            events = [await heard.get(), await heard.get()]
            assert {"run": "run", "changed": ["metrics"]} in events
            assert {"run": "", "changed": ["runs"]} in events, "the run has one more step"
            app.end()
            await listening


def test_missing_folder_error_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Runs([tmp_path / "nowhere"])
