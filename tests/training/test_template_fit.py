"""An exported folder renders conversations as in training, even if the model's own chat template does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("renderers")

import torch
from serving.byte_model import byte_tokenizer

import titan_rl.training.tiny_model
from titan_rl.config.build import make_renderer, template_note
from titan_rl.rollout.renderer.registry import TemplateFit, fit_template
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.export import export_hf
from titan_rl.training.settings import ModelConfig

KEEPING = (Path(titan_rl.training.tiny_model.__file__).parent / "chat_template.jinja").read_text()
QUESTIONS = """{%- set ns = namespace(last_query_index=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_query_index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""
SHOWS = "loop.index0 > ns.last_query_index"
"""The condition in Qwen3's templates."""


def dropping(shows: str) -> str:
    """The template, showing reasoning only where the condition holds."""
    changed = KEEPING.replace("macro said(message)", "macro said(message, shows)")
    changed = changed.replace("if message.reasoning_content", "if shows and message.reasoning_content")
    return QUESTIONS + changed.replace("said(message))", f"said(message, {shows}))")


def folder_with(template: str, folder: Path) -> ModelConfig:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return ModelConfig(path=str(folder))


def talk(model: ModelConfig) -> tuple[list[dict[str, Any]], list[int]]:
    """A conversation with reasoning, and the prompt used in training: the sampled tokens, extended."""
    renderer, tokenizer = make_renderer(model), byte_tokenizer()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 2?"}]
    prompt = list(renderer.render_ids(messages, add_generation_prompt=True))
    for thought, answer in (("Two pairs.", "4"), ("One less.", "3"), ("None.", "0")):
        sampled = tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>", add_special_tokens=False)
        asked = {"role": "user", "content": f"Not {answer}?"}
        extended = renderer.bridge_to_next_turn(prompt, sampled, [asked])
        assert extended is not None
        prompt = list(extended.token_ids)
        messages += [{"role": "assistant", "reasoning_content": thought, "content": answer}, asked]
    return messages, prompt


def rendered(folder: Path | str, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = load_tokenizer(folder)
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def exported(model: ModelConfig, out: Path) -> Path:
    tensors = {"a": torch.ones(2)}
    template = fit_template(model.path, model.renderer).template
    export_hf(out, tensors, tensors.items(), source=Path(model.path), dtype="float32", chat_template=template)
    return out


@pytest.mark.parametrize("renderer", ["auto", "renderers:Qwen3Renderer"])
def test_exported_template_renders_the_training_tokens(tmp_path: Path, renderer: str) -> None:
    model = folder_with(dropping(SHOWS), tmp_path / "Qwen3-0.6B").model_copy(update={"renderer": renderer})
    messages, prompt = talk(model)
    assert rendered(model.path, messages) != prompt
    out = exported(model, tmp_path / "out")
    assert rendered(out, messages) == prompt
    note = template_note(model) or ""
    assert note.startswith(
        f"model.renderer = '{renderer}' keeps earlier reasoning in the prompt, which the model's own"
    )
    assert note.endswith("the chat template of the exported folder keeps it, too")
    again = ModelConfig(path=str(out), renderer="renderers:Qwen3Renderer")
    assert fit_template(again.path, again.renderer) == TemplateFit()


def test_template_in_tokenizer_config_is_replaced(tmp_path: Path) -> None:
    model = folder_with(dropping(SHOWS), tmp_path / "Qwen3-0.6B")
    (file := tmp_path / "Qwen3-0.6B" / "chat_template.jinja").unlink()
    config = file.with_name("tokenizer_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": dropping(SHOWS)}))
    messages, prompt = talk(model)
    out = exported(model, tmp_path / "out")
    assert rendered(out, messages) == prompt
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_template_that_keeps_reasoning_is_unchanged(tmp_path: Path) -> None:
    model = folder_with(KEEPING, tmp_path / "Qwen3-0.6B")
    assert template_note(model) is None
    out = exported(model, tmp_path / "out")
    assert (out / "chat_template.jinja").read_text() == (tmp_path / "Qwen3-0.6B" / "chat_template.jinja").read_text()


def test_warns_when_no_fitting_template_is_found(tmp_path: Path) -> None:
    model = folder_with(dropping("loop.revindex < 3"), tmp_path / "Qwen3-0.6B")
    assert fit_template(model.path, model.renderer) == TemplateFit(drops=True)
    assert "no chat template was found that keeps it" in (template_note(model) or "")


def test_folder_without_tokenizer_or_renderer_keeps_its_template(tmp_path: Path) -> None:
    assert fit_template(tmp_path, "auto") == TemplateFit()
    model = folder_with(KEEPING, tmp_path / "model")
    assert fit_template(model.path, "no_module:make") == TemplateFit()
