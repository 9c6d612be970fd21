"""Generators and rollout workers are replaced by limits of their own."""

from titan_rl.actors.respawns import Respawns


def test_each_kind_has_a_limit_of_its_own():
    respawns = Respawns({"generator-": 1, "rollout-worker-": 2})
    assert [respawns.take("rollout-worker-0") for _ in range(3)] == [True, True, False]
    assert [respawns.take(name) for name in ("generator-0", "generator-1")] == [True, False]
    assert not respawns.take("trainer")
