"""User project in a temporary folder: a task, a model folder and a TOML file."""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.training.tiny_model import make_tiny_model

TASK = '''
from typing import Literal
from titan_rl import MessageTokenEnv, Reward, Rubric, ToolEnv
from titan_rl.core.settings import Section

class Echo(Section):
    """Repeat what was said."""
    words: tuple[str, ...] = ("ham", "eggs")
    style: Literal["plain", "loud"] = "plain"
    length: int = 3

    def train_sample(self, seed, index): return self.words[index % len(self.words)]
    def validation_samples(self, count): return [self.words[0]] * count
    def make_env(self, sample, renderer): return MessageTokenEnv(ToolEnv(sample), renderer)
    def rubric(self): return Rubric([Reward(lambda rollout: 1.0, name="one")])

class Half(Section):
    def rubric(self): raise NotImplementedError
'''

CONFIG = """
seed = 7

[model]
path = "policy"

[task]
type = "echo_task:Echo"
words = ["spam"]

[training]
steps = 5
lr = 1
"""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "head_dim": 16,
    "intermediate_size": 16,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def write_tensors(path: Path, *names: str) -> None:
    """Write a safetensors file of tensors with one float32 each."""
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * len(names)))


@functools.cache
def _weights() -> bytes:
    """Weights of the policy, all zero."""
    vocabulary, width, inner = (ARCHITECTURE[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    head = ARCHITECTURE["head_dim"]
    heads, kv_heads = (head * ARCHITECTURE[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens": [vocabulary, width], "model.norm": [width]}
    for layer in range(ARCHITECTURE["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": [width], "post_attention_layernorm": [width],
                "self_attn.q_proj": [heads, width], "self_attn.q_norm": [head],
                "self_attn.k_proj": [kv_heads, width], "self_attn.k_norm": [head],
                "self_attn.v_proj": [kv_heads, width], "self_attn.o_proj": [width, heads],
                "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
            }.items()
        }  # fmt: skip
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@functools.cache
def _tokenizer_files() -> dict[str, str]:
    """Files of the byte tokenizer of a tiny model, by name."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, texts=[], level="byte", parameters=200_000)
        return {path.name: path.read_text() for path in Path(folder).iterdir() if path.name in TOKENIZER_FILES}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, holding `echo_task.py`, `config.toml` and the model folder `policy`."""
    (tmp_path / "echo_task.py").write_text(TASK)
    (tmp_path / "config.toml").write_text(CONFIG)
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(ARCHITECTURE))
    (policy / "model.safetensors").write_bytes(_weights())
    for name, text in _tokenizer_files().items():
        (policy / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("echo_task", None)
