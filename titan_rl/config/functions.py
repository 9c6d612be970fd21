"""The settings that name functions, and whether these are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast, get_args

from titan_rl.calls.imports import find_function
from titan_rl.config.explain import Origins
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.errors import ConfigError
from titan_rl.generation.registry import find_engine
from titan_rl.settings import FunctionName, Section


def check_functions(config: Section, generation: GenerationConfig, origins: Origins) -> None:
    """Import what settings name as "module:function". The library's own are known by their names alone.

    Raises:
        ConfigError: one is not there, or the engine cannot do what is asked of it. Names the setting, its value, where
            it came from and the fix.
    """
    for key, name, known in _named(config):
        try:
            find_function(key, name, dict.fromkeys(known.names))
        except ConfigError as error:
            raise ConfigError(f"{origins.of(key)}: {error}") from error.__cause__
    _check_engine(generation, origins)


def named_modules(config: Section) -> set[str]:
    """The modules of the user's that settings name as "module:function"."""
    return {name.partition(":")[0] for _, name, known in _named(config) if name not in known.names}


def _check_engine(generation: GenerationConfig, origins: Origins) -> None:
    engine = find_engine(generation.engine)
    size = generation.tensor_parallel_size
    if size > 1 and not engine.tensor_parallel:
        raise ConfigError(
            f"{origins.of('generation.tensor_parallel_size')}: generation.tensor_parallel_size = {size}, and "
            f"generation.engine = {generation.engine!r} does not share a model between processes; set it to 1"
        )
    if generation.return_routed_experts and not engine.routed_experts:
        raise ConfigError(
            f"{origins.of('generation.return_routed_experts')}: generation.return_routed_experts = true, and "
            f"generation.engine = {generation.engine!r} does not return them; set it to false"
        )


def function_name(section: type[Section], field: str) -> FunctionName | None:
    """What a setting, or each of a list or table, may name; None where it names no function."""
    info = section.model_fields[field]
    return next(
        (part for part in (*info.metadata, *_metadata(info.annotation)) if isinstance(part, FunctionName)), None
    )


def _metadata(annotation: object) -> Iterator[object]:
    """Of all parts of a type."""
    for argument in get_args(annotation):
        yield from getattr(argument, "__metadata__", ())
        yield from _metadata(argument)


def _named(section: Section, prefix: str = "") -> Iterator[tuple[str, str, FunctionName]]:
    """(dotted setting, function that it names, what it may name) of all settings under `section`."""
    for field in type(section).model_fields:
        key, value = f"{prefix}{field}", getattr(section, field)
        if field == "task" and isinstance(section, TaskSource):
            continue  # its settings are the table's
        if isinstance(value, Section):
            yield from _named(value, f"{key}.")
        elif isinstance(section, RunConfig) and field == "tasks":
            for table, source in section.tables_of_tasks():
                yield from _named(source, f"{table}.")
                yield from _named(cast("Section", source.task), f"{table}.")
        elif value is None or (known := function_name(type(section), field)) is None:
            continue
        elif isinstance(value, tuple):
            names = cast("tuple[str, ...]", value)
            yield from ((f"{key}[{index}]", name, known) for index, name in enumerate(names))
        elif isinstance(value, Mapping):
            by_key = cast("Mapping[str, object]", value)
            yield from ((f"{key}.{inner}", name, known) for inner, name in by_key.items() if isinstance(name, str))
        else:
            yield key, value, known
