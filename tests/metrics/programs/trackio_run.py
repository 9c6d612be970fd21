"""Logs a run of two lives to trackio by its sink, and prints what trackio has of it."""

import json
import sys
from pathlib import Path

from titan_rl.core.console import ConsoleLines
from titan_rl.metrics.sinks.registry import find_sink
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.metrics.sinks.types import SinkSpec

folder = Path(sys.argv[1])
settings = LoggingConfig(trackio={"project": "sums"})
told = ConsoleLines()
kind = find_sink("trackio")
kind.check()
for step, steps in ((0, (1, 2)), (2, (3,))):
    sink = kind.make(SinkSpec("run", folder, settings, step, told))
    for number in steps:
        sink.log(number, {"rollout/reward_mean": number / 4, "train/loss": 0.5})
    sink.close()

from trackio.sqlite_storage import SQLiteStorage  # noqa: E402  what its dashboard reads

rows = [(row["step"], row["rollout/reward_mean"]) for row in SQLiteStorage.get_logs("sums", "run")]
print(json.dumps({"told": told, "rows": rows}))
