"""`RunConfig`: all settings of one run."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from titan_rl.config import conflicts
from titan_rl.config.adapters import (
    AdapterRun,
    conflicts_of_adapters,
    conflicts_of_names,
    conflicts_of_trainings,
)
from titan_rl.config.conflicts import of_effects
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.sections import (
    CheckpointConfig,
    GenerationConfig,
    RoutingConfig,
    SamplingConfig,
    SFTConfig,
    StateDictConfig,
    ValidationConfig,
)
from titan_rl.config.tasks import ResolvedSuite, TaskSource, ValidationSuite, is_alone
from titan_rl.core.settings import PathText, Section, matching
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.task import TeachingTask
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig

FOLDER_NAME = matching(r"(?!\.{1,2}$)[\w.+=-]{0,80}", "must be letters, digits and -_.+=, 80 at most, and not . or ..")


class RunConfig(Section):
    """Settings of one run.

    In TOML `tasks` are the tables `[[tasks]]`, or one table `[task]`, where `type = "module:Class"` names a `Section`
    that implements `titan_rl.rollout.task.Task` and whose fields are the other keys.

    Raises:
        pydantic.ValidationError: also if settings conflict.
    """

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seeds the data order, sampling and the trainer."""
    name: Annotated[str, FOLDER_NAME] = ""
    """Name of the run's folder, after the time. By default the task, and the settings given on the command line."""
    run_dir: PathText = "runs"
    """Folder that contains the folders of the runs."""
    pythonpath: tuple[PathText, ...] = Field(default=(), strict=False)
    """Folders in which modules named in settings are looked up, after the current folder. Needed folders are added: the
    current one, and that of the TOML file or of the package that contains it."""
    share_run_dir: bool = False
    """Let other users read the run's files, as the umask allows. Otherwise only this user may."""
    model: ModelConfig
    tasks: tuple[TaskSource, ...] = Field(min_length=1, strict=False)
    adapters: tuple[AdapterRun, ...] = Field(default=(), strict=False)
    """Experiments that share the generators and the trainer, each with an adapter of its own."""
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
        if problems := list(self._conflicts_of_adapters() if self.adapters else self._conflicts()):
            raise ValueError("\n".join(dict.fromkeys(problems)))  # several adapters may have the same problem
        return self

    def _conflicts_of_adapters(self) -> Iterator[str]:
        """Conflicts between several adapters, and the conflicts of each adapter as if it were trained alone."""
        if problems := [problem for adapter in self.adapters for problem in adapter.problems(self.training)]:
            yield from problems
            return
        own = [
            *conflicts_of_names(self.adapters, [source.name for source in self.tasks]),
            *conflicts_of_trainings(self.adapters, self.training),
            *conflicts_of_adapters(self.generation, self.scheduling, self.validation, self.rollout, self.hosts),
        ]
        yield from own
        if not own:
            found = {name: list(experiment._conflicts()) for name, experiment in self.experiments.items()}
            for name, problems in found.items():
                for problem in problems:
                    is_common = len(found) > 1 and all(problem in each for each in found.values())
                    yield problem if is_common else f"adapters.{name}: {problem}"

    @property
    def experiments(self) -> dict[str, RunConfig]:
        """Settings of each adapter, in the form of a run that trains it alone, by name; empty without `adapters`.

        Raises:
            pydantic.ValidationError: A setting of an adapter is wrong.
        """
        return {adapter.name: self._experiment(adapter) for adapter in self.adapters}

    def _experiment(self, adapter: AdapterRun) -> RunConfig:
        # Each experiment has task objects of its own, so that opening and closing them does not affect the others.
        tasks = tuple(
            source.model_copy(update={"task": copy(source.task)})
            for source in self.tasks
            if source.name in adapter.tasks
        )
        validation: dict[str, Any] = {}
        if suites := self.validation.suites:
            own = [suite for suite in suites if not isinstance(suite.task, str) or suite.task in adapter.tasks]
            validation["suites"] = tuple(own)
        if self.validation.num_prompts:  # otherwise the setting would have no effect
            validation["beside_training"] = False
        return self.model_copy(
            update={
                "adapters": (),
                "name": adapter.name,
                "tasks": tasks,
                "training": adapter.settings(self.training),
                "validation": self.validation.model_copy(update=validation),
            }
        )

    def _conflicts(self) -> Iterator[str]:
        generation, scheduling = self.generation, self.scheduling
        yield from conflicts.of_lengths(self.model, self.sampling, self.tasks)
        yield from conflicts.of_tasks(self.tasks)
        yield from conflicts.of_training(self.model, self.training, self.correction)
        yield from conflicts.of_distillation(
            self.training,
            {source.name: self.teacher_of(source) for source in self.tasks},
            {source.name: self.sampling_of(source).temperature for source in self.tasks},
            {source.name: isinstance(source.task, TeachingTask) for source in self.tasks},
            [source.name for source in self.tasks if source.teacher is not None],
        )
        advantages = {source.name: self.advantage_of(source) for source in self.tasks}
        yield from conflicts.of_group_size(self.rollout.group_size, advantages)
        yield from conflicts.of_critic(self.training, advantages)
        yield from conflicts.of_kept_cache(generation, scheduling)
        yield from conflicts.of_guessing(generation, scheduling)
        yield from conflicts.of_adapter(self.training, generation, scheduling)
        yield from conflicts.of_interruptions(
            generation, scheduling, self.statedict, self.routing, are_seeded=self.seeds_requests
        )
        yield from self.hosts.too_few()
        yield from of_effects(self)
        yield from conflicts.of_suites(self.validation, self.tasks)
        yield from conflicts.of_background_validation(self.validation, generation, scheduling)

    @property
    def sources(self) -> list[TaskSource]:
        """Tasks of the run, including those that occur only in validation suites."""
        return [source for _, source in self.tables_of_tasks()]

    def tables_of_tasks(self) -> list[tuple[str, TaskSource]]:
        """List (dotted name of the table, task) for all tasks, including those of validation suites."""
        trained = [("task" if is_alone(self.tasks) else f"tasks.{source.name}", source) for source in self.tasks]
        own = [(f"validation.suites.{suite.name}", suite.task) for suite in self.validation.suites]
        return [*trained, *((table, source) for table, source in own if isinstance(source, TaskSource))]

    @property
    def validates_beside_training(self) -> bool:
        """Whether training continues while validations between its steps run."""
        if self.validation.beside_training is not None or self.adapters:
            return bool(self.validation.beside_training)
        continues = self.scheduling.on_batch_ready == "continue"
        return self.generation.adapter_swap == "pinned" and continues and self.validation.is_repeated

    @property
    def suites(self) -> list[ResolvedSuite]:
        """Validation suites of the run; empty if there are no held-out samples."""
        common, tasks = self.validation, {source.name: source for source in self.tasks}
        if not common.num_prompts:
            return []
        suites = common.suites or [ValidationSuite(name=name, task=name) for name in tasks]
        return [
            ResolvedSuite(
                suite.name,
                tasks[suite.task] if isinstance(suite.task, str) else suite.task,
                suite.num_prompts or common.num_prompts,
                suite.samples_per_prompt or common.samples_per_prompt,
                common.temperature if suite.temperature is None else suite.temperature,
                common.interval if suite.interval is None else suite.interval,
                "validation" if len(suites) == 1 else f"validation/{suite.name}",
            )
            for suite in suites
        ]

    def sampling_of(self, source: TaskSource) -> SamplingConfig:
        """Return the sampling parameters of a task's completions."""
        return self.sampling.model_copy(update=source.sampling.model_dump(exclude_none=True))

    @property
    def transport_may_be_tcp(self) -> bool:
        """Whether the transport of weights may be tcp: "auto" chooses it only between machines."""
        return self.statedict.transport != "auto" or self.hosts.elsewhere

    @property
    def seeds_requests(self) -> bool:
        """Whether training requests have seeds of their own. Validation requests always have."""
        if self.sampling.seeded is not None:
            return self.sampling.seeded
        return self.scheduling.max_staleness == 0 and not self.scheduling.oversample

    def limits_of(self, source: TaskSource) -> RolloutConfig:
        """Return the limits of a task's rollouts."""
        return self.rollout.model_copy(update=source.rollout.model_dump(exclude_none=True))

    def teacher_of(self, source: TaskSource) -> str:
        """Return the teacher of a task's rollouts; "" for none."""
        given = self.training.teacher if source.teacher is None else source.teacher
        return given if self.training.distill_coef else ""

    def advantage_of(self, source: TaskSource) -> str:
        """Return the name of a task's advantage function."""
        return source.advantage or self.training.advantage
