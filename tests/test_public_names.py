"""`titan_rl.__all__` has what a loop of one's own is made of."""

from __future__ import annotations

import inspect

import titan_rl
from titan_rl import errors

LOOP = {
    "EngineLoop", "LocalReplica", "Engine", "ScriptedEngine", "GeneratorRouter", "Limits", "Rollouter", "Rubric",
    "GroupScheduler", "GroupBatch", "Lease", "SchedulingConfig", "build_samples", "resume_on_abort",
    "StateDictTransport", "TrainingSample", "WeightedReward", "env_reward", "EngineRequest", "TokenDelta",
    "Backlog", "RunGroup",
}  # fmt: skip


def test_a_loop_finds_its_parts_and_every_error():
    public = set(titan_rl.__all__)
    assert public >= LOOP
    assert {name for name, value in vars(errors).items() if inspect.isclass(value)} <= public
    assert all(hasattr(titan_rl, name) for name in public)
    assert len(titan_rl.__all__) == len(public)
