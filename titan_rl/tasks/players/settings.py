"""Players of seats: the table [task.seats]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag

from titan_rl.core.settings import FilePath, FunctionName, Section


class Endpoint(Section):
    """Model behind OpenAI's chat protocol."""

    url: str = Field(min_length=1)
    """Base URL, such as "https://api.openai.com/v1"."""
    model: str = Field(min_length=1)
    """The model's name there."""
    api_key: str = "OPENAI_API_KEY"
    """Environment variable with the key, if the endpoint needs one."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one answer. By default the endpoint's own."""
    temperature: NonNegativeFloat | None = None
    """By default the endpoint's own."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one answer, retries included."""


class FrozenPolicy(Section):
    """Frozen checkpoint that is served next to the run."""

    policy: FilePath = Field(min_length=1)
    """The folder of a run, whose newest checkpoint is taken, of an export, or of a model. It reads the same tokens as
    the policy in training."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Settings of its server, such as {"generation.kv_cache_gib" = "0.5"}; `titan-rl serve --help` lists them."""
    temperature: NonNegativeFloat | None = None
    """By default the policy's."""
    start_s: PositiveFloat = 300.0
    """Longest time until the first answer."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one answer."""


def _kind(given: Any) -> str | None:
    if isinstance(given, str):
        return "named"
    if isinstance(given, Endpoint) or (isinstance(given, Mapping) and "url" in given):
        return "endpoint"
    if isinstance(given, FrozenPolicy) or (isinstance(given, Mapping) and "policy" in given):
        return "frozen"
    return None


PlayerSetting = Annotated[
    Annotated[str, FunctionName(("policy",)), Tag("named")]
    | Annotated[Endpoint, Tag("endpoint")]
    | Annotated[FrozenPolicy, Tag("frozen")],
    Discriminator(
        _kind,
        custom_error_type="player",
        custom_error_message=(
            'must be "policy", "module:function" of a script, {url = "...", model = "..."} or {policy = "folder"}'
        ),
    ),
]
"""Player of a seat: "policy", the one in training; a script, "module:function", from messages to a reply; an endpoint,
or a checkpoint."""
