"""The table [sft]: supervised training on demonstrations."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from titan_rl.core.settings import PathText, Section, TakesEffect
from titan_rl.training.choices import LearningRateDecay
from titan_rl.training.tiny_model.vocabulary import Level


class TinyModelConfig(Section):
    """The model that is made where `sft.start` names none."""

    level: Level = "word"
    """byte: a token for each byte. word: also one for each word of the demonstrations, and for phrases that many of
    them have."""
    parameters: PositiveInt = 1_000_000
    """How many it has, about."""


class SFTConfig(Section):
    """Supervised training on demonstrations, which makes the model at `model.path`. What the table lacks is as in
    [training]: optimizer, rows, several processes."""

    start: PathText = ""
    """Hugging Face folder of the model that is taught. By default a tiny one is made for the demonstrations."""
    tiny_model: TinyModelConfig = TinyModelConfig()
    """The model that is made where `start` names none."""
    out: PathText = ""
    """Folder that the taught model is written to at the end. By default model.path."""
    data: PathText = ""
    """Where demonstrations come from: a file of chats in JSON lines, or the folder of a run, of which the best rollouts
    are taken. By default what the task demonstrates."""
    top_k: Annotated[PositiveInt, TakesEffect("sft.data", none_of=("",), fix="set that to the folder of a run")] = 1
    """Most rollouts of each group of a run, those with the highest rewards."""
    min_reward: float | None = None
    """Rollouts of a run below this reward are left out. By default none are."""
    demonstrations: PositiveInt = 4096
    """Most that are taken."""
    held_out: NonNegativeInt = 64
    """Demonstrations that are not learned, on which the loss is measured; at most a tenth of them."""
    steps: PositiveInt | None = None
    """Optimizer steps. By default as many as the epochs have."""
    epochs: Annotated[PositiveInt, TakesEffect("sft.steps", one_of=(None,))] = 1
    """How often each demonstration is learned, where `steps` does not say it."""
    batch_size: Annotated[
        PositiveInt, TakesEffect("sft.batch_tokens", one_of=(None,), fix="leave sft.batch_tokens out")
    ] = 32
    """Demonstrations in one optimizer step."""
    batch_tokens: PositiveInt | None = None
    """Tokens in one optimizer step, at most, in place of `batch_size`."""
    shuffle: bool = True
    """Each epoch has an order of its own. Else it is that of the source."""
    lr: PositiveFloat = 2e-3
    """Highest learning rate. The default is for tiny models."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the steps over which the learning rate rises."""
    lr_decay: LearningRateDecay = "cosine"
    """Shape of the learning rate after that."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), TakesEffect("sft.lr_decay", none_of=("constant",))] = 0.1
    """Learning rate at the last step relative to `lr`."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of the optimizer."""
    interval: Annotated[NonNegativeInt, TakesEffect("sft.held_out", none_of=(0,), fix="set that above 0")] = 50
    """Steps between measurements of the held-out loss; 0 measures before and after."""

    @model_validator(mode="after")
    def _data_is_of_one_kind(self) -> Self:
        if not self.data and self.min_reward is not None:
            raise ValueError(
                f"min_reward = {self.min_reward:g} chooses rollouts of a run; set data to its folder, or leave it out"
            )
        return self
