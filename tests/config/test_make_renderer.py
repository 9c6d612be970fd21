"""`make_renderer`: the renderer that model.renderer selects for the tokenizer of a model folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("renderers")

from serving.byte_model import byte_tokenizer

from titan_rl.config.build import make_renderer
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.training.settings import ModelConfig
from titan_rl.training.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    return str(path)


def test_unknown_chat_template_is_rendered_by_the_template(folder: str) -> None:
    assert isinstance(make_renderer(ModelConfig(path=folder)), ChatTemplateRenderer)
    assert isinstance(make_renderer(ModelConfig(path=folder, renderer="chat_template")), ChatTemplateRenderer)


def test_known_chat_template_is_rendered_by_its_packaged_renderer(tmp_path: Path) -> None:
    texts = [f"<|im_start|>system\n# Tools\n\nYou may look up {number}.<|im_end|>\n" for number in range(20)]
    make_tiny_model(tmp_path, texts=texts, parameters=100_000, max_context=64)
    renderer = make_renderer(ModelConfig(path=str(tmp_path)))
    assert type(renderer).__name__ == "Qwen3Renderer"
    template = make_renderer(ModelConfig(path=str(tmp_path), renderer="chat_template"))
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert list(renderer.render_ids(messages, add_generation_prompt=True)) == template.render_ids(
        messages, add_generation_prompt=True
    )


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "models--Qwen--Qwen3-0.6B/snapshots/c1899de2"])
def test_model_name_selects_its_renderer_and_keeps_earlier_reasoning(folder: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shutil.copytree(folder, path)
    renderer: Any = make_renderer(ModelConfig(path=str(path)))
    assert type(renderer).__name__ == "Qwen3Renderer"
    prompt = renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
    answer = byte_tokenizer().encode("<think>\nhm\n</think>\n\nb<|im_end|>", add_special_tokens=False)
    extended = renderer.bridge_to_next_turn(prompt, answer, [{"role": "user", "content": "c"}])
    assert list(extended.token_ids)[: len(prompt) + len(answer)] == [*prompt, *answer]


def test_named_renderer_parses_tool_calls(folder: str) -> None:
    renderer = make_renderer(ModelConfig(path=folder, renderer="renderers:Qwen3Renderer"))
    answer = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
    ids: list[int] = byte_tokenizer().encode(answer, add_special_tokens=False)
    (call,) = renderer.parse_response(ids).tool_calls
    assert (call.name, call.arguments) == ("look_up", {"key": "a"})


def test_named_renderer_extends_a_conversation_with_reasoning(folder: str) -> None:
    renderer: Any = make_renderer(ModelConfig(path=folder, renderer="renderers:Qwen3Renderer"))
    prompt = renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
    answer = byte_tokenizer().encode("<think>\nhm\n</think>\n\nb<|im_end|>", add_special_tokens=False)
    extended = renderer.bridge_to_next_turn(prompt, answer, [{"role": "user", "content": "c"}])
    assert list(extended.token_ids)[: len(prompt) + len(answer)] == [*prompt, *answer]


def refuse(tokenizer: Any) -> Any:
    raise ValueError("no such token")


def test_renderer_that_rejects_the_tokenizer_is_named(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"model.renderer = '[\w.]*test_make_renderer:refuse' .*no such token"):
        make_renderer(ModelConfig(path=folder, renderer=f"{refuse.__module__}:refuse"))
