"""What a journal holds. Encoded as MessagePack and decoded by type: reading one executes nothing."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.types import Completion


class Start(msgspec.Struct, tag="start", frozen=True):
    """The checkpoint of `version` is being written; what follows up to the next one is not in it."""

    version: int
    next_index: int
    unsettled: list[int]  # positions in the data before next_index that are neither trained nor dropped


class Part(msgspec.Struct, tag="part", frozen=True):
    """What one request came back with: a whole completion, or what an interruption left of it."""

    index: int
    prompt_digest: bytes
    completion: Completion


class Finished(msgspec.Struct, tag="finished", frozen=True):
    index: int
    rollouts: list[Rollout]


class Dropped(msgspec.Struct, tag="dropped", frozen=True):
    index: int
    reason: str


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """What the step from `version` is trained on."""

    version: int
    indices: list[int]


Record = Start | Part | Finished | Dropped | Batch

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value))
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    """The record.

    Raises:
        msgspec.DecodeError: these are not the bytes of one.
    """
    return _decoder.decode(data)


def finished(index: int, group: RolloutGroup) -> Finished:
    """A group without its sample, which is a function of its position in the data."""
    return Finished(index, [replace(rollout, sample=None) for rollout in group.rollouts])


def group_of(record: Finished, sample: Any) -> RolloutGroup:
    rollouts = [replace(rollout, sample=sample) for rollout in record.rollouts]
    return RolloutGroup(rollouts[0].group_id, sample, rollouts)


def digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that two prompts share only if they are equal."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Arrays as lists; what an environment put into its messages and nobody can encode, as its text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
