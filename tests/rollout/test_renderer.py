"""Chat-template renderer: tokens that it adds to a conversation, and templates that it rejects."""

import json
from pathlib import Path
from typing import Any

import pytest

from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer import ChatTemplateRenderer

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

import tokenizers
import transformers
from byte_tokenizer import CHATML, MARKUP, byte_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
# Thinking is shown only in the last answer, so rendering a longer conversation changes its earlier part.
THINKING = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
LLAMA2 = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<s>[INST] ' + m.content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + m.content + ' </s>' -}}{%- endif -%}{%- endfor -%}"
)
PLAIN = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}{{- 'assistant:' -}}"
NEWEST_FIRST = CHATML.replace("in messages", "in messages | reverse")
COUNTING = "{{- messages | length -}}" + CHATML
FORGETFUL = "{{- '<|im_start|>' + messages[-1].content + '<|im_end|>' -}}"
SILENT = "{%- for m in messages if m.role == 'user' -%}{{- '<|im_start|>' + m.content + '<|im_end|>' -}}{%- endfor -%}"
RAISING = "{{- raise_exception('one message at most') -}}"


def make_tokenizer(chat_template: str | None, words: tuple[str, ...] = ()) -> Any:
    """A tokenizer of UTF-8 bytes, or one of whole words and nothing else."""
    eos = "</s>" if chat_template == LLAMA2 else "<|endoftext|>"
    if not words:
        return byte_tokenizer(chat_template, special=SPECIAL, eos=eos)
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(MARKUP)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=chat_template)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


USER = {"role": "user", "content": "sort b a"}
MORE = {"role": "user", "content": "and c?"}


@pytest.mark.parametrize(
    ("template", "close", "expected"),
    [
        (CHATML, "<|im_end|>", "<|im_end|>\n<|im_start|>user\nand c?<|im_end|>\n<|im_start|>assistant\n"),
        (THINKING, "<|im_end|>", "<|im_end|>\n<|im_start|>user\nand c?<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA2, "</s>", " </s><s>[INST] and c? [/INST]"),
        (PLAIN, "", "\nuser: and c?\nassistant:"),
    ],
)
def test_next_prompt_extends_prompt_and_completion_by_the_template(template: str, close: str, expected: str) -> None:
    tokenizer = make_tokenizer(template)
    renderer = ChatTemplateRenderer(tokenizer)
    prompt = renderer.render_ids([USER], add_generation_prompt=True)
    # Not how the tokenizer would write it: sampled tokens need not be canonical.
    answer = [*encode(tokenizer, "a"), *encode(tokenizer, "\n"), *encode(tokenizer, "b")]

    cut = renderer.bridge_to_next_turn(prompt, answer, [MORE]).token_ids
    assert cut[: len(prompt) + len(answer)] == prompt + answer
    assert tokenizer.decode(cut[len(prompt) + len(answer) :]) == expected

    closed = [*answer, *encode(tokenizer, close)]
    whole = renderer.bridge_to_next_turn(prompt, closed, [MORE]).token_ids
    assert whole[: len(prompt) + len(closed)] == prompt + closed
    assert tokenizer.decode(whole[len(prompt) + len(closed) :]) == expected[expected.index(close) + len(close) :]


def test_bridging_equals_rendering_for_a_stable_template() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = ChatTemplateRenderer(tokenizer)
    messages = [{"role": "system", "content": "be brief"}, USER]
    prompt = renderer.render_ids(messages, add_generation_prompt=True)
    for answer, new in (("a b", [MORE]), ("a b c", [{"role": "tool", "content": "ok"}, MORE])):
        prompt = renderer.bridge_to_next_turn(prompt, encode(tokenizer, answer + "<|im_end|>"), new).token_ids
        messages += [{"role": "assistant", "content": answer}, *new]
    assert prompt == renderer.render_ids(messages, add_generation_prompt=True)


def test_stop_tokens_are_eos_and_the_end_of_turn_token() -> None:
    tokenizer = make_tokenizer(CHATML)
    stop = ChatTemplateRenderer(tokenizer).get_stop_token_ids()
    assert sorted(tokenizer.convert_ids_to_tokens(stop)) == ["<|endoftext|>", "<|im_end|>"]


def test_bridging_works_with_a_word_level_vocabulary() -> None:
    tokenizer = make_tokenizer(CHATML, words=("user", "assistant", "Ada", "Ben", "sort", "more"))
    renderer = ChatTemplateRenderer(tokenizer)
    prompt = renderer.render_ids([{"role": "user", "content": "sort Ben Ada"}], add_generation_prompt=True)
    new = renderer.bridge_to_next_turn(prompt, encode(tokenizer, "Ada Ben"), [{"role": "user", "content": "more"}])
    added = tokenizer.convert_ids_to_tokens(new.token_ids[len(prompt) + 2 :])
    assert added == ["<|im_end|>", "<|im_start|>", "user", "more", "<|im_end|>", "<|im_start|>", "assistant"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NEWEST_FIRST, "does not show the new messages"),
        (COUNTING, "changes earlier messages"),
        (FORGETFUL, "cannot be found again|changes earlier"),
        (SILENT, "cannot be found again"),
        (RAISING, "one message at most"),
        (None, "no chat template"),
    ],
)
def test_template_that_cannot_be_extended_is_rejected(template: str | None, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        ChatTemplateRenderer(make_tokenizer(template))


def test_parsing_strips_the_stop_token_other_special_tokens_and_reasoning() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = ChatTemplateRenderer(tokenizer)

    def parse(text: str) -> tuple[str, str | None, bool]:
        parsed = renderer.parse_response(encode(tokenizer, text))
        return parsed.content, parsed.reasoning_content, parsed.reasoning_complete

    assert parse("a b<|im_end|>") == ("a b", None, True)
    assert parse("a<|im_start|>b\n") == ("ab\n", None, True)
    assert parse("<think>\nwhy\n</think>\n\na<|im_end|>") == ("a", "why", True)
    assert parse("why</think>a") == ("a", "why", True)
    assert parse("<think>\nwh<|im_end|>") == ("", "wh", False)
    assert parse("") == ("", None, True)


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = make_tokenizer("{{- style -}}" + CHATML)
    prompt = ChatTemplateRenderer(tokenizer, template_kwargs={"style": "terse"}).render_ids([USER])
    assert tokenizer.decode(prompt).startswith("terse<|im_start|>")


def test_cached_rendering_is_shared_and_cannot_be_modified(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = ChatTemplateRenderer(tokenizer)
    rendered: list[Any] = []
    apply = tokenizer.apply_chat_template

    def note(messages: Any, **rest: Any) -> Any:
        rendered.append(messages)
        return apply(messages, **rest)

    monkeypatch.setattr(tokenizer, "apply_chat_template", note)
    messages = [{"role": "user", "content": "sort"}]
    first = renderer.render_ids(messages, add_generation_prompt=True)
    expected = list(first)
    first.clear()
    assert [renderer.render_ids(messages, add_generation_prompt=True) for _ in range(7)] == [expected] * 7
    assert len(rendered) == 1
    assert renderer.render_ids(messages) != expected
    others = [[{"role": "user", "content": f"name {number}"}] for number in range(300)]
    assert all(renderer.render_ids(other) == renderer.render_ids(other) for other in others)
    assert len(rendered) == 302
    assert renderer.render_ids(messages, add_generation_prompt=True) == expected
    assert len(rendered) == 303, "the least recently used rendering is evicted"


@pytest.mark.parametrize("kind", ["TokenizersBackend", "Qwen2Tokenizer", None])
def test_saved_tokenizer_is_loaded(tmp_path: Path, kind: str | None) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": kind}))
    loaded = ChatTemplateRenderer.from_pretrained(tmp_path)
    assert loaded.render_ids([USER]) == ChatTemplateRenderer(tokenizer).render_ids([USER])


def test_error_names_a_model_folder_without_tokenizer_or_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'.*missing' does not exist"):
        ChatTemplateRenderer.from_pretrained(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match=f"'{tmp_path}' has no tokenizer"):
        ChatTemplateRenderer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ModelError, match=f"'{tmp_path}' cannot be loaded"):
        ChatTemplateRenderer.from_pretrained(tmp_path)
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"'{tmp_path}' has no chat template"):
        ChatTemplateRenderer.from_pretrained(tmp_path)
