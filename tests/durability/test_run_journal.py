"""The journal of a run: what it gives back is where the run was."""

from pathlib import Path

import numpy as np

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, SamplingParams, Turn, VersionSpan
from titan_rl.durability.run_journal import RunJournal
from titan_rl.generation.resume import resume_on_abort

SAMPLING = SamplingParams(max_tokens=8)


def group_of(index: int, **message: object) -> RolloutGroup:
    completion = Completion("r", [1], [-0.5], FinishReason.STOP, (VersionSpan(2, 1),), metrics={"queue_s": 0.5})
    rollout = Rollout(f"train-{index}/0", f"train-{index}", 0, index, turns=[Turn([0], completion, {"a": 1.0})])
    rollout.reward, rollout.advantage, rollout.messages = 0.25, -1.0, [{"role": "user", **message}]
    return RolloutGroup(f"train-{index}", index, [rollout])


def reopened(folder: Path, version: int = 0) -> RunJournal:
    return RunJournal(folder, version)


def backlog(journal: RunJournal):
    return journal.backlog(lambda index: index)


def test_a_new_journal_has_no_backlog(tmp_path):
    journal = RunJournal(tmp_path)
    assert backlog(journal).next_index == 0
    journal.close()


def test_groups_batches_and_the_data_position_come_back(tmp_path):
    journal = RunJournal(tmp_path)
    for index in (1, 0, 4):
        journal.finished(index, group_of(index))
    journal.dropped(2, "zero_variance")
    journal.batch(0, [1, 0])
    journal.drain()  # and the process is killed
    found = backlog(reopened(tmp_path))
    assert (found.next_index, list(found.unsettled), found.batches) == (5, [0, 1, 3, 4], [[1, 0]])
    assert sorted(found.finished) == [0, 1, 4]
    rollout = found.finished[4].rollouts[0]
    assert (rollout.sample, rollout.reward, rollout.advantage, rollout.turns[0].rewards) == (4, 0.25, -1.0, {"a": 1.0})
    assert rollout.turns[0].completion.version_spans == [VersionSpan(2, 1)]


def test_what_a_checkpoint_holds_is_not_trained_again(tmp_path):
    journal = RunJournal(tmp_path)
    for index in range(4):
        journal.finished(index, group_of(index))
    journal.batch(0, [0, 1])
    journal.checkpoint(1, next_index=7)
    journal.batch(1, [2])
    journal.drain()
    late = backlog(reopened(tmp_path, version=1))
    assert (late.next_index, list(late.unsettled), late.batches) == (7, [2, 3, 4, 5, 6], [[2]])
    early = backlog(reopened(tmp_path, version=0))  # the checkpoint was never completed
    assert (list(early.unsettled), early.batches) == ([0, 1, 2, 3], [[0, 1], [2]])


def test_a_checkpoint_begun_twice_counts_from_its_second_beginning(tmp_path):
    journal = RunJournal(tmp_path)
    journal.finished(0, group_of(0))
    journal.batch(0, [0])
    journal.checkpoint(1, next_index=1)
    journal.drain()
    again = reopened(tmp_path, version=0)
    again.batch(0, [0])
    again.finished(1, group_of(1))
    again.checkpoint(1, next_index=3)
    again.drain()
    found = backlog(reopened(tmp_path, version=1))
    assert (found.next_index, list(found.unsettled), sorted(found.finished)) == (3, [1, 2], [1])


def test_segments_of_deleted_checkpoints_go(tmp_path):
    journal = RunJournal(tmp_path)
    journal.checkpoint(2, next_index=0)
    journal.checkpoint(4, next_index=0)
    journal.drain()
    journal.forget_before(4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004.journal"]


def test_what_cannot_be_encoded_is_kept_as_text_and_arrays_as_lists(tmp_path):
    journal = RunJournal(tmp_path)
    journal.finished(0, group_of(0, content=Path("a"), array=np.arange(2)))
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


async def test_recorded_turns_are_not_generated_again_and_a_part_is_continued(tmp_path):
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
    other = await generate([2], request_id="train-0/0/0", sampling=SAMPLING)  # an environment that asks otherwise
    assert list(other.token_ids) == list(range(3, 11))


async def test_a_checkpoint_keeps_the_tokens_of_requests_in_flight(tmp_path):
    journal = RunJournal(tmp_path)

    async def interrupted(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        so_far = Completion(request_id, [51, 52], [-1.0, -1.0], FinishReason.ABORT, (VersionSpan(0, 2),))
        journal.checkpoint(3, 1, {request_id: so_far})
        raise KeyboardInterrupt  # the process is killed

    try:
        await journal.record(interrupted, 0)([50], request_id="train-0/0/0", sampling=SAMPLING)
    except KeyboardInterrupt:
        journal.drain()
    engine = Engine()
    generate = resume_on_abort(reopened(tmp_path, version=3).record(engine, 0))
    completion = await generate([50], request_id="train-0/0/0", sampling=SAMPLING)
    assert list(completion.token_ids) == list(range(51, 59))
    assert engine.prompts == [[50, 51, 52]]


async def test_turns_of_a_finished_group_are_forgotten(tmp_path):
    journal, engine = RunJournal(tmp_path), Engine()
    await journal.record(engine, 0)([1], request_id="train-0/0/0", sampling=SAMPLING)
    assert journal.state.parts
    journal.finished(0, group_of(0))
    assert not journal.state.parts
    journal.close()
