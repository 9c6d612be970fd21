"""Task of rows in a local file (JSON lines, JSON, CSV or Parquet) with a function that rewards an answer."""

from __future__ import annotations

import csv
import functools
import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from titan_rl.core.calls.imports import find_function, require
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.plain import plain_json
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FilePath, FunctionName
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message
from titan_rl.tasks.message_task import MessageTask
from titan_rl.tasks.prompt_task import answer_rubric
from titan_rl.tasks.tools import ToolEnv, messages_of

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, by the end of its name: .jsonl, .json (a list of objects), .csv (with a header; all values
    are text) or .parquet.

    Raises:
        ConfigError: there is no such file, it is of no such kind, or has something else than rows. Names the file and,
            where it has any, the line.
        MissingExtraError: reading Parquet needs pyarrow.
    """
    path = Path(path)
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path} is of no kind that has rows; give a .jsonl, .json, .csv or .parquet file")
    try:
        rows = list(read(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json(path: Path) -> Iterator[Row]:
    rows = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is no JSON list of objects")
    for number, row in enumerate(cast("list[Any]", rows)):
        yield _row(row, f"{path}[{number}]")


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in (reader := csv.DictReader(file)):
            if None in row or None in row.values():
                raise ConfigError(f"{path}:{reader.line_num} has another number of values than the header")
            yield dict(row)


def _parquet(path: Path) -> Iterator[Row]:
    parquet: Any = require("pyarrow.parquet", "rows")
    try:
        yield from parquet.read_table(path).to_pylist()
    except OSError:
        raise
    except Exception as error:  # pyarrow's own
        raise ConfigError(f"{path} is no Parquet file: {error}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object: {json.dumps(value)[:80]}")
    return cast("Row", value)


_NONE: dict[str, Callable[..., Any]] = {}  # there is none of the library's own


class Rows(MessageTask):
    """A `Task` of one prompt and one answer for each row of a file. It needs no class of your own:

        [task]
        type = "titan_rl.tasks:Rows"
        path = "questions.jsonl"               # {"question": "What is 2 + 2?", "answer": "4"}
        prompt = "{question} Answer briefly."
        reward = "rewards:is_right"            # def is_right(row, answer): return answer.strip() == row["answer"]

    Each epoch goes through all rows in a different order. The columns that a row's prompt shows decide whether it is
    held out, so this stays the same when rows are added or the prompt is reworded.
    """

    path: FilePath
    """A .jsonl, .json, .csv or .parquet file."""
    validation_path: FilePath | None = None
    """Second file, whose rows are all held out; then no rows of `path` are."""
    prompt: str = "prompt"
    """Column with the prompt (text or a list of messages), or a text with columns in braces."""
    system: str = ""
    """System message before the prompt, if any."""
    reward: Annotated[str, FunctionName(())]
    """Function of the row and the text of the answer; may be async. Answers that are cut off are worth 0."""
    reward_in_thread: bool = False
    """Call the reward in a thread. For rewards that wait, or compute for more than some milliseconds."""
    demonstration: str = ""
    """Column with an answer that `titan-rl sft` teaches, if there is one."""
    tools: tuple[Annotated[str, FunctionName(())], ...] = ()
    """Tools that the policy may call before it answers: functions, or classes whose public methods are tools."""

    def sample(self, rng: random.Random) -> Row:
        """Draw one of the rows for training."""
        return rng.choice(self._rows(held_out=False))

    def train_sample(self, seed: int, index: int) -> Row:
        rows = self._rows(held_out=False)
        epoch, place = divmod(index, len(rows))
        return rows[_order(len(rows), f"{seed}/{epoch}")[place]]

    def validation_samples(self, count: int) -> list[Row]:
        """Fewer where there are not as many."""
        rows = self._rows(held_out=True)
        return [rows[place] for place in _order(len(rows), "validation")[:count]]

    def env(self, sample: Row) -> MessageEnv:
        tools = [find_function("task.tools", name, _NONE) for name in self.tools]
        return ToolEnv(self._prompt_of(sample), [tool() if isinstance(tool, type) else tool for tool in tools])

    def demonstrate(self, sample: Row, messages: Sequence[Message], rng: random.Random) -> str | Message:
        if not self.demonstration:
            raise ConfigError('task.demonstration = "" names no column with answers to teach; set it to one')
        return str(sample[self.demonstration])

    def rubric(self) -> Rubric:
        return answer_rubric(find_function("task.reward", self.reward, _NONE), in_thread=self.reward_in_thread)

    def key(self, sample: Row) -> str:
        """Key of the columns that the prompt shows, whatever its wording."""
        names = [self.prompt] if self.prompt in sample else _columns(self.prompt)
        return json.dumps(plain_json([sample.get(name) for name in names]))

    def check_settings(self) -> None:
        """
        Raises:
            ConfigError: a file cannot be read, lacks a column, or has no rows for one of the two sides.
        """
        _, rows = self._rows(held_out=True), self._rows(held_out=False)
        if self.demonstration and not all(self.demonstration in row for row in rows):
            raise ConfigError(
                f"task.demonstration = {self.demonstration!r}: not all rows of {self.path} have such a column"
            )

    def _rows(self, *, held_out: bool) -> Sequence[Row]:
        return _split(self)[held_out]  # pyright: ignore[reportArgumentType]  a frozen section is hashable

    def _prompt_of(self, row: Row) -> list[Message]:
        prompt = row[self.prompt] if self.prompt in row else self.prompt.format_map(row)
        return [*([{"role": "system", "content": self.system}] if self.system else ()), *messages_of(prompt)]

    def read(self, path: str) -> Iterator[Row]:
        """The rows of a file, each of which has a prompt.

        Raises:
            ConfigError: one has none, or the file cannot be read.
        """
        for number, row in enumerate(read_rows(path)):
            try:
                if self.prompt not in row and not _columns(self.prompt):
                    raise KeyError(self.prompt)
                self._prompt_of(row)
            except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
                wrong = f"has no column {error}" if isinstance(error, KeyError) else f"gives no prompt: {error}"
                raise ConfigError(
                    f"task.prompt = {self.prompt!r}: row {number} of {path} {wrong}; its columns are {', '.join(row)}"
                ) from None
            yield row


def _columns(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


@functools.lru_cache(maxsize=8)
def _split(task: Rows) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows for training, and those held out."""
    rows = list(task.read(task.path))
    if task.validation_path is not None:
        return rows, list(task.read(task.validation_path))
    if not task.held_out:
        return rows, rows
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        sides[task.is_held_out(row)].append(row)
    if not all(sides):
        raise ConfigError(
            f"task.held_out = {task.held_out} leaves {len(sides[0])} of the {len(rows)} rows of {task.path} for "
            f"training and {len(sides[1])} held out; give more rows, another share, or a task.validation_path"
        )
    return sides


@functools.lru_cache(maxsize=4)
def _order(count: int, key: str) -> list[int]:
    return random.Random(key).sample(range(count), count)
