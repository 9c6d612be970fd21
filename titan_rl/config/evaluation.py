"""The settings of an evaluation: the options of `titan-rl eval` and the arguments of `titan_rl.evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, ValidationError

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section


def _names(value: Any) -> Any:
    """Accept names as text, separated by commas, or as a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value if value is None else tuple(value)


class EvalConfig(Section):
    """Settings of an evaluation. A setting that is left out is as in the validations of a run."""

    num_prompts: PositiveInt | None = None
    """Held-out prompts of each task; by default validation.num_prompts."""
    samples: PositiveInt | None = None
    """Rollouts of each prompt; by default validation.samples_per_prompt."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy; by default validation.temperature."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one completion; by default sampling.max_tokens, or what the task has instead."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass that is sampled from."""
    tasks: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = None
    """Names of the config's tasks that are played, "sums,guess"; by default all of them."""
    success: float = 1.0
    """The least reward of a rollout that counts as right, for pass@k."""
    in_flight: PositiveInt = 256
    """Rollouts at once."""
    model: str | None = None
    """The name by which an endpoint knows its model; by default the only one it has."""
    api: Literal["chat", "tokens"] = "chat"
    """How an endpoint is asked: chat for messages, at /v1/chat/completions; tokens for those of the tokenizer in
    model.path, at /inference/v1/generate, which vLLM and titan-rl serve have."""
    key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds an endpoint's key."""
    body: dict[str, Any] | None = None
    """More fields of each chat request, such as {reasoning_effort = "low"}."""


def make_eval_config(given: Mapping[str, Any]) -> EvalConfig:
    """
    Args:
        given: by the fields' names.

    Raises:
        ConfigError: names the first that is wrong, its value and what is allowed.
    """
    try:
        return EvalConfig.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{name} is no option; there are {', '.join(EvalConfig.model_fields)}") from None
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} {given.get(name)}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
