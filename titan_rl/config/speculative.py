"""The table [generation.speculative]: tokens that are guessed, and checked several at a time."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from titan_rl.core.settings import FilePath, Section, TakesEffect

MOST_GUESSED = 128
"""Tokens that vLLM checks at a time, at most: MAX_SPEC_LEN of its rejection sampler."""

WITH_MODEL = ("draft_model", "eagle", "eagle3")


_LOOKS_UP = TakesEffect("generation.speculative.method", one_of=("ngram",))


class SpeculativeConfig(Section):
    """Tokens that an engine guesses, and checks several of at a time with the policy, which decides what is sampled:
    the distribution stays the policy's. The names are those of vLLM's speculative_config."""

    method: Literal["none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"] = "none"
    """What guesses. ngram looks for the last tokens earlier in the same text, suffix in other answers, too; draft_model
    is a small model of its own; eagle, eagle3 and mtp are heads on the policy, whose weights training does not move."""
    num_speculative_tokens: PositiveInt = Field(default=3, le=MOST_GUESSED)
    """Guessed at a time, at most; vLLM checks no more than 128."""
    model: FilePath | None = None
    """Folder of what guesses, on every host: of draft_model, eagle and eagle3."""
    prompt_lookup_min: Annotated[PositiveInt, _LOOKS_UP] = 2
    """Fewest tokens that ngram looks for."""
    prompt_lookup_max: Annotated[PositiveInt, _LOOKS_UP] = 4
    """Most tokens that ngram looks for, which it begins with."""

    @property
    def is_on(self) -> bool:
        return self.method != "none"

    @property
    def has_weights(self) -> bool:
        """It guesses by weights, which an engine loads once."""
        return self.method not in ("none", "ngram", "suffix")

    def options(self) -> dict[str, Any] | None:
        """As vLLM takes them; None where nothing is guessed."""
        if not self.is_on:
            return None
        names = ["method", "num_speculative_tokens"]
        if self.method == "ngram":
            names += ["prompt_lookup_min", "prompt_lookup_max"]
        if self.method in WITH_MODEL:
            names += ["model"]
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.method in WITH_MODEL and self.model is None:
            raise ValueError(f'method = "{self.method}" needs model, the folder of what guesses')
        if self.method not in WITH_MODEL and self.model is not None:
            raise ValueError(
                f'model is for method = "{WITH_MODEL[0]}", "{WITH_MODEL[1]}" or "{WITH_MODEL[2]}", and method is '
                f'"{self.method}"; leave it out'
            )
        usual = type(self).model_fields["num_speculative_tokens"].default
        if not self.is_on and self.num_speculative_tokens != usual:
            raise ValueError(
                f'num_speculative_tokens = {self.num_speculative_tokens} with method = "none": nothing is guessed; set '
                "method, or leave it out"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} is more than prompt_lookup_max = "
                f"{self.prompt_lookup_max}; lower the one or raise the other"
            )
        return self
