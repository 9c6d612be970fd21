"""Settings of the scheduling plane: the table [scheduling]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from titan_rl.core.settings import FunctionName, Section, TakesEffect, one_of
from titan_rl.scheduling.filters import BY_NAME

Mode = Literal["sync", "one_step_off", "streaming", "async"]

MODES: Mapping[Mode, Mapping[str, Any]] = {
    "sync": {"max_staleness": 0},
    "one_step_off": {"max_staleness": 1},
    "streaming": {"max_staleness": 0, "oversample": 0.5},
    "async": {"max_staleness": 3, "oversample": 1.0, "max_group_age": 7},
}
"""Presets of `scheduling.mode`: values for settings that are not given."""


TAIL = one_of('must be "carry_over", "tail_batch", "drop" or a number above 0')


class SchedulingConfig(Section):
    """Number of groups that run, their staleness, and the handling of the long tail."""

    mode: Mode | None = None
    """Preset of the settings below; settings that are given override it. sync: max_staleness = 0. one_step_off:
    max_staleness = 1. streaming: max_staleness = 0 and oversample = 0.5. async: max_staleness = 3, oversample = 1.0 and
    max_group_age = 7, unless window is given."""
    groups_per_step: PositiveInt = 16
    """Groups trained on in one optimizer step."""
    max_staleness: NonNegativeInt = 1
    """Maximum number of optimizer steps between the weights that sampled a token and the step that trains on it. 0 is
    on-policy."""
    oversample: NonNegativeFloat = 0.0
    """Additional groups in flight, as a share of groups_per_step, rounded up. A step trains on the groups that finish
    first."""
    window: Annotated[PositiveInt | None, TakesEffect("scheduling.num_slots", up_to=True)] = None
    """A finished group may overtake unfinished ones by fewer than this many places. By default 1, which is data order;
    with oversample, the number of groups that run for one step."""
    max_group_age: NonNegativeInt | None = None
    """Maximum number of versions between a group's admission and the start of its step. It replaces window: finished
    groups overtake unfinished ones as far as this bound allows, which is further than with any window of the same
    bound."""
    on_batch_ready: Literal["continue", "keep", "abort", "sleep"] = "continue"
    """Generation while a batch is trained and pulled. continue: it continues. keep: requests are frozen, with their KV
    cache. abort: requests leave the engines, and continue from their tokens after the pull. sleep: like
    abort, and a trainer on the same GPUs can use the engines' memory until the pull."""
    tail: Annotated[Literal["carry_over", "tail_batch", "drop"] | PositiveInt, TAIL] = "carry_over"
    """Treatment of unfinished groups that a batch has overtaken. carry_over: they keep running. tail_batch: they are
    suspended until groups_per_step of them wait. A number: they are dropped once this many versions have been pulled
    since their admission; drop is the same as 1."""
    max_token_age: NonNegativeInt | None = None
    """Tokens older than this many versions are used as context only. By default all tokens are trained on."""
    stale_groups: Literal["drop", "mask"] = "drop"
    """Treatment of a finished group whose tokens are all older than max_token_age. drop: it is replaced by another
    group. mask: it stays in its batch with all tokens masked; a batch is dropped only if all its tokens are masked."""
    max_running_rollouts: PositiveInt | None = None
    """Maximum number of rollouts in flight; a game counts once for all its seats. A group starts when all its siblings
    fit. By default only the number of groups is limited."""
    filters: tuple[Annotated[str, FunctionName(tuple(BY_NAME), ("group",), may_be_class=False)], ...] = Field(
        default=(), strict=False
    )
    """Filters of finished groups, in addition to the built-in one for groups with fewer than two siblings left."""
    max_refills: PositiveInt = 4
    """The run ends if this many times groups_per_step groups in a row are dropped."""
    max_failed_groups: PositiveInt = 8
    """The run ends, with the most frequent error, if this many groups in a row are lost to errors."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the settings of the mode. `model_fields_set` has only the given ones."""
        if not isinstance(data, Mapping):
            return check(data)
        given = dict(cast("Mapping[str, Any]", data))
        preset = _preset(given)
        made = check({**preset, **given})
        made.__pydantic_fields_set__.difference_update(preset.keys() - given.keys())
        if made.mode is not None and all(getattr(made, name) != value for name, value in MODES[made.mode].items()):
            others = " and ".join(f"{name} = {_as_toml(getattr(made, name))}" for name in MODES[made.mode])
            raise ValueError(f'mode = "{made.mode}" has no effect where {others}; leave mode out, or the others')
        return made

    @model_validator(mode="after")
    def _has_stale_groups(self) -> Self:
        if self.stale_groups == "mask" and self.max_token_age is None:
            raise ValueError(
                f'stale_groups = "{self.stale_groups}" has no effect without max_token_age: no token is too old to be '
                "trained then; set max_token_age, or leave stale_groups out"
            )
        return self

    @model_validator(mode="after")
    def _age_can_be_kept(self) -> Self:
        if self.max_group_age is None:
            return self
        if self.window is not None:
            raise ValueError(
                f"max_group_age = {self.max_group_age} and window = {self.window} both say how far finished groups "
                "overtake others; leave one of them out"
            )
        if self.max_group_age < (least := (self.num_slots - 1) // self.groups_per_step):
            by_mode = self.mode is not None and MODES[self.mode].get("max_group_age") == self.max_group_age
            origin = f' (set by mode = "{self.mode}")' if by_mode else ""
            raise ValueError(
                f"max_group_age = {self.max_group_age}{origin} is less than {least}, the age of the last of "
                f"{self.num_slots} groups where none overtakes another; raise it, or lower max_staleness or oversample"
            )
        return self

    @property
    def num_oversampled(self) -> int:
        """Number of additional groups in flight due to `oversample`."""
        return math.ceil(self.oversample * self.groups_per_step)

    @property
    def num_slots(self) -> int:
        """Maximum number of groups admitted and not yet trained on: (S+1)P plus the oversampled ones."""
        return (self.max_staleness + 1) * self.groups_per_step + self.num_oversampled

    @property
    def drop_age(self) -> int | None:
        """Number of versions pulled since its admission at which an unfinished group is dropped; None if groups are not
        dropped."""
        return 1 if self.tail == "drop" else self.tail if isinstance(self.tail, int) else None

    @property
    def overtaking_window(self) -> int:
        return self.window or (self.groups_per_step + self.num_oversampled if self.num_oversampled else 1)

    @property
    def age_bound(self) -> int:
        """Maximum number of versions between the one that sampled a token and the one from which the step on it starts.

        With B slots and a window of W places, at most B - 1 groups hold a slot before a group that is admitted, and at
        most W - 1 overtake it: it is trained at most (B + W - 2) // P steps after the version at its admission.
        """
        if self.max_group_age is not None:
            return self.max_group_age
        return (self.num_slots + self.overtaking_window - 2) // self.groups_per_step

    def describe_mode(self) -> str | None:
        """Describe the settings that the mode set and those that were given; None without a mode.

        Example: `scheduling.mode = "async" sets oversample = 1.0 and max_group_age = 7; given: max_staleness = 2`
        """
        if self.mode is None:
            return None
        preset = _preset({"mode": self.mode, **{name: getattr(self, name) for name in self.model_fields_set}})
        shown = {name: f"{name} = {_as_toml(getattr(self, name))}" for name in type(self).model_fields}
        sets = [shown[name] for name in preset if name not in self.model_fields_set]
        given = [shown[name] for name in shown if name in self.model_fields_set and name != "mode"]
        text = f'scheduling.mode = "{self.mode}" sets {" and ".join(sets) or "nothing that is not given"}'
        return f"{text}; given: {', '.join(given)}" if given else text


def _preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that the mode of a table sets. A given `window` takes the place of `max_group_age`."""
    mode = given.get("mode")
    preset: Mapping[str, Any] = MODES[cast("Mode", mode)] if isinstance(mode, str) and mode in MODES else {}
    return {name: value for name, value in preset.items() if name != "max_group_age" or given.get("window") is None}


def _as_toml(value: object) -> str:
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
