"""Tasks whose samples are rows, and `Rows`, which reads them from a local file."""

from __future__ import annotations

import functools
import json
import random
import string
from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.core.plain_data import plain_json
from titan_rl.core.settings import FilePath, FunctionName
from titan_rl.rollout.prompt_length import USUAL_TOKEN, PromptLimit, num_characters
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message
from titan_rl.tasks.message_task import OpeningTask, answer_rubric
from titan_rl.tasks.row_files import Row, read_rows
from titan_rl.tasks.tools import messages_of


class ChosenRows:
    """All rows of a data set, or some of them. Rows are read one at a time.

    Args:
        data: Sequence of rows.
        indices: Indices of the rows; None for all rows.
    """

    def __init__(self, data: Any, indices: Sequence[int] | None = None) -> None:
        self._data = data
        self._indices = range(len(data)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return dict(self._data[self._indices[index]])

    def number(self, index: int) -> int:
        """Number of a row in the data set."""
        return self._indices[index]


Sides = tuple[ChosenRows, ChosenRows]
"""Rows for training, and held-out rows."""


MOST_TOKENIZED = 2_000_000
"""Number of characters that are tokenized before a run to count the prompts that are too long, for each side."""


class RowTask(OpeningTask):
    """Base class of tasks whose samples are rows. Each epoch goes through all rows in a different order."""

    prompt: str = "prompt"
    """Column with the prompt (text or a list of messages), or a text with columns in braces."""
    system: str = ""
    """System message before the prompt, if any."""

    @abstractmethod
    def load_rows(self) -> Sides:
        """Load the rows; called once."""

    @functools.cached_property  # not a private attribute, which would count in comparisons of settings
    def _sides(self) -> Sides:
        return self.load_rows()

    def sample(self, rng: random.Random) -> Row:
        """Draw one of the rows for training."""
        return rng.choice(self.rows(held_out=False))

    def train_sample(self, seed: int, index: int) -> Row:
        rows = self.rows(held_out=False)
        epoch, position = divmod(index, len(rows))
        order = _order(len(rows), f"{seed}/{epoch}")
        following = (rows[order[(position + more) % len(rows)]] for more in range(len(rows)))
        row = next(filter(self.leaves_room, following), None)  # the next row takes the place of one that is too long
        if row is None:
            raise DataError(f"no row of {self.source} leaves room for an answer in model.max_context")
        return row

    def validation_samples(self, count: int) -> list[Row]:
        """First `count` held-out rows that leave room for an answer, or all of them if there are fewer."""
        rows = self.rows(held_out=True)
        drawn = (rows[index] for index in _order(len(rows), "validation"))
        return list(islice(filter(self.leaves_room, drawn), count))

    def rows(self, *, held_out: bool) -> ChosenRows:
        return self._sides[held_out]

    def prompt_of(self, row: Row) -> str | Sequence[Message]:
        """Prompt of a row.

        Raises:
            KeyError: the row lacks a column, or the setting `prompt` names no column.
        """
        if self.prompt in row:
            return row[self.prompt]
        if not columns_in(self.prompt):
            raise KeyError(self.prompt)
        return self.prompt.format_map(row)

    @property
    @abstractmethod
    def source(self) -> str:
        """Name of the data, for messages."""

    def count_long_prompts(self, limit: PromptLimit) -> str:
        trained, held_out = self._sides
        parts = [self._count(limit, trained, "prompts to train on")]
        if held_out is not trained:
            parts.append(self._count(limit, held_out, "held-out prompts"))
        return " and ".join(filter(None, parts))

    def _count(self, limit: PromptLimit, rows: ChosenRows, what: str) -> str:
        """Describe the number of long prompts, measured in a random order for as long as `MOST_TOKENIZED` allows."""
        long: list[int] = []
        measured = tokenized = 0
        for index in _order(len(rows), "measured"):
            messages = self.opening(rows[index])
            if limit.most_tokens(messages) >= limit.max_context:
                tokenized += min(num_characters(messages), limit.max_context * USUAL_TOKEN)
            if tokenized > MOST_TOKENIZED and measured:
                break
            measured += 1
            if not self.leaves_room(rows[index]):
                long.append(index)
        if not long:
            return ""
        if len(long) == len(rows):
            raise DataError(f"none of the {len(rows):,} {what} leaves room for an answer; raise model.max_context")
        of = f"{len(rows):,}" if measured == len(rows) else f"the {measured:,} measured of {len(rows):,}"
        return f"{len(long):,} of {of} {what}, such as row {rows.number(min(long))} of {self.source},"

    def opening(self, sample: Row) -> list[Message]:
        """Opening messages of a row, in the form of OpenAI, also if those of the row are in that of ShareGPT."""
        return messages_of(self.prompt_of(sample), self.system)

    def require_prompt(self, row: Row, place: str) -> None:
        """Check that a row has a prompt.

        Args:
            row: The row.
            place: Description of the row for the error, such as "row 3 of questions.jsonl".

        Raises:
            ConfigError: the row has no prompt.
        """
        try:
            self.opening(row)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, DataError) as error:
            wrong = f"has no column {error}" if isinstance(error, KeyError) else f"gives no prompt: {error}"
            raise ConfigError(
                f"task.prompt = {self.prompt!r}: {place} {wrong}; its columns are {', '.join(row)}"
            ) from None

    def split_rows(self, data: Any, name: str) -> Sides:
        """Split rows by `held_out` and their keys.

        Args:
            data: Sequence of rows.
            name: Name of the data, for the error.

        Raises:
            ConfigError: a row has no prompt.
        """
        if not self.held_out:
            return (rows := ChosenRows(data)), rows
        sides: tuple[list[int], list[int]] = ([], [])
        for number in range(len(data)):
            row: Row = data[number]
            self.require_prompt(row, f"row {number} of {name}")
            sides[self.is_held_out(row)].append(number)
        return ChosenRows(data, sides[0]), ChosenRows(data, sides[1])


class Rows(RowTask):
    """A `Task` of one prompt and one answer for each row of a file. It needs no class of your own:

        [task]
        type = "titan_rl.tasks:Rows"
        path = "questions.jsonl"               # {"question": "What is 2 + 2?", "answer": "4"}
        prompt = "{question} Answer briefly."
        reward = "rewards:is_right"            # def is_right(row, text): return answer_of(text) == row["answer"]

    Whether a row is held out depends on the columns that its prompt shows, so it stays the same when rows are added or
    the prompt is reworded.
    """

    path: FilePath
    """A .jsonl, .ndjson, .json, .csv, .tsv or .parquet file; all but the last may end with .gz."""
    validation_path: FilePath | None = None
    """Second file, whose rows are all held out; then no rows of `path` are."""
    reward: Annotated[str, FunctionName(())]
    """Function of the row and the text that the policy wrote, with its thought; may be async. Answers that are cut off
    are worth 0."""
    reward_in_thread: bool = False
    """Call the reward in a thread. For rewards that wait, or compute for more than some milliseconds."""
    demonstration: str = ""
    """Column with an answer that `titan-rl sft` teaches, if there is one."""
    tools: tuple[Annotated[str, FunctionName(())], ...] = ()
    """Tools that the policy may call before it answers: functions, or classes whose public methods are tools."""

    def load_rows(self) -> Sides:
        rows = self._read(self.path)
        if self.validation_path is not None:
            return ChosenRows(rows), ChosenRows(self._read(self.validation_path))
        sides = self.split_rows(rows, self.path)
        if not all(sides):
            raise ConfigError(
                f"task.held_out = {self.held_out} leaves {len(sides[0])} of the {len(rows)} rows of {self.path} for "
                f"training and {len(sides[1])} held out; give more rows, another share, or a task.validation_path"
            )
        return sides

    def offered_tools(self, sample: Row) -> list[Any]:
        tools: list[Any] = [find_function("task.tools", name, {}) for name in self.tools]
        return [tool() if isinstance(tool, type) else tool for tool in tools]

    @property
    def source(self) -> str:
        return self.path

    def demonstrate(self, sample: Row, messages: Sequence[Message], rng: random.Random) -> str | Message:
        if not self.demonstration:
            raise ConfigError('task.demonstration = "" names no column with answers to train on; set it to one')
        return str(sample[self.demonstration])

    def rubric(self) -> Rubric:
        return answer_rubric(find_function("task.reward", self.reward, {}), in_thread=self.reward_in_thread)

    def key(self, sample: Row) -> str:
        """Key made of the columns that the prompt shows, independent of its wording."""
        names = [self.prompt] if self.prompt in sample else columns_in(self.prompt)
        return json.dumps(plain_json([sample.get(name) for name in names]))

    def check_settings(self) -> None:
        """Read the files and check their columns.

        Raises:
            ConfigError: a file cannot be read or lacks a column, or there are no training rows or no held-out rows.
        """
        rows = self.rows(held_out=False)
        if self.demonstration and not all(self.demonstration in rows[index] for index in range(len(rows))):
            raise ConfigError(
                f"task.demonstration = {self.demonstration!r}: not all rows of {self.path} have such a column"
            )

    def _read(self, path: str) -> list[Row]:
        rows = read_rows(path)
        for number, row in enumerate(rows):
            self.require_prompt(row, f"row {number} of {path}")
        return rows


def columns_in(template: str) -> list[str]:
    """Names of the columns in a text."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


@functools.lru_cache(maxsize=4)
def _order(count: int, key: str) -> list[int]:
    return random.Random(key).sample(range(count), count)
