"""Detection of hanging processes, in virtual time with imaginary processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.liveness.health_check import HealthTracker, ProcessHealth, hang_reason
from titan_rl.cluster.liveness.heartbeat import SilenceTimer
from titan_rl.cluster.liveness.local_processes import TreeUse, used_cpu_between

LIMIT_S = 10.0


def health_after(*looks: tuple[bool, bool, bool], at_work: bool = True) -> ProcessHealth:
    """Health after checks a second apart, each a tuple (answered, made progress, computed)."""
    signs, moves, last = HealthTracker(longest_look_s=2.0), 0, ProcessHealth()
    for now, (answered, moved, computed) in enumerate(looks, start=1):
        moves += moved
        if answered:
            signs.answered(moves, at_work=at_work)
        last = signs.look(float(now), computed=computed)
    return last


def test_silent_process_hangs_at_the_limit_not_before():
    alive = (True, True, False)
    silent = (False, False, False)
    assert hang_reason([health_after(alive, *[silent] * 9)], LIMIT_S) is None
    assert hang_reason([health_after(alive, *[silent] * 10)], LIMIT_S) == (
        "it hangs: it has neither answered nor computed for 10 s"
    )


def test_computing_native_call_that_holds_the_gil_is_no_hang():
    assert hang_reason([health_after((True, True, True), *[(False, False, True)] * 1000)], LIMIT_S) is None


def test_idle_process_that_answers_does_not_hang():
    assert hang_reason([health_after(*[(True, False, False)] * 1000, at_work=False)], LIMIT_S) is None


def test_busy_process_without_progress_hangs_although_it_answers():
    stuck = [(True, False, False)] * 11  # the first answer counts as progress
    assert hang_reason([health_after(*stuck[:-1])], LIMIT_S) is None
    assert "made no progress for 10 s" in (hang_reason([health_after(*stuck)], LIMIT_S) or "")


def test_waiting_rank_hangs_unless_another_computes():
    waits, computes, idle = ProcessHealth(0.0, 100.0), ProcessHealth(0.0, 0.0), ProcessHealth(0.0, None)
    assert hang_reason([waits, computes], LIMIT_S) is None
    assert hang_reason([waits, idle], LIMIT_S) is not None
    assert hang_reason([waits, waits], LIMIT_S) is not None
    assert hang_reason([], LIMIT_S) is None


def test_stopped_process_counts_as_hanging_after_three_seconds():
    signs = HealthTracker(longest_look_s=2.0)
    signs.answered(1, at_work=False)
    looks = [signs.look(float(now), computed=False, stopped=True) for now in range(1, 4)]
    assert [hang_reason([look], 3600.0) for look in looks] == [None, None, "it has been stopped by a signal for 3 s"]
    assert signs.look(4.0, computed=False, stopped=False).stopped_s == 0.0


def test_one_silent_rank_makes_the_group_hang():
    assert hang_reason([ProcessHealth(0.0, 0.0), ProcessHealth(LIMIT_S, None)], LIMIT_S) is not None


def test_pause_of_the_checker_does_not_count_as_silence():
    signs = HealthTracker(longest_look_s=2.0)
    signs.answered(1, at_work=False)
    signs.look(1.0, computed=False)
    assert signs.look(3600.0, computed=False).silent_s == 2.0
    contact = SilenceTimer(3.0, 0.5, now=0.0)
    assert not contact.look(3600.0)


@given(st.lists(st.sampled_from(["reset", "look"]), max_size=60))
def test_silence_timer_expires_after_consecutive_silent_looks(events: list[str]):
    contact, now, since = SilenceTimer(3.0, 0.5, now=0.0), 0.0, 0
    for event in events:
        if event == "reset":
            contact.reset()
            since = 0
        else:
            now += 0.25
            since += 1
            assert contact.look(now) == (since >= 12)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_silence_counts_from_the_last_sign_of_life(looks: list[tuple[bool, bool, bool]]):
    signs = health_after(*looks, at_work=False)
    last_sign = max((at for at, (answered, _, computed) in enumerate(looks, 1) if answered or computed), default=0)
    assert signs.silent_s == len(looks) - last_sign
    assert signs.still_s is None


def test_used_cpu_counts_cpu_time_disk_io_and_new_children():
    before = TreeUse({7: 1.0, 8: 0.0}, on_disk=False)
    assert not used_cpu_between(before, TreeUse({7: 1.05, 8: 0.04}, on_disk=False), 1.0)
    assert used_cpu_between(before, TreeUse({7: 1.05, 8: 0.05}, on_disk=False), 1.0)
    assert used_cpu_between(before, TreeUse({7: 1.0, 8: 0.0}, on_disk=True), 1.0)
    assert used_cpu_between(before, TreeUse({7: 1.0, 8: 0.0, 9: 0.0}, on_disk=False), 1.0)
