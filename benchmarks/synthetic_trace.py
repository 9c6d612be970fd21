"""Traces of a synthetic run, with the lanes, spans and file sizes of a real one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from zlib import crc32

from titan_rl.core.tracing.recorder import TraceFile

MOST_BYTES = 32 << 20
"""Size limit of the trace of each process, the default of a run."""

GENERATORS = 2
GENERATING = 8  # spans of an engine's batch of work in a step
AT_ONCE = 32  # rollouts
STAGES = {
    "waiting for a batch": (0.4, "scheduler,idle"),
    "building samples": (0.01, "scheduler"),
    "packing": (0.01, "trainer"),
    "train step": (0.5, "trainer"),
    "waiting for the pull before": (0.03, "sync,idle"),
    "begin to publish": (0.05, "sync"),
}
LOADS = {"tensors": 0.02, "proximal logprobs": 0.08, "forward and backward": 0.35, "optimizer": 0.05}


def write_traces(
    folder: Path, began: float, *, steps: int, rollouts: int, step_s: float, turns: int = 2, seed: int = 0
) -> None:
    """Write the files of all processes.

    Args:
        began: seconds since 1970.
        rollouts: total number, the same in all steps.
        turns: of a rollout.
    """
    folder.mkdir(exist_ok=True)
    chance = random.Random(seed)
    processes = {
        "controller": _controller(steps, rollouts, turns, step_s, chance),
        "trainer": _trainer(steps, step_s),
        **{f"generator-{number}": _generator(steps, step_s, chance) for number in range(GENERATORS)},
    }
    for process, spans in processes.items():
        file = TraceFile(folder / f"{process}.jsonl", MOST_BYTES)
        lines = _lines(process, began, spans)
        while at_once := [*islice(lines, 1000)]:
            file.append(at_once)
        file.close()


Drawn = tuple[str, str, str, float, float, str]
"""Lane, category, name, beginning and end in seconds, args as JSON."""


def _lines(process: str, began: float, spans: Iterator[Drawn]) -> Iterator[bytes]:
    pid = crc32(process.encode()) & 0x7FFFFFFF
    yield f'{{"ph":"M","name":"process_name","pid":{pid},"tid":0,"args":{{"name":"{process}"}}}}\n'.encode()
    tids: dict[str, int] = {}
    for lane, kind, name, start, end, args in spans:
        if lane not in tids:
            tids[lane] = crc32(lane.encode()) & 0x7FFFFFFF
            named = f'"pid":{pid},"tid":{tids[lane]},"args":{{"name":"{lane}"}}'
            yield f'{{"ph":"M","name":"thread_name",{named}}}\n'.encode()
        ts, until = round((began + start) * 1e6), round((began + end) * 1e6)
        place = f'"name":"{name}","pid":{pid},"tid":{tids[lane]}'
        yield f'{{"cat":"{kind}","ph":"X",{place},"ts":{ts},"dur":{until - ts},"args":{args}}}\n'.encode()


def _controller(steps: int, rollouts: int, turns: int, step_s: float, chance: random.Random) -> Iterator[Drawn]:
    number = 0
    for step in range(1, steps + 1):
        at = (step - 1) * step_s
        while number < rollouts * step // steps:
            lane = f"rollout {number % AT_ONCE + 2}"
            start = at + step_s * (number % AT_ONCE) / (4 * AT_ONCE)
            yield from _rollout(lane, f"g{number // 8}/{number % 8}", start, turns, 0.7 * step_s, chance)
            if number % 8 == 7:
                about = f'{{"group":"g{number // 8}"}}'
                yield f"slot {number // 8 % 8 + 1}", "scheduler", "running", at, at + 0.9 * step_s, about
            number += 1
        for name, (share, kind) in STAGES.items():
            yield "steps", kind, name, at, at + share * step_s, f'{{"step":{step}}}'
            at += share * step_s
        yield "sync", "sync", "publish", at - 0.02 * step_s, at, f'{{"version":{step}}}'


def _rollout(
    lane: str, rollout: str, start: float, turns: int, length: float, chance: random.Random
) -> Iterator[Drawn]:
    args = f'{{"rollout":"{rollout}"}}'
    at = start
    yield lane, "fine,environment", "env reset", at, at + 1e-4, args
    for _ in range(turns):
        end = at + length / turns * (0.5 + 0.5 * chance.random())
        tokens = f'{{"rollout":"{rollout}","tokens":{chance.randrange(10, 200)}}}'
        yield lane, "fine,generator", "request", at + 1e-4, end - 2e-4, tokens
        yield lane, "fine,environment", "env step", end - 2e-4, end, args
        at = end
    yield "reward", "fine,reward", "similarity", at, at + 5e-5, args
    yield lane, "environment", "rollout", start, at, args


def _trainer(steps: int, step_s: float) -> Iterator[Drawn]:
    for step in range(1, steps + 1):
        at, end = (step - 1) * step_s, step * step_s
        yield "train", "trainer,idle", "idle", at, at + 0.42 * step_s, "{}"
        at += 0.42 * step_s
        for name, share in LOADS.items():
            yield "train", "trainer", name, at, at + share * step_s, '{"positions":9904}'
            at += share * step_s
        yield "train", "trainer", "publish", at, end, "{}"
        yield "publish", "sync", "publish copy", end - 0.01, end, f'{{"version":{step}}}'


def _generator(steps: int, step_s: float, chance: random.Random) -> Iterator[Drawn]:
    for step in range(1, steps + 1):
        at, end = (step - 1) * step_s, step * step_s
        yield "engine", "sync", "pull", at, at + 0.04 * step_s, f'{{"version":{step - 1}}}'
        at += 0.04 * step_s
        for _ in range(GENERATING):
            until = at + 0.09 * step_s * (0.5 + 0.5 * chance.random())
            yield "engine", "generator", "generating", at, until, f'{{"steps":6,"tokens":{chance.randrange(2000)}}}'
            at = until
        yield "engine", "generator,idle", "idle", at, end, "{}"
