"""The classes that a `type` in a table may name: tasks and curricula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import get_protocol_members

from titan_rl.core.calls.imports import find_attribute, import_module
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section
from titan_rl.rollout.task import Task
from titan_rl.scheduling.mix.curriculum import Curriculum
from titan_rl.scheduling.mix.registry import BY_NAME as CURRICULA


@dataclass(frozen=True, slots=True)
class ClassKind:
    """What a `type` may name."""

    noun: str
    plural: str
    protocol: type
    own: Mapping[str, type[Section]] = field(default_factory=dict[str, type[Section]])  # the library's, by name


TASK = ClassKind("task", "tasks", Task)
CURRICULUM = ClassKind("curriculum", "curricula", Curriculum, CURRICULA)


def find_class(kind: ClassKind, name: object) -> type[Section]:
    """The class that a `type` names.

    Args:
        name: "module:Class", a name of `kind.own`, or a class.

    Raises:
        ConfigError: there is no such module or class, or it is none of that kind.
    """
    if isinstance(name, type) and issubclass(name, Section):
        return name  # of an object of Python
    if isinstance(name, str) and name in kind.own:
        return kind.own[name]
    if not isinstance(name, str) or name.count(":") != 1:
        known = f"one of {', '.join(kind.own)}, or " if kind.own else ""
        raise ConfigError(f'must be {known}a string "module:Class"')
    module_name, _, class_name = name.partition(":")
    module = import_module(module_name)
    found: object = find_attribute(module, class_name)
    if isinstance(found, type) and issubclass(found, Section):
        missing = _missing_members(kind, found)
        if not missing:
            return found
        problem = f"{class_name} is no {kind.noun}: it lacks {', '.join(missing)}"
    elif found is None:
        problem = f"{module_name} has no {class_name}"
    else:
        problem = f"{class_name} is no subclass of titan_rl.core.settings.Section"
    there = [key for key, value in vars(module).items() if _is_a(kind, value) and _is_of(value, module_name)]
    raise ConfigError(f"{problem}; {kind.plural} in {module_name}: {', '.join(there) or 'none'}")


def _is_a(kind: ClassKind, found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Section) and not _missing_members(kind, found)


def _is_of(found: object, module_name: str) -> bool:
    """Whether a class is defined there, or below a package of that name, and not merely imported."""
    return f"{found.__module__}.".startswith(f"{module_name}.")


def _missing_members(kind: ClassKind, found: type) -> list[str]:
    lacking = {name for name in get_protocol_members(kind.protocol) if not hasattr(found, name)}
    return sorted(lacking | getattr(found, "__abstractmethods__", frozenset[str]()))


def type_of(made: object) -> str:
    """The value of `type` that names an object's class: `examples.alphabet_sort.task:AlphabetSort`."""
    return f"{type(made).__module__}:{type(made).__qualname__}"
