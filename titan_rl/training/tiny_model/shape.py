"""How wide and deep a model of so many parameters is. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HEAD_DIM = 32  # the smallest that vLLM has a kernel for on CPU
PAIR = 2 * HEAD_DIM  # widths are multiples of this, so that two heads share keys and values
WIDEST = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3."""

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
        """The size of each matrix by its Hugging Face name: (outputs, inputs)."""
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
        """The size of each norm's weight by its Hugging Face name."""
        named = {"model.norm": self.width}
        for layer in self._layers():
            named |= {f"{layer}.{norm}": self.width for norm in ("input_layernorm", "post_attention_layernorm")}
            named |= {f"{layer}.self_attn.{norm}": HEAD_DIM for norm in ("q_norm", "k_norm")}
        return {f"{name}.weight": size for name, size in named.items()}

    def _layers(self) -> Iterator[str]:
        return (f"model.layers.{layer}" for layer in range(self.layers))


def fitting_shape(parameters: int, vocab_size: int) -> Shape:
    """The shape that comes nearest to so many parameters, of those about 32 times as wide as deep.

    Example: 900,000 parameters and 402 tokens are 4 layers of width 128.

    Raises:
        ValueError: the smallest has more than twice as many.
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
