"""Log a resumed run to trackio through its sink, and print the rows that trackio has stored."""

import json
import sys
from pathlib import Path

from titan_rl.core.console import ConsoleLines
from titan_rl.metrics.sinks.registry import find_sink
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.metrics.sinks.types import SinkSpec

folder = Path(sys.argv[1])
settings = LoggingConfig(trackio={"project": "sums"})
console = ConsoleLines()
kind = find_sink("trackio")
kind.check()
for step, steps in ((0, (1, 2)), (2, (3,))):
    sink = kind.make(SinkSpec("run", folder, settings, step, console))
    for number in steps:
        sink.log(number, {"rollout/reward_mean": number / 4, "train/loss": 0.5})
    sink.close()

from trackio.sqlite_storage import SQLiteStorage  # noqa: E402  what its dashboard reads

rows = [(row["step"], row["rollout/reward_mean"]) for row in SQLiteStorage.get_logs("sums", "run")]
print(json.dumps({"console": console, "rows": rows}))
