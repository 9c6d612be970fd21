"""A user's project in a temporary folder: a task of their own, a model folder and a TOML file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TASK = '''
from typing import Literal
from titan_rl.settings import Section

class Echo(Section):
    """Repeat what was said."""
    words: tuple[str, ...] = ("ham", "eggs")
    style: Literal["plain", "loud"] = "plain"
    length: int = 3

    def train_sample(self, seed, index): return self.words[index % len(self.words)]
    def validation_samples(self, count): return [self.words[0]] * count
    def make_env(self, sample): raise NotImplementedError
    def rubric(self): raise NotImplementedError

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

ARCHITECTURE = {
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, holding `echo_task.py`, `config.toml` and the model folder `policy`."""
    (tmp_path / "echo_task.py").write_text(TASK)
    (tmp_path / "config.toml").write_text(CONFIG)
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(ARCHITECTURE))
    (policy / "model.safetensors").touch()
    (policy / "tokenizer.json").write_text("{}")
    (policy / "chat_template.jinja").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("echo_task", None)
