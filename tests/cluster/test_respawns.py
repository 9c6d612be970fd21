"""Generators and rollout workers are replaced by limits of their own, which the messages name."""

from titan_rl.cluster.processes.respawns import RespawnLimit, Respawns


def test_each_kind_has_a_limit_of_its_own():
    limits = {"generator-": RespawnLimit("generation.max_respawns", 1), "rollout-worker-": RespawnLimit("w", 2)}
    respawns = Respawns(limits)
    assert [respawns.take("rollout-worker-0")[0] for _ in range(3)] == [True, True, False]
    assert [respawns.take(name)[0] for name in ("generator-0", "generator-1")] == [True, False]
    assert respawns.take("trainer") == (False, "")


def test_setting_value_and_count_are_told():
    respawns = Respawns({"generator-": RespawnLimit("generation.max_respawns", 2)})
    told = [respawns.take("generator-0")[1] for _ in range(3)]
    assert told[0] == " (1 of generation.max_respawns = 2)"
    assert told[1] == " (2 of generation.max_respawns = 2)"
    assert "generation.max_respawns = 2, and 2 were replaced before" in told[2]
