"""Context parallelism: how several ranks share the tokens of rows that are too long for one.

The rows of a batch, laid end to end, are cut into twice as many chunks as there are ranks. Each rank computes one chunk
and its mirror image: the later a token, the more it attends to, and so all ranks have about as much to do. Layer by
layer they gather the keys and values of all tokens; everything else of a token is on its rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Earlier versions of torch have them under the names that are deprecated here.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share the tokens of a row, as one of them sees them."""

    rank: int
    size: int
    group: Any

    def gather(self, own_PNH: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, laid end to end. Its gradient is summed over the ranks, which all use the result:
        one that did not would leave the others waiting in the backward pass.  # [size * P, N, H]"""
        return _Gather.apply(own_PNH, self)

    def spread(self, own_M: torch.Tensor, at_M: torch.Tensor, size: int) -> torch.Tensor:
        """A tensor whose entries the ranks have parts of, whole on each of them. All ranks are to compute the same of
        it, and each takes the gradient of its own entries.

        Args:
            own_M: this rank's entries, of any further dimensions.
            at_M: where they belong.
            size: of the whole.
        """
        return _Spread.apply(own_M, at_M, size, self)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a batch that one of the ranks computes. Behind the last token of the batch there may be padding,
    which is token 0 once more, so that all ranks have as many.

    Example: of 8 tokens rank 0 of 2 computes 0, 1, 6 and 7, and rank 1 the others:

        TokenShare(ranks, chunks=(range(0, 2), range(6, 8)), tokens_P=[0, 1, 6, 7], order_T=[0, 1, 6, 7, 2, 3, 4, 5],
                   place_T=[0, 1, 4, 5, 6, 7, 2, 3])
    """

    ranks: ContextRanks
    chunks: tuple[range, range]  # of this rank, padding included
    tokens_P: torch.Tensor  # this rank's, without padding
    order_T: torch.Tensor  # the tokens of all ranks as they lie when gathered, padding included
    place_T: torch.Tensor  # where each token lies when gathered

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranks, padding included."""
        return len(self.order_T)

    @property
    def here(self) -> slice:
        """This rank's tokens among those gathered."""
        size = len(self.tokens_P)
        return slice(self.ranks.rank * size, (self.ranks.rank + 1) * size)

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all rows, as one row.  # [1, P], and whatever dimensions a token has"""
        return x_BL.flatten(0, 1).index_select(0, self.tokens_P)[None]

    def find(self, tokens_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tokens that this rank computes, and their positions among its own.  # int64 [M], [M]"""
        place_N = self.place_T[tokens_N]
        mine_M = ((place_N >= self.here.start) & (place_N < self.here.stop)).nonzero().squeeze(-1)
        return mine_M, place_N[mine_M] - self.here.start


def share_tokens(
    num_tokens: int, ranks: ContextRanks, *, multiple_of: int = 1, device: torch.device | str = "cpu"
) -> TokenShare:
    """
    Args:
        multiple_of: so many tokens a chunk is to be cut into.
    """
    size = -(-num_tokens // (2 * ranks.size * multiple_of)) * multiple_of
    last = 2 * ranks.size - 1
    numbers = [number for rank in range(ranks.size) for number in (rank, last - rank)]
    chunks_CT = torch.arange((last + 1) * size).view(-1, size)
    order_T = chunks_CT[numbers].flatten()
    early, late = (range(number * size, (number + 1) * size) for number in (ranks.rank, last - ranks.rank))
    own_P = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in (early, late)])
    return TokenShare(
        ranks,
        (early, late),
        own_P.where(own_P < num_tokens, 0).to(device),
        order_T.to(device),
        order_T.argsort().to(device),
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_PNH: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        gathered = own_PNH.new_empty((ranks.size * len(own_PNH), *own_PNH.shape[1:]))
        _gather_into(gathered, own_PNH.contiguous(), group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = grad.new_empty((len(grad) // ctx.ranks.size, *grad.shape[1:]))
        _scatter_into(own, grad.contiguous(), group=ctx.ranks.group)
        return own, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: torch.Tensor, at_M: torch.Tensor, size: int, ranks: ContextRanks) -> torch.Tensor:
        ctx.save_for_backward(at_M)
        whole = own_M.new_zeros((size, *own_M.shape[1:])).index_copy_(0, at_M, own_M)
        dist.all_reduce(whole, group=ranks.group)  # to which the others add zeros
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (at_M,) = ctx.saved_tensors
        return grad.index_select(0, at_M), None, None, None
