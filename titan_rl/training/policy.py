"""A policy or its reference model, which scores tokens and draws sequences.

The weights may be kept in the host's memory between passes, and can be rounded like published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_rl.core.errors import ConfigError
from titan_rl.training.attention.attention import Layout, layout_documents
from titan_rl.training.attention.flex_attention import NO_VARIANTS, layout_blocks
from titan_rl.training.choices import ActivationCheckpointing, Attention, DType, Implementation
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.decoder import READS_PARTS, DecoderModel, replay
from titan_rl.training.device import local_device
from titan_rl.training.models.choice import longest_context
from titan_rl.training.models.hf_model import HFModel, read_hf_config
from titan_rl.training.models.lora import Adapter
from titan_rl.training.parallel import World, local, parallelize
from titan_rl.training.settings import AdapterConfig
from titan_rl.training.tensor_batch import LayOut, TensorBatch, make_tensor_batch
from titan_rl.weights.types import TensorSlice

_LAY_OUT: dict[Attention, Callable[..., Layout]] = {"document": layout_documents, "flex": layout_blocks}

FLEX_HEAD_DIM = 16
"""Smallest head size that flex attention's kernel supports."""


def choose_attention(attention: Attention, device_type: str, head_dim: int, *, has_variants: bool = False) -> Attention:
    """Resolve `training.attention` on a device to "document" or "flex".

    Args:
        has_variants: Whether the model has sliding windows, caps on scores or sinks, which flex attention does not
            support.

    Raises:
        ConfigError: The setting is "flex", which cannot compute the model.
    """
    if attention == "flex" and has_variants:
        raise ConfigError(NO_VARIANTS)
    if attention != "auto":
        return attention
    return "flex" if device_type == "cuda" and head_dim >= FLEX_HEAD_DIM and not has_variants else "document"


class Policy:
    """The model of a Hugging Face folder, on this process's device. With `dtype = "bfloat16"` the forward pass
    runs in bfloat16.

    Batches for it must be made with its `lay_out`. In a world of several ranks each rank holds a part of the model, and
    all of them call every method at the same time.

    Args:
        max_context: Most tokens of a sequence.
        master_dtype: Dtype of the trained weights and their gradients between passes.
        base_dtype: Dtype of weights that an adapter leaves frozen; by default, `dtype`.
        adapter: Settings of an adapter, which is then the only part that is trained.
        seed: Seed of the adapter's initial values.
        row_tokens: Most tokens of a row.
        offload_activations: Whether to keep tensors for the backward pass in the host's memory. This pays off if they
            are few: with full checkpointing, one hidden state for each layer.
        offload_weights: Whether to keep the weights of a model that is not trained in the host's memory between passes.
        offload_parameters: Whether to offload parameters and gradients; see `parallelize`.
        implementation: Implementation to use; see `choose_implementation`.
        has_head: Whether the output layer is used. If only `states` is called, set this to False, which freezes the
            output layer.
        base: Policy of the same folder with another adapter, whose frozen weights this one shares. The world must have
            one rank.

    Raises:
        ModelError: The folder lacks a file, or its config and weights do not fit together.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        max_context: int,
        row_tokens: int,
        dtype: DType = "float32",
        master_dtype: DType = "float32",
        base_dtype: DType | None = None,
        adapter: AdapterConfig | None = None,
        seed: int = 0,
        attention: Attention = "auto",
        compile: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        offload_activations: bool = False,
        offload_weights: bool = False,
        offload_parameters: bool = False,
        implementation: Implementation = "auto",
        has_head: bool = True,
        base: Policy | None = None,
    ) -> None:
        self.device = local_device()
        self._world_size = world.size
        self.dtype: torch.dtype = getattr(torch, dtype)
        # Positions restart with every sample, so rows may be longer than the model's context.
        positions = longest_context(read_hf_config(folder))
        self._longest = max(max_context, row_tokens if positions is None else min(row_tokens, positions))
        self._hf = HFModel(
            folder,
            world,
            max_context=self._longest,
            dtype=getattr(torch, master_dtype),
            adapter=adapter,
            base_dtype=getattr(torch, base_dtype or dtype),
            seed=seed,
            implementation=implementation,
        )
        self._decoder: DecoderModel = self._hf.decoder
        self.model: Any = self._decoder.module
        attends = choose_attention(
            attention, self.device.type, self._decoder.head_dim, has_variants=self._decoder.has_variants
        )
        if not has_head and not self._decoder.is_tied:
            self._decoder.head.requires_grad_(False)
        self.lay_out: LayOut = partial(_LAY_OUT[attends], ranks=world.context)
        self._routers = self._decoder.routers
        parallelize(
            self._decoder,
            world,
            dtype=self.dtype,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            offload_parameters=offload_parameters,
        )
        # Several ranks gather parameters in this dtype. Autocast would convert them in each layer and keep the result
        # until its backward pass.
        self._autocasts = world.size == 1 and self.dtype is not torch.float32
        if base is None:
            self._hf.load(self.device, on_host=offload_parameters)
        else:
            self._hf.share(base._hf, self.device)
        self._offloads = offload_activations
        self._keeps_no_state = activation_checkpointing == "none" and not (compile or offload_activations)
        self._host_weights = (
            HostWeights(self._decoder, by_layer=world.size == 1 and not compile) if offload_weights else None
        )

    @property
    def runs_in_threads(self) -> bool:
        """Whether several threads may compute with this policy at the same time, each with its own batch. This requires
        a CPU, a single rank, and a model that keeps no state for the backward pass, such as the experts of a
        mixture."""
        is_alone = self.device.type == "cpu" and self._world_size == 1
        return is_alone and self._keeps_no_state and not self._routers and self._host_weights is None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is trained; None if all weights are trained."""
        return self._hf.adapter

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Number of entries of a hidden state."""
        weight: Any = self._decoder.head.weight
        return weight.shape[-1]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all parameters in the policy's dtype; see `HFModel.named_tensors`."""
        for name, tensor in self._hf.named_tensors():
            yield name, tensor.to(self.dtype)

    def layout(self) -> dict[str, torch.Tensor]:
        """Dtypes and shapes of `named_tensors`, in that order, without memory."""
        return {name: tensor.to(self.dtype) for name, tensor in self._hf.layout.items()}

    def held_slices(self) -> list[tuple[str, TensorSlice]]:
        """Slices that this rank publishes, in the policy's dtype; see `HFModel.held_slices`."""
        return self._hf.held_slices(self.dtype)

    @contextmanager
    def as_published(self) -> Generator[None]:
        """Compute with the published weights in the block, in float32 and without gradients."""
        if self.dtype is torch.float32:
            yield
            return
        autocasts, self._autocasts = self._autocasts, False
        try:
            with rounded_weights(self.model, self.dtype):
                yield
        finally:
            self._autocasts = autocasts

    def logprobs(self, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens at their temperatures.  # [N], [N]"""
        return self._head_of(batch, batch.predictors_N, batch.targets_N, batch.temperatures_N)

    def logprobs_of(self, batch: TensorBatch, others_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of the trained tokens and of K other tokens in their places, in this order, and the entropies.
        # [N, 1 + K], [N]"""
        targets_NJ = torch.cat([batch.targets_N[:, None], others_NK], dim=-1)
        return self._head_of(batch, batch.predictors_N, targets_NJ, batch.temperatures_N)

    def logits(self, batch: TensorBatch) -> torch.Tensor:
        """Logits that predict the trained tokens. There should be few of these tokens.  # [N, V]"""
        return self._head_of(batch, batch.predictors_N)

    def states(self, batch: TensorBatch, positions_M: torch.Tensor) -> torch.Tensor:
        """Hidden states before the output layer, at positions of the flattened rows.  # [M, D]"""
        return self._head_of(batch, positions_M, is_bare=True)

    def _head_of(
        self, batch: TensorBatch, predictors_M: torch.Tensor, *scored: torch.Tensor, is_bare: bool = False
    ) -> Any:
        """Output of the head for the hidden states at some positions or, if `is_bare`, these hidden states themselves.

        A mixture of experts uses the batch's experts until the next call, because the backward pass may recompute the
        forward pass.
        """
        token_ids_BL, positions_BL, experts_BLRK = batch.token_ids_BL, batch.positions_BL, batch.experts_BLRK
        own_M, size = None, len(predictors_M)
        if (share := batch.layout.share) is not None:
            token_ids_BL, positions_BL = share.take(token_ids_BL), share.take(positions_BL)
            experts_BLRK = None if experts_BLRK is None else share.take(experts_BLRK)
            own_M, predictors_M = share.find(predictors_M)
            scored = tuple(each_N[own_M] for each_N in scored)
        replay(self._routers, experts_BLRK)
        with ExitStack() as stack:
            if self._host_weights is not None:
                stack.enter_context(self._host_weights.brought())
            if self._autocasts:
                stack.enter_context(torch.autocast(self.device.type, self.dtype))
            with save_on_cpu(pin_memory=True) if self._offloads else nullcontext():
                hidden_BLD = local(self._decoder.hidden(token_ids_BL, positions_BL, batch.layout))
            hidden_MD = hidden_BLD.flatten(0, 1).index_select(0, predictors_M)
            found = self._bare(hidden_MD) if is_bare else self._decoder.head(hidden_MD, *scored)
        if share is None or own_M is None:
            return found
        spread = partial(share.ranks.spread, at_M=own_M, size=size)
        return tuple(map(spread, found)) if scored else spread(found)

    def _bare(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return the states after passing zero rows through the output layer: FSDP gathers and frees its weights
        together with those of the last norm, and would wait for its call."""
        if self._world_size == 1:
            return hidden_MD
        return hidden_MD + self._decoder.head(hidden_MD[:0]).sum().to(hidden_MD.dtype)

    def complaint(self, batch: TensorBatch) -> str | None:
        """Reason why a batch cannot be scored, such as a token id outside the vocabulary; None if it can be scored."""
        if not 0 <= int(batch.token_ids_BL.min()) <= int(batch.token_ids_BL.max()) < self.vocab_size:
            return f"a sample has token id {int(batch.token_ids_BL.max())}; the vocabulary is {self.vocab_size}"
        if (length := int(batch.positions_BL.max()) + 1) > self._longest:
            return f"a sample has {length} tokens; the model has {self._longest} positions"
        if batch.experts_BLRK is not None:
            has = {(len(self._routers), router.top_k) for router in self._routers}
            if (given := tuple(batch.experts_BLRK.shape[2:])) not in has:
                return f"a sample has routed experts of {given} (layers, experts); the model has {has or 'none'}"
            if (highest := int(batch.experts_BLRK.max())) >= self._routers[0].num_experts:
                return f"a sample was routed to expert {highest}; the model has {self._routers[0].num_experts}"
        return None


class BaseOfAdapter:
    """Reference model that is the base of a policy's adapter. It shares all of the policy's memory."""

    def __init__(self, policy: Policy) -> None:
        assert policy.adapter is not None
        self._policy, self._adapter = policy, policy.adapter

    @property
    def runs_in_threads(self) -> bool:
        """Always False: while the adapter is off, other threads would also compute without it."""
        return False

    def logprobs(self, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens without the adapter; see `Policy.logprobs`."""
        with self._adapter.off():
            return self._policy.logprobs(batch)


Reference = Policy | BaseOfAdapter
"""A reference model, which scores the trained tokens of a batch."""


@torch.no_grad()
def score(policy: Policy, world: World, sequences: Sequence[Sequence[int]], *, max_context: int) -> list[list[float]]:
    """Score sequences with a policy; see `TrainerCore.score`."""
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
    """Draw sequences from a policy; see `TrainerCore.draw`."""
    if not num_sequences:
        return []
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(policy.vocab_size, (num_sequences, 1), generator=generator).tolist()
    for size in range(1, length):
        # Only the next token is scored. Its predictor does not see the placeholder, 0.
        mask = [False] * size + [True]
        batch = make_tensor_batch([[_asking([*ids, 0], mask)] for ids in sequences], policy.device, policy.lay_out)
        probs_NV = policy.logits(batch).float().softmax(-1).cpu()
        for ids, token in zip(sequences, torch.multinomial(probs_NV, 1, generator=generator), strict=True):
            ids.append(int(token))
    return sequences


def _asking(token_ids: Sequence[int], mask: list[bool]) -> Family:
    """Build a sample to score the masked tokens at temperature 1. Its training values are zeros."""
    blank, versions = [0.0] * len(token_ids), [0] * len(token_ids)
    return Family((TrainingSample("", "", token_ids, mask, blank, blank, versions, temperature=1.0),))


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Make the model compute in float32 with weights that are rounded to `dtype` in the block, without gradients.

    Rounding intermediate results too, as training does, would hide how a step with a small learning rate changes
    logprobs. Only one module at a time has its weights in memory twice.
    """
    with ExitStack() as undone:
        if any(module._compiled_call_impl is not None for module in model.modules()):
            # Compiled blocks would use their original weights. Outside blocks, the kernel of flex attention stays
            # compiled.
            undone.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                undone.callback(_keep_inputs(module))
            for part in module.modules() if getattr(module, READS_PARTS, False) else [module]:
                if part._parameters:
                    rounded = _Rounded(part, dtype)
                    # This runs after the hook that gathers the module's parameters, and before the one that frees them.
                    undone.callback(module.register_forward_pre_hook(rounded.enter).remove)
                    undone.callback(module.register_forward_hook(rounded.leave, prepend=True, always_call=True).remove)
        yield


class _Rounded:
    """Hooks that round the weights of a module during a forward pass of the module itself or of a module around it.

    Args:
        part: Module with the weights.
    """

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        self._part = part
        self._dtype = dtype
        self._own: dict[str, Any] = {}

    def enter(self, *_: Any) -> None:
        self._own = dict(self._part._parameters)
        for name, parameter in self._own.items():
            if parameter is not None:
                self._part._parameters[name] = parameter.detach().to(self._dtype).float()  # pyright: ignore[reportArgumentType]

    def leave(self, *_: Any) -> None:
        self._part._parameters.update(self._own)
        self._own = {}


def _keep_inputs(module: FSDPModule) -> Any:
    """Keep FSDP from casting a module's inputs to the dtype in which it gathers parameters. Return a function that
    undoes this."""
    state: Any = module._get_fsdp_state()
    policy = state._mp_policy
    state._mp_policy = replace(policy, cast_forward_inputs=False)

    def undo() -> None:
        state._mp_policy = policy

    return undo


class HostWeights:
    """Keeps the weights of a model that is not trained in the host's memory, and frees their memory on the device.

    Args:
        by_layer: Whether to move the weights to the device one layer at a time. It must be False with several ranks:
            each rank then moves its whole part for the duration of a pass, because FSDP gathers layers from it in
            streams of its own.
    """

    def __init__(self, decoder: DecoderModel, *, by_layer: bool) -> None:
        self._model = model = decoder.module
        self._by_layer = by_layer
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (on the device, on the host)
        if by_layer:
            for module in decoder.parts:
                module.register_forward_pre_hook(self._bring)
                module.register_forward_hook(self._release, always_call=True)
        self._release(model)

    @contextmanager
    def brought(self) -> Generator[None]:
        """Bring the weights to the device for the block, so that the model can compute."""
        if self._by_layer:
            yield
            return
        self._bring(self._model)
        try:
            yield
        finally:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # otherwise the last layers stay gathered
            self._release(self._model)
            self._kept = {storage._cdata: self._kept[storage._cdata] for storage in _storages(self._model)}

    def _bring(self, module: nn.Module, *_: Any) -> None:
        for storage in _storages(module):
            host = self._kept[storage._cdata][1]
            if not storage.nbytes():
                storage.resize_(host.nbytes())
                storage.copy_(host, non_blocking=True)

    def _release(self, module: nn.Module, *_: Any) -> None:
        for storage in _storages(module):
            if storage._cdata not in self._kept:  # in its first pass, FSDP moves the parameter to pad it
                self._kept[storage._cdata] = (storage, _on_host(storage))
            storage.resize_(0)


def _storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """Storages of this rank's part of the parameters."""
    held = (parameter.data for parameter in module.parameters())
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in held]


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    pin = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
    return host.copy_(storage, non_blocking=False)
