"""Anything that a policy or an environment writes can be stored and read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.plain_data import json_line, plain, plain_json, printable, safe_text, snapshot
from titan_rl.rollout.group.transcript import transcript
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.journal.records import DropRecord, GroupRecord, decode, encode, group_record
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.viewer.report import write_report

PLAYED = Assigned(7, "task", 0)
TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | TEXT | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


class Wild:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def cyclic() -> dict[str, Any]:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message, message]
    return message


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: dict[str, Any] = {  # by name, because some have no text
    "path": Path("a"),
    "sets": ({1, 2}, frozenset("ab")),
    "array": np.arange(3),
    "scalars": [np.float32(0.5), np.float64("nan")],
    "longer than Python prints": 10**5000,
    "object": object(),
    "wild": Wild(),
    "bytearray": bytearray(b"x"),
    "infinity": float("inf"),
    "enum": FinishReason.STOP,
    "cycle": cyclic(),
    "keys": {3: "an integer", None: 1, (1, 2): 2},
}
ANYTHING = st.recursive(
    JSON | st.sampled_from(sorted(ODD)).map(lambda name: ODD[name]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def rollout_with(message: dict[str, Any], text: str = "") -> Rollout:
    completion = Completion("g/0/0", [5], [-0.5], FinishReason.STOP, [VersionSpan(2, 1)], metrics={"queue_s": 0.5})
    return Rollout(
        "g/0",
        "g",
        0,
        None,
        turns=[Turn([1], completion, {text: 1.0})],
        messages=[message],
        error=text,
        reward=0.5,
        reward_breakdown={text: 0.5},
        metrics={text: 1.0},
        failure=Failure(text, text, text),
    )


@settings(deadline=None, max_examples=examples(400))
@given(message=st.dictionaries(TEXT, JSON, max_size=3), text=TEXT)
@example(message={"arguments": {"n": 10**30, "city": "\ud83d", "\udfff": -(2**63) - 1}}, text="\U0010ffff10ffff;")
@example(message={"content": "\ud83d\ude00"}, text="\ud83d\ude00")
def test_journal_round_trips_messages(message: dict[str, Any], text: str) -> None:
    rollout = rollout_with(message, text)
    record = group_record(PLAYED, RolloutGroup("g", None, [rollout]))
    assert decode(encode(record)) == GroupRecord(7, "task", 0, [rollout])
    assert decode(encode(DropRecord(3, text))) == DropRecord(3, text)


@settings(deadline=None, max_examples=examples(400))
@given(message=st.dictionaries(TEXT, ANYTHING, max_size=2))
def test_values_without_a_serialized_form_are_stored_as_text(message: dict[str, Any]) -> None:
    read = decode(encode(group_record(PLAYED, RolloutGroup("g", None, [rollout_with(message)]))))
    assert isinstance(read, GroupRecord)
    assert same(read.rollouts[0].messages[0], plain(message))


def same(one: Any, other: Any) -> bool:
    """Equality in which a NaN equals itself."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(tmp_path_factory.mktemp("run"))


@settings(deadline=None, max_examples=examples(400))
@given(message=st.dictionaries(TEXT, ANYTHING, max_size=2), text=TEXT)
@example(message={"content": "\ud83d", "tool_calls": [{"arguments": {"n": 10**30}}]}, text="\ud83d")
@example(message={}, text='\\\ud83d"\n')
def test_transcripts_and_report_accept_any_value(run_dir: RunDirectory, message: dict[str, Any], text: str) -> None:
    run_dir.close()
    run_dir.rollouts.unlink(missing_ok=True)
    run_dir.write_rollout({"step": 1, "phase": "train"} | transcript(rollout_with(message, text)))
    assert len(run_dir.rollouts.read_text(encoding="utf-8").splitlines()) >= 1
    (read,) = read_jsonl(run_dir.rollouts)
    assert utf16(read["messages"]) == utf16([plain_json(message)])
    assert utf16(read["error"]) == utf16(text)
    assert "</html>" in write_report([run_dir.path], run_dir.report).read_text(encoding="utf-8")


def utf16(value: Any) -> bytes:
    """Encoding that is equal for a surrogate pair and its character, which JSON does not distinguish."""
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", ODD)
def test_every_odd_value_is_stored(run_dir: RunDirectory, name: str) -> None:
    message = {"role": "user", "content": ODD[name]}
    read = decode(encode(group_record(PLAYED, RolloutGroup("g", None, [rollout_with(message)]))))
    assert isinstance(read, GroupRecord)
    assert same(read.rollouts[0].messages[0], plain(message))
    run_dir.write_rollout(transcript(rollout_with(message)))
    assert utf16(read_jsonl(run_dir.rollouts)[-1]["messages"]) == utf16([plain_json(message)])


def test_deeply_nested_value_is_cut_off_as_text(run_dir: RunDirectory) -> None:
    rollout = rollout_with({"role": "user", "content": nested(5000)})
    assert isinstance(decode(encode(group_record(PLAYED, RolloutGroup("g", None, [rollout])))), GroupRecord)
    run_dir.write_rollout(transcript(rollout))
    assert read_jsonl(run_dir.rollouts)[-1]["messages"][0]["role"] == "user"
    assert snapshot(rollout.messages) == rollout.messages


@settings(max_examples=examples(200))
@given(JSON)
def test_plain_values_are_unchanged(value: Any) -> None:
    assert plain(value) == value
    assert snapshot(value) == value


def test_plain_converts_containers_to_lists_and_keys_to_text() -> None:
    assert plain({1: (2, [3]), "set": {4}, "array": np.arange(2)}) == {"1": [2, [3]], "set": [4], "array": [0, 1]}
    assert plain({"path": Path("a")}) == {"path": repr(Path("a"))}
    assert plain_json({"path": Path("a"), "nan": [float("nan")], "raw": b"x"}) == {
        "path": "a",
        "nan": [None],
        "raw": "b'x'",
    }
    assert plain([Wild()]) == ["<Wild, whose text raises RuntimeError>"]
    assert plain(cyclic())["content"] == [repr(cyclic())] * 2


def test_snapshot_shares_no_container() -> None:
    path = Path("a")
    value = {"a": [{"b": [path]}], "t": ([1],)}
    copy = snapshot(value)
    assert copy == value
    value["a"][0]["b"].append(1)
    value["t"][0].append(2)
    assert copy == {"a": [{"b": [path]}], "t": ([1],)}
    assert copy["a"][0]["b"][0] is path
    assert snapshot(cyclic())["content"][0]["role"] == "user"


def test_printable_texts_can_be_encoded() -> None:
    assert printable("h\ud83dé") == "h\\ud83dé"
    assert safe_text(Wild()) == "<Wild, whose text raises RuntimeError>"
    assert json_line({"x": "é\ud83d"}) == '{"x": "é\\ud83d"}'
