"""Micro-batches and minibatches as tensors: inputs of the model, and the values of the trained tokens for the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from titan_rl.core.arrays import FREE_ROW, expert_rows
from titan_rl.training.attention.attention import Layout, layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import MinibatchPlan
from titan_rl.training.decoder_interface import FREE
from titan_rl.training.parallel import World

PLACEHOLDER = Family((TrainingSample("", "", [0, 0], [False, False], [0.0, 0.0], [0.0, 0.0], [-1, -1], 1.0),))
"""Row that a rank without rows passes through the model, because the ranks compute every layer together."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's micro-batches of one optimizer step."""

    batches: list[TensorBatch]
    rollout_ids: list[str]  # rollouts of this rank's samples, including those without a token to train on
    num_samples: int  # number of samples of all ranks
    num_dropped: int  # number of samples of all ranks that are longer than a row
    num_padding: int  # positions without a sample
    num_positions: int

    @staticmethod
    def from_plan(
        plan: MinibatchPlan, device: torch.device, *, alone: bool, lay_out: LayOut = layout_documents
    ) -> Minibatch:
        """Lay out the rows of a plan as tensors.

        Args:
            alone: Whether there is no other rank. Micro-batches without a trained token are then left out.
            lay_out: Function that lays out the documents; see `make_tensor_batch`.
        """
        batches = [make_tensor_batch(rows or [[PLACEHOLDER]], device, lay_out) for rows in plan.micro_batches]
        families = [family for rows in plan.micro_batches for row in rows for family in row]
        num_positions = sum(batch.token_ids_BL.numel() for batch in batches)
        return Minibatch(
            batches=[batch for batch in batches if batch.num_trained or not alone],
            rollout_ids=list(dict.fromkeys(sample.rollout_id for family in families for sample in family.samples)),
            num_samples=plan.num_samples,
            num_dropped=plan.num_dropped,
            num_padding=num_positions - sum(family.num_tokens for family in families),
            num_positions=num_positions,
        )


def packing_metrics(minibatches: Sequence[Minibatch], world: World) -> dict[str, float]:
    """Compute the metrics of minibatches over all ranks: num_samples (trained), num_dropped_samples (longer than a row)
    and padding_fraction (share of positions without a sample)."""
    num_samples = sum(minibatch.num_samples for minibatch in minibatches)
    num_dropped = sum(minibatch.num_dropped for minibatch in minibatches)
    padding_here = sum(minibatch.num_padding for minibatch in minibatches)
    positions_here = sum(minibatch.num_positions for minibatch in minibatches)
    num_padding, num_positions = world.sum([padding_here, positions_here])
    return {
        "num_samples": float(num_samples - num_dropped),
        "num_dropped_samples": float(num_dropped),
        "padding_fraction": num_padding / num_positions if num_positions else 0.0,
    }


ROW_MULTIPLE = 16
"""Multiple to which the length of rows is padded, so that few distinct shapes occur."""


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """One micro-batch: B rows of L tokens, with N trained tokens altogether. Padding at the end of a row is an
    separate, untrained document."""

    token_ids_BL: torch.Tensor  # int64
    positions_BL: torch.Tensor  # int64, restart at 0 with every document
    layout: Layout
    predictors_N: torch.Tensor  # int64, position in the flattened rows of the token before each trained token
    targets_N: torch.Tensor  # int64, the trained tokens
    behaviour_logprobs_N: torch.Tensor  # float32
    advantages_N: torch.Tensor  # float32
    temperatures_N: torch.Tensor  # float32
    loss_weights_N: torch.Tensor  # float32, 1 by default
    versions_N: torch.Tensor  # int64
    oldest_versions_N: torch.Tensor  # int64, oldest version of any token of the same sample
    sequences_N: torch.Tensor  # int64, index of the sample in this micro-batch
    rollout_ids: tuple[str, ...]  # rollout of each sample, in the order of the indices
    teacher: TeacherTokens | None  # None if no sample has any scores
    episodes: EpisodeTokens | None  # None unless all samples have rewards
    experts_BLRK: torch.Tensor | None  # int64, of R routers; FREE where they choose. None if no sample has any

    @property
    def num_trained(self) -> int:
        return self.targets_N.numel()

    @property
    def num_sequences(self) -> int:
        return len(self.rollout_ids)


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """The K top tokens of a teacher at the position of each trained token."""

    ids_NK: torch.Tensor  # int64; 0 where a token has no score
    logprobs_NK: torch.Tensor  # float32, NaN where a token has no score

    @property
    def scored_N(self) -> torch.Tensor:
        """Whether a token has a score.  # bool [N]"""
        return self.logprobs_NK.isfinite().all(-1)


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Rewards of the N trained tokens of S samples, on the host."""

    rewards_N: NDArray[np.float64]  # include the rewards of the untrained tokens up to the next trained one
    turns_N: NDArray[np.int64]
    lasts_S: NDArray[np.int64]  # position in the flattened rows of the last token of each sample
    is_truncated_S: NDArray[np.bool_]
    ends_rollout_S: NDArray[np.bool_]


LayOut = Callable[[Sequence[Document], torch.device | str], Layout]


def make_tensor_batch(
    rows: Sequence[Sequence[Family]], device: torch.device | str = "cpu", lay_out: LayOut = layout_documents
) -> TensorBatch:
    """Lay out rows as tensors, padded to the longest row.

    The first token of a document has no context to be predicted from, so it is never trained.

    Args:
        lay_out: Function that lays out the documents for the attention in use.
    """
    width = max(sum(family.num_tokens for family in row) for row in rows)
    width += -width % ROW_MULTIPLE
    token_ids_T = np.zeros(len(rows) * width, np.int64)
    positions_T = np.zeros(len(rows) * width, np.int64)
    documents: list[Document] = []
    samples: list[TrainingSample] = []
    starts: list[int] = []  # position of each sample's first token in the flattened rows, if its prefix were its own
    experts: dict[int, Any] = {}  # position of the token that the router sees -> [num_layers, top_k]
    for index, row in enumerate(rows):
        end = index * width
        for family in row:
            prefix_start, prefix_length = end, family.prefix_length
            if prefix_length:
                token_ids_T[end : end + prefix_length] = np.asarray(family.samples[0].token_ids[:prefix_length])
                positions_T[end : end + prefix_length] = np.arange(prefix_length)
                documents.append(Document(prefix_length))
                end += prefix_length
            for sample in family.samples:
                start, length = end - prefix_length, len(sample.token_ids)
                begin, end = end, start + length
                token_ids_T[begin:end] = np.asarray(sample.token_ids[prefix_length:])
                positions_T[begin:end] = np.arange(prefix_length, length)
                documents.append(Document(length - prefix_length, prefix_start, prefix_length))
                if sample.routed_experts is not None:
                    experts |= _experts_of(sample, start, prefix_length)
                samples.append(sample)
                starts.append(start)
        if padding := (index + 1) * width - end:
            documents.append(Document(padding))

    targets = [1 + np.flatnonzero(np.asarray(sample.loss_mask)[1:]) for sample in samples]  # [num_trained] each
    versions = [np.asarray(sample.versions) for sample in samples]

    def of_trained(values: Iterable[Any], dtype: Any) -> torch.Tensor:
        """Values of the trained tokens. A sample has one for each of its tokens, or one for all of them."""
        picked = [
            np.asarray(own)[at] if isinstance(own, Sequence | np.ndarray) else np.full(len(at), own, dtype)
            for own, at in zip(values, targets, strict=True)
        ]
        return torch.from_numpy(np.concatenate(picked, dtype=dtype, casting="unsafe")).to(device)

    placed = np.concatenate([start + at for start, at in zip(starts, targets, strict=True)])
    trained_N, flat_T = (torch.from_numpy(each).to(device) for each in (placed, token_ids_T))
    return TensorBatch(
        token_ids_BL=flat_T.view(len(rows), width),
        positions_BL=torch.from_numpy(positions_T).to(device).view(len(rows), width),
        layout=lay_out(documents, device),
        predictors_N=trained_N - 1,
        targets_N=flat_T[trained_N],
        behaviour_logprobs_N=of_trained((each.behaviour_logprobs for each in samples), np.float32),
        advantages_N=of_trained((each.advantages for each in samples), np.float32),
        temperatures_N=of_trained((each.temperature for each in samples), np.float32),
        loss_weights_N=of_trained(
            (1 if each.loss_weights is None else each.loss_weights for each in samples), np.float32
        ),
        versions_N=of_trained(versions, np.int64),
        oldest_versions_N=of_trained(
            (own[at].min() if len(at) else 0 for own, at in zip(versions, targets, strict=True)), np.int64
        ),
        sequences_N=of_trained(range(len(samples)), np.int64),
        rollout_ids=tuple(each.rollout_id for each in samples),
        teacher=_teacher_tokens(samples, targets, device),
        episodes=_episode_tokens(samples, starts, targets),
        experts_BLRK=_experts(experts, len(rows), width, device),
    )


def _teacher_tokens(
    samples: Sequence[TrainingSample], targets: Sequence[NDArray[Any]], device: torch.device | str
) -> TeacherTokens | None:
    """The teacher's top tokens for all samples, with NaN logprobs for samples without scores. None if no sample has
    scores."""
    top_k = max((each.teacher.top_k for each in samples if each.teacher is not None), default=0)
    if not top_k:
        return None
    count = sum(map(len, targets))
    ids_NK, logprobs_NK = np.zeros((count, top_k), np.int64), np.full((count, top_k), np.nan, np.float32)
    end = 0
    for sample, at in zip(samples, targets, strict=True):
        start, end = end, end + len(at)
        if (scores := sample.teacher) is not None and scores.top_k:
            shape = len(sample.token_ids), scores.top_k
            ids_NK[start:end] = np.asarray(scores.top_ids).reshape(shape)[at]
            logprobs_NK[start:end] = np.asarray(scores.top_logprobs).reshape(shape)[at]
    return TeacherTokens(torch.from_numpy(ids_NK).to(device), torch.from_numpy(logprobs_NK).to(device))


def _episode_tokens(
    samples: Sequence[TrainingSample], starts: Sequence[int], targets: Sequence[NDArray[Any]]
) -> EpisodeTokens | None:
    episodes = [each.episode for each in samples if each.episode is not None]
    if len(episodes) < len(samples):
        return None
    rewards = (np.asarray(each.rewards, np.float64) for each in episodes)
    summed = [np.add.reduceat(each, at) if len(at) else each[:0] for each, at in zip(rewards, targets, strict=True)]
    turns = [np.asarray(each.turns, np.int64)[at] for each, at in zip(episodes, targets, strict=True)]
    lasts = [start + len(sample.token_ids) - 1 for start, sample in zip(starts, samples, strict=True)]
    return EpisodeTokens(
        np.concatenate(summed),
        np.concatenate(turns),
        np.array(lasts),
        np.array([each.is_truncated for each in episodes]),
        np.array([each.ends_rollout for each in episodes]),
    )


def _experts_of(sample: TrainingSample, start: int, prefix_length: int) -> dict[int, Any]:
    """Known experts [num_layers, top_k] for the tokens after the prefix, by the position of the token that the router
    sees."""
    rows_TRK = np.asarray(expert_rows(sample.routed_experts))
    known = np.flatnonzero(rows_TRK[:, 0, 0] != FREE_ROW)
    return {start + int(t) - 1: rows_TRK[t] for t in known if t > prefix_length}


def _experts(experts: dict[int, Any], num_rows: int, width: int, device: torch.device | str) -> torch.Tensor | None:
    if not experts:
        return None
    rows_PRK = torch.from_numpy(np.stack([np.asarray(row) for row in experts.values()]).astype(np.int64))
    experts_TRK = torch.full((num_rows * width, *rows_PRK.shape[1:]), FREE)
    experts_TRK[list(experts)] = rows_PRK
    return experts_TRK.unflatten(0, (num_rows, width)).to(device)
