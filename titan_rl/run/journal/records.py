"""What a journal holds. Encoded as MessagePack and decoded by type: reading one executes nothing.

MessagePack has no word for integers beyond 64 bits and for lone surrogates. The former are an extension of it, the
latter escaped, so that messages come back as `titan_rl.calls.plain.plain` makes them, and other text as it was.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from titan_rl.calls.plain import plain
from titan_rl.calls.user_code import Failure
from titan_rl.rollout.types import Message, Rollout, RolloutGroup
from titan_rl.scheduling.mix.events import Assigned, Dropped, MixEvent, Result
from titan_rl.types import Completion, SamplingParams


class StartRecord(msgspec.Struct, tag="start", frozen=True):
    """The checkpoint of `version` is being written; what follows up to the next one is not in it."""

    version: int
    next_index: int
    unsettled: list[int]  # positions in the data before next_index that are neither trained nor dropped
    run: str


class AssignRecord(msgspec.Struct, tag="assign", frozen=True):
    """What the group at a position in the data plays."""

    index: int
    task: str
    sample: int


class ResultRecord(msgspec.Struct, tag="result", frozen=True):
    """What a group that has ended earned."""

    index: int
    rewards: tuple[float, ...]


class CompletionRecord(msgspec.Struct, tag="completion", frozen=True):
    """What one request came back with: a whole completion, or what an interruption left of it."""

    index: int
    prompt_digest: bytes
    sampling: SamplingParams
    completion: Completion


class GroupRecord(msgspec.Struct, tag="group", frozen=True):
    index: int
    task: str
    sample: int
    rollouts: list[Rollout]


class DropRecord(msgspec.Struct, tag="drop", frozen=True):
    index: int
    reason: str


class BatchRecord(msgspec.Struct, tag="batch", frozen=True):
    """What the step from `version` is trained on."""

    version: int
    indices: list[int]


JournalRecord = StartRecord | AssignRecord | CompletionRecord | ResultRecord | GroupRecord | DropRecord | BatchRecord

_ESCAPE = "\U0010ffff"  # stands for no character and never will
_ESCAPE_BYTES = _ESCAPE.encode()
_UNSTORABLE = re.compile(f"[\ud800-\udfff{_ESCAPE}]")
_ESCAPED = re.compile(f"{_ESCAPE}([0-9a-f]+);")
_LONG_INTEGER = 1  # code of the extension

TextFn = Callable[[str], str]


def encode(record: JournalRecord) -> bytes:
    if isinstance(record, GroupRecord):
        rollouts = [_with_text(rollout, _escape, _storable) for rollout in record.rollouts]
        record = GroupRecord(record.index, record.task, record.sample, rollouts)
    elif isinstance(record, DropRecord):
        record = DropRecord(record.index, _escape(record.reason))
    return _encoder.encode(record)


def decode(data: bytes) -> JournalRecord:
    """The record.

    Raises:
        msgspec.DecodeError: these are not the bytes of one.
    """
    record = _decoder.decode(data)
    if _ESCAPE_BYTES not in data:
        return record
    if isinstance(record, GroupRecord):
        rollouts = [_with_text(rollout, _unescape, _restored) for rollout in record.rollouts]
        return GroupRecord(record.index, record.task, record.sample, rollouts)
    return DropRecord(record.index, _unescape(record.reason)) if isinstance(record, DropRecord) else record


def group_record(played: Assigned, group: RolloutGroup) -> GroupRecord:
    """A group without its sample, which is a function of its number.

    Args:
        played: by the group.
    """
    rollouts = [replace(rollout, sample=None) for rollout in group.rollouts]
    return GroupRecord(played.index, played.task, played.sample, rollouts)


def group_of(record: GroupRecord, sample: Any) -> RolloutGroup:
    rollouts = [replace(rollout, sample=sample) for rollout in record.rollouts]
    return RolloutGroup(rollouts[0].group_id, sample, rollouts, task=record.task)


def mix_events(record: JournalRecord) -> Iterator[MixEvent]:
    """What a record says of which group plays what."""
    match record:
        case AssignRecord(index, task, sample) | GroupRecord(index, task, sample):
            yield Assigned(index, task, sample)
        case ResultRecord(index, rewards):
            yield Result(index, rewards)
        case DropRecord(index):
            yield Dropped(index)
        case _:
            pass


def record_of(event: MixEvent) -> AssignRecord | ResultRecord | None:
    """None for a drop, which has a record with its reason."""
    match event:
        case Assigned(index, task, sample):
            return AssignRecord(index, task, sample)
        case Result(index, rewards):
            return ResultRecord(index, rewards)
        case Dropped():
            return None


def digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that two prompts share only if they are equal."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def _with_text(rollout: Rollout, text: TextFn, message: Callable[[Message], Message]) -> Rollout:
    """The rollout with everything in it changed that others have worded."""

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
        messages=[message(said) for said in rollout.messages],
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


def _array(value: Any) -> Any:
    """Tokens and logprobs may be arrays."""
    if not hasattr(value, "tolist"):
        raise NotImplementedError(f"a record holds a {type(value).__name__}, which has no form on disk")
    return value.tolist()


def _extension(code: int, data: memoryview) -> int:
    if code != _LONG_INTEGER:
        raise ValueError(f"extension {code} is unknown")
    return int.from_bytes(data, "big", signed=True)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array)
_decoder = msgspec.msgpack.Decoder(JournalRecord, ext_hook=_extension)
