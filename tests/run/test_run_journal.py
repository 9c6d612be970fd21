"""Run journal: reading it back restores the position of the run."""

import asyncio
import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from background import HANG_S
from run.disk import Disk

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, SamplingParams, Turn, VersionSpan
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import CheckpointError, NoSpaceError, RequestError
from titan_rl.generation.continuation import listener, listening, resume_on_abort
from titan_rl.generation.recording import RecordedAnswer
from titan_rl.run.journal import run_journal
from titan_rl.run.journal.log_file import LogWriter, frame
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import DataPosition
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.types import TokenChunk

SAMPLING = SamplingParams(max_tokens=8)


def group_of(index: int, **message: object) -> RolloutGroup:
    completion = Completion("r", [1], [-0.5], FinishReason.STOP, (VersionSpan(2, 1),), metrics={"queue_s": 0.5})
    rollout = Rollout(f"train-{index}/0", f"train-{index}", 0, index, turns=[Turn([0], completion, {"a": 1.0})])
    rollout.turns.append(Turn([0, 1], completion, sampling=SAMPLING))
    rollout.reward, rollout.advantage, rollout.messages = 0.25, -1.0, [{"role": "user", **message}]
    return RolloutGroup(f"train-{index}", index, [rollout])


def reopened(folder: Path, position: DataPosition | None = None) -> RunJournal:
    return RunJournal(folder, position or DataPosition())


def backlog(journal: RunJournal):
    return journal.backlog(SimpleNamespace(train_sample=lambda task, number: number))


def test_new_journal_has_no_backlog(tmp_path):
    journal = RunJournal(tmp_path)
    assert backlog(journal).next_index == 0
    journal.close()


def test_journal_restores_groups_batches_and_data_position(tmp_path):
    journal = RunJournal(tmp_path)
    for index in (1, 0, 4):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.dropped(2, "zero_variance")
    journal.batch(0, [1, 0])
    journal.drain()  # and the process is killed
    found = backlog(reopened(tmp_path))
    assert (found.next_index, list(found.unsettled), found.batches) == (5, [0, 1, 3, 4], [[1, 0]])
    assert sorted(found.finished) == [0, 1, 4]
    rollout = found.finished[4].rollouts[0]
    assert (rollout.sample, rollout.reward, rollout.advantage, rollout.turns[0].rewards) == (4, 0.25, -1.0, {"a": 1.0})
    assert rollout.turns[0].completion.version_spans == [VersionSpan(2, 1)]
    assert [turn.sampling for turn in rollout.turns] == [None, SAMPLING]


def test_lone_surrogates_and_large_integers_are_restored(tmp_path):
    lone, escape = chr(0xD83D), chr(0x10FFFF)
    content = {
        "text": f"a {lone} b",
        f"key {lone}": [f"{escape}41;", {"deep": [lone, 2**63, -(2**80)]}],
        "large": 2**64,
        "edges": [2**63 - 1, -(2**63)],
        "plain": "Straße",
    }
    group = group_of(0, content=content)
    (rollout,) = group.rollouts
    rollout.error, rollout.failure = f"{lone}!", Failure(f"ValueError: {lone}", f"{lone}.py:1", f"{escape} {lone}")
    rollout.reward_breakdown, rollout.metrics = {f"named {lone}": 1.0}, {f"metric {escape}": 2.0}
    journal = RunJournal(tmp_path)
    journal.finished(Assigned(0, "task", 0), group)
    journal.dropped(1, f"reason {lone}")
    journal.drain()
    (found,) = backlog(reopened(tmp_path)).finished[0].rollouts
    for name in ("messages", "error", "failure", "reward_breakdown", "metrics"):
        assert getattr(found, name) == getattr(rollout, name), name


async def test_discarded_group_is_forgotten_until_it_finishes_again(tmp_path):
    journal = RunJournal(tmp_path)
    asked: list[str] = []

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        asked.append(request_id)
        return Completion(request_id, [1], [-0.5], FinishReason.STOP, (VersionSpan(2, 1),))

    for index in (0, 1):
        await journal.record(generate, index)([1], request_id=f"train-{index}/0", sampling=SAMPLING)
    journal.finished(Assigned(0, "task", 0), group_of(0))
    journal.discarded(0)
    journal.discarded(1)
    journal.drain()
    again = reopened(tmp_path)
    found = backlog(again)
    assert (list(found.unsettled), list(found.finished)) == ([0, 1], [])
    await again.record(generate, 1)([1], request_id="train-1/0", sampling=SAMPLING)
    assert asked == ["train-0/0", "train-1/0", "train-1/0"]
    again.finished(Assigned(0, "task", 0), group_of(0))
    again.drain()
    assert list(backlog(reopened(tmp_path)).finished) == [0]


async def test_groups_in_a_checkpoint_are_not_trained_again(tmp_path):
    journal = RunJournal(tmp_path)
    for index in range(4):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(0, [0, 1])
    position = await journal.checkpoint(1, next_index=7)
    assert position == DataPosition(1, 7, (2, 3, 4, 5, 6))
    journal.batch(1, [2])
    journal.drain()
    late = backlog(reopened(tmp_path, position))
    assert (late.next_index, list(late.unsettled), late.batches) == (7, [2, 3, 4, 5, 6], [[2]])
    early = backlog(reopened(tmp_path))  # the checkpoint was never completed
    assert (list(early.unsettled), early.batches) == ([0, 1, 2, 3], [[0, 1], [2]])


async def test_repeated_checkpoint_restores_its_own_position(tmp_path):
    journal = RunJournal(tmp_path)
    journal.finished(Assigned(0, "task", 0), group_of(0))
    journal.batch(0, [0])
    first = await journal.checkpoint(1, next_index=1)
    again = reopened(tmp_path)
    again.batch(0, [0])
    again.finished(Assigned(1, "task", 1), group_of(1))
    second = await again.checkpoint(1, next_index=3)
    again.drain()
    assert (first, second) == (DataPosition(1, 1, ()), DataPosition(1, 3, (1, 2)))
    found = backlog(reopened(tmp_path, second))
    assert (found.next_index, list(found.unsettled), sorted(found.finished)) == (3, [1, 2], [1])
    found = backlog(reopened(tmp_path, first))
    assert (found.next_index, list(found.unsettled), sorted(found.finished)) == (2, [1], [1])


async def test_recorded_batches_survive_a_new_checkpoint(tmp_path):
    journal = RunJournal(tmp_path)
    for index in range(3):
        journal.finished(Assigned(index, "task", index), group_of(index))
        journal.batch(index, [index])
    journal.drain()
    again = reopened(tmp_path)  # the process was killed before its first checkpoint
    again.batch(0, [0])
    position = await again.checkpoint(1, next_index=3)
    again.forget_before(1)
    assert backlog(reopened(tmp_path, position)).batches == [[1], [2]]
    assert reopened(tmp_path, position).num_batches_again == 2


async def test_journal_of_many_segments_reads_as_one(tmp_path):
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    journal = RunJournal(tmp_path, segment_bytes=1500)
    for index in range(6):
        journal.finished(Assigned(index, "task", index), group_of(index))
        journal.batch(index, [index])
    journal.drain()
    of_start = names()
    assert len(of_start) > 2
    assert all(path.stat().st_size < 2500 for path in tmp_path.iterdir())
    again = RunJournal(tmp_path, segment_bytes=1500)
    assert backlog(again).batches == [[index] for index in range(6)]
    assert names() == of_start, "the last segment is continued"

    position = await again.checkpoint(2, next_index=6)
    of_both = names()
    assert [name for name in of_both if name.startswith("step-000002")] != ["step-000002.journal"], (
        "groups that the checkpoint leaves open fill further segments"
    )
    again.forget_before(1)
    assert names() == of_both, "a checkpoint of version 1 begins in the files of version 0"
    again.forget_before(2)
    assert names() == [name for name in of_both if name.startswith("step-000002")]
    assert backlog(reopened(tmp_path, position)).batches == [[index] for index in range(2, 6)]

    (tmp_path / "step-000002.journal").unlink()
    mended = RunJournal(tmp_path, position)
    mended.finished(Assigned(6, "task", 6), group_of(6))
    mended.drain()
    assert names()[:-1] == [name for name in of_both if name.startswith("step-000002.") and name[12].isdigit()]
    assert 6 in backlog(reopened(tmp_path, position)).finished


async def test_segments_are_deleted_when_no_checkpoint_needs_them(tmp_path):
    journal = RunJournal(tmp_path)
    await journal.checkpoint(2, next_index=0)
    await journal.checkpoint(4, next_index=0)

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    journal.forget_before(3)
    assert names() == ["step-000002.journal", "step-000004.journal"], "a checkpoint of version 3 begins in the former"
    journal.forget_before(4)
    assert names() == ["step-000004.journal"]
    journal.forget_before(9)
    assert names() == ["step-000004.journal"]


def test_unencodable_values_become_text_and_arrays_become_lists(tmp_path):
    journal = RunJournal(tmp_path)
    journal.finished(Assigned(0, "task", 0), group_of(0, content=Path("a"), array=np.arange(2)))
    journal.drain()
    message = backlog(reopened(tmp_path)).finished[0].rollouts[0].messages[0]
    assert message["array"] == [0, 1]
    assert "Path" in message["content"]


class Engine:
    """Answers with the numbers that follow the prompt, the first `abort_at` of them where that is set."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.abort_at: int | None = None

    async def __call__(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        self.prompts.append(list(prompt_token_ids))
        count = sampling.max_tokens if self.abort_at is None else self.abort_at
        reason = FinishReason.LENGTH if self.abort_at is None else FinishReason.ABORT
        tokens = [prompt_token_ids[-1] + 1 + n for n in range(count)]
        return Completion(request_id, tokens, [-1.0] * count, reason, (VersionSpan(0, count),) if count else ())


async def test_recorded_turns_are_replayed_and_partial_turns_continued(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    generate = journal.record(engine, 0)
    whole = await generate([1], request_id="train-0/0/0", sampling=SAMPLING)
    engine.abort_at = 3
    await generate([50], request_id="train-0/0/1", sampling=SAMPLING)
    journal.drain()

    engine = Engine()
    generate = resume_on_abort(reopened(tmp_path).record(engine, 0))
    again = await generate([1], request_id="train-0/0/0", sampling=SAMPLING)
    assert list(again.token_ids) == list(whole.token_ids)
    rest = await generate([50], request_id="train-0/0/1", sampling=SAMPLING)
    assert list(rest.token_ids) == list(range(51, 59))
    assert engine.prompts == [[50, 51, 52, 53]]
    other = await generate([2], request_id="train-0/0/0", sampling=SAMPLING)  # the environment sends another prompt
    assert list(other.token_ids) == list(range(3, 11))


async def test_recorded_chunks_are_replayed_to_a_new_listener(tmp_path):
    """A listener that finds a stop string cancels the request, so no completion is recorded."""
    chunk, heard = TokenChunk("train-0/0/0", [7], [-0.5], (VersionSpan(0, 1),)), []

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling):
        listener()(chunk)
        await asyncio.Event().wait()

    async def ask(journal):
        with listening(heard.append):
            await resume_on_abort(journal.record(generate, 0))([1, 2], request_id="train-0/0/0", sampling=SAMPLING)

    for again in (False, True):
        asked = asyncio.ensure_future(ask(journal := reopened(tmp_path)))
        while len(heard) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [list(each.token_ids) for each in heard[:1]] == [[7]], again
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        heard.clear()
        journal.drain()
        assert ("train-0/0/0" in {name for name, _ in journal.state.completions[0]}) is True


async def test_duplicate_request_id_in_flight_is_rejected(tmp_path):
    journal, may_answer = RunJournal(tmp_path), asyncio.Event()

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling):
        await may_answer.wait()
        return Completion(request_id, [7], [-0.5], FinishReason.LENGTH, (VersionSpan(0, 1),))

    ask = partial(journal.record(generate, 0), request_id="r", sampling=SAMPLING)
    first = asyncio.ensure_future(ask([1]))
    await asyncio.sleep(0)
    for prompt in ([1], [2]):
        with pytest.raises(RequestError, match="request id 'r' is in flight already"):
            await asyncio.wait_for(ask(prompt), HANG_S)
    may_answer.set()
    assert list((await first).token_ids) == [7]
    assert list((await ask([2])).token_ids) == [7]
    journal.close()


async def test_recorded_turn_with_other_sampling_is_not_replayed(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    await journal.record(engine, 0)([1], request_id="train-0/0/0", sampling=SAMPLING)
    journal.drain()
    for sampling, num_asked in ((SAMPLING, 0), (replace(SAMPLING, temperature=0.5), 1)):
        engine = Engine()
        await reopened(tmp_path).record(engine, 0)([1], request_id="train-0/0/0", sampling=sampling)
        assert len(engine.prompts) == num_asked


async def test_checkpoint_keeps_the_tokens_of_requests_in_flight(tmp_path):
    journal = RunJournal(tmp_path)
    positions: list[DataPosition] = []

    async def interrupted(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        so_far = Completion(request_id, [51, 52], [-1.0, -1.0], FinishReason.ABORT, (VersionSpan(0, 2),))
        positions.append(await journal.checkpoint(3, 1, {request_id: so_far}))
        raise KeyboardInterrupt  # the process is killed

    try:
        await journal.record(interrupted, 0)([50], request_id="train-0/0/0", sampling=SAMPLING)
    except KeyboardInterrupt:
        journal.drain()
    engine = Engine()
    generate = resume_on_abort(reopened(tmp_path, positions[0]).record(engine, 0))
    completion = await generate([50], request_id="train-0/0/0", sampling=SAMPLING)
    assert list(completion.token_ids) == list(range(51, 59))
    assert engine.prompts == [[50, 51, 52]]


async def test_turns_of_a_finished_group_are_forgotten(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    await journal.record(engine, 0)([1], request_id="train-0/0/0", sampling=SAMPLING)
    assert journal.state.completions
    journal.finished(Assigned(0, "task", 0), group_of(0))
    assert not journal.state.completions
    journal.close()


async def checkpointed(folder: Path) -> DataPosition:
    """Write a journal whose checkpoint of version 1 leaves group 1 finished and groups 2 and 3 open."""
    journal = RunJournal(folder)
    for index in range(2):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(0, [0])
    position = await journal.checkpoint(1, next_index=4)
    journal.finished(Assigned(2, "task", 2), group_of(2))
    journal.batch(1, [1])
    journal.dropped(4, "zero_variance")
    journal.close()
    journal.forget_before(1)
    assert position == DataPosition(1, 4, (1, 2, 3))
    return position


async def test_journal_of_a_checkpoint_survives_a_power_loss(tmp_path, monkeypatch):
    (tmp_path / "journal").mkdir()
    disk = Disk(tmp_path / "journal", monkeypatch)
    journal = RunJournal(tmp_path / "journal")
    journal.finished(Assigned(0, "task", 0), group_of(0))
    journal.finished(Assigned(1, "task", 1), group_of(1))
    journal.batch(0, [0])
    position = await journal.checkpoint(1, next_index=4)
    journal.finished(Assigned(2, "task", 2), group_of(2))
    left = reopened(disk.left_in(tmp_path / "left"), position)
    assert left.losses == []
    assert sorted(backlog(left).finished) == [1]
    journal.close()


async def test_checkpoint_position_survives_any_journal_damage(tmp_path):
    position = await checkpointed(tmp_path / "whole")
    (segment,) = (tmp_path / "whole").iterdir()
    data = segment.read_bytes()
    damaged = {"none": None, "empty": b"", "zeros": bytes(len(data)), "noise": bytes(range(256))}
    damaged |= {f"cut at {size}": data[:size] for size in range(1, len(data), 37)}
    damaged |= {f"changed at {n}": data[:n] + bytes([data[n] ^ 255]) + data[n + 1 :] for n in range(0, len(data), 37)}
    for name, content in damaged.items():
        folder = tmp_path / name
        folder.mkdir()
        if content is not None:
            (folder / segment.name).write_bytes(content)
        journal = reopened(folder, position)
        found = backlog(journal)
        assert found.next_index in (4, 5)
        assert set(found.unsettled) - {4} == {1, 2, 3}, name
        assert set(found.finished) <= {1, 2}
        assert found.batches in ([], [[1]])
        again = set(found.unsettled) - set(found.finished)
        if name.startswith(("changed", "none", "empty", "zeros", "noise")):
            assert journal.losses, name
            assert all(str(index) in journal.losses[-1] for index in again - {2, 3})
        journal.close()
        kept = (folder / segment.name).read_bytes()
        assert kept.startswith(content or b""), "nothing is cut away"
        mended = reopened(folder, position)
        assert backlog(mended) == found
        assert not any("begins with" in loss for loss in mended.losses)
        mended.close()


async def test_batch_is_replayed_only_if_it_and_earlier_ones_are_complete(tmp_path):
    position = DataPosition(3, 6, (1, 2, 3, 4, 5))
    journal = reopened(tmp_path, position)
    for index in (1, 2, 4, 5):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(3, [1, 2])
    journal.batch(4, [3, 4])  # 3 is not recorded
    journal.batch(5, [5])
    journal.drain()
    assert backlog(reopened(tmp_path, position)).batches == [[1, 2]]
    other = reopened(tmp_path, position)
    other.batch(3, [1, 4])  # history diverges: later batches of the old history are void
    other.close()
    assert backlog(reopened(tmp_path, position)).batches == [[1, 4]]


async def test_group_in_two_batches_ends_the_batches_that_are_handed_out_again(tmp_path):
    position = DataPosition(3, 6, (1, 2, 3, 4, 5))
    journal = reopened(tmp_path, position)
    for index in (1, 2, 3, 4):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(3, [1, 2])
    journal.batch(4, [2, 3])
    journal.batch(5, [4])
    journal.drain()
    assert backlog(reopened(tmp_path, position)).batches == [[1, 2]]


async def test_batches_before_the_checkpoint_are_not_kept(tmp_path):
    journal = RunJournal(tmp_path)
    for index in range(2):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(0, [0])
    await journal.checkpoint(1, next_index=2)
    again = reopened(tmp_path)  # resumed from before the checkpoint, whose segment now receives the first step again
    again.batch(0, [1])
    again.drain()
    later = reopened(tmp_path, DataPosition(1, 2, (1,)))
    assert later.state.batches == {}
    assert backlog(later).batches == []


@pytest.mark.parametrize("counts", [(3, 2), (2, 3)])
async def test_longest_part_of_an_interrupted_answer_is_continued(tmp_path, counts: tuple[int, int]):
    journal, engine = RunJournal(tmp_path), Engine()
    generate = journal.record(engine, 0)
    engine.abort_at = counts[0]
    await generate([50], request_id="train-0/0/0", sampling=SAMPLING)
    ((key, known),) = journal.state.completions[0].items()
    part = Completion(
        key[0], [51, 52, 53][: counts[1]], [-1.0] * counts[1], FinishReason.ABORT, (VersionSpan(0, counts[1]),)
    )
    journal.answered(RecordedAnswer(0, key[1], known.sampling, part))
    journal.drain()
    engine = Engine()
    await resume_on_abort(reopened(tmp_path).record(engine, 0))([50], request_id="train-0/0/0", sampling=SAMPLING)
    assert engine.prompts == [[50, 51, 52, 53]]


async def test_batches_after_one_that_was_formed_otherwise_are_void(tmp_path):
    position = DataPosition(3, 6, (1, 2, 3, 4, 5))
    journal = reopened(tmp_path, position)
    for index in (1, 2, 3):
        journal.finished(Assigned(index, "task", index), group_of(index))
    journal.batch(3, [1])
    journal.batch(4, [2])
    journal.batch(3, [3])
    journal.drain()
    assert backlog(reopened(tmp_path, position)).batches == [[3]]


async def test_answers_of_a_finished_group_are_not_kept(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    await journal.record(engine, 0)([1], request_id="train-0/0/0", sampling=SAMPLING)
    ((key, known),) = journal.state.completions[0].items()
    journal.finished(Assigned(0, "task", 0), group_of(0))
    late = Completion(key[0], [2], [-1.0], FinishReason.STOP, (VersionSpan(0, 1),))
    journal.answered(RecordedAnswer(0, key[1], known.sampling, late))
    assert journal.state.completions == {}
    journal.close()


async def test_part_with_other_sampling_is_recorded_even_if_it_is_shorter(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    engine.abort_at = 3
    await journal.record(engine, 0)([50], request_id="train-0/0/0", sampling=SAMPLING)
    engine.abort_at = 2
    hotter = replace(SAMPLING, temperature=1.5)
    await journal.record(engine, 0)([50], request_id="train-0/0/0", sampling=hotter)
    journal.drain()
    engine = Engine()
    await resume_on_abort(reopened(tmp_path).record(engine, 0))([50], request_id="train-0/0/0", sampling=hotter)
    assert engine.prompts == [[50, 51, 52]]


async def test_journal_of_another_run_is_rejected_with_advice(tmp_path):
    position = await checkpointed(tmp_path / "journal")
    other = DataPosition(1, 9, (7,))
    with pytest.raises(CheckpointError, match=r"data before 9, without 7, and its journal.*Move the folder") as refused:
        reopened(tmp_path / "journal", other)
    assert "1-3" in str(refused.value)
    (tmp_path / "journal").rename(tmp_path / "away")
    assert backlog(reopened(tmp_path / "journal", other)).unsettled == [7]
    assert reopened(tmp_path / "away", position).losses == []


async def test_journal_without_its_checkpoint_is_rejected(tmp_path):
    await checkpointed(tmp_path)
    with pytest.raises(CheckpointError, match="to a checkpoint that is gone"):
        reopened(tmp_path)


async def test_large_checkpoint_waits_without_blocking_the_event_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(run_journal, "LogWriter", partial(LogWriter, max_pending_bytes=1000))
    journal = RunJournal(tmp_path)
    for index in range(50):
        journal.finished(Assigned(index, "task", index), group_of(index, content="x" * 500))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other_task = asyncio.ensure_future(others())
    position = await journal.checkpoint(1, next_index=50)
    other_task.cancel()
    assert turns > 50
    journal.close()
    assert sorted(backlog(reopened(tmp_path, position)).finished) == list(range(50))


async def test_records_during_a_checkpoint_replace_open_groups(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    engine.abort_at = 3
    await journal.record(engine, 5)([1], request_id="train-5/0/0", sampling=SAMPLING)
    for index in range(5):
        journal.finished(Assigned(index, "task", index), group_of(index))
    beginning = asyncio.ensure_future(journal.checkpoint(1, next_index=6))
    await asyncio.sleep(0)
    journal.finished(Assigned(5, "task", 5), group_of(5))
    journal.dropped(4, "too_old")
    position = await beginning
    journal.close()
    found = reopened(tmp_path, position)
    assert position.unsettled == (0, 1, 2, 3, 4, 5)
    assert (list(backlog(found).unsettled), found.state.completions) == ([0, 1, 2, 3, 5], {})


async def test_longer_part_recorded_during_a_checkpoint_is_the_one_that_is_kept(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    engine.abort_at = 2
    await journal.record(engine, 0)([50], request_id="train-0/0/0", sampling=SAMPLING)
    for index in range(1, 5):
        journal.finished(Assigned(index, "task", index), group_of(index))
    ((key, known),) = journal.state.completions[0].items()
    beginning = asyncio.ensure_future(journal.checkpoint(1, next_index=5))
    await asyncio.sleep(0)
    longer = Completion(key[0], [51, 52, 53], [-1.0] * 3, FinishReason.ABORT, (VersionSpan(0, 3),))
    journal.answered(RecordedAnswer(0, key[1], known.sampling, longer))
    position = await beginning
    journal.close()
    engine = Engine()
    again = resume_on_abort(reopened(tmp_path, position).record(engine, 0))
    await again([50], request_id="train-0/0/0", sampling=SAMPLING)
    assert engine.prompts == [[50, 51, 52, 53]]


def test_record_of_another_format_is_rejected_with_advice(tmp_path):
    (tmp_path / "step-000000.journal").write_bytes(frame(b"another"))
    with pytest.raises(CheckpointError, match=r"record of another format.*move the folder .* away"):
        reopened(tmp_path)


async def test_missing_first_segment_is_reported_with_its_consequences(tmp_path):
    position = await checkpointed(tmp_path)
    for segment in tmp_path.iterdir():
        segment.unlink()
    journal = reopened(tmp_path, position)
    meaning, again = journal.losses
    assert meaning.startswith(
        "step-000001.journal, the segment of the journal that the checkpoint of step 1 begins with"
    )
    assert "missing or damaged" in meaning
    assert "no sample of the data is left out or trained twice" in meaning
    assert again.endswith("groups 1-3")
    journal.close()


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


NON_FILES = [folder, loop, os.mkfifo]


@pytest.mark.parametrize("make", NON_FILES)
async def test_segment_that_is_not_a_file_is_rejected_with_advice(tmp_path, make):
    position = await checkpointed(tmp_path / "journal")
    (segment,) = (tmp_path / "journal").iterdir()
    segment.unlink()
    make(segment)
    with pytest.raises(CheckpointError, match=r"step-000001\.journal, a segment .* cannot be read: .* move the folder"):
        reopened(tmp_path / "journal", position)
    (tmp_path / "journal").rename(tmp_path / "away")
    journal = reopened(tmp_path / "journal", position)
    assert backlog(journal).unsettled == [1, 2, 3]
    journal.close()


@pytest.mark.parametrize("make", [Path.touch, loop, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_journal_that_is_not_a_folder_is_rejected_with_advice(tmp_path, make):
    make(tmp_path / "journal")
    with pytest.raises(CheckpointError, match=r"journal.* cannot be (read|created): .*move"):
        reopened(tmp_path / "journal")


def test_full_disk_when_creating_the_journal_folder_is_reported(tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NoSpaceError, match=f"no space left in {tmp_path} for the folder"):
        reopened(tmp_path / "journal")


async def test_foreign_files_and_undeletable_segments_are_ignored(tmp_path):
    (tmp_path / "step-old.journal").write_bytes(b"kept by hand")
    journal = RunJournal(tmp_path)
    await journal.checkpoint(1, next_index=0)
    journal.drain()
    (tmp_path / "step-000000.journal").unlink()
    (tmp_path / "step-000000.journal").mkdir()
    journal.forget_before(1)
    position = await journal.checkpoint(2, next_index=3)
    journal.close()
    (tmp_path / "step-000000.journal").rmdir()
    assert reopened(tmp_path, position).losses == []


async def test_checkpoint_does_not_wait_for_hanging_asyncio_threads(tmp_path):
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hanging = asyncio.ensure_future(asyncio.to_thread(release.wait))
    await asyncio.sleep(0)
    journal = RunJournal(tmp_path)
    try:
        async with asyncio.timeout(HANG_S):
            await journal.checkpoint(1, next_index=0)
        assert not hanging.done()
    finally:
        release.set()
        await hanging
    assert journal.num_batches_again == 0


def test_record_without_sampling_parameters_is_rejected_with_advice(tmp_path):
    (tmp_path / "step-000000.journal").write_bytes(
        frame(msgspec.msgpack.encode({"type": "finished", "index": 0, "rollouts": []}))
    )
    with pytest.raises(CheckpointError, match=r"record of another format.*move the folder .* away"):
        reopened(tmp_path)


async def test_segment_of_another_run_at_the_same_position_is_rejected(tmp_path):
    positions = []
    for name in ("one", "other"):
        journal = RunJournal(tmp_path / name, DataPosition(run=name))
        journal.finished(Assigned(0, "task", 0), group_of(0))
        positions.append(await journal.checkpoint(1, next_index=1))
        journal.drain()
    one, other = positions
    assert replace(one, run="other") == other
    assert 0 in backlog(RunJournal(tmp_path / "one", one)).finished
    segment = next((tmp_path / "other").glob("*1.journal"))
    shutil.copy(segment, tmp_path / "one" / segment.name)
    with pytest.raises(CheckpointError, match="belongs to another run than the checkpoint of version 1"):
        RunJournal(tmp_path / "one", one)


async def test_numpy_values_of_a_custom_generate_are_converted(tmp_path):
    async def generate(prompt_token_ids, *, request_id, **_):
        return Completion(
            request_id,
            np.array([5, 6]),
            np.array([-0.5, -0.25], np.float32),
            FinishReason.STOP,
            [VersionSpan(np.int64(3), np.int64(2))],
            metrics={"queue_s": np.float32(0.5), "cached": np.int64(2)},
            top_logprobs=[[(np.int64(5), np.float32(-0.5))]] * 2,
        )

    journal = RunJournal(tmp_path)
    answer = await resume_on_abort(journal.record(generate, 0))([1, 2], request_id="a", sampling=SAMPLING)
    journal.drain()
    known = reopened(tmp_path).record(generate, 0)
    again = await known([1, 2], request_id="a", sampling=SAMPLING)
    assert answer == again
    assert again.token_ids == [5, 6]
    assert again.metrics == {"queue_s": 0.5, "cached": 2.0}
    journal.close()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"metrics": {"queue_s": float("nan")}}, r"generate returned metrics\['queue_s'\] = nan; it must be finite"),
        ({"logprobs": [-0.5, float("inf")]}, "generate returned a logprob of inf"),
        ({"token_ids": [5, -6]}, "the completion has token -6"),
    ],
)
async def test_invalid_completion_names_its_field_and_is_not_recorded(tmp_path, fields, expected):
    async def generate(prompt_token_ids, *, request_id, **_):
        answer = Completion(request_id, [5, 6], [-0.5, -0.25], FinishReason.STOP, [VersionSpan(3, 2)])
        return replace(answer, **fields)

    journal = RunJournal(tmp_path)
    with pytest.raises(ValueError, match=expected):
        await journal.record(generate, 0)([1, 2], request_id="a", sampling=SAMPLING)
    journal.drain()
    assert not reopened(tmp_path).state.completions
    journal.close()
