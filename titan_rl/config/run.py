"""All settings of one run, and which of them do not fit together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from titan_rl.config.hosts import HostsConfig
from titan_rl.config.sections import (
    CheckpointConfig,
    GenerationConfig,
    RoutingConfig,
    SamplingConfig,
    StateDictConfig,
    ValidationConfig,
)
from titan_rl.config.sft import SFTConfig
from titan_rl.config.suites import ResolvedSuite, ValidationSuite
from titan_rl.config.tasks import TaskSource, is_alone
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.settings import Section
from titan_rl.sinks.settings import LoggingConfig
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+=-]{0,80}", name) or name in (".", ".."):
        raise PydanticCustomError("name", "must be letters, digits and -_.+=, 80 at most, and not . or ..")
    return name


class RunConfig(Section):
    """The settings of one run: two of its own and one table for each part.

    In TOML `tasks` are the tables `[[tasks]]`, or one table `[task]`, where `type = "module:Class"` names a `Section`
    that implements `titan_rl.rollout.task.Task` and whose fields are the other keys.

    Raises:
        pydantic.ValidationError: also when settings that are each allowed do not fit together.
    """

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the data order, the sampling and the trainer."""
    name: Annotated[str, AfterValidator(_folder_name)] = ""
    """Of the run's folder, behind the time. By default the task, and what the command line sets."""
    run_dir: str = "runs"
    """Folder in which each run makes a folder of its own."""
    pythonpath: tuple[str, ...] = Field(default=(), strict=False)
    """Folders in which the modules that settings name are found, behind the current one. Those that are needed are
    added: the current folder, and that of the TOML file or of the package that it lies in."""
    share_run_dir: bool = False
    """Other users may read the run's files, as far as the umask lets them; else they are for this user alone."""
    model: ModelConfig
    tasks: tuple[TaskSource, ...] = Field(min_length=1, strict=False)
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    training: TrainingConfig = TrainingConfig()
    correction: CorrectionConfig = CorrectionConfig()
    validation: ValidationConfig = ValidationConfig()
    generation: GenerationConfig = GenerationConfig()
    routing: RoutingConfig = RoutingConfig()
    hosts: HostsConfig = HostsConfig()
    statedict: StateDictConfig = StateDictConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    sft: SFTConfig = SFTConfig()

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        problems = list(conflicts(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def sources(self) -> list[TaskSource]:
        """The tasks of the run, and those that suites of its validation have for themselves."""
        return [source for _, source in self.tables_of_tasks()]

    def tables_of_tasks(self) -> list[tuple[str, TaskSource]]:
        """The dotted name of each task's table with the task, those of suites too."""
        trained = [("task" if is_alone(self.tasks) else f"tasks.{source.name}", source) for source in self.tasks]
        own = [(f"validation.suites.{suite.name}", suite.task) for suite in self.validation.suites]
        return [*trained, *((table, source) for table, source in own if isinstance(source, TaskSource))]

    @property
    def suites(self) -> list[ResolvedSuite]:
        """What is validated on; nothing without held-out samples."""
        common, tasks = self.validation, {source.name: source for source in self.tasks}
        if not common.num_prompts:
            return []
        said = common.suites or [ValidationSuite(name=name, task=name) for name in tasks]
        return [
            ResolvedSuite(
                suite.name,
                tasks[suite.task] if isinstance(suite.task, str) else suite.task,
                suite.num_prompts or common.num_prompts,
                suite.samples_per_prompt or common.samples_per_prompt,
                common.temperature if suite.temperature is None else suite.temperature,
                common.interval if suite.interval is None else suite.interval,
                "validation" if len(said) == 1 else f"validation/{suite.name}",
            )
            for suite in said
        ]

    def sampling_of(self, source: TaskSource) -> SamplingConfig:
        """How a task's completions are sampled."""
        return self.sampling.model_copy(update=source.sampling.model_dump(exclude_none=True))

    @property
    def seeds_requests(self) -> bool:
        """Whether training requests are sampled with seeds of their own; held-out ones always are."""
        if self.sampling.seeded is not None:
            return self.sampling.seeded
        return self.scheduling.max_staleness == 0 and not self.scheduling.oversample

    def limits_of(self, source: TaskSource) -> RolloutConfig:
        """The limits of a task's rollouts."""
        return self.rollout.model_copy(update=source.rollout.model_dump(exclude_none=True))

    def advantage_of(self, source: TaskSource) -> str:
        """The name of what makes advantages of a task's rewards."""
        return source.advantage or self.training.advantage


def conflicts(config: RunConfig) -> Iterator[str]:
    """Say which settings exclude each other: the fields, their values and the fix, one line each."""
    context = config.model.max_context
    given = {f"tasks.{source.name}.sampling": source.sampling.max_tokens or 0 for source in config.tasks}
    for table, max_tokens in {"sampling": config.sampling.max_tokens, **given}.items():
        if max_tokens >= context:
            yield (
                f"{table}.max_tokens = {max_tokens} leaves no room for a prompt in model.max_context = {context}; "
                "lower the one or raise the other"
            )
    for name, count in Counter(source.name for source in config.tasks).items():
        if count > 1:
            yield f"tasks: {count} of them have name = {name!r}; give each a name of its own"
    if config.training.row_tokens < context:
        # Dropping what does not fit would train on short answers more than on long ones.
        yield (
            f"training.row_tokens = {config.training.row_tokens} is less than model.max_context = {context}, so the "
            f"longest samples would fit in no row; set it to at least {context}"
        )
    if config.training.context_parallel > config.training.row_tokens:
        yield (
            f"training.context_parallel = {config.training.context_parallel} is more than training.row_tokens = "
            f"{config.training.row_tokens}: there would be ranks without a token; lower the one or raise the other"
        )
    if config.training.warmup_steps > config.training.steps:
        yield (
            f"training.warmup_steps = {config.training.warmup_steps} is more than training.steps = "
            f"{config.training.steps}; the learning rate would never reach training.lr"
        )
    correction = config.correction
    if correction.proximal == "behaviour" and (correction.weight, correction.mask, correction.veto) != (
        "none",
        "none",
        None,
    ):
        yield (
            'correction.proximal = "behaviour" makes every importance ratio 1, so correction.weight, mask and veto do '
            'nothing; set proximal = "recomputed" or "interpolated"'
        )
    generation = config.generation
    if not generation.reset_prefix_cache and generation.pull_mode == "drain":
        yield (
            'generation.reset_prefix_cache = false with generation.pull_mode = "drain": no request mixes weights, '
            "but later ones would reuse KV of the old; set reset_prefix_cache = true"
        )
    if not generation.reset_prefix_cache and generation.running_kv == "recompute":
        yield (
            'generation.reset_prefix_cache = false with generation.running_kv = "recompute": running requests would be '
            "computed anew from KV of the old weights; set reset_prefix_cache = true"
        )
    if not generation.reset_prefix_cache and config.scheduling.max_staleness == 0:
        yield (
            "generation.reset_prefix_cache = false with scheduling.max_staleness = 0: prompts would reuse KV of older "
            "weights, which is not on-policy; set reset_prefix_cache = true, or max_staleness to at least 1"
        )
    guesses = generation.speculative
    if guesses.is_on and generation.return_routed_experts:
        yield (
            f'generation.speculative.method = "{guesses.method}" with generation.return_routed_experts = true: the '
            "experts of tokens that were guessed and refused cannot be told from the others'; set either to what it is "
            "by default"
        )
    if guesses.has_weights and config.scheduling.on_batch_ready == "sleep":
        yield (
            f'generation.speculative.method = "{guesses.method}" with scheduling.on_batch_ready = "sleep": an engine '
            "that sleeps gives up the weights that guess, and no version brings them back; set method to "
            '"ngram" or on_batch_ready to "abort"'
        )
    if generation.pull_mode == "drain" and config.scheduling.on_batch_ready != "continue":
        yield (
            f'generation.pull_mode = "drain" with scheduling.on_batch_ready = "{config.scheduling.on_batch_ready}": '
            'interrupted requests cannot finish; use pull_mode = "hot_swap" or on_batch_ready = "continue"'
        )
    if config.routing.move_below is not None and config.seeds_requests:
        yield (
            f"routing.move_below = {config.routing.move_below:g} with requests that are seeded, of which none moves: "
            "when is a matter of time, and a seed draws another answer from there on; leave move_below out, or set "
            "sampling.seeded = false"
        )
    if generation.stall_timeout_s <= config.statedict.pull_timeout_s:
        yield (
            f"generation.stall_timeout_s = {generation.stall_timeout_s:g} is not more than statedict.pull_timeout_s = "
            f"{config.statedict.pull_timeout_s:g}: a generator that loads weights generates nothing meanwhile, and "
            "would be taken to hang; raise the one or lower the other"
        )
    least, number, most = generation.least_generators, generation.num_generators, generation.most_generators
    if least > number or (most is not None and most < number):
        yield (
            f"generation.num_generators = {number} is not between least_generators = {least} and most_generators = "
            f"{most or 'any number'}; the run begins with num_generators"
        )
    yield from config.hosts.too_few()
    yield from _conflicts_of_suites(config)


def _conflicts_of_suites(config: RunConfig) -> Iterator[str]:
    validation, tasks = config.validation, [source.name for source in config.tasks]
    for name, count in Counter(suite.name for suite in validation.suites).items():
        if count > 1:
            yield f"validation.suites: {count} of them have name = {name!r}; give each a name of its own"
    for suite in validation.suites:
        if isinstance(suite.task, str) and suite.task not in tasks:
            yield (
                f"validation.suites.{suite.name}.task = {suite.task!r} is none of the run's tasks, {', '.join(tasks)}; "
                'name one of them, or give the suite type = "module:Class"'
            )
            return
        if isinstance(suite.task, TaskSource) and suite.task.name in tasks:
            yield f"validation.suites.{suite.name} has a task of its own, and one of the run's has that name; rename it"
    for table, temperature, samples in [
        ("validation", validation.temperature, validation.samples_per_prompt),
        *((f"validation.suites.{suite.name}", suite.temperature, suite.samples_per_prompt) for suite in config.suites),
    ]:
        if temperature == 0 and samples > 1:
            yield (
                f"{table}.temperature = 0 is greedy, so all {table}.samples_per_prompt = {samples} samples would be "
                "the same; set samples_per_prompt = 1"
            )
            return
