"""A model that scores tokens: the policy itself, or the reference it is held to."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from titan_rl.config.sections import ModelConfig, TrainingConfig
from titan_rl.training.batch import Batch
from titan_rl.training.device import local_device
from titan_rl.training.logprobs import selected_logprobs
from titan_rl.training.model import build_model, load_weights, model_config_from_hf, read_hf_config
from titan_rl.training.parallel import local, parallelize, plan_sharding, whole
from titan_rl.training.world import World


class Policy:
    """torchtitan's model of a Hugging Face folder, on this process's device. Weights are float32; with
    `dtype = "bfloat16"` the forward pass runs in bfloat16.

    In a world of several ranks each holds a part, and all of them call every method at the same time.

    Raises:
        ModelError: the folder lacks a file, or its config and weights do not fit together.
    """

    def __init__(self, config: ModelConfig, training: TrainingConfig, world: World) -> None:
        folder = Path(config.path)
        self.device = local_device()
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        hf_config = read_hf_config(folder)
        # Positions restart with every sample, so rows may be longer than what the model can attend to.
        positions = hf_config.get("max_position_embeddings", training.row_tokens)
        self._longest = max(config.max_context, min(training.row_tokens, positions))
        model_config = model_config_from_hf(hf_config, max_context=self._longest)
        plan_sharding(model_config, world)
        self.model = build_model(model_config, self.device)
        load_weights(self.model, folder)
        parallelize(self.model, world, training)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size

    def logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens at their temperatures.  # [N], [N]"""
        return selected_logprobs(self.logits(batch), batch.targets_N, batch.temperatures_N)

    def logits(self, batch: Batch) -> torch.Tensor:
        """What the model predicts in place of each trained token.  # [N, V]"""
        autocast = self.dtype is not torch.float32
        with torch.autocast(self.device.type, self.dtype) if autocast else nullcontext():
            hidden_BLD = local(self.model(batch.token_ids_BL, batch.positions_BL, batch.layout))
            return whole(self.model.lm_head(hidden_BLD.flatten(0, 1).index_select(0, batch.predictors_N)))

    def complaint(self, batch: Batch) -> str | None:
        """Why this batch cannot be scored: a token id outside the vocabulary, or more positions than the model has."""
        if not 0 <= int(batch.token_ids_BL.min()) <= int(batch.token_ids_BL.max()) < self.vocab_size:
            return f"a sample has token id {int(batch.token_ids_BL.max())}; the vocabulary is {self.vocab_size}"
        if (length := int(batch.positions_BL.max()) + 1) > self._longest:
            return f"a sample has {length} tokens; the model has {self._longest} positions"
        return None
