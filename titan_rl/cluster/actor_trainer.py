"""The trainer in processes of its own, as the controller knows it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ActorDiedError, TitanRLError
from titan_rl.core.tracing.spans import span
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import StepPlan, plan_step
from titan_rl.training.protocol import StepResult, agreed_version
from titan_rl.training.settings import TrainingConfig
from titan_rl.training.state.checkpoint import being_written, put_in_place, step_directory, written_by
from titan_rl.weights.layouts import KnownLayouts
from titan_rl.weights.shards import join
from titan_rl.weights.types import Manifest


class ActorTrainer:
    """The controller's `Trainer` over the ranks of a `TrainerActor`.

    What the ranks write appears under its name only here, once they have said that it is whole: ranks that cannot be
    reached any more may go on writing while others are in their place.

    Attributes:
        is_leaving: its host is to go, and this with it.

    Raises:
        ActorDiedError: from every call, once a process of the trainer is gone.
    """

    def __init__(self, remote: RemoteProcess, ranks: Sequence[Any], training: TrainingConfig) -> None:
        self.remote = remote
        self.is_leaving = False
        self._plan = partial(
            plan_step,
            row_tokens=training.row_tokens,
            rows_per_micro_batch=training.rows_per_micro_batch,
            minibatches=training.minibatches,
            ranks=training.data_parallel,
            share_prompts=training.share_prompts,
        )
        self._ranks_a_row = training.ranks_a_row
        self._layouts = KnownLayouts()
        self._ranks = ranks
        self._writer = uuid.uuid4().hex
        self._saving: Path | None = None  # where the checkpoint begun last is to be

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """As `TrainerCore.step`. Each rank is sent its own rows."""
        results: list[StepResult] = await self._all("train", *await self._rows(samples))
        agreed_version([result.version for result in results], "after a step")
        return results[0]

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        """As `TrainerCore.measure`. Each rank is sent its own rows."""
        return (await self._all("measure", *await self._rows(samples)))[0]

    async def _rows(self, samples: Sequence[TrainingSample]) -> list[list[StepPlan]]:
        """What each rank is sent."""
        with span("packing", "trainer"):
            plans = await in_thread(self._plan, samples)
        return [[plan] for plan in plans for _ in range(self._ranks_a_row)]

    async def begin_publish(self) -> None:
        await self._all("begin_publish")

    async def finish_publish(self) -> Manifest:
        """The version begun last, of which each rank has published its shard.

        Raises:
            StateDictError: a rank could not; none of them keeps a part of it.
        """
        known = [(self._layouts.digests,)] * len(self._ranks)
        return join(self._layouts.unpack(await self._all("finish_publish", *known)))

    async def publish(self) -> Manifest:
        """Both at once: the current version."""
        await self.begin_publish()
        return await self.finish_publish()

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        path = step_directory(root, run_state["step"])
        written = written_by(self._writer, path)
        saved = await self._all("begin_save", *[(written, run_state)] * len(self._ranks))
        self._saving = path
        return agreed_version(saved, "in one checkpoint")

    async def finish_save(self) -> None:
        await self._all("finish_save")
        if self._saving is not None:
            await in_thread(self._put_in_place, self._saving, "step-")
            self._saving = None

    async def load(self, checkpoint: Path) -> int:
        """Continue from a checkpoint folder, whose version is returned.

        Raises:
            DamagedCheckpointError: its bytes are not those that were written.
            CheckpointError: it is of another model.
        """
        return agreed_version(await self._all("load", *[(checkpoint,)] * len(self._ranks)), "from one checkpoint")

    async def export(self, path: Path) -> None:
        await self._all("export", *[(written_by(self._writer, path),)] * len(self._ranks))
        await in_thread(self._put_in_place, path, path.name)

    def _put_in_place(self, path: Path, others: str) -> None:
        """
        Args:
            others: how the names begin of what nobody will put in place any more.
        """
        put_in_place(written_by(self._writer, path), path)
        for left in being_written(path.parent, others):
            shutil.rmtree(left, ignore_errors=True)

    async def close(self) -> None:
        """Give the published versions back."""
        await self._all("close", timeout_s=30.0)

    @property
    def excused(self) -> bool:
        """As `MortalTrainer.excused`."""
        return self.is_leaving or self.remote.excused

    async def ended(self) -> str:
        """Returns once a process of it is gone: why."""
        with contextlib.suppress(ActorDiedError):
            await self.remote.until_end(asyncio.Event().wait)
        return f"{self.remote.name} {'leaves its host' if self.is_leaving else 'died'}: {self.remote.reason}"

    def end(self, reason: str) -> None:
        """Kill what is left of it."""
        self.remote.end(reason)

    async def _all(self, endpoint: str, *arguments: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Call every rank, each with its arguments, and return what each one does."""
        calls = [
            self.remote.call(getattr(rank, endpoint), *own, timeout_s=timeout_s)
            for rank, own in zip(self._ranks, arguments or [()] * len(self._ranks), strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        except TitanRLError:
            raise
        except Exception as error:
            if len(self._ranks) == 1:
                raise
            # What no rank foresaw leaves them out of step; above all the end of one of them.
            raise ActorDiedError(f"trainer died: a rank failed with {summary(error)}") from error
