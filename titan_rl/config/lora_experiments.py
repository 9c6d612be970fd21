"""Table [[adapters]]: several experiments of one run, each with its own adapter."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import Field, ValidationError

from titan_rl.config.tasks import Name
from titan_rl.config.unchecked_tables import fields_of, validated
from titan_rl.config.validation_errors import ARGUMENTS, COMMAND_LINE, Origins, nearest, problems
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section
from titan_rl.training.settings import AdapterConfig, StopAtConfig, TrainingConfig


class AdapterRun(Section):
    """One of several adapters that a run trains at the same time, on one trainer and one set of generators.

    In TOML it is a table of `[[adapters]]`. Without any, a run trains one policy by `[training]`.
    """

    name: Name
    """Name of its folder `adapters/NAME` in that of the run, and on the command line: `--adapters.NAME.training.lr`."""
    tasks: tuple[str, ...] = Field(min_length=1, strict=False)
    """Names of the tasks that it is trained on."""
    training: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of [training] that differ from those of the run: `training = { steps = 40, adapter.rank = 4 }`."""

    def settings(self, common: TrainingConfig) -> TrainingConfig:
        """Return the settings of the adapter's training.

        Args:
            common: `[training]` of the run.

        Raises:
            pydantic.ValidationError: A setting is wrong.
        """
        return TrainingConfig.model_validate(_merged(common.own_settings(), self.training))

    def problems(self, common: TrainingConfig) -> Iterator[str]:
        """Describe the wrong settings of the adapter's training, one line each."""
        try:
            self.settings(common)
        except ValidationError as error:
            for _, problem in problems(error, TrainingConfig, f"adapters.{self.name}.training"):
                yield problem


def load_adapters(tables: dict[str, Any], origins: Origins, common: Container[str]) -> None:
    """Replace the tables of `[[adapters]]` by `AdapterRun` objects, in place.

    Args:
        tables: Tables of all settings; `tables["adapters"]` has the tables of the adapters, by name.
        common: Names of the settings of a run.

    Raises:
        ConfigError: A setting is wrong, or options or arguments name an adapter that the files do not have.
    """
    if "adapters" not in tables:
        return
    adapters: Any = tables["adapters"]
    if not isinstance(adapters, dict):
        raise ConfigError(f"{origins.of('adapters')}: adapters = {adapters!r} must be tables, each under [[adapters]]")
    by_name = cast("dict[str, Any]", adapters)
    complete = [name for name, table in by_name.items() if isinstance(table, dict) and "tasks" in table]
    tables["adapters"] = [_load_adapter(name, table, complete, common, origins) for name, table in by_name.items()]


def _load_adapter(
    name: str, table: Any, complete: Sequence[str], common: Container[str], origins: Origins
) -> AdapterRun:
    prefix = f"adapters.{name}"
    fields = {"name": name, **fields_of(table, prefix, origins)}
    if misplaced := next((key for key in fields if key in common and key not in AdapterRun.model_fields), None):
        key = f"{prefix}.{misplaced}"
        raise ConfigError(
            f"{origins.of(key)}: {key}: only settings of [training] may differ between adapters; set {misplaced} for "
            "the whole run"
        )
    source, given = origins.of(prefix), origins.below(prefix)
    if name not in complete and given and all(origins.of(key) in (COMMAND_LINE, ARGUMENTS) for key in given):
        near = nearest(name, complete)
        known = f"the adapters of the run are {', '.join(complete)}" if complete else "the run has no [[adapters]]"
        raise ConfigError(
            f"{source}: {', '.join(given)}: there is no adapter {name!r}; "
            f"{f'nearest: adapters.{near}; ' if near else ''}{known}"
        )
    extra_names = [f"training.{field}" for field in TrainingConfig.model_fields]
    extra_names += [f"training.adapter.{field}" for field in AdapterConfig.model_fields]
    extra_names += [f"training.stop_at.{field}" for field in StopAtConfig.model_fields]
    return validated(AdapterRun, fields, origins, prefix, extra_names)


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**common, **own}
    for name, value in own.items():
        if isinstance(value, Mapping) and isinstance(common.get(name), Mapping):
            merged[name] = _merged(common[name], cast("Mapping[str, Any]", value))
    return merged
