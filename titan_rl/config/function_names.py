"""Functions that settings name as "module:function": their search path, and the check of their signatures."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig, RoutingConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.config.unchecked_tables import read_tables
from titan_rl.config.validation_errors import ARGUMENTS, COMMAND_LINE, Origins
from titan_rl.core.calls.imports import find_function, search_in
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, Section, path_problem
from titan_rl.generation.registry import EngineKind, find_engine
from titan_rl.generation.router.strategies import make_strategy
from titan_rl.generation.vllm_arguments import problem_of
from titan_rl.weights.transports.registry import TransportKind

_NAMES_CODE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")

_LIBRARIES = ("torch", "monarch", "torchtitan", "transformers", "vllm")
"""Libraries that processes of a run import. A folder of such a name is usually a checkout, which may be installed."""


class SearchPath:
    """Search path of a config's modules, which is added to Python's: the current folder, those of `pythonpath`, and
    that of each TOML file, in this order. If a TOML file is in a package, the folder that contains the package is used.

    Args:
        given: Value of `pythonpath`; ignored unless it is a list of folders.

    Raises:
        ConfigError: A file in one of these folders would be imported in place of a module of Python or of a library.
    """

    def __init__(self, given: object, origins: Origins) -> None:
        is_of_file = origins.of("pythonpath") not in (COMMAND_LINE, ARGUMENTS)
        base = origins.folders_for("pythonpath")[-1] if is_of_file else Path()
        self._given = [str((base / folder).resolve()) for folder in _folders(given)]
        self._others = [os.getcwd(), *(str(_import_root(toml)) for toml in origins.files)]
        folders = [*self._given, *self._others]
        for file, module in _hiding_modules(folders):
            raise ConfigError(f"{file} would be imported in place of the installed module {module}; rename or move it")
        search_in(folders)

    def needed_for(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the folders in which other processes find the imported modules: the given folders, and others that
        contain one of these modules."""
        homes = {home for name in modules if (home := _home(name)) is not None}
        return tuple(dict.fromkeys([*self._given, *(folder for folder in self._others if folder in homes)]))


def recorded_modules(toml: Path) -> dict[str, str]:
    """Find the modules that a TOML file of settings names, with their folders, if they are in its `pythonpath` or
    next to it. Nothing is imported."""
    tables, _ = read_tables([toml], ())
    folders = [str((toml.parent / folder).resolve()) for folder in _folders(tables.get("pythonpath"))]
    folders.append(str(_import_root(toml)))
    found: dict[str, str] = {}
    for name in dict.fromkeys(_modules_in(tables)):
        spec = PathFinder.find_spec(name.partition(".")[0], folders)
        origin = None if spec is None else next(iter(spec.submodule_search_locations or ()), None) or spec.origin
        if origin is not None:
            found[name] = str(Path(origin).parent)
    return found


def _folders(given: object) -> list[str]:
    """Return the entries that can be folders. The validation of the settings reports the others."""
    items = cast("Iterable[object]", given) if isinstance(given, list | tuple) else ()
    return [folder for folder in items if isinstance(folder, str) and not path_problem(folder)]


def _modules_in(value: object) -> Iterator[str]:
    if isinstance(value, str) and (named := _NAMES_CODE.fullmatch(value)):
        yield named[1]
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_modules_in, cast("Mapping[str, object]", value).values()))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_modules_in, cast("list[object]", value)))


def _hiding_modules(folders: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Find files that processes of a run would import in place of a module of Python's standard library or of a
    library, and the names of these modules."""
    for folder in dict.fromkeys(folders):
        try:
            entries = sorted(os.listdir(folder))
        except OSError:  # other checks report it
            continue
        for entry in entries:
            name = entry.removesuffix(".py")
            file = Path(folder, entry, *(["__init__.py"] if name == entry else ()))
            is_library = name in _LIBRARIES and name != entry
            if (is_library or _is_found_by_path(name)) and file.is_file():
                yield file, name


def _is_found_by_path(name: str) -> bool:
    """Return whether a module of Python's standard library is searched on Python's path. Others are in the program."""
    is_in_program = BuiltinImporter.find_spec(name) is not None or FrozenImporter.find_spec(name) is not None
    return name in sys.stdlib_module_names and not is_in_program


def _import_root(toml: Path) -> Path:
    folder = toml.resolve().parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _home(name: str) -> str | None:
    """Return the folder on the search path in which an imported module was found; None if unknown."""
    top = sys.modules.get(name.partition(".")[0])
    path = next(iter(getattr(top, "__path__", ())), None) or getattr(top, "__file__", None)
    return None if path is None else str(Path(path).resolve().parent)


def check_functions(config: Section, generation: GenerationConfig, routing: RoutingConfig, origins: Origins) -> None:
    """Import the functions that settings name as "module:function", and construct the routing strategy.

    Raises:
        ConfigError: A function does not exist or takes other arguments, the strategy cannot be constructed, or the
            engine does not support a setting. The message names the setting, its value, its origin and the fix.
    """
    for key, name, known in _named(config):
        try:
            names: dict[str, Any] = dict.fromkeys(known.names)
            found = find_function(key, name, names, known.kind)
            if name not in known.names and (problem := _problem(found, known)) is not None:
                raise ConfigError(f"{key} = {name!r} {problem}")
        except ConfigError as error:
            raise ConfigError(f"{origins.of(key)}: {error}") from error.__cause__
    try:
        make_strategy(routing.strategy)
    except ConfigError as error:
        raise ConfigError(f"{origins.of('routing.strategy')}: {error}") from error.__cause__
    run_problems = _engine_problems_of_run(config) if isinstance(config, RunConfig) else ()
    for key, problem in chain(run_problems, _engine_problems(generation)):
        raise ConfigError(f"{origins.of(key)}: {problem}")


def _problem(found: Any, known: FunctionName) -> str | None:
    """Return the reason why a user's function cannot be called with the arguments that it will get; None if it can."""
    if not known.arguments:
        return None
    call = f"is called with ({', '.join(known.arguments)})"
    if isinstance(found, type) and not known.may_be_class:
        return f"is a class; name a function, which {call}"
    function = found.make if isinstance(found, EngineKind | TransportKind) else found
    if inspect.iscoroutinefunction(function):
        return "is async, and nothing awaits it; make it a plain function"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the function is not written in Python, and has no signature
        return None
    try:
        signature.bind(*known.arguments)
    except TypeError as error:
        return f"{call}, and takes {signature}: {error}"
    return None


def named_modules(config: Section) -> set[str]:
    """Return the names of the user's modules that settings name as "module:function"."""
    return {name.partition(":")[0] for _, name, known in _named(config) if name not in known.names}


def _engine_problems_of_run(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Iterate over the settings outside [generation] that the engine does not support, with the reason and the fix."""
    name, rank = config.generation.engine, config.training.adapter.rank
    engine = find_engine(name)
    if config.scheduling.on_batch_ready == "sleep" and not engine.sleeps:
        problem = 'cannot release its memory; set it to "abort"'
        yield _unsupported("scheduling.on_batch_ready", '"sleep"', name, problem)
    if rank and not engine.adapters:
        problem = "does not apply adapters; set it to 0, or the engine to 'vllm'"
        yield _unsupported("training.adapter.rank", rank, name, problem)
    if config.adapters and not engine.several_adapters:
        problem = f"[[adapters]], and generation.engine = {name!r} does not hold several adapters"
        yield "adapters", f"{problem}; set the engine to 'vllm'"


def _engine_problems(generation: GenerationConfig) -> Iterator[tuple[str, str]]:
    """Iterate over the settings of [generation] that the engine does not support, with the reason and the fix."""
    name, size = generation.engine, generation.tensor_parallel_size
    engine = find_engine(name)
    if size > 1 and not engine.tensor_parallel:
        problem = "cannot split a model across processes; set it to 1"
        yield _unsupported("generation.tensor_parallel_size", size, name, problem)
    if generation.max_running == "auto" and not engine.adapts:
        problem = "cannot determine how many requests it can hold; set it to a number"
        yield _unsupported("generation.max_running", "'auto'", name, problem)
    if generation.return_routed_experts and not engine.routed_experts:
        problem = "does not return them; set it to false"
        yield _unsupported("generation.return_routed_experts", "true", name, problem)
    if generation.vllm and name != "vllm":
        problem = f"[generation.vllm] has {', '.join(generation.vllm)}, and generation.engine = {name!r} is not vLLM"
        yield "generation.vllm", f"{problem}; leave the table out, or set the engine to 'vllm'"
    if (found := problem_of(generation.vllm)) is not None:
        option, problem = found
        key = f"generation.vllm.{option}"
        yield key, f"{key} = {generation.vllm[option]!r}: {option} {problem}"
    if (method := generation.speculative.method) != "none" and not engine.speculative:
        problem = 'has no speculative decoding; set it to "none"'
        yield _unsupported("generation.speculative.method", f'"{method}"', name, problem)


def _unsupported(setting: str, value: object, engine: str, problem: str) -> tuple[str, str]:
    return setting, f"{setting} = {value}, and generation.engine = {engine!r} {problem}"


def function_name(section: type[Section], field: str) -> FunctionName | None:
    """Return the `FunctionName` of a setting or of its items; None if it does not name functions."""
    info = section.model_fields[field]
    return next(
        (part for part in (*info.metadata, *_metadata(info.annotation)) if isinstance(part, FunctionName)), None
    )


def _metadata(annotation: object) -> Iterator[object]:
    """Yield the metadata of all parts of a type."""
    for argument in get_args(annotation):
        yield from getattr(argument, "__metadata__", ())
        yield from _metadata(argument)


def _named(section: Section, prefix: str = "") -> Iterator[tuple[str, str, FunctionName]]:
    """Yield (dotted setting, name of the function, its `FunctionName`) for all settings in `section`."""
    for field in type(section).model_fields:
        key, value = f"{prefix}{field}", getattr(section, field)
        if field == "task" and isinstance(section, TaskSource):
            continue  # fields of a task are settings of its table
        if isinstance(value, Section):
            yield from _named(value, f"{key}.")
        elif isinstance(section, RunConfig) and field == "tasks":
            for table, source in section.tables_of_tasks():
                yield from _named(source, f"{table}.")
                yield from _named(cast("Section", source.task), f"{table}.")
        elif isinstance(section, RunConfig) and field == "adapters":
            for name, experiment in section.experiments.items():
                yield from _named(experiment.training, f"adapters.{name}.training.")
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
