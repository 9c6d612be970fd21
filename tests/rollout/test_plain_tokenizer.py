"""Tokenizers without transformers: the same tokens, texts and prompts as with it, and transformers for all else."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

import transformers
from byte_tokenizer import CHATML, byte_tokenizer

from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer.plain_tokenizer import NAMED_TOKENS, PlainTokenizer
from titan_rl.rollout.renderer.registry import ASKED, TALK, TALK_WITH_CALL, TOOLS
from titan_rl.rollout.renderer.tokenizer import load_tokenizer

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson(indent=2) + '<|im_end|>\\n' }}{% endif %}\n"
    "{%- for m in messages %}\n"
    "    {%- if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "    {%- if m.role == 'skipped' %}{% continue %}{% endif %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + eos_token + (word or '') + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + strftime_now('%Y') + '\\n' }}{% endif %}\n"
)
TEXTS = st.text() | st.sampled_from(
    ["", "a <|im_end|> b", "<think>é</think>", "  two  spaces , and .", "\n\n", "<|endoftext|><|im_start|>"]
)


def write(folder: Path, template: str | None = TEMPLATE, *, has_been_saved: bool = True, **changed: Any) -> Path:
    """A folder whose tokenizer is plain, except for the changes to its tokenizer_config.json.

    Args:
        has_been_saved: By transformers, which gives it a post-processor that adds nothing.
    """
    folder.mkdir()
    tokenizer = json.loads(byte_tokenizer(None).backend_tokenizer.to_str())
    assert tokenizer["post_processor"]
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer if has_been_saved else {**tokenizer, "post_processor": None})
    )
    config = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "TokenizersBackend",
        **changed,
    }
    config = {name: value for name, value in config.items() if value != "absent"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module", params=[False, True])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainTokenizer, Any]:
    folder = write(tmp_path_factory.mktemp("both") / "policy", has_been_saved=request.param)
    plain = load_tokenizer(folder)
    assert isinstance(plain, PlainTokenizer)
    return plain, transformers.TokenizersBackend.from_pretrained(folder, local_files_only=True)


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_texts_have_the_tokens_and_tokens_the_texts_of_transformers(both: Any, text: str, special: bool) -> None:
    plain, full = both
    ids = full.encode(text, add_special_tokens=special)
    assert plain.encode(text, add_special_tokens=special) == ids
    assert plain.encode(text) == full.encode(text)
    for given_ids in (ids, tuple(ids), [*ids[:1]], [[*ids]]):
        for skip in (False, True):
            assert plain.decode(given_ids, skip_special_tokens=skip) == full.decode(given_ids, skip_special_tokens=skip)
    encoded, wanted = (each(text, add_special_tokens=special, return_offsets_mapping=True) for each in both)
    for key in ("input_ids", "attention_mask", "offset_mapping"):
        assert encoded[key] == wanted[key]
    assert encoded.input_ids == ids
    assert plain(text, add_special_tokens=special)["input_ids"] == ids
    tokens = full.convert_ids_to_tokens(ids)
    assert plain.convert_ids_to_tokens(ids) == tokens
    assert plain.convert_tokens_to_ids(tokens) == full.convert_tokens_to_ids(tokens)
    assert plain.convert_ids_to_tokens(ids, skip_special_tokens=True) == full.convert_ids_to_tokens(
        ids, skip_special_tokens=True
    )


def test_its_vocabulary_and_special_tokens_are_those_of_transformers(both: Any) -> None:
    plain, full = both
    for name in (*NAMED_TOKENS, *(f"{name}_id" for name in NAMED_TOKENS)):
        assert getattr(plain, name) == getattr(full, name), name
    for name in ("special_tokens_map", "chat_template", "vocab_size", "is_fast", "all_special_ids", "model_max_length"):
        assert getattr(plain, name) == getattr(full, name), name
    assert (len(plain), bool(plain), plain.get_vocab()) == (len(full), bool(full), full.get_vocab())
    assert {key: str(token) for key, token in plain.added_tokens_decoder.items()} == {
        key: str(token) for key, token in full.added_tokens_decoder.items()
    }
    assert str(plain.name_or_path) == str(full.name_or_path)
    for token in ("<|im_end|>", "no such token", 300, 5):
        if isinstance(token, str):
            assert plain.convert_tokens_to_ids(token) == full.convert_tokens_to_ids(token)
        else:
            assert plain.convert_ids_to_tokens(token) == full.convert_ids_to_tokens(token)


@pytest.mark.parametrize("messages", [ASKED, TALK, TALK_WITH_CALL, ({"role": "skipped"}, *ASKED)])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [None, CHATML, "{% generation %}{{ messages[0].content }}{% endgeneration %}"])
def test_prompts_are_those_of_transformers(both: Any, messages: Any, tools: Any, template: str | None) -> None:
    if template == CHATML and any(message.get("content") is None for message in messages):
        return  # the template refuses it
    messages, tools = list(messages), None if tools is None else list(tools)
    for keywords in ({"tokenize": False}, {"return_dict": False}, {}, {"word": "é<b>", "tokenize": False}):
        prompt, wanted = (
            each.apply_chat_template(
                messages, tools=tools, chat_template=template, add_generation_prompt=True, **keywords
            )
            for each in both
        )
        assert (prompt if isinstance(wanted, str | list) else dict(prompt)) == (
            wanted if isinstance(wanted, str | list) else dict(wanted)
        )
    if template is None:
        assert str(datetime.now().year) in both[0].apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )


@pytest.mark.parametrize(
    ("messages", "keywords"),
    [
        ([{"role": "refused", "content": ""}], {}),
        ([], {}),
        ([{"role": "user", "content": "a"}], {"chat_template": "{{ messages[0].content "}),
        ([{"role": "user", "content": "a"}], {"chat_template": "{{ messages.append(1) }}"}),
        ([{"role": "user", "content": "a"}], {"tools": [3]}),
    ],
)
def test_a_template_refuses_what_it_refuses_with_transformers(both: Any, messages: Any, keywords: Any) -> None:
    errors = list[Exception]()
    for each in both:
        with pytest.raises(Exception) as raised:  # noqa: PT011  whatever transformers raises
            each.apply_chat_template(messages, tokenize=False, **keywords)
        errors.append(raised.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


def test_a_copy_is_a_tokenizer_of_its_own(both: Any) -> None:
    plain, full = both
    other = copy.deepcopy(plain)
    assert other.encode("a <|im_end|>") == full.encode("a <|im_end|>")
    assert other.decode([1, 2]) == full.decode([1, 2])
    assert other.backend_tokenizer is not plain.backend_tokenizer
    assert not hasattr(plain, "_nothing")
    with pytest.raises(AttributeError):
        plain.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"clean_up_tokenization_spaces": True},
        {"clean_up_tokenization_spaces": "absent"},
        {"add_bos_token": True},
        {"eos_token": "<unknown>"},
        {"eos_token": "<think>"},
        {"extra_special_tokens": ["<think>"]},
        {"split_special_tokens": True},
        {"chat_template": CHATML},
    ],
)
def test_a_folder_that_asks_for_more_has_the_tokenizer_of_transformers(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert not isinstance(load_tokenizer(write(tmp_path / "policy", **changed)), PlainTokenizer)


@pytest.mark.parametrize("file", ["additional_chat_templates", "special_tokens_map.json", "added_tokens.json"])
def test_a_folder_with_further_files_has_the_tokenizer_of_transformers(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path / "policy")
    (folder / file).mkdir() if "." not in file else (folder / file).write_text("{}")
    assert not isinstance(load_tokenizer(folder), PlainTokenizer)


@pytest.mark.parametrize(
    "changed",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}},
    ],
)
def test_a_tokenizer_that_truncates_or_adds_tokens_is_that_of_transformers(tmp_path: Path, changed: Any) -> None:
    file = write(tmp_path / "policy") / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    assert not isinstance(load_tokenizer(file.parent), PlainTokenizer)


@pytest.mark.parametrize("content", ["no JSON", "[]"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "policy")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"policy.*cannot be loaded"):
        load_tokenizer(folder)


WITHOUT = """
import sys
from titan_rl.rollout.renderer.registry import choose_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer

tokenizer = load_tokenizer(sys.argv[1])
renderer = choose_renderer(tokenizer).renderer
print(tokenizer.decode(renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)))
assert "transformers" not in sys.modules
"""


def test_rendering_imports_no_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "policy", CHATML)
    done = subprocess.run([sys.executable, "-c", WITHOUT, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n"
