"""Memory of the forward and backward pass of one micro-batch, computed from shapes.

The model's own code runs, with its checkpointing and output layer, on tensors that have a shape but no memory (torch's
FakeTensorMode), while a `MemoryTracker` counts the bytes of live tensors, so no family needs its own formula. A model
of more than `TRACED` layers is run twice, with two smaller numbers of layers, and extrapolated linearly, because every
further layer keeps the same number of bytes.
"""

from __future__ import annotations

import json
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_rl.core.errors import ModelError
from titan_rl.training.attention.documents import Document, DocumentSequences
from titan_rl.training.attention.variants import PLAIN, Variant, attend_by_scores
from titan_rl.training.choices import ActivationCheckpointing, DType
from titan_rl.training.decoder_interface import DecoderModel
from titan_rl.training.models.families import is_longrope
from titan_rl.training.parallel import checkpoint_activations
from titan_rl.training.selected_logprobs import CHUNK_LOGITS
from titan_rl.training.settings import AdapterConfig

PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type")
"""Fields of config.json with one value per layer."""

TRACED = 8
"""Maximum number of layers to run."""

CHUNKS = 4
"""Maximum number of chunks of logits to run."""

RECURRENT_CONTEXT = 256
"""Maximum number of tokens of a sequence to run in recurrent layers, at least one of their chunks. These layers keep
the same number of bytes for each token, and transformers' code loops over the chunks of a sequence."""

TOKEN_BY_TOKEN: Mapping[str, int] = {"falcon_mamba": 32, "jamba": 32, "mamba": 32}
"""Maximum number of tokens of a sequence to run in recurrent layers, by `model_type`, for families whose code in
transformers loops over tokens."""

LAYERS = ("num_hidden_layers", "n_layer")
"""Names of the number of layers in config.json."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Description from which a decoder without memory can be built.

    Args:
        text: Content of config.json.
        adapter_rank: Rank of the adapter; 0 if all weights are trained.
    """

    text: str
    implementation: Literal["torchtitan", "transformers"]
    trained_dtype: DType = "float32"
    frozen_dtype: DType = "float32"
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()

    def build(self, num_layers: int | None = None) -> DecoderModel:
        """Build the decoder, with only `num_layers` layers if that is given.

        Raises:
            ModelError: The config lacks a dimension, or the family is unknown.
        """
        hf = _with_one_rope(json.loads(self.text))
        if num_layers is not None:
            for name in LAYERS:
                if name in hf:
                    hf[name] = num_layers
            for name in PER_LAYER:
                if isinstance(hf.get(name), list):
                    hf[name] = hf[name][:num_layers]
        trained, frozen = (getattr(torch, name) for name in (self.trained_dtype, self.frozen_dtype))
        adapter = AdapterConfig(rank=self.adapter_rank, targets=self.adapter_targets) if self.adapter_rank else None
        if self.implementation == "torchtitan":
            from titan_rl.training.models.torchtitan_decoder import TorchtitanDecoder

            return TorchtitanDecoder(
                hf, max_context=1, dtype=trained, splits_matrices=False, adapter=adapter, base_dtype=frozen
            )
        from titan_rl.training.models.transformers_decoder import TransformersDecoder

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(hf))
            try:
                return TransformersDecoder(
                    Path(folder), max_context=1, dtype=trained, adapter=adapter, base_dtype=frozen
                )
            except ModelError as error:  # the message must not name the temporary folder
                raise ModelError(str(error).replace(f" in {folder}", "").replace(folder, "its folder")) from error


def _with_one_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Replace longrope's rotary embeddings in a config.json by plain ones, which need the same memory. Longrope chooses
    between two sets of frequencies by the positions of a batch, but tensors without memory have no values."""
    if not is_longrope(hf):
        return hf
    for name in ("rope_parameters", "rope_scaling"):
        if rope := hf.get(name):
            kept = {field: rope[field] for field in ("rope_theta", "partial_rotary_factor") if field in rope}
            hf[name] = {"rope_type": "default", **kept}
    return hf


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """Shape of a micro-batch, and the settings of its computation.

    Args:
        context: Maximum number of tokens of one document.
        ranks_a_row: Number of context-parallel ranks that share the tokens.
        gathers_documents: Whether attention gathers documents into batches; otherwise it is one kernel over all rows.
        autocasts: Whether each layer converts its weights, as with a single rank.
    """

    rows: int
    row_tokens: int
    context: int
    ranks_a_row: int = 1
    gathers_documents: bool = False
    compute_dtype: DType = "float32"
    autocasts: bool = False
    checkpointing: ActivationCheckpointing = "none"

    @property
    def tokens(self) -> int:
        """Number of tokens of one rank."""
        return -(-self.rows * self.row_tokens // self.ranks_a_row)


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes of one micro-batch, excluding parameters and their gradients.

    Attributes:
        kept: Bytes that the layers keep for the backward pass.
        kept_last: Part of `kept` of the second half of the layers.
        head: Peak of the additional bytes of the output layer, including the gradient of its weights.
        layer: Peak of the additional bytes of the backward pass of the layers.
    """

    kept: int
    head: int
    layer: int
    kept_last: int = 0


def measure_activations(source: DecoderSpec, shape: MicroBatchShape) -> ActivationMemory:
    """Measure the bytes of a forward and a backward pass.

    Raises:
        ModelError: The decoder cannot be built (see `DecoderSpec.build`), or its code needs the values of tensors.
    """
    hf = json.loads(source.text)
    size = next((hf[name] for name in LAYERS if name in hf), TRACED)
    if size <= TRACED:
        return _trace(source, shape, None)
    traced = _trace(source, shape, TRACED)
    further = size - TRACED
    return ActivationMemory(
        traced.kept + traced.kept_last * further // (TRACED - TRACED // 2), traced.head, traced.layer
    )


@lru_cache(maxsize=256)
def _trace(source: DecoderSpec, shape: MicroBatchShape, num_layers: int | None) -> ActivationMemory:
    decoder = source.build(num_layers)
    checkpoint_activations(decoder, shape.checkpointing)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # about kernels, which do not run here
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            _allocate(decoder.module)
            tracker = MemoryTracker((*decoder.module.parameters(), *decoder.module.buffers()))
            stack.enter_context(tracker)
            most = TOKEN_BY_TOKEN.get(json.loads(source.text)["model_type"], RECURRENT_CONTEXT)
            return _run(decoder, shape, tracker, ShapeLayout(shape, most))
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"the memory of this model cannot be computed from its shapes: {str(error).splitlines()[0]}"
        ) from error


def _run(
    decoder: DecoderModel, shape: MicroBatchShape, tracker: MemoryTracker, layout: ShapeLayout
) -> ActivationMemory:
    dtype = getattr(torch, shape.compute_dtype)
    tokens, ids = shape.tokens, torch.zeros(1, shape.tokens, dtype=torch.long)
    begin = tracker.live
    blocks, at = list(decoder.blocks.values()), list[int]()  # bytes before the second half of the layers and after it
    blocks[len(blocks) // 2].register_forward_pre_hook(lambda *_: at.append(tracker.live))
    blocks[-1].register_forward_hook(lambda *_: at.append(tracker.live))
    with torch.autocast("cpu", dtype, enabled=shape.autocasts):
        hidden_BLD = decoder.hidden(ids, torch.zeros_like(ids), cast(Any, layout))
        tracker.restart()
        kept, kept_last = tracker.live - begin, at[1] - at[0]
        # All chunks of logits take the same memory, so a few of them represent all.
        scored = min(tokens, CHUNKS * max(1, CHUNK_LOGITS // decoder.vocab_size))
        unscored = 2 * (tokens - scored) * hidden_BLD.shape[-1] * hidden_BLD.itemsize  # hidden states, their gradients
        targets_N, temperatures_N = torch.zeros(scored, dtype=torch.long), torch.ones(scored)
        hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, targets_N)
        del hidden_BLD
        logprobs_N, _ = decoder.head(hidden_ND, targets_N, temperatures_N)
    found: list[int] = []

    def begin_layers(gradient: torch.Tensor) -> None:
        found.append(tracker.restart())

    hidden_ND.register_hook(begin_layers)
    del hidden_ND
    cast(Any, logprobs_N.sum()).backward()
    head = found[0] if found else tracker.peak
    peak_of_head, peak_of_layer = max(0, head - begin - kept) + unscored, max(0, tracker.peak - begin - kept)
    return ActivationMemory(kept, peak_of_head, peak_of_layer, kept_last)


def _allocate(module: nn.Module) -> None:
    """Replace parameters and buffers by CPU tensors without memory. Gradients are freed as soon as they are
    computed."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    made[id(parameter)].register_post_accumulate_grad_hook(_free)
            each._parameters[name] = made[id(parameter)]
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensors that are created in its block and are still alive.

    Args:
        uncounted: Tensors to leave out of the count.

    Attributes:
        live: Bytes that are alive now.
        peak: Largest number of bytes that were alive at once since `restart`.
    """

    def __init__(self, uncounted: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in uncounted}

    def restart(self) -> int:
        """Begin a new peak, and return the previous one."""
        before, self.peak = self.peak, self.live
        return before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # torch knows its shapes for bfloat16 only
            found = _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {})["offs"])
        else:
            found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


class ShapeLayout:
    """Layout of a micro-batch that has a shape but no tokens, filled with documents of equal length.

    Args:
        recurrent_context: Maximum number of tokens of a sequence in recurrent layers.
    """

    share = None

    def __init__(self, shape: MicroBatchShape, recurrent_context: int) -> None:
        self._shape = shape
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        context = min(shape.context, shape.tokens, recurrent_context)
        count, rest = divmod(shape.tokens, context)
        self.sequences = DocumentSequences([Document(context)] * count + [Document(rest)] * bool(rest))

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float | None = None,
        variant: Variant = PLAIN,
    ) -> torch.Tensor:
        """Allocate the tensors that attention allocates: copies of queries, keys and values if they are gathered, the
        result, and for some variants all scores."""
        shape = self._shape
        q, k, v = q_BLNH, k_BLNH, v_BLNH
        if shape.ranks_a_row > 1:
            k, v = (x.repeat(1, shape.ranks_a_row, 1, 1) for x in (k, v))
        if shape.gathers_documents:
            q, k, v = (x.clone() for x in (q, k, v))
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        context = min(shape.context, q.shape[1])
        mask = None
        if variant.needs_scores or (variant.window is not None and variant.window < context):
            mask = self._mask(context, variant.window, q.dtype)
        if variant.needs_scores and mask is not None:
            count = q.shape[1] // context
            q_D, k_D, v_D = (x[0, : count * context].unflatten(0, (count, context)) for x in (q, k, v))
            out = attend_by_scores(q_D, k_D, v_D, mask, scale, variant)
            rest = q.shape[1] - count * context
            out = torch.cat([out.flatten(0, 1), out.new_empty(rest, *out.shape[2:])])[None]
        else:
            out = _Attention.apply(q, k, v)
        return out.clone() if shape.gathers_documents else out

    def _mask(self, context: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = torch.empty(1, 1, context, context, dtype=dtype)
        return self._masks[window, dtype]


class _Attention(torch.autograd.Function):
    """Attention kernel that saves queries, keys, values, the result and a normalizer per query, but no scores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Allocate the result of a grouped matrix product: of rows with a stack of matrices, or of the columns and rows of
    each group."""
    if a.ndim == b.ndim == 2:
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    return a.new_empty(a.shape[-2], b.shape[-1])
