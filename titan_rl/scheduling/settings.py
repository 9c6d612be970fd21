"""Settings of the scheduling plane: the table [scheduling]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from titan_rl.core.settings import FunctionName, Section, TakesEffect, one_of
from titan_rl.scheduling.filters import BY_NAME

Mode = Literal["sync", "one_step_off", "streaming", "async"]

MODES: Mapping[Mode, Mapping[str, Any]] = {
    "sync": {"max_staleness": 0},
    "one_step_off": {"max_staleness": 1},
    "streaming": {"max_staleness": 0, "oversample": 0.5},
    "async": {"max_staleness": 3, "oversample": 1.0, "max_group_age": 7},
}
"""Presets of `scheduling.mode`: the settings that each sets where they are not given."""


TAIL = one_of('must be "carry_over", "tail_batch", "drop" or a number above 0')


class SchedulingConfig(Section):
    """Number of groups that run, their staleness, and the handling of the long tail."""

    mode: Mode | None = None
    """Preset of the settings below, each of which may still be given. sync: max_staleness = 0. one_step_off:
    max_staleness = 1. streaming: max_staleness = 0 and oversample = 0.5. async: max_staleness = 3, oversample = 1.0 and
    max_group_age = 7, unless window is given."""
    groups_per_step: PositiveInt = 16
    """Groups trained on in one optimizer step."""
    max_staleness: NonNegativeInt = 1
    """Optimizer steps between the weights that sampled a token and the step it is trained in. 0 is on-policy."""
    oversample: NonNegativeFloat = 0.0
    """Groups that run beyond those needed, as a share of groups_per_step, rounded up; the first to finish go first."""
    window: Annotated[PositiveInt | None, TakesEffect("scheduling.num_slots", up_to=True)] = None
    """A finished group overtakes an unfinished one by fewer places than this. By default 1, which is data order, or
    with oversample as many as run for a step."""
    max_group_age: NonNegativeInt | None = None
    """Most versions from a group's admission to the one that its step starts from. Finished groups overtake unfinished
    ones as far as that allows, in the place of window: more than any window with the same bound lets them."""
    on_batch_ready: Literal["continue", "keep", "abort", "sleep"] = "continue"
    """While a batch is trained and pulled, generation goes on, is frozen with its KV cache, leaves the engines, or
    leaves them while they give the memory of weights and KV cache to a trainer on the same GPUs, until the pull.
    "sleep" is experimental."""
    tail: Annotated[Literal["carry_over", "tail_batch", "drop"] | PositiveInt, TAIL] = "carry_over"
    """Unfinished groups that a batch overtook run on, wait until groups_per_step of them do, or are dropped: with a
    number once so many versions were pulled since their admission, with "drop" after one."""
    max_token_age: NonNegativeInt | None = None
    """Tokens older than this many versions are context and not trained. By default all are trained."""
    stale_groups: Literal["drop", "mask"] = "drop"
    """With max_token_age: a finished group all of whose tokens are older is dropped and replaced by another, or takes
    its turn with nothing of it trained. "mask" drops only batches that would have no token to train."""
    max_running_rollouts: PositiveInt | None = None
    """Most rollouts in flight, a game counting once for all its seats; a group starts when all its siblings fit. By
    default as many as the groups have."""
    filters: tuple[Annotated[str, FunctionName(tuple(BY_NAME), ("group",), may_be_class=False)], ...] = Field(
        default=(), strict=False
    )
    """Filters of finished groups, besides the one for groups with fewer than two siblings left."""
    max_refills: PositiveInt = 4
    """A step whose groups are all filtered is refilled this often before the run stops."""
    max_failed_groups: PositiveInt = 8
    """Groups in a row that may be lost to errors before the run stops with the most frequent."""

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
            others = " and ".join(f"{name} = {_told(getattr(made, name))}" for name in MODES[made.mode])
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
        """Groups that run beyond those needed."""
        return math.ceil(self.oversample * self.groups_per_step)

    @property
    def num_slots(self) -> int:
        """Groups admitted and not yet trained on, at most: (S+1)P and the oversampled."""
        return (self.max_staleness + 1) * self.groups_per_step + self.num_oversampled

    @property
    def drop_age(self) -> int | None:
        """Versions pulled since its admission at which an unfinished group is dropped; None where none is."""
        return 1 if self.tail == "drop" else self.tail if isinstance(self.tail, int) else None

    @property
    def overtaking_window(self) -> int:
        return self.window or (self.groups_per_step + self.num_oversampled if self.num_oversampled else 1)

    @property
    def age_bound(self) -> int:
        """Most versions between the one that sampled a token and the one that the step on it starts from.

        With B slots and a window of W places, at most B - 1 groups hold a slot before a group that is admitted, and at
        most W - 1 overtake it: it is trained at most (B + W - 2) // P steps after the version it was admitted at.
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
        shown = {name: f"{name} = {_told(getattr(self, name))}" for name in type(self).model_fields}
        sets = [shown[name] for name in preset if name not in self.model_fields_set]
        given = [shown[name] for name in shown if name in self.model_fields_set and name != "mode"]
        text = f'scheduling.mode = "{self.mode}" sets {" and ".join(sets) or "nothing that is not given"}'
        return f"{text}; given: {', '.join(given)}" if given else text


def _preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that the mode of a table sets. A given `window` takes the place of `max_group_age`."""
    preset = cast("Mapping[object, Mapping[str, Any]]", MODES).get(given.get("mode"), {})
    return {name: value for name, value in preset.items() if name != "max_group_age" or given.get("window") is None}


def _told(value: object) -> str:
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
