"""Held-out rewards of a run by version: its best checkpoint, and the end of a run that has reached its goal or makes no
progress. They are part of the run's state, so that a resumed run decides as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from titan_rl.run.journal.state import RunState
from titan_rl.training.settings import StopAtConfig
from titan_rl.training.state.checkpoint import latest, list_checkpoints, step_of


def best_checkpoint(root: Path, rewards: Mapping[int, float]) -> Path | None:
    """Checkpoint with the highest held-out reward; the oldest of several, and None if no checkpoint was validated."""
    validated = [path for path in list_checkpoints(root) if step_of(path) in rewards]
    return max(validated, key=lambda path: rewards[step_of(path)], default=None)


def best_of(root: Path) -> tuple[Path | None, float] | None:
    """Best policy in a folder of checkpoints and its held-out reward, by the state of the newest one: a checkpoint, or
    None for the initial model, which has no checkpoint. The result is None if no checkpoint was validated.

    Raises:
        CheckpointError: The state cannot be read.
    """
    newest = latest(root)
    rewards = {} if newest is None else RunState.read(newest).held_out
    if (best := best_checkpoint(root, rewards)) is None:
        return None
    return (None, rewards[0]) if best_version(rewards) == 0 else (best, rewards[step_of(best)])


def best_version(rewards: Mapping[int, float]) -> int | None:
    """First version with the highest held-out reward; None without validations."""
    return max(sorted(rewards), key=lambda version: rewards[version], default=None)


def reason_to_stop(stop_at: StopAtConfig, rewards: Mapping[int, float]) -> str | None:
    """Reason why a run ends before its last step, for a message; None if it goes on."""
    trained = [reward for version, reward in rewards.items() if version]
    if stop_at.reward is not None and trained and max(trained) >= stop_at.reward:
        return f"the held-out reward {max(trained):.3f} has reached training.stop_at.reward = {stop_at.reward:g}"
    best = best_version(rewards)
    if stop_at.patience is None or best is None:
        return None
    if (count := sum(version > best for version in rewards)) < stop_at.patience:
        return None
    validations = "1 validation" if count == 1 else f"{count} validations"
    return f"no held-out reward above {rewards[best]:.3f}, of step {best}, in {validations} (training.stop_at.patience)"
