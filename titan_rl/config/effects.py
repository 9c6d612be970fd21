"""Settings that are given and have no effect, as declared beside each by `titan_rl.core.settings.TakesEffect`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from titan_rl.core.settings import Section, TakesEffect

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a run, or a list of tables.

    Attributes:
        conditions: those of its own and of the tables it is in; all of them must hold.
    """

    name: str  # dotted
    value: Any
    default: Any
    conditions: tuple[TakesEffect, ...]


def settings_in(section: Section, prefix: str = "", conditions: tuple[TakesEffect, ...] = ()) -> Iterator[Setting]:
    """Every setting of a table, those of tables in it too."""
    for name, field in type(section).model_fields.items():
        own = (*conditions, *(item for item in field.metadata if isinstance(item, TakesEffect)))
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from settings_in(value, f"{prefix}{name}.", own)
        else:
            default = None if field.is_required() or field.default_factory else field.default
            yield Setting(f"{prefix}{name}", value, default, own)


def without_effect(root: Section) -> Iterator[tuple[Setting, TakesEffect]]:
    """Settings whose value is not the default and does nothing, each with the first condition that does not hold.

    Args:
        root: the settings of a run. Conditions on settings that it does not have are taken to hold.
    """
    for setting in settings_in(root):
        if setting.value == setting.default:
            continue
        for condition in setting.conditions:
            other = _value_of(root, condition.setting)
            if other is not _MISSING and not condition.holds(setting.value, other):
                yield setting, condition
                break


def of_effects(root: Section) -> Iterator[str]:
    """Which settings have no effect, and what would make them take effect: a line each."""
    for setting, condition in without_effect(root):
        other = _value_of(root, condition.setting)
        given, leave = f"{setting.name} = {_told(setting.value)}", f"leave {setting.name} out"
        if setting.default is not None and setting.default != ():
            leave += f", as {_told(setting.default)}"
        if condition.up_to:
            fix = condition.fix or f"lower it to at most {_told(other)}"
            yield f"{given} has no effect beyond {condition.setting} = {_told(other)}; {fix}, or {leave}"
            continue
        choices = " or ".join(map(_told, condition.one_of))
        others = " and ".join(map(_told, condition.none_of))
        set_to = f"something else than {others}" if condition.none_of else choices
        fix = condition.fix or f"set {condition.setting} to {set_to}"
        because = condition.without or f"with {condition.setting} = {_told(other)}"
        yield f"{given} has no effect {because}; {fix} for it to take effect, or {leave}"


def reset_without_effect(config: S) -> S:
    """The same settings, with the default of each that has no effect."""
    for setting, _ in without_effect(config):
        config = _with_value(config, setting.name.split("."), setting.default)
    return config


def _with_value(section: S, path: list[str], value: Any) -> S:
    name, *below = path
    return section.model_copy(update={name: _with_value(getattr(section, name), below, value) if below else value})


_MISSING = object()


def _value_of(root: Section, name: str) -> Any:
    found: Any = root
    for part in name.split("."):
        if not hasattr(found, part):
            return _MISSING
        found = getattr(found, part)
    return found


def _told(value: Any) -> str:
    """As TOML has it, and as `none` unsets a setting; tables by their number."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Section):
        return "{...}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_told, cast('tuple[Any, ...]', value)))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
