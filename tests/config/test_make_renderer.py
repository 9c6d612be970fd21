"""The renderer is the one that the settings name, over the tokenizer of the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from serving.speaking import byte_tokenizer

from titan_rl.config.make_renderer import make_renderer
from titan_rl.errors import ConfigError
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.training.settings import ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    return str(path)


def test_the_chat_template_renders_unless_another_is_named(folder: str) -> None:
    assert isinstance(make_renderer(ModelConfig(path=folder)), ChatTemplateRenderer)


def test_a_named_renderer_reads_the_calls_of_tools(folder: str) -> None:
    renderer = make_renderer(ModelConfig(path=folder, renderer="renderers:Qwen3Renderer"))
    answer = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
    ids: list[int] = byte_tokenizer().encode(answer, add_special_tokens=False)
    (call,) = renderer.parse_response(ids).tool_calls
    assert (call.name, call.arguments) == ("look_up", {"key": "a"})


def refuse(tokenizer: Any) -> Any:
    raise ValueError("no such token")


def test_one_that_refuses_the_tokenizer_is_named_with_what_it_says(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"model.renderer = '[\w.]*test_make_renderer:refuse' .*no such token"):
        make_renderer(ModelConfig(path=folder, renderer=f"{refuse.__module__}:refuse"))
