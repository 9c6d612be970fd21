"""Index of rollouts: filters, sorting, facets, and search, compared with a scan of all lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.plain_data import json_line
from titan_rl.viewer.rollout_index import KEPT_TEXT, SORTABLE, QueryError, RolloutIndex, RolloutQuery

Record = dict[str, Any]

TEXTS = ("Anna", "anna, Bo", "<b>", "\ud83d", "Straße", "")
RECORDS = st.fixed_dictionaries(
    {
        "step": st.integers(0, 5),
        "phase": st.sampled_from(["train", "validation"]),
        "task": st.sampled_from(["sort", "sums"]),
        "rollout_id": st.sampled_from(["g0/0", "g1/0"]),
        "group_id": st.sampled_from(["g0", "g1"]),
        "sibling": st.integers(0, 3),
        "status": st.sampled_from(["completed", "error_env"]),
        "reward": st.none() | st.floats(-1, 1),
        "advantage": st.none() | st.floats(-1, 1),
        "num_completion_tokens": st.integers(0, 9),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(TEXTS)}),
            max_size=2,
        ),
        "turns": st.lists(st.just({"tokens": {"ids": [1, 2]}}), max_size=2),
    },
    optional={"dropped": st.just("zero_variance"), "seat": st.just("x"), "error": st.sampled_from(TEXTS)},
)
STEPS, REWARDS = st.integers(0, 5).map(float), st.floats(-1, 1)
QUERIES = st.fixed_dictionaries(
    {"sort": st.sampled_from(SORTABLE), "descending": st.booleans()},
    optional={
        "phase": st.just("train"),
        "task": st.just("sums"),
        "status": st.just("completed"),
        "group": st.sampled_from(["g0", "g"]),
        "step_min": STEPS,
        "step_max": STEPS,
        "reward_min": REWARDS,
        "reward_max": REWARDS,
        "dropped": st.booleans(),
        "text": st.sampled_from(["ANNA", "an", "<", "strasse", "\ud83d", "zero"]),
        "offset": st.integers(0, 3),
        "limit": st.integers(1, 5),
    },
)


def lines_of(records: list[Record]) -> list[tuple[int, bytes]]:
    lines: list[tuple[int, bytes]] = []
    offset = 0
    for record in records:
        line = json_line(record).encode()
        lines.append((offset, line))
        offset += len(line) + 1
    return lines


def fits(record: Record, query: RolloutQuery, leave_out: str = "") -> bool:
    texts = [record.get("error") or "", *(str(message["content"]) for message in record["messages"])]
    tests = {
        "phase": lambda asked: record["phase"] == asked,
        "task": lambda asked: record["task"] == asked,
        "status": lambda asked: record["status"] == asked,
        "group": lambda asked: record["group_id"] == asked,
        "step_min": lambda asked: record["step"] >= asked,
        "step_max": lambda asked: record["step"] <= asked,
        "reward_min": lambda asked: record["reward"] is not None and record["reward"] >= asked,
        "reward_max": lambda asked: record["reward"] is not None and record["reward"] <= asked,
        "dropped": lambda asked: ("dropped" in record) == asked,
        "text": lambda asked: any(asked.casefold() in text.casefold() for text in texts),
    }
    return all(
        test(asked) for name, test in tests.items() if name != leave_out and (asked := getattr(query, name)) is not None
    )


def in_order(records: list[tuple[int, Record]], query: RolloutQuery) -> list[int]:
    def value(one: tuple[int, Record]) -> Any:
        index, record = one
        return {"index": index, "turns": len(record["turns"])}.get(query.sort, record.get(query.sort))

    known = sorted((one for one in records if value(one) is not None), key=lambda one: (value(one), one[0]))
    unknown = [one for one in records if value(one) is None]
    if query.descending:
        known, unknown = known[::-1], unknown[::-1]
    return [index for index, _ in known + unknown]


@given(st.lists(RECORDS, max_size=12), st.lists(QUERIES, min_size=1, max_size=4), st.integers(0, 12))
def test_query_equals_a_full_scan(records: list[Record], queries: list[dict[str, Any]], split: int) -> None:
    index = RolloutIndex()
    lines = lines_of(records)
    known: list[tuple[int, Record]] = []
    for part in (slice(None, split), slice(split, None)):
        index.add(lines[part])
        known += [(len(known) + place, record) for place, record in enumerate(records[part])]
        for asked in queries:
            query = RolloutQuery(**asked)
            found = index.find(query)
            fitting = [(place, record) for place, record in known if fits(record, query)]
            assert found["total"] == len(fitting)
            page = in_order(fitting, query)[query.offset : query.offset + query.limit]
            assert [row["index"] for row in found["rows"]] == page
            for facet in ("status", "task", "phase"):
                values = [record[facet] for _, record in known if fits(record, query, leave_out=facet)]
                assert found["facets"][facet] == {value: values.count(value) for value in set(values)}
    index.close()


def test_byte_range_locates_the_line() -> None:
    records = [{"rollout_id": f"g/{place}", "turns": []} for place in range(3)]
    lines = lines_of(records)
    whole = b"".join(line + b"\n" for _, line in lines)
    index = RolloutIndex()
    index.add(lines)
    for place, record in enumerate(records):
        found = index.byte_range(place)
        assert found is not None
        offset, length = found
        assert json.loads(whole[offset : offset + length]) == record
    assert index.byte_range(3) is None


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"step": "x"}', b'{"messages": 3}', b"[" * 10_000]
)
def test_invalid_transcripts_are_skipped_and_counted(broken: bytes) -> None:
    index = RolloutIndex()
    index.add([(0, broken), (9, b'{"rollout_id": "g/0"}')])
    assert len(index) == 1
    assert index.num_broken == (1 if broken else 0)
    assert index.byte_range(0) == (9, 21)


def test_long_texts_are_searched_at_both_ends() -> None:
    index = RolloutIndex()
    text = "begin" + "x" * (3 * KEPT_TEXT) + "middle" + "x" * (3 * KEPT_TEXT) + "end"
    index.add(lines_of([{"messages": [{"role": "assistant", "content": text}]}]))
    assert [index.find(RolloutQuery(text=part))["total"] for part in ("begin", "end", "middle")] == [1, 1, 0]


def test_faults_do_not_count_in_the_median_of_a_prompt() -> None:
    def line(step: int, sibling: int, status: str, reward: float) -> Record:
        opening = [{"role": "user", "content": "2 + 3?"}]
        about = {"step": step, "phase": "validation", "sibling": sibling, "status": status, "reward": reward}
        return {**about, "group_id": "g", "messages": opening, "turns": []}

    index = RolloutIndex()
    of_step = [("error_env", 0.0), ("error_timeout", 0.0), ("completed", 0.5), ("error_parse", 0.25)]
    index.add(lines_of([line(step, n, *one) for step in (0, 1) for n, one in enumerate(of_step)]))
    (prompt,) = index.prompts()["prompts"]
    assert [(at["reward"], at["lowest"], at["highest"], at["count"]) for at in prompt["steps"]] == [
        (0.25, 0.25, 0.5, 4),
        (0.25, 0.25, 0.5, 4),
    ]


def test_beginnings_of_answers_distinguish_prompts() -> None:
    asked = {"role": "user", "content": "2 + 3?"}
    begun = [{"role": "assistant", "content": text, "prefix": True} for text in ("So", "Well")]
    about = {"phase": "validation", "status": "completed", "reward": 1.0, "turns": []}
    said = {"role": "assistant", "content": "5"}
    index = RolloutIndex()
    for step in (0, 1):
        lines = [{**about, "step": step, "group_id": "g", "messages": [asked, each, said]} for each in begun]
        index.add(lines_of(lines))
    assert len(index.prompts()["prompts"]) == 2


def test_ranges_cover_all_rollouts() -> None:
    index = RolloutIndex()
    index.add(lines_of([{"step": step, "reward": step / 10} for step in (3, 1, 2)]))
    assert index.find(RolloutQuery(step_min=3))["ranges"] == {"step": [1, 3], "reward": [0.1, 0.3], "turns": [0, 0]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0.5"), ("limit", "1001"), ("limit", "-1"), ("offset", "x"), ("step_min", "nan"),
        ("reward_max", "inf"), ("dropped", "yes"), ("descending", "1"), ("sort", "text; DROP TABLE rollouts"),
        ("unknown", "1"), ("limit", "9" * 30), ("limit", "١"),
    ],
)  # fmt: skip
def test_invalid_parameter_error_names_the_field(name: str, value: str) -> None:
    with pytest.raises(QueryError, match=name) as caught:
        RolloutQuery.parse({name: value})
    assert caught.value.field == name


def test_empty_parameter_is_ignored() -> None:
    assert RolloutQuery.parse({"status": "", "limit": "5"}) == RolloutQuery(limit=5)
