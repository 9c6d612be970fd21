"""Tables of a run's settings, one class each, checked before any process starts. Checking changes no value.

The docstring under a field is its description in `titan-rl settings` and in the reference.
"""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from titan_rl.config.hosts import HostsConfig
from titan_rl.config.lora_experiments import AdapterRun
from titan_rl.config.tasks import ResolvedSuite, TaskSource, ValidationSuite, is_alone
from titan_rl.core.settings import FilePath, FunctionName, PathText, Section, TakesEffect, matching, one_of
from titan_rl.generation.registry import BY_NAME as ENGINES
from titan_rl.generation.router.strategies import BY_NAME as STRATEGIES
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.choices import Level
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.weights.transports.registry import BY_NAME as TRANSPORTS

MOST_GUESSED = 128
"""Most tokens that vLLM checks at a time: MAX_SPEC_LEN of its rejection sampler."""

WITH_MODEL = ("draft_model", "eagle", "eagle3")


_LOOKS_UP = TakesEffect("generation.speculative.method", one_of=("ngram",))


class SpeculativeConfig(Section):
    """Speculative decoding: an engine drafts several tokens at a time and verifies them with the policy, so samples
    still follow the policy's distribution. The names are those of vLLM's speculative_config."""

    method: Literal["none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"] = "none"
    """Source of the draft. ngram finds the last tokens earlier in the same text, suffix also in other answers;
    draft_model is a separate small model; eagle, eagle3 and mtp are heads on the policy, which are not trained."""
    num_speculative_tokens: PositiveInt = Field(default=3, le=MOST_GUESSED)
    """Maximum number of tokens drafted at a time; vLLM verifies at most 128."""
    model: FilePath | None = None
    """Folder of the draft model or of the heads, on every host. For draft_model, eagle and eagle3."""
    prompt_lookup: Annotated[tuple[PositiveInt, PositiveInt], _LOOKS_UP] = Field(default=(2, 4), strict=False)
    """[least, most]: numbers of tokens that ngram searches for, starting with the most."""

    @property
    def is_on(self) -> bool:
        return self.method != "none"

    @property
    def has_weights(self) -> bool:
        """Whether the draft comes from weights, which an engine loads once."""
        return self.method not in ("none", "ngram", "suffix")

    def options(self) -> dict[str, Any] | None:
        """Speculative-decoding options in vLLM's format; None if it is off."""
        if not self.is_on:
            return None
        options: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens}
        if self.method == "ngram":
            options["prompt_lookup_min"], options["prompt_lookup_max"] = self.prompt_lookup
        if self.method in WITH_MODEL:
            options["model"] = self.model
        return options

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.method in WITH_MODEL and self.model is None:
            raise ValueError(f'method = "{self.method}" needs model, the folder of the draft model or of the heads')
        if self.method not in WITH_MODEL and self.model is not None:
            raise ValueError(
                f'model is for method = "{WITH_MODEL[0]}", "{WITH_MODEL[1]}" or "{WITH_MODEL[2]}", and method is '
                f'"{self.method}"; leave it out'
            )
        usual = type(self).model_fields["num_speculative_tokens"].default
        if not self.is_on and self.num_speculative_tokens != usual:
            raise ValueError(
                f'num_speculative_tokens = {self.num_speculative_tokens} with method = "none": there is no speculative '
                "decoding; set method, or leave it out"
            )
        if self.prompt_lookup[0] > self.prompt_lookup[1]:
            raise ValueError(f"prompt_lookup = {list(self.prompt_lookup)}: the least number of tokens must come first")
        return self


STREAM_INTERVAL = 32
"""Default of `generation.stream_interval` in a run."""


class GenerationConfig(Section):
    """The generator actors and their engines."""

    engine: Annotated[str, FunctionName(tuple(ENGINES), ("spec",))] = "vllm"
    """Engine that generates completions in each generator."""
    num_generators: PositiveInt = 2
    """Number of generator actors, each with one engine."""
    num_generators_range: tuple[PositiveInt, PositiveInt] | None = Field(default=None, strict=False)
    """[least, most] number of generators, such as [2, 8]. While fewer are in service the run waits, at most
    hosts.wait_s; hosts that join do not add more. By default the least is 1, and each host that joins adds as many as
    the others have."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share the model of one generator; must divide the number of the model's attention heads."""
    max_running: Annotated[PositiveInt | Literal["auto"], one_of('must be a number above 0 or "auto"')] | None = None
    """Maximum number of requests that one engine runs at a time. By default its share of the rollouts in all slots of
    the scheduler, or fewer if kv_cache_gib does not hold that many contexts of half the maximum length. With "auto" at
    most that share, and in each step as many as the KV cache is expected to hold, estimated from the lengths of
    requests."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory of one engine's KV cache, at least enough for one full context. By default 1 on a CPU and on a GPU shared
    with a trainer; otherwise what weights and work space leave of gpu_share, or of 0.9 of the GPU, divided evenly
    among the engines on it."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for one process of an engine, which does not start if less is free. By default the sum of
    weights, KV cache and work space. Experimental."""
    return_routed_experts: bool = False
    """Record the experts of each token in training completions. For mixtures of experts, on GPUs."""
    pull_mode: Literal["hot_swap", "recompute", "drain"] = "hot_swap"
    """Loading of new weights. hot_swap: between two tokens of running requests, which keep their KV cache. recompute:
    at the same moment, and running requests recompute their KV cache. drain: once a generator's requests have
    finished."""
    adapter_swap: Annotated[Literal["hot", "pinned"], TakesEffect("training.adapter.rank", none_of=(0,))] = "hot"
    """Loading of a new version of [training.adapter]. hot: as set by pull_mode, replacing the previous version. pinned:
    running requests finish on the version they started with, so that each has one policy; an engine holds
    scheduling.max_staleness + 2 versions. Groups must be trained in data order."""
    prefix_cache: Annotated[bool | Literal["keep"], one_of('must be true, false or "keep"')] = True
    """Reuse the KV cache of requests that begin with the same tokens, until new weights are loaded; with "keep" also
    after that. On a CPU, vLLM has no such cache for models with recurrent layers."""
    stream_interval: PositiveInt | None = None
    """Engine steps between two messages of new tokens to the router, which continues from these tokens if a generator
    dies. By default 32, and 1 where `titan-rl serve` streams to clients."""
    stall_timeout_s: PositiveFloat = 300.0
    """Seconds after which a generator with requests is considered hung, and is replaced, if it sends neither tokens nor
    another sign of progress. Pauses do not count. A rollout worker whose event loop is blocked for so long is replaced,
    too: pauses and pulls wait for it until then."""
    start_timeout_s: PositiveFloat | None = None
    """Time limit for the start of an engine, a trainer or a rollout worker. By default 180 s plus one second per 100 MB
    of weights in the model's folder: 780 s for 30B in bfloat16."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Options of vLLM, by the names of its EngineArgs: {max_num_batched_tokens = 16384}. Options that other settings
    cover, or that titan_rl sets itself, are rejected."""

    @property
    def least_generators(self) -> int:
        return self.num_generators_range[0] if self.num_generators_range else 1

    @property
    def most_generators(self) -> int | None:
        return self.num_generators_range[1] if self.num_generators_range else None

    @model_validator(mode="after")
    def _begins_within_the_range(self) -> Self:
        if self.num_generators_range is not None:
            least, most = self.num_generators_range
            if not least <= self.num_generators <= most:
                raise ValueError(
                    f"num_generators = {self.num_generators} is not in num_generators_range = [{least}, {most}]; the "
                    "run begins with num_generators"
                )
        return self


class RoutingConfig(Section):
    """Settings of the router, which assigns requests to replicas."""

    strategy: Annotated[str, FunctionName(tuple(STRATEGIES), ("max_sessions",))] = "sticky"
    """sticky keeps a rollout on the replica that holds its KV cache; group_affinity also starts its siblings there."""
    move_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Move requests to a generator that has at most this fraction of the requests of the fullest one; their tokens are
    computed again there. By default requests do not move. Cannot be combined with seeded requests."""


class SamplingConfig(Section):
    """Sampling of training completions. The loss accounts for temperature only, so there are no other parameters."""

    max_tokens: PositiveInt = 64
    """Maximum number of tokens of one completion."""
    temperature: PositiveFloat = 1.0
    """Temperature of the distribution that is sampled from and trained on."""
    seeded: bool | None = None
    """Give each request its own seed, so that the run is reproducible; on GPUs vLLM then launches one kernel per
    request and step. By default true only if scheduling.max_staleness = 0 without oversample; other runs are not
    reproducible in any case."""


_TCP = TakesEffect("statedict.transport", none_of=("shared_memory", "rdma", "cuda_ipc"), fix='set that to "tcp"')


_NOT_SHARED_MEMORY = TakesEffect(
    "transport_may_be_tcp",
    one_of=(True,),
    without="on one machine",
    fix='set hosts.addresses or hosts.provider, or statedict.transport to "tcp",',
)


class StateDictConfig(Section):
    """Transport of published versions to the generators, and their verification."""

    transport: Annotated[str, FunctionName(tuple(TRANSPORTS), ("spec",))] = "auto"
    """auto is tcp on several hosts, cuda_ipc if vLLM and the trainer have separate GPUs on one host with enough free
    memory, and otherwise shared_memory; --dry-run shows which, and why. With tcp each host receives a version once,
    from the previous host, mostly as a delta. With rdma each generator reads the trainer's memory over the network.
    With cuda_ipc all are on GPUs of one host, and read from the trainer's GPU memory, which then holds two more copies.
    Experimental between hosts, and with rdma or cuda_ipc."""
    anchor_interval: Annotated[PositiveInt, _TCP, _NOT_SHARED_MEMORY] = 16
    """With tcp, interval of versions that are sent whole; the others are sent as deltas, also to a host that missed
    some. 1 sends every version whole."""
    num_probes: NonNegativeInt | None = None
    """Probe sequences whose logprobs the trainer publishes with each version, for verification; 0 turns it off. By
    default 32, and 4 in float32 on CPUs."""
    tolerance: Annotated[PositiveFloat | None, TakesEffect("statedict.num_probes", none_of=(0,))] = None
    """Maximum mean logprob difference of a probe; by default 0.1 in bfloat16, 0.01 in float32 on GPUs, whose
    kernels multiply in TF32, and 1e-5 in float32 on CPUs."""
    pull_timeout_s: PositiveFloat = 120.0
    """Time limit for a generator to load a version."""


_VALIDATED = TakesEffect("validation.num_prompts", none_of=(0,), fix="set that above 0")


class ValidationConfig(Section):
    """A fixed held-out set, run before, during and after training."""

    num_prompts: NonNegativeInt = 64
    """Number of held-out samples; 0 turns validation off."""
    samples_per_prompt: Annotated[PositiveInt, _VALIDATED] = 4
    """Rollouts of each sample; its reward is their mean."""
    temperature: Annotated[NonNegativeFloat, _VALIDATED] = 1.0
    """Sampling temperature; 0 is greedy."""
    interval: Annotated[NonNegativeInt, _VALIDATED] = 0
    """Steps between validations; 0 validates only before and after training."""
    beside_training: Annotated[bool | None, _VALIDATED] = None
    """Continue training while validations between steps run, with the same results. One generator keeps the validated
    version until the validation is done, while the others continue; with generation.adapter_swap = "pinned" all of them
    keep that version. By default true only with "pinned"; with false, training waits."""
    suites: Annotated[tuple[ValidationSuite, ...], _VALIDATED] = Field(default=(), strict=False)
    """Validation suites; by default one for each task of the run."""

    @property
    def is_repeated_in_full(self) -> bool:
        """Whether all suites run between steps."""
        return self.num_prompts > 0 and all(suite.interval or self.interval for suite in self.suites or [self])

    @property
    def is_repeated(self) -> bool:
        """Whether a suite runs between steps."""
        own = [suite.interval for suite in self.suites] or [None]
        return self.num_prompts > 0 and any(self.interval if each is None else each for each in own)


class CheckpointConfig(Section):
    """Content and interval of checkpoints."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves by time only, and at the end."""
    interval_s: NonNegativeFloat = 600.0
    """Seconds between checkpoints, at least 9 times the duration of the last one; 0 saves by steps only."""
    keep: Annotated[PositiveInt | Literal["best"], one_of('must be a number above 0 or "best"')] = 2
    """Number of checkpoints to keep; the oldest is deleted first. "best" keeps the newest one and the one with the
    highest held-out reward (with `titan-rl sft`, the lowest held-out loss), and also saves after a validation that is
    the best so far."""
    allow_changed_data: bool = False
    """Let a run be resumed although a task's data changed since its checkpoint. By default that is an error."""

    @property
    def num_newest(self) -> int:
        """Number of checkpoints that are kept because they are the newest."""
        return 1 if self.keep == "best" else self.keep


class TinyModelConfig(Section):
    """Tiny model that `titan-rl sft` creates if `sft.start` is not set."""

    level: Level = "word"
    """Vocabulary. byte: one token for each byte. word: also one for each word of the demonstrations, and for frequent
    phrases."""
    parameters: PositiveInt = 1_000_000
    """Approximate number of parameters."""


class SFTConfig(Section):
    """Supervised fine-tuning on demonstrations, which creates the model at `model.path`. The optimizer, rows and
    parallelism are those of [training]."""

    start: PathText = ""
    """Hugging Face folder of the model to fine-tune. By default a tiny model is created for the demonstrations."""
    tiny_model: TinyModelConfig = TinyModelConfig()
    """Tiny model that is created if `start` is not set."""
    out: PathText = ""
    """Folder in which the fine-tuned model is saved. By default model.path."""
    data: PathText = ""
    """Source of the demonstrations: a file of chats, or the folder of a run, whose best rollouts are used. By default
    the task's own demonstrations."""
    top_k: Annotated[PositiveInt, TakesEffect("sft.data", none_of=("",), fix="set that to the folder of a run")] = 1
    """Rollouts used of each group of a run, those with the highest rewards."""
    min_reward: float | None = None
    """Least reward of the rollouts used of a run. By default there is no minimum."""
    demonstrations: PositiveInt = 4096
    """Maximum number of demonstrations to use."""
    held_out: NonNegativeInt = 64
    """Demonstrations held out to measure the loss; at most a tenth of all."""
    steps: PositiveInt | None = None
    """Optimizer steps. By default the number of steps in the epochs."""
    epochs: Annotated[PositiveInt, TakesEffect("sft.steps", one_of=(None,))] = 1
    """Passes over the demonstrations, if `steps` is not set."""
    batch_size: Annotated[
        PositiveInt, TakesEffect("sft.batch_tokens", one_of=(None,), fix="leave sft.batch_tokens out")
    ] = 32
    """Demonstrations in one optimizer step."""
    batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one optimizer step; replaces `batch_size`."""
    shuffle: bool = True
    """Shuffle the demonstrations in each epoch. Otherwise they keep the order of the source."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate. The default is for tiny models."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step relative to `lr`, to which it falls as a cosine; 1 keeps it constant."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of the optimizer."""
    interval: Annotated[NonNegativeInt, TakesEffect("sft.held_out", none_of=(0,), fix="set that above 0")] = 50
    """Steps between measurements of the held-out loss; 0 measures only before and after training."""

    @model_validator(mode="after")
    def _min_reward_needs_a_run(self) -> Self:
        if not self.data and self.min_reward is not None:
            raise ValueError(
                f"min_reward = {self.min_reward:g} selects rollouts of a run; set data to its folder, or leave it out"
            )
        return self


FOLDER_NAME = matching(r"(?!\.{1,2}$)[\w.+=-]{0,80}", "must be letters, digits and -_.+=, 80 at most, and not . or ..")


class RunTables(Section):
    """All tables of a run, with the values that follow from several of them. `RunConfig` checks that they fit
    together."""

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
    tasks: tuple[TaskSource, ...] = Field(strict=False)
    adapters: tuple[AdapterRun, ...] = Field(default=(), strict=False)
    """Experiments that share the generators and the trainer, each with its own adapter."""
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
        """Whether each training request has its own seed. Validation requests always have one."""
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

    @property
    def experiments(self) -> dict[str, Self]:
        """Settings of each adapter, in the form of a run that trains it alone, by name; empty without `adapters`.

        Raises:
            pydantic.ValidationError: A setting of an adapter is wrong.
        """
        return {adapter.name: self._experiment(adapter) for adapter in self.adapters}

    def _experiment(self, adapter: AdapterRun) -> Self:
        # Each experiment has its own task objects, so that opening and closing them does not affect the others.
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
