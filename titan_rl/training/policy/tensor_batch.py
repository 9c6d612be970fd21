"""Rows of packed samples as tensors: what the model reads, and what the loss needs of the trained tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from titan_rl.training.attention.attention import Document, Layout, layout_documents
from titan_rl.training.data.family import Family
from titan_rl.training.models.experts import FREE

ROW_MULTIPLE = 16
"""Rows are padded to a multiple of this, so that few distinct shapes occur."""


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """One micro-batch. B rows of L tokens, N of them trained; a padded tail is a document of its own, untrained."""

    token_ids_BL: torch.Tensor  # int64
    positions_BL: torch.Tensor  # int64, restart at 0 with every document
    layout: Layout
    predictors_N: torch.Tensor  # int64, where in the flattened rows the token before each trained token lies
    targets_N: torch.Tensor  # int64, the trained tokens
    behaviour_logprobs_N: torch.Tensor  # float32
    advantages_N: torch.Tensor  # float32
    temperatures_N: torch.Tensor  # float32
    versions_N: torch.Tensor  # int64
    oldest_versions_N: torch.Tensor  # int64, of any token of the same sample
    sequences_N: torch.Tensor  # int64, the number of the sample in this micro-batch
    num_sequences: int
    experts_BLRK: torch.Tensor | None  # int64, of R routers; FREE where they choose. None without a sample that has any
    num_padding: int

    @property
    def num_trained(self) -> int:
        return self.targets_N.numel()


LayOut = Callable[[Sequence[Document], torch.device | str], Layout]


def make_tensor_batch(
    rows: Sequence[Sequence[Family]], device: torch.device | str = "cpu", lay_out: LayOut = layout_documents
) -> TensorBatch:
    """Lay rows out as tensors, padded to the longest of them.

    The first token of a document has no context to be predicted from, so it is never trained.

    Args:
        lay_out: for the attention that is to be used.
    """
    width = max(sum(family.num_tokens for family in row) for row in rows)
    width += -width % ROW_MULTIPLE
    token_ids: list[int] = []
    positions: list[int] = []
    documents: list[Document] = []
    trained: list[int] = []
    behaviour_logprobs: list[float] = []
    advantages: list[float] = []
    temperatures: list[float] = []
    versions: list[int] = []
    oldest_versions: list[int] = []
    sequences: list[int] = []
    num_sequences = 0
    experts: dict[int, Any] = {}  # position of the token that the router sees -> [num_layers, top_k]
    num_padding = 0
    for index, row in enumerate(rows):
        for family in row:
            prefix_start, prefix_length = len(token_ids), family.prefix_length
            if prefix_length:
                token_ids += family.samples[0].token_ids[:prefix_length]
                positions += range(prefix_length)
                documents.append(Document(prefix_length))
            for sample in family.samples:
                start, length = len(token_ids) - prefix_length, len(sample.token_ids)
                token_ids += sample.token_ids[prefix_length:]
                positions += range(prefix_length, length)
                documents.append(Document(length - prefix_length, prefix_start, prefix_length))
                targets = [t for t in range(1, length) if sample.loss_mask[t]]
                trained += [start + t for t in targets]
                behaviour_logprobs += [sample.behaviour_logprobs[t] for t in targets]
                advantages += [sample.advantages[t] for t in targets]
                sample_temperatures = sample.temperatures
                temperatures += [sample_temperatures[t] for t in targets]
                versions += [sample.versions[t] for t in targets]
                for t, experts_RK in enumerate(sample.routed_experts or ()):
                    if t > prefix_length and experts_RK is not None:
                        experts[start + t - 1] = experts_RK
                sequences += [num_sequences] * len(targets)
                num_sequences += 1
                oldest_versions += [min(sample.versions[t] for t in targets)] * len(targets) if targets else []
        if padding := (index + 1) * width - len(token_ids):
            token_ids += [0] * padding
            positions += [0] * padding
            documents.append(Document(padding))
            num_padding += padding

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    token_ids_T, trained_N = ints(token_ids), ints(trained)
    return TensorBatch(
        token_ids_BL=token_ids_T.view(len(rows), width),
        positions_BL=ints(positions).view(len(rows), width),
        layout=lay_out(documents, device),
        predictors_N=trained_N - 1,
        targets_N=token_ids_T[trained_N],
        behaviour_logprobs_N=floats(behaviour_logprobs),
        advantages_N=floats(advantages),
        temperatures_N=floats(temperatures),
        versions_N=ints(versions),
        oldest_versions_N=ints(oldest_versions),
        sequences_N=ints(sequences),
        num_sequences=num_sequences,
        experts_BLRK=_experts(experts, len(rows), width, device),
        num_padding=num_padding,
    )


def _experts(experts: dict[int, Any], num_rows: int, width: int, device: torch.device | str) -> torch.Tensor | None:
    if not experts:
        return None
    rows_PRK = torch.from_numpy(np.stack([np.asarray(row) for row in experts.values()]).astype(np.int64))
    experts_TRK = torch.full((num_rows * width, *rows_PRK.shape[1:]), FREE)
    experts_TRK[list(experts)] = rows_PRK
    return experts_TRK.unflatten(0, (num_rows, width)).to(device)
