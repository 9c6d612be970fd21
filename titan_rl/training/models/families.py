"""Model families, and the choice between the two implementations of a policy, from config.json alone.

torchtitan's models have tensor parallelism, flex attention and compiled blocks; transformers' modeling code has all
other families. Importing this file imports neither library.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from titan_rl.core.errors import ModelError
from titan_rl.core.settings import dotted
from titan_rl.training.choices import Implementation

_FAMILIES = tomllib.loads(files("titan_rl.training.models").joinpath("families.toml").read_text("utf-8"))


def _values(field: str) -> dict[str, Any]:
    return {family: entry[field] for family, entry in _FAMILIES.items() if field in entry}


TORCHTITAN: Mapping[str, Mapping[str, Any]] = _values("torchtitan")
"""Families that torchtitan's models have, by `model_type`: the values that the models require of fields of config.json,
which are also the fields' defaults, and the types of rotary embeddings that they support."""

REFUSED: Mapping[str, str] = _values("refused")
"""Families that transformers has but that cannot be trained, by `model_type`, with the reason."""

PROVED = frozenset(_FAMILIES.keys() - REFUSED.keys())
"""Families whose transformers implementation the tests check. For any other family the trainer checks a tiny model
before it starts."""

ADAPTED = frozenset(family for family, tested in _values("adapters").items() if tested is True)
"""Families whose adapters the tests check in transformers' implementation and in vLLM."""

UNADAPTED: Mapping[str, str] = {family: why for family, why in _values("adapters").items() if why is not True}
"""Families without adapters, with the reason."""

DIVIDED = frozenset(_values("divided"))
"""Mixtures whose experts the tests divide over ranks in transformers' implementation."""

RECURRENT: Mapping[str, str] = _values("mixer")
"""Families with layers that pass a state from token to token, and the class of transformers that computes these layers.
`recurrent.py` gives this class one document at a time."""

UNTESTED = "its adapters have not been compared between transformers and vLLM"
"""Reason for families in neither `ADAPTED` nor `UNADAPTED`."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Names of the number of experts per layer in config.json."""

TOP_KS = ("num_experts_per_tok", "moe_topk", "moe_k")
"""Names of the number of experts per token in config.json."""

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
"""Fields of config.json that are numbers of at least 1 in every family that has them."""

STATEFUL = frozenset({"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"})
"""Types of layers with a recurrent state, in `layer_types` or `layers_block_type` of config.json."""


@dataclass(frozen=True, slots=True)
class ChosenImplementation:
    """Implementation of a policy, and the reason for the choice."""

    name: Literal["torchtitan", "transformers"]
    reason: str


_OLD_MASK = re.compile(r"\.(attn|attention|attn\.attention)\.(masked_)?bias$")
_NEXT_TOKEN_MODULE = re.compile(r"(^|\.)mtp(_layers)?\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def is_untrained(name: str, hf: Mapping[str, Any]) -> bool:
    """Return whether a folder may have a tensor for which the model has no place: an attention mask, which old versions
    of transformers stored, or a layer that predicts further tokens (MTP).

    Args:
        name: Hugging Face name of the tensor.
        hf: Content of the model's config.json.

    Example: `model.layers.46.eh_proj.weight` if config.json has 46 layers and num_nextn_predict_layers = 1.
    """
    if _OLD_MASK.search(name) or _NEXT_TOKEN_MODULE.search(name):
        return True
    layer, own, more = _LAYER.match(name), hf.get("num_hidden_layers"), hf.get("num_nextn_predict_layers")
    return layer is not None and isinstance(own, int) and own <= int(layer[1]) < own + (more or 0)


def choose_implementation(
    hf: Mapping[str, Any],
    wanted: Implementation = "auto",
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    has_adapter: bool = False,
) -> ChosenImplementation:
    """Resolve `model.implementation`.

    Args:
        hf: Content of the model's config.json.
        has_adapter: Whether an adapter is trained. transformers' implementation supports that only for the families in
            `ADAPTED`.

    Raises:
        ModelError: No implementation can train the model, the one that `wanted` names cannot, or config.json
            contradicts itself.

    Example: Qwen2.5, whose model_type is "qwen2", is trained with transformers, and Qwen3 with torchtitan.
    """
    check_numbers(hf)
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"this model cannot be trained: its weights are quantized ({method}); save them in bfloat16 first"
        )
    if expert_parallel > 1:
        _check_experts(hf, expert_parallel)
    lacks = torchtitan_lacks(hf)
    if wanted == "torchtitan" or (wanted == "auto" and lacks is None):
        if lacks is not None:
            raise ModelError(
                f'model.implementation = "torchtitan": {lacks}; set it to "auto" to use transformers\' implementation'
            )
        reason = "model.implementation requests it" if wanted == "torchtitan" else "it has this family"
        return ChosenImplementation("torchtitan", reason)
    if (refused := transformers_refuses(hf)) is not None:
        if lacks is None:
            raise ModelError(f'model.implementation = "transformers": {refused}; set it to "auto"')
        raise ModelError(f"this model cannot be trained: {refused}; and {lacks}")
    if has_adapter and (family := hf.get("model_type")) not in ADAPTED:
        raise ModelError(
            f"training.adapter.rank is set, and model_type {family!r} is trained without adapters: "
            f"{UNADAPTED.get(str(family), UNTESTED)}; set it to 0, or use a model of another family: "
            f"{', '.join(sorted(ADAPTED))}"
        )
    if tensor_parallel > 1:
        why = "which is requested" if lacks is None else f"needed because {lacks}"
        raise ModelError(
            f"training.tensor_parallel = {tensor_parallel}, and transformers' implementation of the model, {why}, "
            "does not split matrices; set training.tensor_parallel = 1 and use training.data_parallel"
        )
    if context_parallel > 1 and (family := hf.get("model_type")) in RECURRENT:
        raise ModelError(
            f"training.context_parallel = {context_parallel}, and model_type {family!r} has layers with a recurrent "
            "state, which need all tokens of a document on one rank; set it to 1 and use training.data_parallel"
        )
    if expert_parallel > 1 and (family := hf.get("model_type")) not in DIVIDED:
        raise ModelError(
            f"training.expert_parallel = {expert_parallel}, and the experts of model_type {family!r} have not been "
            f"divided in a test; set it to 1, or use a model of another family: {', '.join(sorted(DIVIDED))}"
        )
    return ChosenImplementation("transformers", "model.implementation requests it" if lacks is None else lacks)


def check_numbers(hf: Mapping[str, Any]) -> None:
    """Check the numbers in config.json: sizes of heads, layers, experts and vocabulary, and bases of rotary embeddings.

    Raises:
        ModelError: A size is not an integer of at least 1, or does not fit another size; a base is not above 0; or a
            value is not a number.
    """
    for name, value in dotted(hf):
        if isinstance(value, float) and math.isnan(value):
            raise ModelError(f"config.json has {name} = {value}, which is not a number; write the model's value")
        is_base = name.rpartition(".")[2] in ("rope_theta", "rope_local_base_freq") and value is not None
        if is_base and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ModelError(f"config.json has {name} = {value!r}; it must be a number above 0")
    for name in SIZES:
        value = hf.get(name)
        if value is None or isinstance(value, list):  # the family computes the value, or has one for each layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json has {name} = {value!r}; it must be an integer of at least 1")
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ModelError(
            f"config.json has num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the first must be a "
            "multiple of the second"
        )
    experts = next((found for name in EXPERT_COUNTS if isinstance(found := hf.get(name), int)), None)
    top_k = next((found for name in TOP_KS if isinstance(found := hf.get(name), int)), None)
    if experts and top_k and top_k > experts:
        raise ModelError(
            f"config.json gives each token {top_k} experts, and has {experts} of them; "
            f"{' or '.join(name for name in TOP_KS if hf.get(name))} must be at most that"
        )


def is_longrope(hf: Mapping[str, Any]) -> bool:
    """Whether the model rotates tokens with one set of frequencies in short sequences and with another in long ones."""
    return _rope_type(hf) == "longrope"


def longest_context(hf: Mapping[str, Any]) -> int | None:
    """Maximum number of positions of a sequence that trainer and engines compute alike; None without a limit.

    With longrope, the limit is that of the short sequences: if a sequence grows beyond it, transformers rotates all of
    its tokens with the other frequencies, including those whose keys a generator has cached.
    """
    most: int | None = hf.get("max_position_embeddings")
    if not is_longrope(hf):
        return most
    short = hf.get("original_max_position_embeddings") or _rope(hf).get("original_max_position_embeddings")
    return most if short is None else short


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _rope_type(hf: Mapping[str, Any]) -> str:
    rope = _rope(hf)
    return rope.get("rope_type", rope.get("type", "default"))


def _check_experts(hf: Mapping[str, Any], ranks: int) -> None:
    count = next((hf[name] for name in EXPERT_COUNTS if hf.get(name)), None)
    if count is None:
        raise ModelError(
            f"training.expert_parallel = {ranks}, and config.json has no experts to divide ({', '.join(EXPERT_COUNTS)})"
            "; set it to 1"
        )
    if count % ranks:
        raise ModelError(
            f"training.expert_parallel = {ranks} does not divide the model's {count} experts; choose one that does"
        )


def torchtitan_lacks(hf: Mapping[str, Any]) -> str | None:
    """Reason why torchtitan's models cannot train a model; None if they can."""
    name: Any = hf.get("model_type")
    if name not in TORCHTITAN:
        return f"torchtitan's models here have no model_type {name!r}, only {', '.join(TORCHTITAN)}"
    for key, value in TORCHTITAN[name]["fields"].items():
        if (found := hf.get(key, value)) != value:
            return f"torchtitan's {name} supports only {key} {value!r}, and config.json has {found!r}"
    if (rope_type := _rope_type(hf)) not in TORCHTITAN[name]["rope_types"]:
        known = " and ".join(map(repr, TORCHTITAN[name]["rope_types"]))
        return f"config.json has rope type {rope_type!r}; only {known} are supported by torchtitan's {name}"
    if (share := _rope(hf).get("partial_rotary_factor") or 1.0) != 1.0:
        return f"config.json has partial_rotary_factor {share}, which torchtitan's {name} does not support"
    return None


def transformers_refuses(hf: Mapping[str, Any]) -> str | None:
    """Reason why transformers' modeling code cannot train a model; None if config.json shows no such reason."""
    name: Any = hf.get("model_type")
    if name in REFUSED:
        return f"model_type {name!r} is refused: {REFUSED[name]}"
    if "text_config" in hf or "vision_config" in hf:
        return f"model_type {name!r} reads more than text; only text models are trained"
    if hf.get("is_encoder_decoder"):
        return f"model_type {name!r} has an encoder; only decoders are trained"
    kinds = {*(hf.get("layer_types") or ()), *(hf.get("layers_block_type") or ())}
    if name not in RECURRENT and (found := sorted(STATEFUL.intersection(kinds))):
        return (
            f"layers of type {found[0]!r} have a recurrent state, and titan_rl does not know the module that computes "
            f"it in model_type {name!r}; only those of {', '.join(sorted(RECURRENT))}"
        )
    if _rope_type(hf) == "dynamic":
        return "rope type 'dynamic' rotates the tokens of a sequence by its length, which changes as it grows"
    return None
