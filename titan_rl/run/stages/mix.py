"""The mix of a run's tasks, from where the run stood."""

from __future__ import annotations

from titan_rl.config.run import RunConfig
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.scheduling.mix.task_mix import Share, TaskMix


def make_mix(config: RunConfig, journal: RunJournal, start: RunState) -> TaskMix:
    """As the checkpoint and the journal have it, with the weights and curricula of the config. The journal is told of
    what happens."""
    return TaskMix(
        {source.name: Share(source.weight, source.curriculum) for source in config.tasks},
        journal.note,
        state=start.tasks,
        events=journal.events,
        is_settled=start.position.is_settled,
        is_dropped=journal.state.is_settled,
    )
