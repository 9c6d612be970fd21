"""Conflicts between settings: combinations that exclude each other, and settings that are given but have no effect.

Each conflict is one line that names the fields, their values and the fix. A rule between settings of one table is a
validator of its class, and a setting that has an effect only with some values of another one has the annotation
`TakesEffect`. Any other rule between tables is one of `RULES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar, cast

from titan_rl.config.sections import RunTables, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.settings import Section, TakesEffect, with_value
from titan_rl.rollout.task import TeachingTask

MAX_ADAPTER_RANK = 512

OF_SIBLINGS = ("standardized", "group_mean", "leave_one_out")
"""Advantages of the library that compare the siblings of a group."""

COMPARING = (*OF_SIBLINGS, "batch_mean", "role_baseline")
"""Advantages of the library that compare a reward with other rewards."""


def conflicts(run: RunTables) -> Iterator[str]:
    """Iterate over the conflicts between the settings of a run. With several adapters, these are the conflicts between
    them, or otherwise those of each adapter as if it were trained alone."""
    if not run.adapters:
        for rule in RULES:
            yield from rule(run)
        return
    if problems := [problem for adapter in run.adapters for problem in adapter.problems(run.training)]:
        yield from problems
        return
    if problems := [*adapter_name_conflicts(run), *adapter_training_conflicts(run), *shared_setting_conflicts(run)]:
        yield from problems
        return
    found = {name: list(conflicts(experiment)) for name, experiment in run.experiments.items()}
    for name, problems in found.items():
        for problem in problems:
            is_common = len(found) > 1 and all(problem in each for each in found.values())
            yield problem if is_common else f"adapters.{name}: {problem}"


def length_conflicts(run: RunTables) -> Iterator[str]:
    context = run.model.max_context
    given = {f"tasks.{source.name}.sampling": source.sampling.max_tokens or 0 for source in run.tasks}
    for table, max_tokens in {"sampling": run.sampling.max_tokens, **given}.items():
        if max_tokens >= context:
            yield (
                f"{table}.max_tokens = {max_tokens} leaves no room for a prompt in model.max_context = {context}; "
                f"lower {table}.max_tokens or raise model.max_context"
            )


def task_name_conflicts(run: RunTables) -> Iterator[str]:
    if not run.tasks and not run.sft.data:
        yield "tasks has no task; give one, or set sft.data for titan-rl sft"
    for name, count in Counter(source.name for source in run.tasks).items():
        if count > 1:
            yield f"{count} tasks have name = {name!r}; give each a different name"


def training_conflicts(run: RunTables) -> Iterator[str]:
    training, context = run.training, run.model.max_context
    if training.row_tokens < context:
        # If samples that do not fit were dropped, short answers would be trained more than long ones.
        yield (
            f"training.row_tokens = {training.row_tokens} is less than model.max_context = {context}, so the "
            f"longest samples would fit in no row; set it to at least {context}"
        )
    if training.context_parallel > training.row_tokens:
        yield (
            f"training.context_parallel = {training.context_parallel} is more than training.row_tokens = "
            f"{training.row_tokens}: some ranks would have no tokens; lower context_parallel or raise row_tokens"
        )
    if "parameters" in training.offload and training.num_ranks == 1:
        yield (
            'training.offload = ["parameters"] has no effect with one trainer process; set training.data_parallel to '
            'the number of GPUs, or leave "parameters" out'
        )
    if training.warmup_steps > training.steps:
        yield (
            f"training.warmup_steps = {training.warmup_steps} is more than training.steps = "
            f"{training.steps}; the learning rate would never reach training.lr; lower it"
        )
    correction = run.correction
    corrected = (correction.weight, correction.mask, correction.veto) != ("none", "none", None)
    if correction.proximal == "behaviour" and corrected:
        yield (
            'correction.proximal = "behaviour" makes every importance ratio 1, so correction.weight, mask and veto '
            'have no effect; set proximal = "recomputed" or "interpolated"'
        )


def distillation_conflicts(run: RunTables) -> Iterator[str]:
    weight = run.training.distill_coef
    if weight and not any(map(run.teacher_of, run.tasks)):
        yield (
            f"training.distill_coef = {weight:g} without a teacher; set training.teacher to a folder, a "
            'URL or "self", or set distill_coef = 0'
        )
    for source in run.tasks:
        name, teacher, temperature = source.name, run.teacher_of(source), run.sampling_of(source).temperature
        if source.teacher is not None and not weight:
            yield (
                f"tasks.{name}.teacher has no effect with training.distill_coef = 0; set that to the weight of "
                "distillation, or leave the teacher out"
            )
        if teacher and temperature != 1:
            yield (
                f"the temperature of task {name!r} is {temperature:g}, and its teacher {teacher!r} scores at "
                "temperature 1; set sampling.temperature = 1"
            )
        if teacher == "self" and not isinstance(source.task, TeachingTask):
            yield (
                f'the teacher of task {name!r} is "self", and the task has no method teacher_messages(rollout), which '
                "extends the prompt that the policy sees; add it, or name another teacher"
            )


def advantage_conflicts(run: RunTables) -> Iterator[str]:
    for source in run.tasks:
        name, advantage = source.name, run.advantage_of(source)
        if run.rollout.group_size == 1 and advantage in OF_SIBLINGS:
            yield (
                f'rollout.group_size = 1 with the advantage "{advantage}" of task {name!r}, which compares '
                'siblings; set group_size to at least 2, or training.algorithm to "ppo" or "reinforce"'
            )
        if (critic := run.training.critic) != "none" and advantage in COMPARING:
            yield (
                f'training.critic = "{critic}" computes advantages from rewards, and the advantage of task '
                f'{name!r}, "{advantage}", has already compared them; set training.algorithm = "ppo", or '
                'training.advantage = "reward"'
            )


def kept_cache_conflicts(run: RunTables) -> Iterator[str]:
    """Check the settings that keep the KV cache of older weights."""
    generation = run.generation
    if generation.prefix_cache != "keep":
        return
    if generation.pull_mode == "drain":
        yield (
            'generation.prefix_cache = "keep" with generation.pull_mode = "drain": no request mixes weights, but later '
            "requests would reuse KV of old weights; set prefix_cache = true"
        )
    if generation.pull_mode == "recompute":
        yield (
            'generation.prefix_cache = "keep" with generation.pull_mode = "recompute": running requests would be '
            "recomputed from KV of the old weights; set prefix_cache = true"
        )
    if run.scheduling.max_staleness == 0:
        yield (
            'generation.prefix_cache = "keep" with scheduling.max_staleness = 0: prompts would reuse KV of older '
            "weights, which is not on-policy; set prefix_cache = true, or max_staleness to at least 1"
        )


def speculative_decoding_conflicts(run: RunTables) -> Iterator[str]:
    speculative = run.generation.speculative
    if speculative.is_on and run.generation.return_routed_experts:
        yield (
            f'generation.speculative.method = "{speculative.method}" with generation.return_routed_experts = true: the '
            "experts of rejected draft tokens cannot be distinguished from those of accepted ones; set either to its "
            "default"
        )
    if speculative.has_weights and run.scheduling.on_batch_ready == "sleep":
        yield (
            f'generation.speculative.method = "{speculative.method}" with scheduling.on_batch_ready = "sleep": an '
            "engine that sleeps discards the draft weights, which published versions do not contain; set method to "
            '"ngram" or on_batch_ready to "abort"'
        )


def adapter_conflicts(run: RunTables) -> Iterator[str]:
    """Check settings that cannot be combined with an adapter."""
    generation, scheduling = run.generation, run.scheduling
    rank = run.training.adapter.rank
    if not rank:
        return
    if rank > MAX_ADAPTER_RANK:
        yield f"training.adapter.rank = {rank} is more than the {MAX_ADAPTER_RANK} that vLLM supports; lower it"
    if scheduling.on_batch_ready == "sleep":
        yield (
            f'training.adapter.rank = {rank} with scheduling.on_batch_ready = "sleep": an engine that sleeps discards '
            'the base model, and versions contain only the adapter; set on_batch_ready to "abort"'
        )
    if generation.adapter_swap == "pinned":
        overtaking = [name for name in ("window", "max_group_age", "oversample") if getattr(scheduling, name)]
        if overtaking or scheduling.tail != "carry_over":
            name = overtaking[0] if overtaking else "tail"
            yield (
                f'generation.adapter_swap = "pinned" with scheduling.{name} = {getattr(scheduling, name)!r}: groups '
                "that others overtake could run on versions of any age, and an engine holds only max_staleness + 2; "
                f'leave scheduling.{name} out, or set adapter_swap = "hot"'
            )
        if generation.pull_mode != "hot_swap":
            yield (
                f'generation.adapter_swap = "pinned" with generation.pull_mode = "{generation.pull_mode}": running '
                "requests keep their weights, so nothing is drained or recomputed; leave pull_mode out"
            )
    if generation.speculative.is_on:
        yield (
            f'training.adapter.rank = {rank} with generation.speculative.method = "{generation.speculative.method}": '
            "drafts would be generated or verified without the adapter; set method to its default"
        )


def interruption_conflicts(run: RunTables) -> Iterator[str]:
    """Check the settings that interrupt requests."""
    generation, scheduling, routing, statedict = run.generation, run.scheduling, run.routing, run.statedict
    if generation.pull_mode == "drain" and scheduling.on_batch_ready != "continue":
        yield (
            f'generation.pull_mode = "drain" with scheduling.on_batch_ready = "{scheduling.on_batch_ready}": '
            'interrupted requests cannot finish; use pull_mode = "hot_swap" or on_batch_ready = "continue"'
        )
    if routing.move_below is not None and run.seeds_requests:
        yield (
            f"routing.move_below = {routing.move_below:g} with seeded requests, which never move: the "
            "continuation on another generator draws other tokens, at a point that depends on timing; leave move_below "
            "out, or set sampling.seeded = false"
        )
    if generation.stall_timeout_s <= statedict.pull_timeout_s:
        yield (
            f"generation.stall_timeout_s = {generation.stall_timeout_s:g} is not more than statedict.pull_timeout_s = "
            f"{statedict.pull_timeout_s:g}: a generator that loads weights generates nothing meanwhile, and "
            "would be considered hung; raise stall_timeout_s or lower pull_timeout_s"
        )


def host_conflicts(run: RunTables) -> Iterator[str]:
    return run.hosts.too_few()


def suite_conflicts(run: RunTables) -> Iterator[str]:
    validation, names = run.validation, [source.name for source in run.tasks]
    for name, count in Counter(suite.name for suite in validation.suites).items():
        if count > 1:
            yield f"{count} of [[validation.suites]] have name = {name!r}; give each a different name"
    for suite in validation.suites:
        if isinstance(suite.task, str) and suite.task not in names:
            yield (
                f"validation.suites.{suite.name}.task = {suite.task!r} is not one of the run's tasks, "
                f"{', '.join(names)}; "
                'name one of them, or give the suite type = "module:Class"'
            )
            return
        if isinstance(suite.task, TaskSource) and suite.task.name in names:
            yield f"validation.suites.{suite.name} has its own task, with the name of a task of the run; rename it"
    for table, temperature, samples in _sampled(validation):
        if temperature == 0 and samples > 1:
            yield (
                f"{table}.temperature = 0 is greedy, so all {table}.samples_per_prompt = {samples} samples would be "
                "the same; set samples_per_prompt = 1"
            )
            return


def _sampled(validation: ValidationConfig) -> Iterator[tuple[str, float, int]]:
    """Yield (table, temperature, samples per prompt) of the validation and of each suite."""
    yield "validation", validation.temperature, validation.samples_per_prompt
    for suite in validation.suites if validation.num_prompts else ():
        temperature = validation.temperature if suite.temperature is None else suite.temperature
        samples = suite.samples_per_prompt or validation.samples_per_prompt
        yield f"validation.suites.{suite.name}", temperature, samples


def background_validation_conflicts(run: RunTables) -> Iterator[str]:
    """Check the settings that a validation during training needs."""
    validation, generation, scheduling = run.validation, run.generation, run.scheduling
    if not validation.beside_training or not validation.num_prompts:
        return
    setting = "validation.beside_training = true"
    if not validation.is_repeated:
        yield f"{setting} with validation.interval = 0: no validation runs between steps; set interval, or leave it out"
    if scheduling.on_batch_ready != "continue":
        yield (
            f'{setting} with scheduling.on_batch_ready = "{scheduling.on_batch_ready}": each training step would '
            'interrupt the validation; set on_batch_ready = "continue"'
        )
    least = max(1, generation.least_generators)
    if generation.adapter_swap != "pinned" and generation.num_generators <= least:
        yield (
            f"{setting} with generation.num_generators = {generation.num_generators}: one generator is held for the "
            f"validation, and training needs {least} more; set num_generators to at least {least + 1}"
        )


def best_checkpoint_conflicts(run: RunTables) -> Iterator[str]:
    if run.checkpoint.keep == "best" and not run.validation.is_repeated_in_full:
        yield (
            'checkpoint.keep = "best" without validations of all suites between steps: only the last step would be '
            "validated; set validation.interval above 0, or keep to a number"
        )


def adapter_name_conflicts(run: RunTables) -> Iterator[str]:
    """Check the names of several adapters and of their tasks."""
    adapters, tasks = run.adapters, [source.name for source in run.tasks]
    for name, count in Counter(adapter.name for adapter in adapters).items():
        if count > 1:
            yield f"{count} of [[adapters]] are named {name!r}; give them different names"
    for adapter in adapters:
        for task in adapter.tasks:
            if task not in tasks:
                yield f"adapters.{adapter.name}.tasks has {task!r}; the run has the tasks {', '.join(tasks)}"
        if repeated := [task for task, count in Counter(adapter.tasks).items() if count > 1]:
            yield f"adapters.{adapter.name}.tasks names {repeated[0]!r} twice; set its weight in [[tasks]] instead"
    trained = {task for adapter in adapters for task in adapter.tasks}
    for task in tasks:
        if task not in trained:
            yield f"task {task!r} belongs to no adapter; add it to the tasks of one of [[adapters]], or leave it out"


def adapter_training_conflicts(run: RunTables) -> Iterator[str]:
    """Check the training settings of several adapters."""
    for adapter in run.adapters:
        key, training = f"adapters.{adapter.name}.training", adapter.settings(run.training)
        if not training.adapter.is_on:
            yield f"{key}.adapter.rank = 0: each of [[adapters]] trains an adapter; set it or training.adapter.rank"
        if training.num_ranks > 1:
            yield (
                f"[[adapters]] with {training.num_ranks} trainer processes: adapters share the weights in the memory "
                "of one process; set training.data_parallel, context_parallel and tensor_parallel to 1"
            )
        if training.critic != "none":
            yield f'{key}.critic = "{training.critic}": critics are not supported with [[adapters]]; set it to "none"'
        if training.distill_coef:
            yield (
                f"{key}.distill_coef = {training.distill_coef:g}: teachers are not supported with [[adapters]]; set it "
                "to 0"
            )


def shared_setting_conflicts(run: RunTables) -> Iterator[str]:
    """Check common settings that cannot be combined with several adapters."""
    generation, scheduling = run.generation, run.scheduling
    if scheduling.on_batch_ready != "continue":
        yield (
            f'scheduling.on_batch_ready = "{scheduling.on_batch_ready}" with [[adapters]]: a step of one adapter would '
            'stop the others; set it to "continue"'
        )
    if generation.pull_mode != "hot_swap":
        yield (
            f'generation.pull_mode = "{generation.pull_mode}" with [[adapters]]: a version of one adapter would hold '
            'up the requests of the others; set it to "hot_swap"'
        )
    if run.validation.beside_training:
        yield (
            "validation.beside_training = true with [[adapters]]: an adapter waits for its validation, while the "
            "others train; leave it out"
        )
    if run.rollout.num_workers:
        yield (
            f"rollout.num_workers = {run.rollout.num_workers} with [[adapters]]: their rollouts run in the "
            "controller's process; set it to 0"
        )
    if run.hosts.elsewhere:
        yield "[[adapters]] with hosts.addresses or hosts.provider: [[adapters]] train on one machine; leave these out"


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a run. A list of tables is also a setting.

    Attributes:
        conditions: Conditions of the setting and of the tables that contain it. All must hold for the setting to take
            effect.
    """

    name: str  # dotted
    value: Any
    default: Any
    conditions: tuple[TakesEffect, ...]


def settings_in(section: Section, prefix: str = "", conditions: tuple[TakesEffect, ...] = ()) -> Iterator[Setting]:
    """Iterate over the settings of a table and of the tables in it."""
    for name, field in type(section).model_fields.items():
        own = (*conditions, *(item for item in field.metadata if isinstance(item, TakesEffect)))
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from settings_in(value, f"{prefix}{name}.", own)
        else:
            default = None if field.is_required() or field.default_factory else field.default
            yield Setting(f"{prefix}{name}", value, default, own)


def without_effect(run: RunTables) -> Iterator[tuple[Setting, TakesEffect]]:
    """Iterate over the settings that have no effect although they differ from their defaults, each with the first
    condition that does not hold."""
    for setting in settings_in(run):
        if setting.value == setting.default:
            continue
        for condition in setting.conditions:
            if not condition.holds(setting.value, attrgetter(condition.setting)(run)):
                yield setting, condition
                break


def effect_conflicts(run: RunTables) -> Iterator[str]:
    """Iterate over messages about given settings without effect, which say how the setting would take effect."""
    for setting, condition in without_effect(run):
        other = attrgetter(condition.setting)(run)
        given, leave = f"{setting.name} = {_as_toml(setting.value)}", f"leave {setting.name} out"
        if setting.default is not None and setting.default != ():
            leave += f" (its default is {_as_toml(setting.default)})"
        if condition.up_to:
            fix = condition.fix or f"lower it to at most {_as_toml(other)}"
            yield f"{given} has no effect beyond {condition.setting} = {_as_toml(other)}; {fix}, or {leave}"
            continue
        choices = " or ".join(map(_as_toml, condition.one_of))
        others = " and ".join(map(_as_toml, condition.none_of))
        set_to = f"something else than {others}" if condition.none_of else choices
        fix = condition.fix or f"set {condition.setting} to {set_to}"
        because = condition.without or f"with {condition.setting} = {_as_toml(other)}"
        yield f"{given} has no effect {because}; {fix} for it to take effect, or {leave}"


R = TypeVar("R", bound=RunTables)


def reset_without_effect(config: R) -> R:
    """Copy settings, with those without effect reset to their defaults."""
    for setting, _ in without_effect(config):
        config = with_value(config, setting.name, setting.default)
    return config


def _as_toml(value: Any) -> str:
    """Format a value for messages: as TOML, but `none` for an unset setting, and short for tables."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Section):
        return "{...}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, cast('tuple[Any, ...]', value)))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


RULES = (
    length_conflicts,
    task_name_conflicts,
    training_conflicts,
    distillation_conflicts,
    advantage_conflicts,
    kept_cache_conflicts,
    speculative_decoding_conflicts,
    adapter_conflicts,
    interruption_conflicts,
    host_conflicts,
    effect_conflicts,
    suite_conflicts,
    background_validation_conflicts,
    best_checkpoint_conflicts,
)
"""Rules between the tables of a run, in the order of their messages."""
