"""Settings that may change when a run is resumed, and settings that may not, because weights and rollouts depend on
them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titan_rl.config.run import RunConfig
from titan_rl.config.task_tables import task_table
from titan_rl.config.tasks import is_alone
from titan_rl.config.unchecked_tables import UNSET, read_tables
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import dotted
from titan_rl.scheduling.settings import MODES
from titan_rl.training.algorithms import find_algorithm
from titan_rl.training.settings import TrainingConfig

_TABLES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
RESUMABLE, LOCATIONS = tuple(_TABLES["resumable"]), tuple(_TABLES["locations"])

PRESETS = ("training.algorithm", "scheduling.mode")
"""Settings that set others, whose values a run's file has, too."""


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return every setting by its dotted name, as a JSON value: `{"seed": 0, "training.lr": 0.0003, ...}`.

    `tasks` has the names of the tasks, whose settings begin with `tasks.NAME.`, even if there is only one task."""
    tables = config.model_dump(mode="json", exclude={"tasks", "adapters"})
    tables["adapters"] = {
        adapter.name: adapter.model_dump(mode="json", exclude={"name"}) for adapter in config.adapters
    }
    share = not is_alone(config.tasks)
    tasks = {source.name: task_table(source, with_share=share) for source in config.tasks}
    settings = {name: value for name, value in dotted({**tables, "tasks": tasks}) if value != {}}
    return {**settings, "tasks": list(tasks)}


def check_unchanged(
    config: RunConfig, made_with: Mapping[str, Any], *, source: Path, inputs: Collection[str] = (), fix: str = ""
) -> None:
    """Check that a run is resumed with its original settings, except for those of `RESUMABLE`.

    Settings that only one side has, because of another version of titan_rl, are not compared.

    Args:
        made_with: Result of `settings_of` when the run was saved.
        source: File of the settings, for the message.
        inputs: Settings whose files and folders are compared instead of their names.
        fix: Way to begin a new run with the changed settings, for the message.

    Raises:
        ConfigError: A setting differs. The message names each such setting, both values and the fix.
    """
    now = settings_of(config)
    changed = [
        f"{source}: {shown_name(config, name)} is {_as_json(now[name])}, and this run was made with "
        f"{_as_json(before)}; restore that value, or begin a new run with the current one"
        for name, before in made_with.items()
        if name in now
        and not (is_resumable(name) or name.startswith(LOCATIONS) or name in inputs)
        and _as_json(now[name]) != _as_json(before)
    ]
    if changed:
        raise ConfigError("\n".join([*changed, *filter(None, [fix])]))


MAY_CHANGE = "steps, hosts, generation, weight sync, checkpoints, logging, time limits, teachers and weights of tasks"
"""Summary of `RESUMABLE` for messages."""


def check_options(config: RunConfig, earlier: RunConfig, fix: str = "begin a new run") -> None:
    """Check that options of the command line change only settings that may change when a run is resumed.

    Args:
        config: Settings with all options of the command line.
        earlier: Settings with only the options that may change.
        fix: Way to begin a new run with the changed settings, for the message.

    Raises:
        ConfigError: An option changes another setting. The message names each such setting, both values and the fix.
    """
    now, before = settings_of(config), settings_of(earlier)
    changed = [
        f"--{shown_name(config, name)} is {_as_json(_value(now, name))}, and the run has "
        f"{_as_json(_value(before, name))}"
        for name in {**before, **now}
        if _as_json(_value(now, name)) != _as_json(_value(before, name))
    ]
    if changed:
        raise ConfigError(unchangeable(changed, fix))


def unchangeable(changed: Sequence[str], fix: str) -> str:
    """Message about settings that may not change when a run is resumed."""
    left_out = "it" if len(changed) == 1 else "them"
    return (
        f"{'; '.join(changed)}: these cannot change when a run is resumed ({MAY_CHANGE} can); leave {left_out} out, "
        f"or {fix}"
    )


def check_presets(toml: Path, options: Sequence[tuple[str, str]], fix: str) -> None:
    """Check that options do not give a resumed run another algorithm or scheduling mode. Its file has the settings that
    these set, which would contradict them.

    Args:
        fix: Way to begin a new run with the changed settings, for the message.

    Raises:
        ConfigError: An option changes one of them.
    """
    settings = dict(dotted(read_tables([toml], ())[0]))
    changed: list[str] = []
    for key, value in options:
        own = key if key in settings or not key.startswith("adapters.") else _own_key(key)
        if own.endswith(PRESETS) and str(settings.get(own, UNSET)) != value:
            changed.append(f"--{key} is {value}, and the run has {settings.get(own, UNSET)}")
    if changed:
        raise ConfigError(unchangeable(changed, fix))


def settings_of_new_run(toml: Path, model: Path, options: Mapping[str, str]) -> dict[str, object]:
    """Return the settings by which a new run from the weights of another one differs from it.

    Args:
        toml: Settings of the other run.
        model: Folder with its weights.
        options: Options of the new run. They may choose another algorithm or scheduling mode, whose settings replace
            the earlier ones.
    """
    tables, _ = read_tables([toml], ())
    training: Mapping[str, Any] = tables["training"]
    given: dict[str, object] = {"model.path": str(model)}
    if "start" in training.get("adapter", {}):  # that adapter is a part of the weights
        given["training.adapter.start"] = UNSET
    for mode, settings in MODES.items():
        if mode == options.get("scheduling.mode"):
            given |= {f"scheduling.{key}": UNSET if value is None else value for key, value in settings.items()}
    if (name := options.get("training.algorithm")) is not None:
        preset, before = find_algorithm(name).settings(), find_algorithm(training["algorithm"]).settings()
        for key in {**before, **preset}:
            default = TrainingConfig.model_fields[key].default
            if _as_json(training.get(key)) == _as_json(before.get(key, default)):  # the run gives no other value
                given[f"training.{key}"] = preset.get(key, default)
    return {key: value for key, value in given.items() if key not in options}


def may_be_given(key: str, inputs: Collection[str]) -> bool:
    """Whether an option may be given when a run is resumed: it may change, or names a file or folder that may have been
    moved.

    Args:
        inputs: Settings whose files and folders are compared instead of their names.
    """
    moved = {name for each in inputs for name in (each, re.sub(r"^tasks\.[^.]+\.", "task.", each))}
    return is_resumable(key) or key in LOCATIONS or key in moved


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """Value of a setting. If the table of an adapter leaves a setting out, this is the value in [training]."""
    if key not in settings and key.startswith("adapters."):
        key = _own_key(key)
    return settings.get(key)


def _own_key(key: str) -> str:
    """Name of the run's setting that `adapters.NAME.KEY` overrides."""
    return ".".join(key.split(".")[2:])


def check_schedule(config: RunConfig, made_with: Mapping[str, Any], option: str = "training") -> None:
    """Check that a resumed run continues the schedule of its learning rate, which depends on its number of steps.

    Args:
        made_with: Result of `settings_of` when the run was saved.
        option: Table of the run's training on the command line.

    Raises:
        ConfigError: The learning rate would jump, because the run has another number of steps.
    """
    training, steps = config.training, made_with.get("training.steps")
    decayed = made_with.get("training.decay_steps") or steps
    if training.lr_decay == "constant" or training.decay_steps is not None or decayed in (None, training.steps):
        return
    raise ConfigError(
        f"{option}.steps = {training.steps}, and the learning rate decays over {decayed} steps "
        f"({option}.lr_decay = {training.lr_decay!r}), so it would jump; add --{option}.decay_steps={decayed} to "
        f"continue the schedule and keep its last rate after it, or --{option}.decay_steps={training.steps} to let the "
        "rate jump"
    )


def is_resumable(key: str) -> bool:
    """Whether a setting may change when a run is resumed."""
    if key.startswith("adapters."):
        key = _own_key(key)
    return key.startswith(RESUMABLE) or any(fnmatchcase(key, name) for name in ("tasks.*.weight", "tasks.*.teacher"))


def _as_json(value: Any) -> str:
    return json.dumps(UNSET if value is None else value)


def shown_name(config: RunConfig, key: str) -> str:
    """Name of a setting as the user writes it: `task.KEY` if the run has a single table [task]."""
    prefix = f"tasks.{config.tasks[0].name}."
    return f"task.{key.removeprefix(prefix)}" if is_alone(config.tasks) and key.startswith(prefix) else key
