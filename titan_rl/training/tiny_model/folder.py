"""Creation of a tiny model as a Hugging Face folder. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.core.errors import MissingExtraError
from titan_rl.training.choices import Level

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
INITIAL_STD = 0.02
"""Standard deviation of the matrices, as in transformers' initialization of Qwen3."""


def make_tiny_model(
    folder: str | Path,
    *,
    texts: Iterable[str],
    level: Level = "word",
    parameters: int = 1_000_000,
    max_context: int = 1024,
    seed: int = 0,
) -> Shape:
    """Write an untrained Qwen3 with a tokenizer for some texts. Existing files are replaced.

    The embeddings are untied. The chat template is Qwen3's, but does not rewrite earlier turns, so that every
    conversation, with or without tools, can be extended turn by turn. Answers end with `<|im_end|>`.

    Args:
        texts: Examples of the texts that the model will read and write, such as a few hundred conversations, whole or
            message by message. Used only for `level = "word"`.
        level: Kind of tokens. "byte": a token for each UTF-8 byte. "word": also a token for each word of the texts, and
            for each longer phrase that at least about a tenth of the texts contain; any other text falls back to bytes.
        parameters: Approximate number of parameters.
        max_context: Maximum number of tokens of a conversation.
        seed: Seed of the weights.

    Returns:
        Shape of the model.

    Raises:
        ValueError: The smallest model with this vocabulary has more than twice as many parameters.
        MissingExtraError: A library that is needed to write the folder is not installed.

    Example:

        make_tiny_model("sums/start", texts=["What is 3 + 4?", "7"], parameters=200_000, max_context=128)
    """
    try:
        from safetensors.numpy import save_file

        from titan_rl.training.tiny_model.tokenizer import PAD, TURN_END, build_tokenizer
    except ImportError as error:
        raise MissingExtraError(error.name or "tokenizers", "cpu") from error
    tokenizer = build_tokenizer(texts, level)
    shape = fitting_shape(parameters, tokenizer.get_vocab_size())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "model_max_length": max_context,
            "pad_token": PAD,
            "tokenizer_class": "TokenizersBackend",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    _write(folder / "generation_config.json", ids)
    _write(folder / "config.json", _model_config(shape, max_context) | ids)
    save_file(_draw_weights(shape, seed), folder / "model.safetensors", {"format": "pt"})
    return shape


def _model_config(shape: Shape, max_context: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "initializer_range": INITIAL_STD,
        "intermediate_size": shape.mlp_width,
        "max_position_embeddings": max_context,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,  # vLLM on CPU serves stale tied weights after a swap
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


HEAD_DIM = 32  # smallest head of vLLM's CPU kernels
PAIR = 2 * HEAD_DIM  # widths are multiples of this, so that pairs of heads share keys and values
WIDEST = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Qwen3 model."""

    vocab_size: int
    width: int
    layers: int

    @property
    def head_dim(self) -> int:
        return HEAD_DIM

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        return self.heads // 2

    @property
    def mlp_width(self) -> int:
        return 3 * self.width

    @property
    def parameters(self) -> int:
        width = self.width
        layer = 3 * width * width + 3 * width * self.mlp_width + 2 * width + 2 * HEAD_DIM
        return 2 * self.vocab_size * width + width + self.layers * layer

    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """Size of each matrix, (outputs, inputs), by its Hugging Face name."""
        width, mlp, kv = self.width, self.mlp_width, self.kv_heads * HEAD_DIM
        named = {"model.embed_tokens": (self.vocab_size, width), "lm_head": (self.vocab_size, width)}
        for layer in self._layers():
            named |= {
                f"{layer}.self_attn.q_proj": (width, width),
                f"{layer}.self_attn.k_proj": (kv, width),
                f"{layer}.self_attn.v_proj": (kv, width),
                f"{layer}.self_attn.o_proj": (width, width),
                f"{layer}.mlp.gate_proj": (mlp, width),
                f"{layer}.mlp.up_proj": (mlp, width),
                f"{layer}.mlp.down_proj": (width, mlp),
            }
        return {f"{name}.weight": size for name, size in named.items()}

    def norms(self) -> Mapping[str, int]:
        """Size of each norm's weight by its Hugging Face name."""
        named = {"model.norm": self.width}
        for layer in self._layers():
            named |= {f"{layer}.{norm}": self.width for norm in ("input_layernorm", "post_attention_layernorm")}
            named |= {f"{layer}.self_attn.{norm}": HEAD_DIM for norm in ("q_norm", "k_norm")}
        return {f"{name}.weight": size for name, size in named.items()}

    def _layers(self) -> Iterator[str]:
        return (f"model.layers.{layer}" for layer in range(self.layers))


def fitting_shape(parameters: int, vocab_size: int) -> Shape:
    """Choose the shape nearest to a number of parameters, among those about 32 times as wide as deep.

    Example: 900,000 parameters and 402 tokens are 4 layers of width 128.

    Raises:
        ValueError: The smallest shape has more than twice as many parameters.
    """
    shapes = [
        Shape(vocab_size, width, layers)
        for width in range(PAIR, WIDEST + 1, PAIR)
        for layers in range(max(1, width // 48), width // 20 + 1)
    ]
    smallest = min(shape.parameters for shape in shapes)
    if parameters < smallest / 2:
        raise ValueError(
            f"parameters = {parameters:,} is too few: the smallest model of {vocab_size:,} tokens has {smallest:,}"
        )
    return min(shapes, key=lambda shape: (abs(shape.parameters - parameters), abs(shape.width - 32 * shape.layers)))


def _draw_weights(shape: Shape, seed: int) -> dict[str, Any]:
    """Draw the matrices from a normal distribution, and set the norms to 1."""
    rng = np.random.default_rng(seed)
    weights = {name: np.ones(size, np.float32) for name, size in shape.norms().items()}
    for name, size in shape.matrices().items():
        weights[name] = INITIAL_STD * rng.standard_normal(size, np.float32)
    return weights
