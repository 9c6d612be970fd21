"""Demonstrations for supervised training, from tasks, a file of chats, or the best rollouts of a run, and their
tokens."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.bounded import OutOfTimeError
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.threads import call_within
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, DemonstratingTask, Demonstration, Task, calling, wrong_result
from titan_rl.tasks.chats import demonstration_of
from titan_rl.tasks.row_files import rows_with_places
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sft_tokens import DemonstrationTokens, encode

Found = tuple[str, Demonstration]
"""Description of a demonstration's source, for messages, and the demonstration."""


def task_demonstrations(
    tasks: Sequence[tuple[Task, float]], count: int, limits: RolloutConfig | None = None
) -> list[Found]:
    """Collect demonstrations of tasks, mixed by weight as evenly as possible. Each task's demonstrations stay in order.

    Args:
        tasks: Tasks with their weights.
        count: Largest number of demonstrations in total.
        limits: Time limits of a call into an environment, and of a demonstration.

    Raises:
        ConfigError: A task has no demonstrations.
        DataError: `demonstrations` of a task raised, returned something else, or returned nothing for too long.
    """
    limits = limits or RolloutConfig()
    total = sum(weight for _, weight in tasks)
    queues = [(iter(_demonstrations(task, -(-count * weight // total), limits)), weight) for task, weight in tasks]
    return list(islice(_mixed(queues), count))


def _mixed(queues: Sequence[tuple[Iterator[Found], float]]) -> Iterator[Found]:
    """Interleave queues by always taking from the one that is furthest behind its weight. When one ends, the others
    continue."""
    left = dict(enumerate(queues))
    taken = [0] * len(queues)
    while left:
        at = min(left, key=lambda number: (taken[number] + 1) / left[number][1])
        found = next(left[at][0], None)
        if found is None:
            del left[at]
            continue
        taken[at] += 1
        yield found


def _demonstrations(task: Task, count: float, limits: RolloutConfig) -> list[Found]:
    name = type(task).__name__
    if not isinstance(task, DemonstratingTask):
        raise ConfigError(
            f"{name} has no demonstrations: give it a method demonstrations(count) -> Iterable[Demonstration], or "
            "name a file of chats or a run with sft.data"
        )
    found: list[Found] = []

    call = f"demonstrations({int(count)})"

    def find() -> None:
        DEMONSTRATED_CALL_S.set(limits.env_timeout_s)
        with calling(call):
            for number, demonstration in enumerate(islice(cast("Any", task.demonstrations(int(count))), int(count))):
                if not isinstance(demonstration, Demonstration):
                    problem = f"number {number} is {demonstration!r}; it must be a titan_rl.Demonstration"
                    raise wrong_result(task, "demonstrations", problem)
                found.append((f"demonstration {number} of {name}", demonstration))

    try:
        call_within(
            find,
            limits.rollout_timeout_s,
            "one demonstration",
            progress=lambda: len(found),
            advice="raise rollout.rollout_timeout_s if it needs longer",
        )
    except OutOfTimeError as error:
        raise DataError(f"{call} of the task failed: {describe(error)}") from error
    if not found:
        raise DataError(f"{name} gave no demonstration")
    return found


def read_chats(file: Path, count: int) -> list[Found]:
    """Read at most `count` conversations from a file of chats; see `read_rows` and `demonstration_of`.

    Example of a line: `{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}`,
    with `"tools": [...]` if tools are offered.

    Raises:
        DataError: The file cannot be read or is empty, or a row is wrong. The message names file, row and field.
    """
    try:
        return [(place, demonstration_of(row, place)) for place, row in islice(rows_with_places(file), count)]
    except ConfigError as error:
        raise DataError(str(error)) from None


_LEARNED = ("rollout_id", "reward", "messages")
"""Fields of a record that are kept in memory. The tokens would take ten times as much."""


def best_rollouts(run: Path, count: int, *, top_k: int, min_reward: float | None) -> list[Found]:
    """Return at most `count` conversations of a run's training, those with the highest rewards, in training order.

    `logging.transcripts_per_step` decides which groups of a step a run records.

    Args:
        top_k: Largest number of conversations from each group.
        min_reward: Smallest reward of a conversation.

    Raises:
        DataError: The run has no such conversation, or one of them calls tools: a run does not record the tools that
            were offered.
    """
    file = run / "rollouts.jsonl"
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = _record(line)
                if record.get("phase") == "train" and _can_be_learned(record, min_reward):
                    groups[record["group_id"]].append({name: record[name] for name in _LEARNED})
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    best = [
        record
        for rollouts in groups.values()
        for record in sorted(rollouts, key=lambda rollout: -rollout["reward"])[:top_k]
    ]
    if not best:
        least = "" if min_reward is None else f" with a reward of sft.min_reward = {min_reward:g} or more"
        raise DataError(f"{file} has no completed rollout of messages{least}")
    if any(message.get("tool_calls") for record in best for message in record["messages"]):
        raise DataError(
            f"{file} has rollouts that call tools, and does not record the tools that were offered; write them to a "
            "file of chats, with their tools, and set sft.data to it"
        )
    return [(f"rollout {record['rollout_id']} of {run}", Demonstration(record["messages"])) for record in best[:count]]


def _record(line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except json.JSONDecodeError:  # a killed process may have cut it short
        return {}
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def _can_be_learned(record: Mapping[str, Any], min_reward: float | None) -> bool:
    reward = record.get("reward")
    return (
        record.get("status") == "completed"
        and isinstance(reward, int | float)
        and (min_reward is None or reward >= min_reward)
        and any(message.get("role") == "assistant" for message in record.get("messages") or [])
    )


class TokenSource:
    """Tokens of demonstrations, which are encoded at their first request. Demonstrations with more than `max_context`
    tokens are left out. Not thread-safe.

    Attributes:
        too_long: Indices of the requested demonstrations that were left out.
    """

    def __init__(self, renderer: Renderer, found: Sequence[Found], max_context: int) -> None:
        self._renderer = renderer
        self._found = found
        self._max_context = max_context
        self._tokens: dict[int, DemonstrationTokens] = {}
        self.too_long: set[int] = set()

    @property
    def num_demonstrations(self) -> int:
        return len(self._found)

    def length(self, number: int) -> int:
        """Length of a demonstration in tokens."""
        return len(self._encoded(number).token_ids)

    def samples(self, numbers: Sequence[int]) -> list[TrainingSample]:
        """Build the training samples of demonstrations.

        Args:
            numbers: Indices of the demonstrations.

        Raises:
            DataError: A demonstration cannot be rendered, or all of them are too long.
        """
        encoded = [(number, self._encoded(number)) for number in numbers]
        self.too_long |= {number for number, tokens in encoded if len(tokens.token_ids) > self._max_context}
        samples = [
            tokens.sample(f"{index}/{number}")
            for index, (number, tokens) in enumerate(encoded)
            if number not in self.too_long
        ]
        if not samples:
            names = ", ".join(self._found[number][0] for number in numbers[:3])
            raise DataError(
                f"all {len(numbers)} demonstrations of a step have more than model.max_context = {self._max_context} "
                f"tokens, such as {names}; raise model.max_context, or leave them out"
            )
        return samples

    def _encoded(self, number: int) -> DemonstrationTokens:
        if (tokens := self._tokens.get(number)) is None:
            name, demonstration = self._found[number]
            try:
                tokens = self._tokens[number] = encode(self._renderer, demonstration)
            except DataError as error:
                raise DataError(f"{name}: {error}") from error.__cause__
        return tokens
