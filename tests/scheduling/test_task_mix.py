"""Task mix: the task and sample of each group, for any drops and any order in which groups end."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import CheckpointError, DataError
from titan_rl.scheduling.curriculum import ByDifficulty, Curriculum, CurriculumState, InOrder, Stages
from titan_rl.scheduling.task_mix import Assigned, Dropped, MixEvent, TaskMix, WeightedTask

SLOTS = 8


class Twice(InOrder):
    """Curriculum that repeats a sample that earned nothing, so that the order depends on when groups end."""

    def begin(self) -> CurriculumState:
        return {**super().begin(), "again": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["again"][0] if state["again"] else super().next_sample(state)

    def given(self, state: CurriculumState, sample: int) -> None:
        if sample in state["again"]:
            state["again"].remove(sample)
        else:
            super().given(state, sample)

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        if not any(rewards):
            state["again"].append(sample)


class Events(list[MixEvent]):
    def note(self, event: MixEvent) -> None:
        self.append(event)


class Play:
    """Admits groups into slots, has them end in any order and drops some, as a scheduler does."""

    def __init__(self, weights: dict[str, float], seed: int, drops: dict[str, float] | None = None, **curricula: Any):
        self.tasks = {name: WeightedTask(weight, curricula.get(name, InOrder())) for name, weight in weights.items()}
        self.random = random.Random(seed)
        self.drops = drops or {}
        self.events = Events()
        self.mix = TaskMix(self.tasks, self.events)
        self.next_index = 0
        self.running: dict[int, Assigned] = {}
        self.done: dict[int, Assigned] = {}
        self.admitted: list[Assigned] = []
        self.trained: list[Assigned] = []

    def step(self) -> None:
        if len(self.running) + len(self.done) < SLOTS:
            played = self.running[self.next_index] = self.mix.assignment(self.next_index)
            self.admitted.append(played)
            self.next_index += 1
            return
        if self.running:
            index = self.random.choice(list(self.running))
            played = self.running.pop(index)
            self.mix.finished(index, [self.random.random() < 0.5])
            if self.random.random() < self.drops.get(played.task, 0.0):
                self.mix.dropped(index)
            else:
                self.done[index] = played
        while (index := self.next_to_train()) in self.done:
            self.train(index)
        if not self.running and len(self.done) >= SLOTS:  # possible after a partial loss of the journal
            self.train(min(self.done))

    def next_to_train(self) -> int:
        """Return the oldest group of the task whose turn it is."""
        turns = self.mix.turns(1)
        return min((i for i, p in {**self.running, **self.done}.items() if [p.task] == turns[:1]), default=-1)

    def train(self, index: int) -> None:
        self.trained.append(self.done.pop(index))
        self.mix.trained([index])


def off(groups: Sequence[Assigned], weights: dict[str, float], window: int) -> float:
    """Return the largest deviation of a task from its share in any window, in groups."""
    total, counts, most = sum(weights.values()), Counter[str](), 0.0
    for end, played in enumerate(groups, start=1):
        counts[played.task] += 1
        if end > window:
            counts[groups[end - window - 1].task] -= 1
        if end >= window:
            most = max(most, *(abs(counts[name] - window * weight / total) for name, weight in weights.items()))
    return most


@pytest.mark.parametrize(
    ("weights", "drops"),
    [
        ({"a": 1.0, "b": 1.0}, {}),
        ({"a": 3.0, "b": 1.0, "c": 0.5}, {"a": 0.3, "b": 0.3, "c": 0.3}),
        ({"a": 1.0, "b": 1.0}, {"a": 0.9}),
        ({"a": 7.0, "b": 2.0, "c": 1.0}, {"c": 0.95, "b": 0.5}),
    ],
)
def test_trained_groups_follow_the_weights_in_any_window(weights, drops):
    play = Play(weights, seed=3, drops=drops)
    while len(play.trained) < 3000:
        play.step()
    assert off(play.trained, weights, 1000) < 2
    if not drops:
        assert off(play.admitted, weights, 1000) < 2


@given(
    weights=st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1),
    drops=st.dictionaries(st.sampled_from("abcde"), st.floats(0, 0.8)),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_dropped_group_is_replaced_by_one_of_its_task(weights: dict[str, float], drops, seed: int):
    play = Play(weights, seed, drops)
    for _ in range(600):
        play.step()
    total = sum(weights.values())
    kept = Counter(played.task for played in [*play.trained, *play.done.values(), *play.running.values()])
    dealt = Counter(play.mix.turns(1000)) + Counter(played.task for played in play.trained)
    for name, weight in weights.items():
        assert 0 <= dealt[name] - kept[name] <= 1, "except for one that was just dropped"
        assert abs(dealt[name] - dealt.total() * weight / total) < 1 + 1e-9


def in_json(mix: TaskMix) -> Any:
    return json.loads(json.dumps(mix.state()))


@given(
    seed=st.integers(0, 999),
    saved=st.integers(0, 120),
    killed=st.integers(0, 120),
    lost=st.sets(st.integers(0, 300), max_size=20),
    kind=st.sampled_from(["intact", "damaged", "gone"]),
)
@settings(deadline=None, max_examples=200)
def test_kill_at_any_moment_neither_skips_nor_repeats_samples(
    seed: int, saved: int, killed: int, lost: set[int], kind: str
):
    """In the resumed run, groups that are not settled in the checkpoint run again."""
    weights, drops = {"a": 2.0, "b": 1.0, "c": 1.0}, {"a": 0.3, "c": 0.5}
    first = Play(weights, seed, drops)
    for _ in range(saved):
        first.step()
    state, position, since = in_json(first.mix), first.next_index, len(first.events)
    settled = {played.index for played in first.admitted} - first.running.keys() - first.done.keys()
    trained = list(first.trained)
    dropped = [played for played in first.admitted if played.index in settled and played not in trained]
    for _ in range(killed):
        first.step()

    events = {
        "intact": first.events,
        "damaged": [event for number, event in enumerate(first.events[since:]) if number not in lost],
        "gone": [],
    }[kind]
    again = Play(weights, seed + 1, drops)
    again.events = Events()
    unsettled = [event for event in events if event.index not in settled]
    again.mix = TaskMix(again.tasks, again.events, state=state, events=unsettled)
    dropped_since = {event.index for event in events if isinstance(event, Dropped)}
    dropped += [played for played in first.admitted if played.index in dropped_since - settled]
    known = max((event.index + 1 for event in events), default=0)
    again.next_index = max(position, known)
    again.trained = list(trained)
    before = {played.index: played for played in first.admitted}
    for index in sorted(set(range(again.next_index)) - settled - dropped_since):
        played = again.running[index] = again.mix.assignment(index)
        if kind == "intact":
            assert played == before[index]
        again.admitted.append(played)
    while len(again.trained) < len(trained) + 60:
        again.step()

    for name in weights:
        samples = [played.sample for played in again.trained if played.task == name]
        assert len(samples) == len(set(samples)), "no sample is trained twice"
        open_now = [*again.running.values(), *again.done.values()]
        gone = {event.index for event in again.events if isinstance(event, Dropped)}
        accounted = samples + [
            played.sample
            for played in [*open_now, *dropped, *(p for p in again.admitted if p.index in gone)]
            if played.task == name
        ]
        assert set(range(max(accounted) + 1)) == set(accounted), "no sample is left out"


@given(seed=st.integers(0, 999), saved=st.integers(0, 150), more=st.integers(0, 150))
@settings(deadline=None)
def test_curriculum_state_is_restored_exactly(seed: int, saved: int, more: int):
    curricula = {
        "a": Twice(),
        "b": ByDifficulty(samples=7, left_out=2),
        "c": Stages(sizes=(3, 4, 5), threshold=0.5, window=4),
    }
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    whole = Play(weights, seed, {"a": 0.2, "b": 0.4}, **curricula)
    for _ in range(saved):
        whole.step()
    state, settled = in_json(whole.mix), set(range(whole.next_index)) - whole.running.keys() - whole.done.keys()
    for _ in range(more):
        whole.step()
    trained_since = [played.index for played in whole.trained if played.index not in settled]
    unsettled = [event for event in whole.events if event.index not in settled]
    again = TaskMix(whole.tasks, state=state, events=unsettled)
    again.trained(trained_since)
    assert in_json(again) == in_json(whole.mix)
    assert again.assignment(whole.next_index) == whole.mix.assignment(whole.next_index)


@pytest.mark.parametrize(
    ("weights", "window", "own"),
    [
        ({"a": 1.0}, 16, 16),
        ({"a": 1.0, "b": 1.0}, 4, 1),  # of the 3 turns by which a group of b may be delayed, 1.5 belong to a
        ({"a": 1.0, "b": 1.0}, 5, 2),
        ({"a": 3.0, "b": 1.0}, 9, 6),
        ({"a": 1.0, "b": 9.0}, 5, 1),
    ],
)
def test_window_of_a_task_is_its_share_of_the_turns_before_a_delayed_group(
    weights: dict[str, float], window: int, own: int
):
    assert Play(weights, seed=0).mix.window("a", window) == own


def test_changed_weights_apply_to_later_groups():
    play = Play({"a": 1.0, "b": 1.0}, seed=0)
    for index in range(100):
        play.mix.assignment(index)
        play.mix.trained([index])
    tasks = {"a": WeightedTask(3.0, InOrder()), "b": WeightedTask(1.0, InOrder())}
    again = TaskMix(tasks, state=in_json(play.mix))
    dealt = [again.assignment(index) for index in range(100, 200)]
    assert Counter(played.task for played in dealt) == {"a": 75, "b": 25}
    samples = defaultdict[str, list[int]](list)
    for played in dealt:
        samples[played.task].append(played.sample)
    assert samples == {"a": list(range(50, 125)), "b": list(range(50, 75))}


def test_state_of_other_tasks_is_rejected():
    state = TaskMix({"a": WeightedTask(1.0, InOrder())}).state()
    with pytest.raises(CheckpointError, match="saved with the tasks a, and continues with b"):
        TaskMix({"b": WeightedTask(1.0, InOrder())}, state=state)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"turns": ..., "deals": []}, "it lacks 'turns' and has an unknown 'deals'"),
        ({"weights": 1}, "'weights' must be a table with an entry for each task"),
        ({"places": {}}, "'places' must be a table with an entry for each task"),
        ({"open": [[0]]}, "missing"),
        ({"open": 3}, "not iterable"),
        ({"old_turns": "x"}, "invalid literal"),
        ({"weights": {"a": "heavy"}}, "heavy"),
    ],
)
def test_invalid_mix_state_is_rejected_with_advice(changes: dict[str, Any], complaint: str):
    tasks = {"a": WeightedTask(1.0, InOrder())}
    state = {key: value for key, value in (TaskMix(tasks).state() | changes).items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"cannot be read: .*{complaint}.*titan-rl export"):
        TaskMix(tasks, state=state)


def sequence(curriculum: Curriculum, rewards: Any, count: int) -> list[int]:
    """Return the samples given when each group ends before the next begins."""
    mix, samples = TaskMix({"task": WeightedTask(1.0, curriculum)}), list[int]()
    for index in range(count):
        samples.append(mix.assignment(index).sample)
        mix.finished(index, rewards(samples[-1]))
        mix.trained([index])
    return samples


def test_by_difficulty_continues_with_samples_of_mixed_rewards():
    means = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 0.0]}
    given = sequence(ByDifficulty(samples=4, left_out=2), means.__getitem__, 12)
    assert given == [0, 1, 2, 3, 1, 3, 1, 3, 0, 1, 2, 3]


def test_by_difficulty_tries_all_again_when_none_is_useful():
    assert sequence(ByDifficulty(samples=3, left_out=5), lambda sample: [1.0], 6) == [0, 1, 2, 0, 1, 2]
    assert sequence(ByDifficulty(samples=2), lambda sample: [], 6) == [0, 1, 0, 1, 0, 1]


class FullScan:
    """Reference for `ByDifficulty` that scans every sample of each pass."""

    def __init__(self, samples: int, left_out: int) -> None:
        self.samples, self.left_out = samples, left_out
        self.number, self.next, self.due = 0, 0, dict[int, int]()

    def give(self) -> int:
        while True:
            for sample in range(self.next, self.samples):
                if self.due.get(sample, 0) <= self.number:
                    self.next = sample + 1
                    return sample
            self.number, self.next = self.number + 1, 0

    def finished(self, sample: int, mean: float) -> None:
        self.due.pop(sample, None)
        if mean in (0.0, 1.0):
            self.due[sample] = self.number + 1 + self.left_out


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 1 << 30), st.sampled_from([0.2, 0.8, 1.0]))
def test_by_difficulty_agrees_with_a_full_scan(samples: int, left_out: int, seed: int, ends: float):
    draw, full_scan = random.Random(seed), FullScan(samples, left_out)
    curriculum = ByDifficulty(samples=samples, left_out=left_out)
    state, running = curriculum.begin(), list[int]()
    for _ in range(200):
        sample = curriculum.next_sample(state)
        curriculum.given(state, sample)
        assert sample == full_scan.give()
        state = json.loads(json.dumps(state))
        running.append(sample)
        while running and draw.random() < 0.6:
            ended = running.pop(draw.randrange(len(running)))
            mean = draw.choice([0.0, 1.0]) if draw.random() < ends else 0.5
            curriculum.finished(state, ended, [mean])
            full_scan.finished(ended, mean)


def test_by_difficulty_skips_passes_without_due_samples():
    assert sequence(ByDifficulty(samples=3, left_out=10**12), lambda sample: [1.0], 7) == [0, 1, 2, 0, 1, 2, 0]


def test_by_difficulty_does_not_scan_all_samples():
    curriculum = ByDifficulty(samples=10_000, left_out=100_000)
    state = curriculum.begin()
    for sample in range(curriculum.samples):
        curriculum.given(state, sample)
        curriculum.finished(state, sample, [1.0 if sample != 7_000 else 0.5])
    began = time.process_time()
    for _ in range(2000):
        assert curriculum.next_sample(state) == 7_000
        curriculum.given(state, 7_000)
        curriculum.finished(state, 7_000, [0.5])
    assert time.process_time() - began < 2, "CPU time of this process; scanning every sample takes 10 s"


def test_mix_rarely_inspects_a_large_curriculum_state():
    looks = 0

    class Large(list[int]):
        def __repr__(self) -> str:
            nonlocal looks
            looks += 1
            return super().__repr__()

    class Curious(InOrder):
        def begin(self) -> CurriculumState:
            return {**super().begin(), "seen": Large()}

    mix = TaskMix({"task": WeightedTask(1.0, Curious())})
    for index in range(1000):
        mix.assignment(index)
    assert looks <= 2 * 11


def test_next_stage_begins_once_the_current_one_is_mastered():
    earned = iter([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    given = sequence(Stages(sizes=(2, 3), threshold=1.0, window=2), lambda sample: [next(earned)], 8)
    assert given == [0, 1, 0, 2, 3, 4, 2, 3]


class Careless(InOrder):
    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        state["seen"] = {sample: len(rewards)}


class Raising(InOrder):
    def next_sample(self, state: CurriculumState) -> int:
        raise LookupError("no more")


class Eager(InOrder):
    def next_sample(self, state: CurriculumState) -> int:
        state["next"] += 1
        return state["next"] - 1


class Negative(InOrder):
    def next_sample(self, state: CurriculumState) -> int:
        return -1


class Huge(InOrder):
    def next_sample(self, state: CurriculumState) -> int:
        return 2**70


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (Careless(), r"state.*task.*comes back from JSON as .*names must be strings"),
        (Raising(), "curriculum.next_sample, 'task' of the task failed: LookupError: no more"),
        (Eager(), "curriculum.next_sample, 'task' .*: it changed the state"),
        (Negative(), "it returned -1; it must return the number of a sample"),
        (Huge(), "it returned 1180591620717411303424; it must return the number of a sample"),
    ],
)
def test_invalid_curriculum_error_names_the_problem(curriculum: Curriculum, message: str):
    with pytest.raises(DataError, match=message):
        sequence(curriculum, lambda sample: [1.0], 3)
