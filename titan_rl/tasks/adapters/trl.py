"""Task made of the parts of TRL's `GRPOTrainer`: a data set, reward functions, tools, a class of environments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import PrivateAttr

from titan_rl.core.calls.imports import find_function, require
from titan_rl.core.calls.user_code import is_async, summary
from titan_rl.core.errors import ConfigError, RewardError
from titan_rl.core.settings import FilePath, FunctionName
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.policy_text import WRITTEN, text_of
from titan_rl.rollout.renderer.types import content_of
from titan_rl.rollout.rewards.reward import GroupReward
from titan_rl.rollout.rewards.rubric import Rubric, TextRubric
from titan_rl.rollout.types import Message, Rollout, RolloutGroup
from titan_rl.tasks import Row, ToolEnv
from titan_rl.tasks.adapters.shared import check_name
from titan_rl.tasks.adapters.trl_env import Instances, ToolClassEnv, tools_of_class
from titan_rl.tasks.row_files import read_rows, rows_with_places, without_invented_nulls
from titan_rl.tasks.rows import ChosenRows, RowTask, Sides
from titan_rl.types import sequence_or_none

KINDS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Files that `datasets` reads, by suffix: as TRL's users have them, with numbers in CSV, and text by lines."""


def load_dataset(dataset: str, subset: str, split: str, revision: str) -> Any:
    """Load a data set.

    Args:
        dataset: File, folder of files or of `Dataset.save_to_disk`, or id of a data set on the hub.
        subset: Subset of a data set on the hub; "" if there is none.
        split: Split in the notation of `datasets`, such as "train" or "train[:90%]". A single file has the split
            "train".
        revision: Revision of a data set on the hub; "" for the default one.

    Returns:
        A list of rows for a file of JSON, otherwise a `datasets.Dataset`, which stays on disk. Its rows are
        dictionaries, accessed by number.

    Raises:
        ConfigError: there is no such data set or split, or it cannot be read.
        MissingExtraError: `datasets` is not installed.
    """
    datasets = require("datasets", "datasets")
    path = Path(dataset)
    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            data: Any = _saved(datasets.load_from_disk(dataset), dataset, split)
        elif path.is_file():
            data = _of_file(datasets, path, split)
        else:
            data = datasets.load_dataset(dataset, subset or None, split=split, revision=revision or None)
        return data.with_transform(_without_invented_nulls) if hasattr(data, "with_transform") else data
    except ConfigError:
        raise
    except Exception as error:
        where = "" if path.exists() else f"; there is no such path in {Path.cwd()}, and it was not found on the hub"
        raise ConfigError(f"task.dataset = {dataset!r}, split {split!r}: {summary(error)}{where}") from error


def _of_file(datasets: Any, path: Path, split: str) -> Any:
    suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()
    if suffix in KINDS:
        if suffix != ".txt":
            next(rows_with_places(path))  # refuses two columns of one name, of which `datasets` renames one
        options = {"delimiter": "\t"} if suffix == ".tsv" else {}
        return datasets.load_dataset(KINDS[suffix], data_files=str(path), split=split, **options)
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)  # each row has every column, as in `datasets`
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    return [{name: row.get(name) for name in names} for part in parts for row in rows[part.from_ : part.to]]


def _without_invented_nulls(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: [without_invented_nulls(value) for value in values] for name, values in columns.items()}


def _saved(found: Any, dataset: str, split: str) -> Any:
    """Data set written by `save_to_disk`, which may have several splits."""
    if hasattr(found, "column_names") and isinstance(found.column_names, list):
        if split != "train":
            raise ConfigError(f"task.dataset = {dataset!r} was saved without splits, and split is {split!r}; set train")
        return found
    check_name("task.split", split, list(found), f"splits of {dataset}")
    return found[split]


Function = Annotated[str, FunctionName(())]

NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class TRLTask(RowTask):
    """Rows of Hugging Face `datasets`, with reward functions, tools and environments written for TRL.

    Example:

        [task]
        type = "titan_rl.tasks.adapters.trl:TRLTask"
        dataset = "trl-lib/DeepMath-103K"       # on the hub, or a file or folder here
        reward_funcs = ["rewards:is_right"]     # def is_right(completions, solution, **kwargs): return [...]

    A reward function is called once for all siblings of a group that are judged, with TRL's keyword arguments:
    `prompts`, `completions`, `completion_ids`, each column as a list, `trainer_state`, `log_extra`, `log_metric`, and
    `environments` if there are any. Prompts and completions are texts if the prompt's column has text, otherwise lists
    of messages. A completion is the whole text that the policy wrote, with its thought, as in TRL.
    """

    dataset: FilePath | None = None
    """Data set: an id on the hub, a file of rows, or a folder of them. May be left out if environments make their own
    data."""
    subset: str = ""
    """Subset of a data set on the hub."""
    split: str = "train"
    """Split in the notation of `datasets`: "train", "train[:90%]"."""
    validation_split: str = ""
    """Split of the held-out rows; by default the share held_out of split, chosen by their prompts."""
    revision: str = ""
    """Revision of the data set on the hub."""
    reward_funcs: tuple[Function, ...] = ()
    """Reward functions of TRL's trainers, sync or async."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward function; 1 by default."""
    reward_funcs_in_thread: bool = False
    """Call sync functions in threads, for those that take more than some milliseconds."""
    tools: tuple[Function, ...] = ()
    """Functions that the policy may call."""
    environment_factory: Function | Mapping[str, Function] | None = None
    """Class with `reset`, whose other public methods are tools; or several classes by name, which the column
    `environment` selects. Each rollout has its own object, in its own thread."""
    error_reward: float = 0.0
    """Reward of an answer that cannot be parsed."""

    _instances: Instances = PrivateAttr(default_factory=Instances)

    def check_settings(self) -> None:
        """Load the data, and make each environment once.

        Raises:
            ConfigError: the data cannot be loaded, has no prompts, or a function or class does not fit.
            MissingExtraError: `datasets` is not installed.
        """
        if self.dataset is None and not isinstance(self.environment_factory, str):
            raise ConfigError(
                "task.dataset is not set; name one, or a single task.environment_factory that has the data"
            )
        for factory in self._factories().values():
            try:
                instance = factory()
                if not tools_of_class(instance):
                    raise ValueError("has no public methods for tools")
                close = getattr(instance, "close", None)
                if callable(close) and not is_async(close):
                    close()
            except Exception as error:
                raise ConfigError(f"task.environment_factory: {name_of(factory)}: {error}") from error
        self.rubric()
        sample = self.train_sample(0, 0)
        self._factory_of(sample)
        ToolEnv(self.opening(sample), self.offered_tools(sample))

    def load_rows(self) -> Sides:
        if self.dataset is None:
            own_data = ChosenRows([{}])  # the environments have the data
            return own_data, own_data
        data = load_dataset(self.dataset, self.subset, self.split, self.revision)
        if self.validation_split:
            held_out = load_dataset(self.dataset, self.subset, self.validation_split, self.revision)
            sides = ChosenRows(data), ChosenRows(held_out)
        else:
            sides = self.split_rows(data, self.dataset)
        if not all(sides):
            raise ConfigError(
                f"task.dataset = {self.dataset!r} has {len(sides[0])} rows for training and {len(sides[1])} held out; "
                f"give more, another held_out than {self.held_out}, or a validation_split"
            )
        return sides

    def validation_samples(self, count: int) -> list[Row]:
        return [{} for _ in range(count)] if self.dataset is None else super().validation_samples(count)

    def env(self, sample: Row) -> MessageEnv:
        messages, tools = self.opening(sample), self.offered_tools(sample)
        factory = self._factory_of(sample)
        if factory is None:
            return ToolEnv(messages, tools)
        columns = dict(sample)
        if isinstance(self.environment_factory, Mapping):
            del columns["environment"]
        made = functools.partial(ToolClassEnv, factory, messages, sample, columns, tools, self._instances)
        return cast("MessageEnv", ThreadedEnv(made))

    @property
    def source(self) -> str:
        return self.dataset or "no data set"

    def offered_tools(self, sample: Row) -> list[Any]:
        return [_find("task.tools", name) for name in self.tools]

    def key(self, sample: Row) -> str:
        return repr(self.opening(sample))

    def rubric(self) -> Rubric:
        """Make the rubric of the reward functions, and of `get_reward` of the environments.

        Raises:
            ConfigError: there is no reward, or the number of weights differs from that of the functions.
        """
        found = [_find("task.reward_funcs", name) for name in self.reward_funcs]
        weights = self.reward_weights or (1.0,) * len(found)
        if len(weights) != len(found):
            raise ConfigError(
                f"task.reward_weights has {len(weights)} values for {len(found)} task.reward_funcs; give one for each"
            )
        own = dict.fromkeys(kind for kind in self._factories().values() if hasattr(kind, "get_reward"))
        functions = [*zip(found, weights, strict=True), *((_own_reward(kind, self._instances), 1.0) for kind in own)]
        names = _different([*map(name_of, found), *map(name_of, own)])
        if not functions:
            raise ConfigError("task.reward_funcs is not set, and no environment has a method get_reward; give one")
        named = [(name, *function) for name, function in zip(names, functions, strict=True)]
        return RewardFuncsRubric(named, self, self._instances)

    def columns(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Keyword arguments of reward functions, each a list with one value for each rollout."""
        rows = [cast("Row", rollout.sample) for rollout in rollouts]
        opening = len(self.opening(rows[0]))
        in_text = isinstance(self.prompt_of(rows[0]), str)
        environments: dict[str, Any] = {}
        if self.environment_factory is not None:
            played = [self._instances.of(rollout) for rollout in rollouts]
            environments = {"environments": [each.instance for each in played]}
        return {
            **{name: [row[name] for row in rows] for name in rows[0] if name not in NOT_COLUMNS},
            "prompts": [_prompt(rollout.messages[:opening], in_text) for rollout in rollouts],
            "completions": [self._completion(rollout.messages[opening:], in_text) for rollout in rollouts],
            "completion_ids": [completion_ids_of(rollout) for rollout in rollouts],
            **environments,
        }

    def prompt_of(self, row: Row) -> str | Sequence[Message]:
        if self.environment_factory is not None and self.prompt == "prompt" and "prompt" not in row:
            return [{"role": "user", "content": ""}]  # `reset` gives the text
        return super().prompt_of(row)

    def _completion(self, messages: Sequence[Message], in_text: bool) -> str | list[dict[str, Any]]:
        """Completion in TRL's form: the text of the last answer, or all messages.

        As in TRL, `content` is the whole text of an answer, with its thought. If the policy has tools, messages are
        parsed, and the thought of an answer is its `reasoning_content`.
        """
        if in_text:
            answers = [message for message in messages if message.get("role") == "assistant"]
            return text_of(answers[-1]) if answers else ""
        is_parsed = bool(self.tools) or self.environment_factory is not None
        return [_in_trl_form(message, is_parsed) for message in messages]

    def _factories(self) -> dict[str, Callable[[], Any]]:
        named = self.environment_factory or {}
        named = {"": named} if isinstance(named, str) else named
        return {key: _find("task.environment_factory", name) for key, name in named.items()}

    def _factory_of(self, row: Row) -> Callable[[], Any] | None:
        factories = self._factories()
        if not isinstance(self.environment_factory, Mapping):
            return factories.get("")
        name = str(row.get("environment"))
        check_name("the column environment", name, factories, "names of task.environment_factory")
        return factories[name]


RewardFunc = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Subset of transformers' `TrainerState`.

    Args:
        global_step: Number of optimizer steps of the policy that sampled the newest token of the group.
    """

    global_step: int


@dataclass(slots=True)
class _Notes:
    """Logged values of one rollout besides its rewards."""

    absent: set[str] = field(default_factory=set[str])  # functions that returned None
    logged: dict[str, float] = field(default_factory=dict[str, float])


class RewardFuncsRubric(TextRubric):
    """Rubric that judges siblings as TRL judges a batch:

        reward = sum_i weight_i * value_i

    The sum is over the functions that return a value. A function that returns None for a rollout does not count in its
    reward. If all functions return None, the rollout has no reward and no advantage. Async functions run concurrently.
    Numbers passed to `log_metric` and `log_extra` are added to the rollouts' `reward_breakdown`.

    Args:
        functions: Reward functions, each as (name, function, weight).
        task: Provides the arguments of the functions, except `trainer_state`, `log_extra` and `log_metric`.
        instances: Environments of the rollouts, which are forgotten when the rollouts have been judged.
    """

    def __init__(self, functions: Sequence[tuple[str, RewardFunc, float]], task: TRLTask, instances: Instances) -> None:
        rewards = [self._group_reward(name, fn, task.reward_funcs_in_thread) for name, fn, _ in functions]
        super().__init__(rewards, error_reward=task.error_reward)
        self._weights = {name: weight for name, _, weight in functions}
        self._task = task
        self._instances = instances
        self._notes: dict[str, _Notes] = {}  # by rollout id, while the rollout's group is judged

    async def score(
        self, group: RolloutGroup | Sequence[Rollout], begun: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else group
        try:
            await super().score(rollouts, begun)
            for rollout in rollouts:
                if rollout.reward_breakdown:
                    self._sum_up(rollout, self._notes.get(rollout.rollout_id, _Notes()))
        except RewardError:
            self._instances.forget(rollouts)
            raise
        finally:
            for rollout in rollouts:
                self._notes.pop(rollout.rollout_id, None)
        self._instances.forget(rollouts)  # not reached if judging was cancelled, since it restarts

    def _sum_up(self, rollout: Rollout, notes: _Notes) -> None:
        values = {name: value for name, value in rollout.reward_breakdown.items() if name not in notes.absent}
        rollout.reward = sum(self._weights[name] * value for name, value in values.items()) if values else None
        rollout.reward_breakdown = {**notes.logged, **values}

    def _group_reward(self, name: str, fn: RewardFunc, in_thread: bool) -> GroupReward:
        def call(rollouts: Sequence[Rollout]) -> list[float]:
            return self._noted(name, rollouts, fn(**self._arguments(rollouts)))

        async def awaited(rollouts: Sequence[Rollout]) -> list[float]:
            return self._noted(name, rollouts, await fn(**self._arguments(rollouts)))

        return GroupReward(awaited if is_async(fn) else call, name=name, in_thread=in_thread)

    def _noted(self, name: str, rollouts: Sequence[Rollout], given: Any) -> list[float]:
        """Values of a function, with 0 instead of None."""
        values = sequence_or_none(given, len(rollouts))
        if values is None:
            return given  # the rubric's error names the problem
        for rollout, value in zip(rollouts, values, strict=True):
            absent = self._of(rollout).absent
            (absent.add if value is None else absent.discard)(name)
        return [0.0 if value is None else value for value in values]

    def _arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(rollouts):
                raise ValueError(f"log_extra({column!r}, ...) got {len(values)} values for {len(rollouts)} completions")
            for rollout, value in zip(rollouts, values, strict=True):
                if isinstance(value, int | float):
                    self._of(rollout).logged[column] = float(value)

        def log_metric(name: str, value: float) -> None:
            log_extra(name, [value] * len(rollouts))

        spans = [span for rollout in rollouts for turn in rollout.turns for span in turn.completion.version_spans]
        state = TrainerState(max((span.version for span in spans), default=0))
        return {
            **self._task.columns(rollouts),
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    def _of(self, rollout: Rollout) -> _Notes:
        return self._notes.setdefault(rollout.rollout_id, _Notes())


def name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = cast("functools.partial[Any]", fn).func
    return getattr(fn, "__name__", type(fn).__name__)


def completion_ids_of(rollout: Rollout) -> list[int]:
    """All tokens after the first prompt, including results of tools.  # [num_tokens]"""
    if not rollout.turns:
        return []
    last = rollout.turns[-1]
    return [*last.prompt_token_ids, *last.completion.token_ids][len(rollout.turns[0].prompt_token_ids) :]


def _find(setting: str, name: str) -> Callable[..., Any]:
    known: dict[str, Callable[..., Any]] = {}
    return find_function(setting, name, known)


def _different(names: Sequence[str]) -> list[str]:
    """Make names distinct by numbering repeated ones.

    >>> _different(["a", "b", "a"])
    ['a', 'b', 'a_2']
    """
    counts = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True)]


def _prompt(messages: Sequence[Message], in_text: bool) -> str | list[dict[str, Any]]:
    return content_of(messages[-1]) if in_text else [dict(message) for message in messages]


def _in_trl_form(message: Message, is_parsed: bool) -> dict[str, Any]:
    """Message of a completion; with `is_parsed`, its thought is separate if it ends."""
    text, has_calls = text_of(message), bool(message.get("tool_calls"))
    if message.get("role") != "assistant" or (is_parsed and (has_calls or text.answer)):
        return {name: value for name, value in message.items() if name != WRITTEN}
    return {"role": "assistant", "content": text}


def _own_reward(kind: Any, instances: Instances) -> RewardFunc:
    """Reward function that returns the rewards of the environments of one class."""

    def get_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
        return [instances.own_reward(each) if type(each) is kind else None for each in environments]

    return get_reward
