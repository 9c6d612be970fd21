"""Builds torchtitan's Qwen3 from a Hugging Face folder and loads its weights.

The folder's config and weights are compared by name and shape before anything is loaded, so that a mismatch is an
error that names the tensor and not a model that generates noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.errors import ModelError
from titan_rl.training.attention import DocumentAttention
from titan_rl.training.parallel import whole

# isort: split
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

_INIT: dict[str, Callable[..., Any]] = {"weight": partial(nn.init.normal_, std=0.02)}
_NORM_INIT: dict[str, Callable[..., Any]] = {"weight": nn.init.ones_}


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: it is missing, not JSON, or of a model this package does not build.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; model.path must be a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    supported = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    # What a config leaves out has the default, which is supported; the model type has none.
    for key, value in supported.items():
        found = config.get(key, None if key == "model_type" else value)
        if found != value:
            raise ModelError(f"{path} has {key} {found!r}; only {value!r} is supported")
    return cast(dict[str, Any], config)


def model_config_from_hf(hf: Mapping[str, Any], *, max_context: int) -> Qwen3Model.Config:
    """torchtitan's config of a dense Qwen3.

    Args:
        max_context: the most positions that will be used; rotary caches are no longer than needed.

    Raises:
        ModelError: a field is missing or cannot be built.
    """
    try:
        dim, vocab_size, eps = hf["hidden_size"], hf["vocab_size"], hf["rms_norm_eps"]
        num_layers, hidden_dim = hf["num_hidden_layers"], hf["intermediate_size"]
        num_heads, num_kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}") from None
    head_dim = hf.get("head_dim") or dim // num_heads
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ModelError(f"config.json has rope type {rope_type!r}; only 'default' is supported")
    positions = hf.get("max_position_embeddings", max_context)
    if positions < max_context:
        raise ModelError(f"config.json has max_position_embeddings {positions}; {max_context} positions are needed")

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=_NORM_INIT)

    def layer() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=num_heads,
                n_kv_heads=num_kv_heads,
                head_dim=head_dim,
                wqkv_param_init=_INIT,
                wo_param_init=_INIT,
                inner_attention=DocumentAttention.Config(),
                # Separate projections have the layout of the published weights, so publishing copies nothing.
                fuse_qkv=False,
                rope=CosSinRoPE.Config(
                    dim=head_dim,
                    max_seq_len=max_context,
                    theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
                ),
                qk_norm=norm(head_dim),
            ),
            feed_forward=make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=_INIT, w2w3_param_init=_INIT),
        )

    return Qwen3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=norm(dim),
        enable_weight_tying=bool(hf.get("tie_word_embeddings", False)),
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_INIT),
        layers=[layer() for _ in range(num_layers)],
    )


def build_model(config: Qwen3Model.Config, device: torch.device) -> Qwen3Model:
    """The model with uninitialized float32 weights. Its forward returns hidden states; `lm_head` is applied apart."""
    with torch.device("meta"):
        model = cast(Qwen3Model, config.build())
    model.to_empty(device=device)
    if config.enable_weight_tying:
        # `to_empty` gave each of the two names a tensor of its own.
        model.tok_embeddings.weight = model.lm_head.weight
    for module in model.modules():
        if isinstance(module, CosSinRoPE):
            module._init_self_buffers(buffer_device=device)
    # Only trained positions need logits, and they are few: the head is applied after they are gathered.
    model._skip_lm_head = True
    return model


def hf_named_tensors(model: Qwen3Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under its Hugging Face name, detached, whole, and where no rank holds a part of it sharing the
    model's memory. All ranks iterate at the same time.

    With tied embeddings there is no `lm_head.weight`.
    """
    adapter = _adapter(model)
    for name, tensor in model.state_dict().items():
        yield from adapter.to_hf({name: whole(tensor)}).items()


def load_weights(model: Qwen3Model, folder: Path) -> None:
    """Copy the folder's safetensors into the model, through torchtitan's state-dict adapter.

    Raises:
        ModelError: there are none, or a name or shape differs from what config.json describes; names the tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in hf_named_tensors(model)}
    tied = model.config.enable_weight_tying
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  a safe_open is not a mapping
                    if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                        continue
                    if name not in expected:
                        raise ModelError(f"{file} has {name!r}, which config.json does not describe")
                    shape = tuple(tensors.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ModelError(
                            f"{name!r} in {file} has shape {shape}; config.json describes {expected[name]}"
                        )
                    weights[name] = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    if missing := sorted(expected.keys() - weights.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the weights in {folder} lack {missing[0]!r}{more}, which config.json describes")
    model.load_state_dict(_adapter(model).from_hf(weights))


def _adapter(model: Qwen3Model) -> Qwen3StateDictAdapter:
    return Qwen3StateDictAdapter(cast(Qwen3Model.Config, model.config), None)
