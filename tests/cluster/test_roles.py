"""Roles of processes, and limits on the replacements of each role, which the messages name."""

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.processes.roles import ProcessId, RespawnLimit, Respawns, Role


def test_each_role_has_a_limit_of_its_own():
    limits = {Role.GENERATOR: RespawnLimit("hosts.max_respawns", 1), Role.ROLLOUT_WORKER: RespawnLimit("w", 2)}
    respawns = Respawns(limits)
    assert [respawns.take(Role.ROLLOUT_WORKER)[0] for _ in range(3)] == [True, True, False]
    assert [respawns.take(Role.GENERATOR)[0] for _ in range(2)] == [True, False]
    assert respawns.take(Role.TRAINER) == (False, "")


def test_setting_value_and_count_are_told():
    respawns = Respawns({Role.GENERATOR: RespawnLimit("hosts.max_respawns", 2)})
    told = [respawns.take(Role.GENERATOR)[1] for _ in range(3)]
    assert told[0] == " (1 of hosts.max_respawns = 2)"
    assert told[1] == " (2 of hosts.max_respawns = 2)"
    assert "hosts.max_respawns = 2, and 2 were replaced before" in told[2]


@given(st.sampled_from(Role), st.integers(0, 10**6))
def test_the_name_of_a_process_tells_its_role(role: Role, index: int):
    assert Role.of(str(ProcessId(role, index))) is role


def test_other_names_have_no_role():
    assert Role.of("supervisor") is Role.of("generators") is None
    assert str(ProcessId(Role.TRAINER)) == "trainer"
