"""Shrunken models: the structure of any config.json in a tiny size, with random weights, to try a family without its
real weights. `training/tiny_model` creates tiny models that can learn a task."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from titan_rl.core.errors import ModelError, in_one_line
from titan_rl.training.models.families import EXPERT_COUNTS

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_SIZES: Mapping[str, int] = _TABLES["sizes"]
_FIELDS: Mapping[str, Sequence[str]] = _TABLES["fields"]

VOCABULARY, HEAD_DIM = _SIZES["vocab_size"], _SIZES["head_dim"]
HEADS = 4
INITIALIZER_RANGE = 0.02
"""Largest initial standard deviation of the weights of models with Mamba layers. With their usual one, which is five
times as large, the logits are large, and so is their rounding."""

TRAINED_POSITIONS = 512
"""Positions for which the original model of a scaled rotary embedding was trained."""

MOST_EXPERTS = 8
MOST_LAYERS = 8
"""Maximum number of consecutive layers to keep, so that a repeated pattern is whole. If the pattern is longer, the
first layer of each kind is kept."""

MOST_PARAMETERS = 20_000_000

_WIDTH, _EXPERT_WIDTH = 96, 32


def tiny_config(config: Any, **fields: Any) -> Any:
    """Copy a config of transformers with small dimensions, and with just enough layers to show all kinds of layers.

    Everything else is kept: types and scales of rotary embeddings, ratios of heads, tied embeddings, biases, norms,
    caps, multipliers, and the routing of experts.

    Args:
        fields: Further values to set in the copy.

    Example: 28 query heads and 4 key-value heads, 7 for each, become 8 and 2, 4 for each, since 4 are enough to show
    that they share keys. Layer types of 5 sliding windows and 1 full attention, repeated, become 6 layers.
    """
    tiny = deepcopy(config)
    for name, value in _SIZES.items():
        if _number(tiny, name):
            setattr(tiny, name, value)
    if getattr(tiny, "head_dim", HEAD_DIM) is None:
        tiny.head_dim = HEAD_DIM
    _shrink_widths(tiny)
    if getattr(config, "num_attention_heads", None) is None:
        tiny.hidden_size = HEADS * HEAD_DIM
    else:
        _shrink_heads(tiny, config)
    _shrink_states(tiny)
    _shrink_experts(tiny)
    _shorten(tiny, config)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tiny, name, None) is not None:
            setattr(tiny, name, 0 if name == "pad_token_id" else 1)
    if _number(tiny, "original_max_position_embeddings"):
        tiny.original_max_position_embeddings = TRAINED_POSITIONS
    if isinstance(rope := getattr(tiny, "rope_parameters", None), dict):
        tiny.rope_parameters = _tiny_rope(rope)
    for name, value in fields.items():
        setattr(tiny, name, value)
    return tiny


def _number(config: Any, name: str) -> int:
    """Value of a field that is a number other than 0; 0 if it is anything else."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _shrink_heads(tiny: Any, config: Any) -> None:
    """Shrink the heads. Queries share keys in the same ratio, up to 4, and all heads together are as wide as the hidden
    states only if they were so before."""
    old_head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads in (None, 1, heads):
        tiny.num_attention_heads = HEADS
        if kv_heads is not None:
            tiny.num_key_value_heads = HEADS if kv_heads == heads else 1
    else:
        tiny.num_attention_heads, tiny.num_key_value_heads = 2 * min(HEADS, heads // kv_heads), 2
    width, old_width = tiny.num_attention_heads * HEAD_DIM, heads * old_head_dim
    hidden = width + HEAD_DIM * ((config.hidden_size > old_width) - (config.hidden_size < old_width))
    for name in _FIELDS["hidden"]:
        if _number(tiny, name):
            setattr(tiny, name, hidden)
    for name in ("query_pre_attn_scalar", "rotary_dim"):
        if found := getattr(tiny, name, None):
            setattr(tiny, name, max(2, int(found * HEAD_DIM / old_head_dim)))


def _shrink_states(tiny: Any) -> None:
    """Shrink Mamba layers, whose heads together have a multiple of the entries of the hidden states."""
    width = (_number(tiny, "mamba_expand") or _number(tiny, "expand")) * tiny.hidden_size
    if not width:
        return
    tiny.initializer_range = min(INITIALIZER_RANGE, tiny.initializer_range)
    if _number(tiny, "mamba_d_ssm"):
        tiny.mamba_d_ssm = width
    for heads, size in _TABLES["state_heads"].items():
        if _number(tiny, heads):
            setattr(tiny, heads, width // HEAD_DIM)
            setattr(tiny, size, HEAD_DIM)
    for name in ("n_groups", "mamba_n_groups"):
        if found := _number(tiny, name):
            setattr(tiny, name, min(2, found))
    if getattr(tiny, "num_attention_heads", None) is None and _number(tiny, "intermediate_size"):
        tiny.intermediate_size = width  # here not the width of a feed-forward layer


def _shrink_widths(tiny: Any) -> None:
    """Shrink feed-forward layers."""
    for name in list(vars(tiny)):
        if any(part in name for part in ("intermediate_size", "ffn_dim", "ffn_hidden_size")) and _number(tiny, name):
            is_expert = any(part in name for part in ("moe", "expert", "shared"))
            setattr(tiny, name, _EXPERT_WIDTH if is_expert else _WIDTH)


def _shrink_experts(tiny: Any) -> None:
    """Shrink mixtures to 8 experts in at most 4 groups, of which each token takes at most 2."""
    for name in EXPERT_COUNTS:
        if found := _number(tiny, name):
            setattr(tiny, name, min(MOST_EXPERTS, found))
    for name in _FIELDS["top_k"]:
        if found := _number(tiny, name):
            setattr(tiny, name, min(2, found))
    if (groups := _number(tiny, "n_group")) > 1:
        taken = _number(tiny, "topk_group") or groups
        tiny.n_group = min(4, groups)
        tiny.topk_group = tiny.n_group if taken == groups else max(1, tiny.n_group // 2)


def _shorten(tiny: Any, config: Any) -> None:
    """Keep the first layers, at least two, until every kind of layer occurs."""
    total: int = config.num_hidden_layers
    lists = {name: value for name, value in vars(tiny).items() if isinstance(value, list) and len(value) == total}
    bounds = {name: found for name in _FIELDS["first_layers"] if (found := _number(tiny, name))}
    listed = {
        name: found for name in _FIELDS["layer_lists"] if isinstance(found := getattr(tiny, name, None), list | tuple)
    }
    kinds = [
        (*(repr(value[layer]) for value in lists.values()), *(layer < found for found in bounds.values()),
         *(layer in found for found in listed.values()))
        for layer in range(total)
    ]  # fmt: skip
    firsts = sorted({kinds.index(kind) for kind in kinds})
    steps = [_number(tiny, name) for name in _FIELDS["steps"]]
    size = min(total, max(2, firsts[-1] + 1, *steps))
    kept: Sequence[int] = range(size) if size <= MOST_LAYERS or max(steps) > 1 else sorted({0, 1, *firsts})
    for name, value in lists.items():
        setattr(tiny, name, [value[layer] for layer in kept])
    if windows_begin := _number(tiny, "max_window_layers"):  # must agree with the list of layer types
        bounds["max_window_layers"] = windows_begin
    for name, found in bounds.items():
        setattr(tiny, name, sum(layer < found for layer in kept))
    for name, value in listed.items():
        setattr(tiny, name, [new for new, layer in enumerate(kept) if layer in value])
    if _number(tiny, "moe_layer_end_index") > 0:
        tiny.moe_layer_end_index = len(kept) - 1
    tiny.num_hidden_layers = len(kept)


def _tiny_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink rotary embeddings to small heads and few positions, with the same type. Some families have embeddings by
    layer type."""
    tiny: dict[str, Any] = {
        name: _tiny_rope(value) if name.endswith("_attention") else value for name, value in rope.items()
    }
    if tiny.get("original_max_position_embeddings"):
        tiny["original_max_position_embeddings"] = TRAINED_POSITIONS
    pairs = int(HEAD_DIM * (tiny.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if factors := tiny.get(name):  # one for each pair of entries of a head
            tiny[name] = [factors[pair * len(factors) // pairs] for pair in range(pairs)]
    return tiny


def make_tiny(config: Any, folder: Path, *, seed: int = 0) -> Path:
    """Write a model folder with random weights: config.json and model.safetensors.

    Raises:
        ModelError: The model cannot be built by transformers, or it is not tiny.
    """
    try:
        _require_tiny(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
            with torch.no_grad():
                for parameter in model.parameters():
                    # Random weights give nearly uniform distributions; larger ones show differences of logits.
                    if parameter.ndim >= 2:
                        parameter.mul_(4)
                    elif parameter.numel() > 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases are zero, and norms all alike
                for name, buffer in model.named_buffers():
                    if name.endswith(("correction_bias", "expert_bias")):
                        buffer.add_(torch.randn_like(buffer), alpha=0.05)
            model.save_pretrained(folder)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(f"transformers cannot build a tiny {config.model_type}: {error}") from error
    return folder


def _require_tiny(config: Any) -> None:
    """Check that a model of a config is tiny.

    Raises:
        ModelError: The model has more than `MOST_PARAMETERS` parameters.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if sum(sizes.values()) > MOST_PARAMETERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise ModelError(
            f"a tiny {config.model_type} would have {sum(sizes.values()):,} parameters, {sizes[largest]:,} of them in "
            f"{largest}: its config.json sets their number in a field that titan_rl does not know; "
            "report the model_type to titan_rl"
        )


def tiny_of_folder(folder: Path, out: Path) -> Path:
    """Write a tiny model with the family and the structure of a model's config.json.

    Raises:
        ModelError: The family is unknown to transformers, or no tiny model of it can be built.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the code of a family may raise anything for fields that it does not expect
        raise ModelError(f"transformers cannot read {folder / 'config.json'}: {in_one_line(error)}") from error
    try:
        tiny = tiny_config(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} does not describe a decoder with attention: {error}") from error
    return make_tiny(tiny, out)
