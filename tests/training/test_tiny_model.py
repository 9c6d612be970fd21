"""Tiny models: their tokenizer, chat template and shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from safetensors import safe_open

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer, load_transformers_tokenizer
from titan_rl.training.tiny_model import make_tiny_model
from titan_rl.training.tiny_model.folder import fitting_shape
from titan_rl.training.tiny_model.tokenizer import build_tokenizer

SUMS = [f"What is {a} + {b}? Give the number alone." for a in range(7) for b in range(7)]
NAMES = ["AdaWolf\nBenHill", "MiaKhan"]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, texts=[*SUMS, *NAMES], parameters=60_000, max_context=128)
    return folder


WORDS = build_tokenizer([*SUMS, *NAMES], "word")
BYTES = build_tokenizer([], "byte")


@given(text=st.text())
def test_tokenizer_round_trips_any_text(text: str) -> None:
    for tokenizer in (WORDS, BYTES):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def pieces(text: str) -> list[str]:
    return [WORDS.decode([token]) for token in WORDS.encode(text).ids]


def test_words_and_common_phrases_are_single_tokens() -> None:
    assert pieces("What is 3 + 4? Give the number alone.") == ["What is ", *"3 + 4", "? Give the number alone."]
    assert pieces("AdaWolf\nBenHill") == ["Ada", "Wolf", "\n", "Ben", "Hill"]
    assert pieces("Adam") == ["A", "d", "a", "m"]
    assert len(BYTES.encode("What is").ids) == 7


def test_phrase_does_not_start_in_a_turn_header() -> None:
    texts = [f"<|im_start|>assistant\n<answer to it>\n{number}<|im_end|>\n" for number in range(20)]
    tokenizer = build_tokenizer(texts, "word")
    prompt, answer = "<|im_start|>assistant\n", "<answer to it>\n3"
    assert tokenizer.encode(prompt + answer).ids == tokenizer.encode(prompt).ids + tokenizer.encode(answer).ids
    assert len(tokenizer.encode(answer).ids) == 2


def test_phrase_does_not_end_inside_a_word() -> None:
    texts = [f"{number} guess the man" for number in range(20)]
    tokenizer = build_tokenizer(texts, "word")
    assert len(tokenizer.encode("1 guess the man").ids) == 2
    assert len(tokenizer.encode("1 guess the manager").ids) > 8


@pytest.mark.parametrize("parameters", [100_000, 900_000, 5_000_000, 100_000_000])
def test_model_has_about_the_requested_number_of_parameters(parameters: int) -> None:
    shape = fitting_shape(parameters, vocab_size=402)
    assert abs(shape.parameters / parameters - 1) < 0.2
    assert 16 <= shape.width / shape.layers <= 64


def test_rejects_too_few_parameters_for_the_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"parameters = 10,000 is too few: the smallest model of 402 tokens has"):
        fitting_shape(10_000, vocab_size=402)


def test_transformers_loads_every_weight(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, about = transformers.Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values())
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert set(weights.keys()) == set(model.state_dict())
    tokenizer = load_transformers_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) == len(model.lm_head.weight)
    assert model.generation_config.eos_token_id == config["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id is not None
    assert model.num_parameters() == make_tiny_model(folder, texts=[*SUMS, *NAMES], parameters=60_000).parameters


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, texts=SUMS, level="byte", parameters=60_000, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_conversation_with_tools_extends_turn_by_turn(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    renderer = ChatTemplateRenderer(tokenizer)
    assert renderer.get_stop_token_ids() == [tokenizer.eos_token_id]
    conversation = [
        {"role": "system", "content": "Be brief."},
        user("1 + 2?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        assistant("3", reasoning_content="It says 3."),
        user("Thanks."),
    ]
    prompt = renderer.render_ids(conversation[:2], tools=TOOLS, add_generation_prompt=True)
    whole = renderer.render_ids(conversation, tools=TOOLS, add_generation_prompt=True)
    for answered, following in ((2, conversation[3:5]), (5, conversation[6:])):
        text = renderer.render_ids(conversation[: answered + 1], tools=TOOLS)[len(prompt) : -1]
        prompt = list(renderer.bridge_to_next_turn(prompt, text, following, tools=TOOLS).token_ids)
    assert prompt == whole


def test_chat_template_matches_the_renderers_package(folder: Path) -> None:
    qwen3 = pytest.importorskip("renderers.qwen3")
    tokenizer = load_tokenizer(folder)
    theirs, ours = qwen3.Qwen3Renderer(tokenizer), ChatTemplateRenderer(tokenizer)
    tool = {"role": "tool", "content": "3"}
    conversation = [user("1 + 2?"), assistant("", tool_calls=[CALL]), tool, tool, assistant("So:", tool_calls=[CALL])]
    for messages in (conversation[:1], [{"role": "system", "content": "Be brief."}, user("1 + 2?")]):
        prompts = [
            renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True) for renderer in (theirs, ours)
        ]
        assert prompts[0] == prompts[1]
    asked = [*conversation, tool]  # reasoning is rendered only in the last message
    shown = [tokenizer.decode(renderer.render_ids(asked, tools=TOOLS)) for renderer in (theirs, ours)]
    assert shown[0] == shown[1]
    called = ours.render_ids(conversation[:2], tools=TOOLS)
    answer = called[len(ours.render_ids(conversation[:1], tools=TOOLS, add_generation_prompt=True)) : -1]
    (call,) = theirs.parse_response(answer).tool_calls
    assert (call.name, call.arguments, str(call.status.value)) == ("add", {"a": 1, "b": 2}, "ok")
