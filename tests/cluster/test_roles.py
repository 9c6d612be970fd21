"""Roles of processes, and the limit on replacements per role."""

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.processes.roles import ProcessId, Respawns, Role


def test_respawns_are_counted_per_role():
    respawns = Respawns(2)
    assert [respawns.take(Role.ROLLOUT_WORKER)[0] for _ in range(3)] == [True, True, False]
    assert [respawns.take(Role.GENERATOR)[0] for _ in range(3)] == [True, True, False]
    respawns.reset(Role.GENERATOR)
    assert [respawns.take(role)[0] for role in (Role.GENERATOR, Role.ROLLOUT_WORKER)] == [True, False]


def test_respawn_message_gives_setting_value_and_count():
    respawns = Respawns(2)
    messages = [respawns.take(Role.GENERATOR)[1] for _ in range(3)]
    assert messages[0] == " (1 of hosts.max_respawns = 2)"
    assert messages[1] == " (2 of hosts.max_respawns = 2)"
    assert "hosts.max_respawns = 2, and 2 were replaced before" in messages[2]


@given(st.sampled_from(Role), st.integers(0, 10**6))
def test_role_is_parsed_from_the_process_name(role: Role, index: int):
    assert Role.of(str(ProcessId(role, index))) is role


def test_unknown_process_names_have_no_role():
    assert Role.of("supervisor") is Role.of("generators") is None
    assert str(ProcessId(Role.TRAINER)) == "trainer"
