"""Log of rollouts and groups: transcripts, errors by kind, and dropped groups."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from titan_rl.core.console import Console
from titan_rl.rollout.group.transcript import (
    ErrorCounts,
    TokenRecords,
    error_in_full,
    error_kind,
    error_text,
    transcript,
)
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.sinks import BestEffort
from titan_rl.scheduling.task_mix import TaskMix


@dataclass(frozen=True, slots=True)
class DroppedGroups:
    """Groups that were dropped in favor of those of a batch."""

    finished: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by task and reason


class GroupRecords:
    """`SchedulerObserver` of a run, which records groups in the journal, the transcripts and the task mix."""

    def __init__(self, mix: TaskMix, journal: RunJournal, transcripts: RolloutLog, console: Console) -> None:
        self._console = console
        self._mix = mix
        self._journal = journal
        self._transcripts = transcripts
        self._dropped: defaultdict[int, DroppedGroups] = defaultdict(DroppedGroups)  # by the batch's step

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._mix.finished(index, rewards_of(group))
        self._journal.finished(self._mix.assignment(index), group)

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        if (task := self._mix.task_of(index)) is not None:
            self._dropped[step].reasons[task, reason] += 1
        if group is not None:
            self._dropped[step].finished.append(group)
            self._transcripts.dropped(group, reason, step)
            self._mix.finished(index, rewards_of(group))
        self._mix.dropped(index)
        self._journal.dropped(index, reason)

    def discarded(self, index: int, group: RolloutGroup) -> None:
        self._journal.discarded(index)
        self._console.message(
            f"group {group.group_id} is generated again: it has tokens of version {min(group.versions)}, which are too "
            "old to be trained on now"
        )

    def batch(self, version: int, indices: Sequence[int]) -> None:
        self._journal.batch(version, indices)

    def take_dropped(self, step: int) -> DroppedGroups:
        """Return the groups that were dropped before the batch of a step was complete, and forget them."""
        return self._dropped.pop(step, DroppedGroups())


def rewards_of(group: RolloutGroup) -> list[float]:
    """Finite rewards of a group, without rollouts that ended in a fault that is not the policy's."""
    judged = [rollout.reward for rollout in group.rollouts if not rollout.status.is_fault]
    return [float(reward) for reward in judged if reward is not None and math.isfinite(reward)]


logger = logging.getLogger(__name__)

SKIPPED = "skipped_step"
"""Value of `dropped` in the record of a rollout whose step the trainer skipped."""
FIRST_OF_A_KIND = 16  # most transcripts per step of rollouts with the same error, or the same reason for being dropped


class RolloutLog:
    """Writer of `rollouts.jsonl`, and reporter of the errors of rollouts by kind.

    Each kind of error is shown when it first occurs, with its line in the user's code; the log has the full error with
    its traceback. At the end, the number of rollouts with each kind is reported. An answer that cannot be parsed is the
    policy's own fault, and does not count as an error here.

    Args:
        run_dir: Folder of the run, with the file. Failures to write it are reported, and do not end the run.
        groups_per_step: Number of groups of a step and phase that are written in full.
        tokens: Builder of the records of tokens; None writes no tokens.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        groups_per_step: int,
        console: Console,
        tokens: TokenRecords | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._groups_per_step = groups_per_step
        self._console = console
        self._tokens = tokens
        self._writing = BestEffort("writing rollouts.jsonl", console)
        self._errors = ErrorCounts()
        self._reported: set[str] = set()
        self._lost: Counter[str] = Counter()  # number of groups whose reward failed, by kind of error
        self._lost_texts: dict[str, str] = {}
        self._of_a_kind: Counter[tuple[int, str, str]] = Counter()  # number of transcripts by step, phase and kind
        self._num_left_out = 0

    def ended(self, rollout: Rollout) -> None:
        """Note a finished rollout. Its siblings may still be running."""
        if not rollout.status.is_fault:
            return
        self._errors.add([rollout])
        kind = error_kind(rollout)
        if kind not in self._reported:
            self._reported.add(kind)
            logger.error("rollout %s ended in %s", rollout.rollout_id, error_in_full(rollout))
            self._console.warning(f"rollout {rollout.rollout_id} ended in {error_text(rollout)}")

    def lost(self, group: RolloutGroup) -> None:
        """Note a group whose reward function failed."""
        failure = group.failure
        assert failure is not None, "only a group whose reward failed is lost"
        self._lost[failure.kind] += 1
        self._lost_texts.setdefault(failure.kind, str(failure))
        if self._lost[failure.kind] == 1:
            logger.error("group %s is dropped: %s\n%s", group.group_id, failure, failure.traceback)
            self._console.warning(f"group {group.group_id} is dropped, as will be later ones like it: {failure}")

    def finished(
        self,
        groups: Sequence[RolloutGroup],
        phase: str,
        step: int,
        *,
        trained_at: int | None = None,
        skipped: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Write the groups on which a step was trained, or those of a validation. Rollouts with an error and skipped
        rollouts are written for every group. A group whose reward failed is left out, because it has been dropped.

        Args:
            trained_at: Version that was trained on the groups; None if none was.
            skipped: Reasons why rollouts were skipped, by their ids. These rollouts are marked as dropped.
        """
        for position, group in enumerate(group for group in groups if group.failure is None):
            for rollout in group.rollouts:
                labels = {"step": step, "phase": phase, "task": group.task}
                if (why := skipped.get(rollout.rollout_id)) is not None:
                    self._record(rollout, {**labels, "dropped": SKIPPED, "skipped": why}, None)
                elif position < self._groups_per_step:
                    self._record(rollout, labels, trained_at)
                elif rollout.status.is_error:
                    self._record_first(rollout, error_kind(rollout), labels, trained_at)

    def dropped(self, group: RolloutGroup, reason: str, step: int, phase: str = "train") -> None:
        """Write a group that is not trained on, or does not count in a validation."""
        for rollout in group.rollouts:
            kind = error_kind(rollout) if rollout.status.is_error else reason
            labels = {"step": step, "phase": phase, "task": group.task, "dropped": reason}
            self._record_first(rollout, kind, labels)

    def figures(self) -> dict[str, float]:
        """Return transcripts/left_out, the number of transcripts of errors and dropped groups that were left out since
        the last call, and transcripts/lost, the number of failed writes in the run."""
        left_out, self._num_left_out = self._num_left_out, 0
        return {"transcripts/left_out": float(left_out), "transcripts/lost": float(self._writing.num_lost)}

    def close(self) -> None:
        """Report the errors, with the number of rollouts for each."""
        for text, count in self._errors.most_common():
            logger.warning("%d rollouts ended in %s", count, text)
        if self._errors.num_errors:
            text, count = self._errors.most_common()[0]
            others = len(self._errors.most_common()) - 1
            more = f", and others with {others} other kinds of error" if others else ""
            self._console.warning(
                f"{count} rollouts ended in {text}{more}; logs/controller.log has every error in full"
            )
        for kind, count in self._lost.most_common():
            logger.warning("%d groups were dropped with %s", count, self._lost_texts[kind])
        if self._lost:
            kind = self._lost.most_common(1)[0][0]
            text = self._lost_texts[kind]
            self._console.warning(
                f"{self._lost.total()} groups were dropped for rewards that failed, most of them with {text}"
            )
        self._writing.close()

    def _record_first(
        self, rollout: Rollout, kind: str, labels: Mapping[str, Any], trained_at: int | None = None
    ) -> None:
        key = (labels["step"], labels["phase"], kind)
        self._of_a_kind[key] += 1
        if self._of_a_kind[key] <= FIRST_OF_A_KIND:
            self._record(rollout, labels, trained_at)
        else:
            self._num_left_out += 1
        for old in [key for key in self._of_a_kind if key[0] < labels["step"] - 1]:
            del self._of_a_kind[old]

    def _record(self, rollout: Rollout, labels: Mapping[str, Any], trained_at: int | None) -> None:
        with self._writing.attempt():
            tokens = None if self._tokens is None else self._tokens.of(rollout, trained_at)
            self._run_dir.write_rollout({**labels, **transcript(rollout, tokens)})
