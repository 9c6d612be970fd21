"""Records of a journal, encoded as MessagePack and decoded by type: reading one executes nothing.

Tokens are stored as bytes, and each turn of a rollout as its difference from an earlier turn. MessagePack can represent
neither integers beyond 64 bits nor lone surrogates. Such integers are stored as an extension type, and surrogates are
escaped, so that messages are read back as `titan_rl.core.plain_data.plain` returns them, and other text unchanged.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from titan_rl.core.arrays import (
    LOGPROBS,
    TOKENS,
    ExpertRows,
    array_from_bytes,
    expert_rows,
    logprob_array,
    token_array,
)
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.plain_data import plain
from titan_rl.rollout.shared_tokens import TokenStorage, context_after, end_in_buffer, num_shared
from titan_rl.rollout.types import Message, Rollout, RolloutGroup, Turn
from titan_rl.scheduling.task_mix import Assigned, Dropped, MixEvent, Result
from titan_rl.types import Completion, FinishReason, PromptScores, SamplingParams, VersionSpan


class StoredExperts(msgspec.Struct, array_like=True, frozen=True):
    """Routed experts of tokens, with two bytes for each expert."""

    num_layers: int
    top_k: int
    values: bytes


class StoredCompletion(msgspec.Struct, array_like=True, frozen=True):
    """Completion, with four bytes for each token and eight for its logprob."""

    request_id: str
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    version_spans: list[tuple[int, int]]
    routed_experts: StoredExperts | None
    metrics: dict[str, float]
    ended: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]] | None
    allowed_logprobs: bytes | None = None


class StoredTurn(msgspec.Struct, array_like=True, frozen=True):
    """Turn of a rollout. Its prompt consists of the first `num_shared` tokens of the prompt and completion of turn
    `base`, followed by `added`."""

    base: int  # index of a turn of the same rollout; meaningless if nothing is shared
    num_shared: int
    added: bytes
    completion: StoredCompletion
    rewards: dict[str, float]
    token_advantages: bytes | None
    sampling: SamplingParams | None
    teacher: tuple[bytes, int, bytes, bytes] | None = None  # logprobs, top_k, top_ids, top_logprobs


class StoredRollout(msgspec.Struct, array_like=True, frozen=True):
    """Rollout with its turns stored separately.

    Args:
        rollout: Rollout without its turns.
    """

    rollout: Rollout
    turns: list[StoredTurn]


def stored_completion(completion: Completion) -> StoredCompletion:
    experts = completion.routed_experts
    rows = None if experts is None else expert_rows(experts)
    return StoredCompletion(
        completion.request_id,
        token_array(completion.token_ids).tobytes(),
        logprob_array(completion.logprobs).tobytes(),
        completion.finish_reason,
        [(span.version, span.num_tokens) for span in completion.version_spans],
        None if rows is None else StoredExperts(rows.num_layers, rows.top_k, rows.tobytes()),
        dict(completion.metrics),
        completion.ended,
        _top(completion.top_logprobs),
        None if completion.allowed_logprobs is None else logprob_array(completion.allowed_logprobs).tobytes(),
    )


def completion_of(stored: StoredCompletion) -> Completion:
    """Convert a stored completion back.

    Raises:
        ValueError: The parts of the completion are inconsistent.
    """
    return Completion(
        stored.request_id,
        array_from_bytes(TOKENS, stored.token_ids),
        array_from_bytes(LOGPROBS, stored.logprobs),
        stored.finish_reason,
        [VersionSpan(*span) for span in stored.version_spans],
        None if stored.routed_experts is None else _experts_of(stored.routed_experts),
        stored.metrics,
        stored.ended,
        stored.top_logprobs,
        None if stored.allowed_logprobs is None else array_from_bytes(LOGPROBS, stored.allowed_logprobs),
    )


def stored_rollout(rollout: Rollout) -> StoredRollout:
    turns: list[StoredTurn] = []
    last_on_line: dict[int, int] = {}  # index of the last turn, by the id() of the array that turns share
    for index, turn in enumerate(rollout.turns):
        prompt = token_array(turn.prompt_token_ids)
        window = prompt.window()
        base = index - 1 if window is None else last_on_line.get(id(window[0]), index - 1)
        count = num_shared(rollout.turns[base], turn) if base >= 0 else 0
        advantages = turn.token_advantages
        turns.append(
            StoredTurn(
                base,
                count,
                prompt[count:].tobytes(),
                stored_completion(turn.completion),
                dict(turn.rewards),
                None if advantages is None else logprob_array(advantages).tobytes(),
                turn.sampling,
                None if turn.teacher is None else _stored_scores(turn.teacher),
            )
        )
        if (end := end_in_buffer(turn)) is not None:
            last_on_line[id(end[0])] = index
    return StoredRollout(replace(rollout, turns=[]), turns)


def rollout_of(stored: StoredRollout) -> Rollout:
    """Convert a stored rollout back.

    Raises:
        ValueError: The parts of the rollout are inconsistent.
    """
    turns: list[Turn] = []
    storage = TokenStorage()
    for turn in stored.turns:
        prompt = array_from_bytes(TOKENS, turn.added)
        if turn.num_shared:
            if not 0 <= turn.base < len(turns):
                raise ValueError(f"turn {len(turns)} continues turn {turn.base}, which is not before it")
            prompt = context_after(turns[turn.base])[: turn.num_shared] + prompt
        advantages = turn.token_advantages
        turns.append(
            storage.add(
                Turn(
                    prompt,
                    completion_of(turn.completion),
                    turn.rewards,
                    None if advantages is None else array_from_bytes(LOGPROBS, advantages),
                    turn.sampling,
                    None if turn.teacher is None else _scores_of(*turn.teacher),
                )
            )
        )
    return replace(stored.rollout, turns=turns)


def _top(rows: Sequence[Sequence[tuple[int, float]]] | None) -> list[list[tuple[int, float]]] | None:
    if rows is None:
        return None
    return [[(int(token), float(logprob)) for token, logprob in row] for row in rows]  # numbers may be NumPy's


def _stored_scores(scores: PromptScores) -> tuple[bytes, int, bytes, bytes]:
    top_ids, top_logprobs = token_array(scores.top_ids), logprob_array(scores.top_logprobs)
    return logprob_array(scores.logprobs).tobytes(), scores.top_k, top_ids.tobytes(), top_logprobs.tobytes()


def _scores_of(logprobs: bytes, top_k: int, top_ids: bytes, top_logprobs: bytes) -> PromptScores:
    return PromptScores(
        array_from_bytes(LOGPROBS, logprobs),
        top_k,
        array_from_bytes(TOKENS, top_ids),
        array_from_bytes(LOGPROBS, top_logprobs),
    )


def _experts_of(stored: StoredExperts) -> ExpertRows:
    values: array[int] = array("H")
    values.frombytes(stored.values)
    if stored.num_layers < 1 or stored.top_k < 1:
        raise ValueError(f"experts of {stored.num_layers} layers, {stored.top_k} in each")
    return ExpertRows(values, stored.num_layers, stored.top_k)


class StartRecord(msgspec.Struct, tag="start", frozen=True):
    """First record of a segment, for the checkpoint of `version`. The checkpoint does not contain the events that
    follow, up to the next such record."""

    version: int
    next_index: int
    unsettled: list[int]  # positions in the data before next_index that are neither trained nor dropped
    run: str


class AssignRecord(msgspec.Struct, tag="assign", frozen=True):
    """Task and sample of the group at a position in the data."""

    index: int
    task: str
    sample: int


class ResultRecord(msgspec.Struct, tag="result", frozen=True):
    """Rewards of a finished group."""

    index: int
    rewards: tuple[float, ...]


class CompletionRecord(msgspec.Struct, frozen=True):
    """Answer to one request: a whole completion, or its part before an interruption."""

    index: int
    prompt_digest: bytes
    sampling: SamplingParams
    completion: Completion


class _StoredCompletionRecord(msgspec.Struct, tag="completion", frozen=True):
    index: int
    prompt_digest: bytes
    sampling: SamplingParams
    completion: StoredCompletion


class GroupRecord(msgspec.Struct, frozen=True):
    index: int
    task: str
    sample: int
    rollouts: list[Rollout]


class _StoredGroupRecord(msgspec.Struct, tag="group", frozen=True):
    index: int
    task: str
    sample: int
    rollouts: list[StoredRollout]


class DropRecord(msgspec.Struct, tag="drop", frozen=True):
    index: int
    reason: str


class DiscardRecord(msgspec.Struct, tag="discard", frozen=True):
    """Group that is generated again. Earlier records of it no longer count."""

    index: int


class BatchRecord(msgspec.Struct, tag="batch", frozen=True):
    """Groups on which the step from `version` is trained."""

    version: int
    indices: list[int]


_Plain = StartRecord | AssignRecord | ResultRecord | DropRecord | DiscardRecord | BatchRecord
JournalRecord = _Plain | CompletionRecord | GroupRecord
_Stored = _Plain | _StoredCompletionRecord | _StoredGroupRecord

_ESCAPE = "\U0010ffff"  # a noncharacter, which never stands for text
_ESCAPE_BYTES = _ESCAPE.encode()
_UNSTORABLE = re.compile(f"[\ud800-\udfff{_ESCAPE}]")
_ESCAPED = re.compile(f"{_ESCAPE}([0-9a-f]+);")
_LONG_INTEGER = 1  # code of the extension

TextFn = Callable[[str], str]


def encode(record: JournalRecord) -> bytes:
    stored: _Stored
    match record:
        case GroupRecord(index, task, sample, rollouts):
            texts = [stored_rollout(_with_text(rollout, _escape, _storable)) for rollout in rollouts]
            stored = _StoredGroupRecord(index, task, sample, texts)
        case CompletionRecord(index, prompt_digest, sampling, completion):
            stored = _StoredCompletionRecord(index, prompt_digest, sampling, stored_completion(completion))
        case DropRecord(index, reason):
            stored = DropRecord(index, _escape(reason))
        case _:
            stored = record
    return _encoder.encode(stored)


def decode(data: bytes) -> JournalRecord:
    """Decode a record.

    Raises:
        msgspec.DecodeError: The bytes are not those of a record.
        ValueError: The parts of the record are inconsistent.
    """
    stored = _decoder.decode(data)
    is_escaped = _ESCAPE_BYTES in data
    match stored:
        case _StoredGroupRecord(index, task, sample, of_group):
            rollouts = list(map(rollout_of, of_group))
            if is_escaped:
                rollouts = [_with_text(rollout, _unescape, _restored) for rollout in rollouts]
            return GroupRecord(index, task, sample, rollouts)
        case _StoredCompletionRecord(index, prompt_digest, sampling, completion):
            return CompletionRecord(index, prompt_digest, sampling, completion_of(completion))
        case DropRecord(index, reason):
            return DropRecord(index, _unescape(reason)) if is_escaped else stored
        case _:
            return stored


def group_record(played: Assigned, group: RolloutGroup) -> GroupRecord:
    """Build the record of a group, without its sample, which its number determines.

    Args:
        played: Position, task and sample of the group.
    """
    rollouts = [replace(rollout, sample=None) for rollout in group.rollouts]
    return GroupRecord(played.index, played.task, played.sample, rollouts)


def group_of(record: GroupRecord, sample: Any) -> RolloutGroup:
    rollouts = [replace(rollout, sample=sample) for rollout in record.rollouts]
    return RolloutGroup(rollouts[0].group_id, sample, rollouts, task=record.task)


def mix_events(record: JournalRecord) -> Iterator[MixEvent]:
    """Iterate over the events of the task mix in a record."""
    match record:
        case AssignRecord(index, task, sample) | GroupRecord(index, task, sample):
            yield Assigned(index, task, sample)
        case ResultRecord(index, rewards):
            yield Result(index, rewards)
        case DropRecord(index):
            yield Dropped(index)
        case _:
            pass


def _with_text(rollout: Rollout, text: TextFn, message: Callable[[Message], Message]) -> Rollout:
    """Copy a rollout with its user-written texts replaced."""

    def names(values: Mapping[str, float]) -> dict[str, float]:
        return {text(name): value for name, value in values.items()}

    failure = rollout.failure
    if failure is not None:
        at = None if failure.where is None else text(failure.where)
        failure = Failure(text(failure.error), at, text(failure.traceback))
    return replace(
        rollout,
        failure=failure,
        error=None if rollout.error is None else text(rollout.error),
        messages=[message(each) for each in rollout.messages],
        turns=[replace(turn, rewards=names(turn.rewards)) for turn in rollout.turns],
        reward_breakdown=names(rollout.reward_breakdown),
        metrics=names(rollout.metrics),
    )


def _storable(message: Message) -> Message:
    return _escaped(plain(message))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return _escape(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_LONG_INTEGER, value.to_bytes(size, "big", signed=True))
    return _inside(value, _escape, _escaped)


def _restored(value: Any) -> Any:
    return _unescape(value) if isinstance(value, str) else _inside(value, _unescape, _restored)


def _inside(value: Any, key: TextFn, item: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key(name): item(inner) for name, inner in value.items()}
    return [item(inner) for inner in value] if isinstance(value, list) else value


def _escape(text: str) -> str:
    return text if text.isascii() else _UNSTORABLE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):x};", text)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


def _extension(code: int, data: memoryview) -> int:
    if code != _LONG_INTEGER:
        raise ValueError(f"extension {code} is unknown")
    return int.from_bytes(data, "big", signed=True)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored, ext_hook=_extension)
