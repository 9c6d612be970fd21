"""Stop a real run at random moments within a step, resume it each time, and check the samples it was trained on.

    PYTHONPATH=.:tests python -m e2e.stop_ten_times [--stops 10] [--seed 0]

Takes some minutes and prints a line per stop. Fails if a sample was trained twice, left out, or out of order.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from e2e.runs import run_training
from e2e.slow_loss import GATE, SECONDS
from e2e.test_stopped_and_killed import GROUPS, SETTINGS, assert_trained_once_and_in_order, wait_until

from titan_rl.run.journal.state import RunState
from titan_rl.training.state.checkpoint import latest

STEP_S = 1.0  # at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {GATE: folder, SECONDS: str(STEP_S)}
        marker = Path(folder, "begun")
        steps = 4 * arguments.stops
        with run_training(Path(folder), training__steps=steps, checkpoint__interval=3, **SETTINGS) as run:
            for number in range(1, arguments.stops + 1):
                for _ in range(rng.randint(1, 3)):  # steps of this part
                    marker.unlink(missing_ok=True)
                    wait_until(marker.exists, run)
                delay = rng.uniform(0, STEP_S)
                time.sleep(delay)
                sent = rng.choice([signal.SIGINT, signal.SIGTERM])
                run.process.send_signal(sent)
                assert run.wait(600) == 128 + sent, run.output
                state = RunState.read(latest(run.folder / "checkpoints") or run.folder)
                assert_trained_once_and_in_order(run.folder, state.step)
                assert state.next_index >= state.step * GROUPS > 0
                print(
                    f"stop {number}: {sent.name} {delay:.2f} s into a step; saved at step {state.step}, next index "
                    f"{state.next_index}, {len(state.unsettled)} samples pending",
                    flush=True,
                )
                run.resume("--training.steps", str(state.step + 2 if number == arguments.stops else steps))
            assert run.wait(1500) == 0, run.output
            last = RunState.read(latest(run.folder / "checkpoints") or run.folder)
            assert_trained_once_and_in_order(run.folder, last.step)
            print(f"{last.step} steps, {last.step * GROUPS} samples, each trained once and in order")


if __name__ == "__main__":
    main()
