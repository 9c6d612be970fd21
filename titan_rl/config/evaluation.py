"""Settings of an evaluation: the options of `titan-rl eval` and the arguments of `titan_rl.evaluate`."""

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
    """Settings of an evaluation. Defaults are those of the run's validation."""

    num_prompts: PositiveInt | None = None
    """Held-out prompts of each task; by default validation.num_prompts."""
    samples: PositiveInt | None = None
    """Rollouts of each prompt; by default validation.samples_per_prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy. By default validation.temperature."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one completion; by default sampling.max_tokens, or the task's own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of nucleus sampling."""
    tasks: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = None
    """Names of the tasks to play, "sums,guess"; by default all tasks of the config."""
    success: float = 1.0
    """Least reward of a successful rollout, for pass@k."""
    in_flight: PositiveInt = 256
    """Most rollouts at a time."""
    model: str | None = None
    """Name of an endpoint's model; by default the only one it has."""
    api: Literal["chat", "tokens"] = "chat"
    """API of an endpoint. chat: messages, at /v1/chat/completions. tokens: token ids of the tokenizer in model.path, at
    /inference/v1/generate, which vLLM and titan-rl serve have."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable with an endpoint's key."""
    body: dict[str, Any] | None = None
    """Further fields of each chat request, such as {reasoning_effort = "low"}."""


def make_eval_config(given: Mapping[str, Any]) -> EvalConfig:
    """Check the settings of an evaluation.

    Args:
        given: Values of settings by field name.

    Raises:
        ConfigError: A setting is wrong. The message names the first such setting, its value and what is allowed.
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
