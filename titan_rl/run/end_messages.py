"""The last words of a run: where it stands, and the command that goes on with it."""

from __future__ import annotations

import shlex

from titan_rl.config.run import RunConfig
from titan_rl.core.errors import CheckpointError
from titan_rl.run.checkpoints.resumption import is_finished
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState, list_segments, read_segments
from titan_rl.training.state.checkpoint import latest, step_of


class EndMessages:
    """What to say when a run ends before its time.

    Args:
        step: of the checkpoint that it begins from.
        begun_by: the command that has begun it; None where it is resumed.
        command: of `titan-rl`, that goes on with it.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDirectory,
        step: int,
        begun_by: str | None = None,
        command: str = "train",
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._step = step
        self._begun_by = begun_by
        self._command = shlex.join(["titan-rl", command, "--resume", str(run_dir.path)])

    def stands_at(self, step: int) -> None:
        """The run has trained this step last."""
        self._step = step

    def stopped(self) -> str:
        """After a stop in order: "stopped with step 3 saved; to go on: titan-rl train --resume runs/latest"."""
        if (finished := self._finished()) is not None:
            return f"stopped when {finished}"
        if (unsaved := self._unsaved()) is not None:
            return f"stopped at {unsaved}; to go on from {self._start()}: {self._command}"
        saved = f"with step {self._step} saved" if self._step else "before a step was trained"
        return f"stopped {saved}; to go on: {self._command}"

    def failed(self) -> str:
        """After the error that ended the run."""
        if (finished := self._finished()) is not None:
            return finished
        if (unsaved := self._unsaved()) is not None:
            return f"the run stands at {unsaved}; once it is mended, go on from {self._start()} with: {self._command}"
        if self._begun_by is not None and not self._step and self._has_no_journal():
            return f"nothing was trained or saved; once it is mended, begin again with: {self._begun_by}"
        saved = f"step {self._step} is saved; " if self._step else ""
        return f"{saved}once it is mended, go on with: {self._command}"

    def cut_short(self) -> str:
        """After an end at once, whatever the run was doing."""
        return f"what was saved before stays; to go on: {self._command}"

    def _finished(self) -> str | None:
        """What there is, where nothing is left to do."""
        if not is_finished(self._config, self._run_dir, latest(self._run_dir.checkpoints)):
            return None
        return f"all steps were trained and saved: the run is finished, its policy is {self._run_dir.export}"

    def _unsaved(self) -> str | None:
        """The step that the run stands at, where a resume starts from one before."""
        checkpoint = latest(self._run_dir.checkpoints)
        if self._step <= (0 if checkpoint is None else step_of(checkpoint)):
            return None
        return f"step {self._step}, which is not saved"

    def _has_no_journal(self) -> bool:
        """Whether no answer of the policy is kept that a resume could take."""
        try:
            position = RunState.read(self._run_dir.path).position
            state = read_segments(list_segments(self._run_dir.journal), position).state
        except CheckpointError:
            return False
        return not (state.finished or state.completions)

    def _start(self) -> str:
        """What a resume starts from."""
        checkpoint = latest(self._run_dir.checkpoints)
        return (
            "step 0, for there is no checkpoint" if checkpoint is None else f"step {step_of(checkpoint)}, {checkpoint}"
        )
