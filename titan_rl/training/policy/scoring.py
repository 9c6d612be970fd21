"""What a policy makes of whole sequences: their logprobs, and sequences of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from titan_rl.training.data.family import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.parallel.world import World
from titan_rl.training.policy.policy import Policy
from titan_rl.training.policy.tensor_batch import make_tensor_batch


@torch.no_grad()
def score(policy: Policy, world: World, sequences: Sequence[Sequence[int]], *, max_context: int) -> list[list[float]]:
    """See `TrainerCore.score`."""
    row: list[Family] = []
    for sequence in sequences:
        length = len(sequence)
        if length > max_context:
            raise ValueError(f"a sequence has {length} tokens; model.max_context is {max_context}")
        if length > 1:
            row.append(_asking(sequence, [True] * length))
    if not row:
        return [[] for _ in sequences]
    batch = make_tensor_batch([row], policy.device, policy.lay_out)
    world.agree(policy.complaint(batch))
    logprobs_N, _ = policy.logprobs(batch)
    logprobs = iter(logprobs_N.tolist())
    return [list(islice(logprobs, max(len(sequence) - 1, 0))) for sequence in sequences]


@torch.no_grad()
def draw(policy: Policy, num_sequences: int, length: int, seed: int) -> list[list[int]]:
    """See `TrainerCore.draw`."""
    if not num_sequences:
        return []
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(policy.vocab_size, (num_sequences, 1), generator=generator).tolist()
    for size in range(1, length):
        # The token to be drawn is the only one asked for; what stands in its place is not seen by its predictor.
        mask = [False] * size + [True]
        batch = make_tensor_batch([[_asking([*ids, 0], mask)] for ids in sequences], policy.device, policy.lay_out)
        probs_NV = policy.logits(batch).float().softmax(-1).cpu()
        for ids, token in zip(sequences, torch.multinomial(probs_NV, 1, generator=generator), strict=True):
            ids.append(int(token))
    return sequences


def _asking(token_ids: Sequence[int], mask: list[bool]) -> Family:
    """A sample that is asked for the logprobs of the masked tokens at temperature 1, and brings nothing to train."""
    blank, versions = [0.0] * len(token_ids), [0] * len(token_ids)
    return Family((TrainingSample("", "", token_ids, mask, blank, blank, versions, temperature=1.0),))
