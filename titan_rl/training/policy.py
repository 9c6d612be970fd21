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
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule

from titan_rl.core.errors import ConfigError
from titan_rl.training.attention.attention import Layout, layout_documents
from titan_rl.training.attention.flex_attention import NO_VARIANTS, layout_blocks
from titan_rl.training.choices import Attention, DType
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.decoder_interface import READS_PARTS, DecoderModel, replay
from titan_rl.training.device import local_device
from titan_rl.training.models.families import longest_context
from titan_rl.training.models.hf_model import HFModel, read_hf_config
from titan_rl.training.models.lora import Adapter
from titan_rl.training.parallel import World, local, parallelize
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.tensor_batch import LayOut, TensorBatch, make_tensor_batch
from titan_rl.weights.types import TensorSlice

_LAY_OUT: dict[Attention, Callable[..., Layout]] = {"document": layout_documents, "flex": layout_blocks}

FLEX_HEAD_DIM = 16
"""Smallest head size that flex attention's kernel supports."""


def choose_attention(attention: Attention, device_type: str, head_dim: int, *, has_variants: bool = False) -> Attention:
    """Resolve `training.attention` on a device to "document" or "flex".

    Args:
        has_variants: Whether the model has sliding windows, softcapped scores or sinks, which flex attention does not
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
    """The model of a Hugging Face folder, on this process's device. With `model.dtype = "bfloat16"` the forward pass
    runs in bfloat16.

    Batches must be made with the policy's `lay_out`. In a world of several ranks each rank holds a part of the model,
    and all ranks call every method at the same time.

    Args:
        seed: Seed of the adapter's initial values.
        role: "policy", "reference" for a reference model, which is not trained and has no adapter, or "trunk" for a
            critic's trained trunk, of which only `states` is called, and whose output layer is frozen.
        base: Policy of the same folder with another adapter, whose frozen weights this one shares. The world must have
            one rank.
        base_dtype: Dtype of weights that an adapter leaves frozen; by default, `model.dtype`.

    Attributes:
        runs_in_threads: Whether several threads may compute with this policy at the same time, each with its own batch.
            This requires a CPU, a single rank, and a model that keeps no state for the backward pass, such as the
            experts of a mixture.

    Raises:
        ModelError: The folder lacks a file, or its config and weights do not fit together.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        world: World,
        *,
        seed: int = 0,
        role: Literal["policy", "reference", "trunk"] = "policy",
        base: Policy | None = None,
        base_dtype: DType | None = None,
    ) -> None:
        self.device = local_device()
        self._world = world
        self._max_context = model.max_context
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        # Positions restart with every sample, so rows may be longer than the model's context.
        row_tokens, positions = training.row_tokens, longest_context(read_hf_config(Path(model.path)))
        self._longest = max(model.max_context, row_tokens if positions is None else min(row_tokens, positions))
        self._hf = HFModel(
            Path(model.path),
            world,
            max_context=self._longest,
            dtype=getattr(torch, training.master_dtype),
            adapter=training.adapter if training.adapter.is_on and role != "reference" else None,
            base_dtype=getattr(torch, base_dtype or model.dtype),
            seed=seed,
            implementation=model.implementation,
        )
        self._decoder: DecoderModel = self._hf.decoder
        self.model: Any = self._decoder.module
        attends = choose_attention(
            training.attention, self.device.type, self._decoder.head_dim, has_variants=self._decoder.has_variants
        )
        if role == "trunk" and not self._decoder.is_tied:
            self._decoder.head.requires_grad_(False)
        self.lay_out: LayOut = partial(_LAY_OUT[attends], ranks=world.context)
        self._routers = self._decoder.routers
        on_host = "parameters" in training.offload and role != "reference"
        parallelize(
            self._decoder,
            world,
            dtype=self.dtype,
            compile=training.compile,
            activation_checkpointing=training.activation_checkpointing,
            offload_parameters=on_host,
        )
        # Several ranks gather parameters in this dtype. Autocast would convert them in each layer and keep the result
        # until its backward pass.
        self._autocasts = world.size == 1 and self.dtype is not torch.float32
        if base is None:
            self._hf.load(self.device, on_host=on_host)
        else:
            self._hf.share(base._hf, self.device)
        self._offloads = "activations" in training.offload
        self._host_weights = None
        if "reference" in training.offload and role == "reference":
            self._host_weights = HostWeights(self._decoder, by_layer=world.size == 1 and not training.compile)
        is_alone = self.device.type == "cpu" and world.size == 1
        self.runs_in_threads = is_alone and not (training.prevents_threads or self._routers)

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

    def untrained_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the folder's tensors that are not trained; see `HFModel.untrained_tensors`."""
        return self._hf.untrained_tensors()

    def layout(self) -> dict[str, torch.Tensor]:
        """Dtypes and shapes of `named_tensors` and `untrained_tensors`, in that order, without memory."""
        layout = {name: tensor.to(self.dtype) for name, tensor in self._hf.layout.items()}
        return layout | {name: tensor.to("meta") for name, tensor in self.untrained_tensors()}

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
        """Logprobs of the trained tokens and of K other tokens at their positions, in this order, and the entropies.
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
        if self._world.size == 1:
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

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the logprobs at temperature 1 of each sequence's tokens after the first.

        Returns:
            Logprobs as [num_sequences][len(sequence) - 1].

        Raises:
            TrainingError: A token id is outside the vocabulary.
            ValueError: A sequence is longer than model.max_context.
        """
        row: list[Family] = []
        for sequence in sequences:
            length = len(sequence)
            if length > self._max_context:
                raise ValueError(f"a sequence has {length} tokens; model.max_context is {self._max_context}")
            if length > 1:
                row.append(_asking(sequence, [True] * length))
        if not row:
            return [[] for _ in sequences]
        batch = make_tensor_batch([row], self.device, self.lay_out)
        self._world.agree(self.complaint(batch))
        logprobs_N, _ = self.logprobs(batch)
        logprobs = iter(logprobs_N.tolist())
        return [list(islice(logprobs, max(len(sequence) - 1, 0))) for sequence in sequences]

    @torch.no_grad()
    def draw(self, num_sequences: int, length: int, seed: int) -> list[list[int]]:
        """Sample sequences at temperature 1, after a random first token; see `TrainerCore.draw`.

        Returns:
            Token ids as [num_sequences][length].
        """
        if not num_sequences:
            return []
        generator = torch.Generator().manual_seed(seed)
        sequences = torch.randint(self.vocab_size, (num_sequences, 1), generator=generator).tolist()
        for size in range(1, length):
            # Only the next token is scored. Its predictor does not see the placeholder, 0.
            mask = [False] * size + [True]
            batch = make_tensor_batch([[_asking([*ids, 0], mask)] for ids in sequences], self.device, self.lay_out)
            probs_NV = self.logits(batch).float().softmax(-1).cpu()
            for ids, token in zip(sequences, torch.multinomial(probs_NV, 1, generator=generator), strict=True):
                ids.append(int(token))
        return sequences


class InitialAdapter:
    """Reference model that is a policy with its initial adapter. It shares the policy's frozen weights.

    Without `training.adapter.start` an adapter initially changes nothing, so it is switched off. Otherwise its initial
    matrices are kept, as the policy computes with them.

    Args:
        policy: Policy whose adapter has its initial values.
    """

    def __init__(self, policy: Policy) -> None:
        assert policy.adapter is not None
        self._policy, self._adapter = policy, policy.adapter
        self.runs_in_threads = False  # during a pass, other threads would also compute with the initial adapter
        starts = self._adapter.settings.start is not None
        self._initial = _gathered_weights(policy.model, self._adapter.parts) if starts else {}

    def logprobs(self, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens with the initial adapter; see `Policy.logprobs`."""
        with self._with_initial() if self._initial else self._adapter.off():
            return self._policy.logprobs(batch)

    @contextmanager
    def _with_initial(self) -> Generator[None]:
        with ExitStack() as undone:
            _leave_compiled_blocks(self._policy.model, undone)
            for part, weight in self._initial.items():
                _Substituted(part, partial(_other, weight)).hook(part, undone)
            yield


Reference = Policy | InitialAdapter
"""A reference model, which scores the trained tokens of a batch."""


def _gathered_weights(model: nn.Module, parts: Sequence[nn.Module]) -> dict[nn.Module, torch.Tensor]:
    """Copies of the weights of some modules, as a forward pass uses them. All ranks call this at the same time."""
    owners: dict[nn.Module, FSDPModule | None] = dict.fromkeys(parts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            owners |= {part: module for part in module.modules() if part in owners}  # modules inside follow
    kept: dict[nn.Module, torch.Tensor] = {}
    for owner in dict.fromkeys(owners.values()):
        if owner is not None:
            owner.unshard()
        kept |= {part: cast(Any, part).weight.detach().clone() for part in parts if owners[part] is owner}
        if owner is not None:
            owner.reshard()
    return kept


def _other(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return weight


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
        _leave_compiled_blocks(model, undone)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                undone.callback(_keep_inputs(module))
            for part in module.modules() if getattr(module, READS_PARTS, False) else [module]:
                if part._parameters:
                    _Substituted(part, partial(_rounded, dtype)).hook(module, undone)
        yield


def _rounded(dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to(dtype).float()


def _leave_compiled_blocks(model: nn.Module, undone: ExitStack) -> None:
    """Compute without compiled blocks, which would use their original weights. Outside blocks, the kernel of flex
    attention stays compiled."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        undone.enter_context(torch.compiler.set_stance("force_eager"))


class _Substituted:
    """Hooks that replace the weights of a module during a forward pass of the module itself or of a module around it.

    Args:
        part: Module with the weights.
        substitute: Function from a weight to its replacement.
    """

    def __init__(self, part: nn.Module, substitute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._part = part
        self._substitute = substitute
        self._own: dict[str, Any] = {}

    def hook(self, module: nn.Module, undone: ExitStack) -> None:
        """Replace the weights during forward passes of `module`, until `undone` is closed."""
        # This runs after the hook that gathers the module's parameters, and before the one that frees them.
        undone.callback(module.register_forward_pre_hook(self.enter).remove)
        undone.callback(module.register_forward_hook(self.leave, prepend=True, always_call=True).remove)

    def enter(self, *_: Any) -> None:
        self._own = dict(self._part._parameters)
        for name, parameter in self._own.items():
            if parameter is not None:
                self._part._parameters[name] = self._substitute(parameter)  # pyright: ignore[reportArgumentType]

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
            each rank then moves its whole part for the duration of a pass, because FSDP gathers layers from it in its
            own streams.
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
    return [local(parameter.data).untyped_storage() for parameter in module.parameters()]


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    pin = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
    return host.copy_(storage, non_blocking=False)
