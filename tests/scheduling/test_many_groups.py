"""Incremental data structures of the scheduler agree with a scan of all groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from titan_rl.scheduling.batches import ReadyQueue
from titan_rl.scheduling.task_mix import TaskTurns


def choose(waiting: Iterable[int], is_ready: Callable[[int], bool], *, size: int, window: int) -> list[int]:
    """Choose up to `size` ready groups, the oldest first, overtaking by fewer than `window` places.

    Groups go by their position in the data. Over all batches together, a group is overtaken by at most `window - 1`
    others: only those less than `window` positions behind the oldest that waits may go before it.

    Args:
        waiting: Positions of the groups admitted and neither trained nor dropped, in ascending order.

    Example: group 4 is not ready; with a window of 3 only 5 and 6 may overtake it.

        choose([4, 5, 6, 7], lambda index: index > 4, size=3, window=3)   # [5, 6]
    """
    chosen: list[int] = []
    oldest: int | None = None  # of those that stay
    for index in waiting:
        if len(chosen) == size or (oldest is not None and index - oldest >= window):
            break
        if is_ready(index):
            chosen.append(index)
        elif oldest is None:
            oldest = index
    return chosen


@given(
    window=st.integers(1, 6),
    size=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["add", "finish", "finish", "drop", "again", "batch"]), st.integers(0, 9))
    ),
)
@example(window=1, size=1, events=[("add", 0), ("add", 0), ("finish", 1), ("again", 0), ("finish", 0)])
def test_ready_queue_agrees_with_a_full_scan(window: int, size: int, events: list[tuple[str, int]]):
    queue, finished, admitted = ReadyQueue(), dict[int, bool](), 0
    for event, number in events:
        running = [place for place, is_done in finished.items() if not is_done]
        if event == "add":
            admitted += 1 + number % 2  # places need not be consecutive
            queue.add(admitted, -admitted)
            finished[admitted] = False
        elif event == "finish" and running:
            place = running[number % len(running)]
            queue.finish(place)
            finished[place] = True
        elif event == "drop" and finished:
            place = list(finished)[number % len(finished)]
            queue.remove(place)
            del finished[place]
        elif event == "again" and any(finished.values()):
            done = [place for place, is_done in finished.items() if is_done]
            place = done[number % len(done)]
            queue.remove(place)
            queue.add(place, -place)
            finished[place] = False
        expected = choose(finished, lambda place: finished[place], size=size, window=window)
        if event == "batch" and queue.count(window) >= size:
            assert queue.first(size) == [-place for place in expected]
            for place in expected:
                queue.remove(place)
                del finished[place]
        else:
            assert min(queue.count(window), size) == len(expected)


@given(
    old=st.lists(st.sampled_from("abc"), max_size=4),
    events=st.lists(st.tuples(st.sampled_from(["admit", "admit", "drop", "batch", "train"]), st.sampled_from("abc"))),
)
@example(old=["a", "b"], events=[("admit", "a"), ("batch", "a"), ("train", "a")])
def test_task_turns_agree_with_a_plain_list(old: list[str], events: list[tuple[str, str]]):
    turns, dealt, num_old = TaskTurns(old, len(old)), list(old), len(old)
    groups: Counter[str] = Counter()
    batched: Counter[str] = Counter()
    for event, task in events:
        if event == "admit":
            if not turns.fill(task):
                turns.deal(task)
                dealt.append(task)
            groups[task] += 1
        elif event == "drop" and groups[task] > batched[task]:
            turns.free(task, in_batch=False)
            groups[task] -= 1
        elif event == "batch" and groups[task] > batched[task]:
            turns.batched(task)
            batched[task] += 1
        elif event == "train" and batched[task]:
            turns.take(task, in_batch=True)
            num_old -= dealt.index(task) < num_old
            dealt.remove(task)
            groups[task] -= 1
            batched[task] -= 1
        assert turns.all() == dealt
        assert turns.num_old == num_old
        assert turns.first_free() == next(iter(without(dealt, groups)), None)
        assert turns.next(2) == without(dealt, batched)[:2]
    assert len(turns) == len(dealt)


def without(turns: list[str], taken: Counter[str]) -> list[str]:
    """Return the turns that are left when the first `taken[task]` turns of each task are taken."""
    left, seen = list[str](), Counter[str]()
    for task in turns:
        seen[task] += 1
        if seen[task] > taken[task]:
            left.append(task)
    return left
