"""Chats of model families: renderers, prompt extension, tool calls and stop tokens, with real chat templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the dev extra")
pytest.importorskip("renderers")

from tests.models.chats import CHATS, GPT_OSS
from titan_rl.config.build import make_renderer
from titan_rl.core.errors import ModelError
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.rollout.renderer.registry import TOOLS
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.tasks import ToolEnv
from titan_rl.training.settings import ModelConfig

WITH_TOOLS = ("qwen2", "qwen3", "llama", "glm4_moe", "glm4", "mistral", "olmo3")
USER: Any = {"role": "user", "content": "Define it."}
MORE: Any = {"role": "user", "content": "Longer."}


@cache
def folder_of(family: str) -> Path:
    return CHATS[family].write(Path(mkdtemp(prefix=f"{family}-")))


def renderer_of(family: str) -> Any:
    return make_renderer(ModelConfig(path=str(folder_of(family))))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", CHATS)
def test_each_prompt_extends_the_previous_tokens(family: str) -> None:
    renderer, tokenizer = renderer_of(family), load_tokenizer(folder_of(family))
    messages = [USER]
    prompt = list(renderer.render_ids(messages, add_generation_prompt=True))
    stop = renderer.get_stop_token_ids()[0]
    for answer in ("A word", "A pronoun"):
        text = f"<think>\nHm.\n</think>\n\n{answer}"
        # Sampled tokens need not be the canonical tokenization.
        answered = [*ids_of(tokenizer, text[:10]), *ids_of(tokenizer, text[10:]), stop]
        extended = renderer.bridge_to_next_turn(prompt, answered, [MORE])
        assert extended is not None
        assert list(extended.token_ids)[: len(prompt) + len(answered)] == [*prompt, *answered]
        assert "Longer." in tokenizer.decode(list(extended.token_ids)[len(prompt) + len(answered) :])
        prompt = list(extended.token_ids)


ANSWER_FIRST = ("qwen3", "qwen3_moe", "glm4_moe", "glm4", "deepseek_v3")
"""Families whose answers begin with reasoning, its end tag or a line break."""


@pytest.mark.parametrize("family", [name for name in CHATS if name not in ANSWER_FIRST])
def test_extended_prompt_matches_the_rendered_template(family: str) -> None:
    renderer, tokenizer = renderer_of(family), load_tokenizer(folder_of(family))
    prompt = list(renderer.render_ids([USER], add_generation_prompt=True))
    messages = [USER, {"role": "assistant", "content": "A word."}, MORE]
    whole = list(renderer.render_ids(messages, add_generation_prompt=True))
    answered = ids_of(tokenizer, "A word.")
    assert list(renderer.bridge_to_next_turn(prompt, answered, [MORE]).token_ids) == whole


@pytest.mark.parametrize("family", CHATS)
def test_generation_config_eos_tokens_are_stop_tokens(family: str) -> None:
    renderer, tokenizer = renderer_of(family), load_tokenizer(folder_of(family))
    assert {*CHATS[family].stops} <= {*tokenizer.convert_ids_to_tokens(renderer.get_stop_token_ids())}


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tool_call_is_parsed_and_its_result_extends_the_prompt(family: str) -> None:
    renderer, tokenizer = renderer_of(family), load_tokenizer(folder_of(family))
    tools = list(TOOLS)
    prompt = list(renderer.render_ids([USER], tools=tools, add_generation_prompt=True))
    assert "Look up a word." in tokenizer.decode(prompt)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "look_up", "arguments": {"word": "it"}}}
    asked = [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}]
    whole = list(renderer.render_ids(asked, tools=tools))
    assert whole[: len(prompt)] == prompt
    answered = whole[len(prompt) :]
    stops = renderer.get_stop_token_ids()
    ends = [place for place, token in enumerate(answered) if token in stops]
    answered = answered[: ends[0] + 1] if ends else [*answered, *tokenizer.convert_tokens_to_ids(["<|observation|>"])]

    (read,) = renderer.parse_response(answered, tools=tools, prompt_ids=prompt).tool_calls
    assert (read.name, read.arguments, read.status) == ("look_up", {"word": "it"}, "ok")

    result = {"role": "tool", "name": "look_up", "tool_call_id": read.id or "abcdefghi", "content": "a pronoun"}
    extended = list(renderer.bridge_to_next_turn(prompt, answered, [result], tools=tools).token_ids)
    assert extended[: len(prompt) + len(answered)] == [*prompt, *answered]
    rendered = tokenizer.decode(list(renderer.render_ids([*asked, result], tools=tools, add_generation_prompt=True)))
    assert tokenizer.decode(extended) == rendered


def test_mistral_repeats_tools_before_the_last_user_message() -> None:
    renderer, tokenizer = renderer_of("mistral"), load_tokenizer(folder_of("mistral"))
    prompt = renderer.render_ids([USER], tools=list(TOOLS), add_generation_prompt=True)
    answered = ids_of(tokenizer, "A word.</s>")
    extended = renderer.bridge_to_next_turn(prompt, answered, [MORE], tools=list(TOOLS)).token_ids
    assert extended[: len(prompt) + len(answered)] == [*prompt, *answered]
    assert tokenizer.decode(extended).count("[AVAILABLE_TOOLS]") == 2


async def test_reset_fails_if_the_template_does_not_show_tools() -> None:
    env = MessageTokenEnv(ToolEnv("1 + 1?", look_up), renderer_of("gemma3_text"))
    with pytest.raises(ModelError, match="does not show the model the environment's 1 tools"):
        await env.reset()


def look_up(word: str) -> str:
    """Look up a word."""
    return word


def test_json_answer_without_a_call_is_text() -> None:
    renderer, tokenizer = renderer_of("llama"), load_tokenizer(folder_of("llama"))
    parsed = renderer.parse_response(ids_of(tokenizer, 'It is {"a": 1}.<|eot_id|>'), tools=list(TOOLS))
    assert (parsed.content, list(parsed.tool_calls)) == ('It is {"a": 1}.', [])


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ('<tool_call>\n{"name": "look_up", "arguments": {"word": }\n</tool_call>', "invalid_json"),
        ('<tool_call>\n{"name": "look_up", "arguments": {"word": "it"}}', "unclosed_block"),
        ('<tool_call>\n{"arguments": {"word": "it"}}\n</tool_call>', "missing_name"),
        ("<tool_call>\n3\n</tool_call>", "malformed_structure"),
    ],
)
def test_malformed_tool_call_has_an_error_status(answer: str, status: str) -> None:
    renderer, tokenizer = renderer_of("qwen2"), load_tokenizer(folder_of("qwen2"))
    (call,) = renderer.parse_response(ids_of(tokenizer, f"Wait.{answer}<|im_end|>"), tools=list(TOOLS)).tool_calls
    assert call.status == status


def test_text_before_calls_excludes_special_tokens_and_reasoning() -> None:
    renderer, tokenizer = renderer_of("qwen2"), load_tokenizer(folder_of("qwen2"))
    answered = (
        "<think>\nhm <tool_call>\n</think>\n\nWait<|im_start|>.\n"
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
        '\n<tool_call>\n{"name": "b", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    )
    parsed = renderer.parse_response(ids_of(tokenizer, answered), tools=list(TOOLS))
    assert (parsed.content, parsed.reasoning_content) == ("Wait.", "hm <tool_call>")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("a", {}), ("b", {"x": 1})]
    assert not renderer.parse_response(ids_of(tokenizer, answered)).tool_calls, "calls need tools"


def test_renderer_is_chosen_by_family() -> None:
    qwen2 = renderer_of("qwen2")
    assert isinstance(qwen2, ChatTemplateRenderer)
    assert "You are Qwen" in load_tokenizer(folder_of("qwen2")).decode(qwen2.render_ids([USER]))
    assert type(renderer_of("qwen3")).__name__ == "Qwen3Renderer"
    assert type(renderer_of("llama")).__name__ == "Llama3Renderer"
    assert type(renderer_of("glm4_moe")).__name__ == "GLM45Renderer"


def test_rejects_multi_message_template_and_names_the_renderer_to_set(tmp_path: Path) -> None:
    folder = GPT_OSS.write(tmp_path)
    with pytest.raises(ModelError, match=r'model\.renderer = "renderers:GptOssRenderer"'):
        make_renderer(ModelConfig(path=str(folder), renderer="chat_template"))


def test_package_renderer_gains_stop_tokens_of_generation_config(tmp_path: Path) -> None:
    folder = CHATS["qwen3"].write(tmp_path)
    tokenizer = load_tokenizer(folder)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [start, 65]}))
    renderer = make_renderer(ModelConfig(path=str(folder)))
    assert start in renderer.get_stop_token_ids()
    assert 65 not in renderer.get_stop_token_ids(), "65 is a letter, not a stop token"
    assert renderer.parse_response([*ids_of(tokenizer, "yes"), start]).content == "yes"


def test_rejects_noninteger_eos_in_generation_config(tmp_path: Path) -> None:
    folder = CHATS["qwen2"].write(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "<|im_end|>"}))
    with pytest.raises(ModelError, match=r"eos_token_id in .* is '<\|im_end\|>'; it must be a token id"):
        make_renderer(ModelConfig(path=str(folder)))
