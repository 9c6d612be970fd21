"""Tokenizers that are read without transformers give what those of transformers give."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="needs the dev extra")

from tests.models.chats import CHATS
from titan_rl.config.build import make_renderer
from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer.plain_tokenizer import PlainTokenizer
from titan_rl.rollout.renderer.registry import TOOLS, chat_support, choose_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer, load_transformers_tokenizer
from titan_rl.training.settings import ModelConfig

BASE = Path(__file__).parents[2] / "examples" / "alphabet_sort" / "base"
TEXTS = (
    "",
    "\n",
    " Sort these names: Zoë, 李, \U0001f600.",
    "<|im_start|>assistant\n<think>\n\n</think> <s>[INST]<tool_call></s>",
)
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "look_up", "arguments": {"word": "é<&>"}}}
CONVERSATIONS: tuple[list[Any], ...] = (
    [{"role": "user", "content": 'Define <it> & "é".'}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Define it."}],
    [
        {"role": "user", "content": "Define it."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "look_up", "tool_call_id": "abcdefghi", "content": "a pronoun"},
    ],
    [],
)


@cache
def folder_of(family: str) -> Path:
    return BASE if family == "sft" else CHATS[family].write(Path(mkdtemp(prefix=f"{family}-")))


@pytest.fixture(params=["sft", *CHATS])
def folder(request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param)


def test_plain_tokenizer_equals_that_of_transformers(folder: Path) -> None:
    plain, full = load_tokenizer(folder), load_transformers_tokenizer(folder)
    assert type(plain) is PlainTokenizer
    for name in (
        "name_or_path",
        "chat_template",
        "special_tokens_map",
        "all_special_tokens",
        "eos_token_id",
        "unk_token_id",
    ):
        assert getattr(plain, name) == getattr(full, name), name
    assert len(plain) == len(full)
    assert plain.get_vocab() == full.get_vocab()
    assert {key: str(token) for key, token in plain.added_tokens_decoder.items()} == {
        key: str(token) for key, token in full.added_tokens_decoder.items()
    }
    every_id = list(range(len(full)))
    assert plain.convert_ids_to_tokens(every_id) == full.convert_ids_to_tokens(every_id)
    tokens = [*full.get_vocab(), "no such token"]
    assert plain.convert_tokens_to_ids(tokens) == full.convert_tokens_to_ids(tokens)
    assert plain.convert_tokens_to_ids("no such token") == full.convert_tokens_to_ids("no such token")
    for skip in (False, True):
        assert plain.decode(every_id, skip_special_tokens=skip) == full.decode(every_id, skip_special_tokens=skip)
    assert [plain.decode(each) for each in every_id] == [full.decode(each) for each in every_id]


@pytest.mark.parametrize("text", TEXTS)
def test_plain_tokenizer_encodes_like_that_of_transformers(folder: Path, text: str) -> None:
    plain, full = load_tokenizer(folder), load_transformers_tokenizer(folder)
    for special in (False, True):
        assert plain.encode(text, add_special_tokens=special) == full.encode(text, add_special_tokens=special)
        given = {"add_special_tokens": special, "return_offsets_mapping": True}
        found, expected = plain(text, **given), full(text, **given)
        assert {name: found[name] for name in found} == {name: expected[name] for name in found}
    assert copy.deepcopy(plain).encode(text) == plain.encode(text)


@pytest.mark.parametrize("tools", [None, list(TOOLS)], ids=["no_tools", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "call", "empty"])
def test_plain_tokenizer_renders_like_that_of_transformers(folder: Path, messages: list[Any], tools: Any) -> None:
    plain, full = load_tokenizer(folder), load_transformers_tokenizer(folder)
    for opens_answer in (False, True):
        given = {"tools": tools, "add_generation_prompt": opens_answer, "return_dict": False}
        for tokenize in (False, True):
            assert outcome(plain, messages, tokenize=tokenize, **given) == outcome(
                full, messages, tokenize=tokenize, **given
            )


def outcome(tokenizer: Any, messages: list[Any], **given: Any) -> object:
    """Result of rendering, or its error."""
    try:
        return tokenizer.apply_chat_template(copy.deepcopy(messages), **given)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson(indent=2) }}",
        "{%- for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}{{ m.content }}\n{%- endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ bos_token }}{{ eos_token }}{{ documents }}{{ tools }}{{ missing }}",
        "{{ missing.part }}",
        "{{ strftime_now('%Y') }}",
        "{% if %}",
    ],
)
def test_template_environment_equals_that_of_transformers(template: str) -> None:
    plain, full = load_tokenizer(BASE), load_transformers_tokenizer(BASE)
    given = {"chat_template": template, "tokenize": False}
    messages = [*CONVERSATIONS[0], {"role": "assistant", "content": "é"}]
    assert outcome(plain, messages, **given) == outcome(full, messages, **given)


def test_chat_support_is_the_same_with_and_without_transformers(folder: Path) -> None:
    plain, full = (
        chat_support(tokenizer, choose_renderer(tokenizer, single_turn=True))
        for tokenizer in (load_tokenizer(folder), load_transformers_tokenizer(folder))
    )
    assert plain == full


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: rewrite(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer"),
        lambda folder: rewrite(folder / "tokenizer_config.json", extra_special_tokens=["<extra>"]),
        lambda folder: rewrite(folder / "tokenizer_config.json", bos_token="<new>"),
        lambda folder: rewrite(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True),
        lambda folder: rewrite(folder / "tokenizer_config.json", split_special_tokens=True),
        lambda folder: (folder / "special_tokens_map.json").write_text('{"bos_token": "<think>"}'),
        lambda folder: (folder / "added_tokens.json").write_text('{"<added>": 400}'),
        lambda folder: (folder / "chat_template.jinja").write_text("{% generation %}{% endgeneration %}"),
        lambda folder: (
            (folder / "additional_chat_templates").mkdir(),
            (folder / "additional_chat_templates" / "rag.jinja").write_text("a"),
        ),
        lambda folder: rewrite(
            folder / "tokenizer.json",
            truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        ),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
    ],
    ids=[
        "class",
        "extra_tokens",
        "token_outside_vocabulary",
        "clean_up",
        "unknown_setting",
        "special_tokens_map",
        "added_tokens",
        "generation_tag",
        "several_templates",
        "truncation",
        "no_config",
    ],
)
def test_folder_that_needs_transformers_is_loaded_with_it(tmp_path: Path, change: Any) -> None:
    folder = shutil.copytree(BASE, tmp_path / "model")
    assert type(load_tokenizer(folder)) is PlainTokenizer
    change(folder)
    assert type(load_tokenizer(folder)) is type(load_transformers_tokenizer(folder))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_file_is_reported_by_transformers(tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(BASE, tmp_path / "model")
    (folder / file).write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded") as plain:
        load_tokenizer(folder)
    with pytest.raises(ModelError) as full:
        load_transformers_tokenizer(folder)
    assert str(plain.value) == str(full.value)


def test_arguments_of_transformers_do_not_become_template_keywords() -> None:
    with pytest.raises(TypeError, match="continue_final_message cannot be given here"):
        load_tokenizer(BASE).apply_chat_template(CONVERSATIONS[0], continue_final_message=True)


def users_renderer(tokenizer: Any) -> Any:
    import transformers

    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return choose_renderer(tokenizer).renderer


def test_users_renderer_is_called_with_a_tokenizer_of_transformers() -> None:
    make_renderer(ModelConfig(path=str(BASE), renderer=f"{__name__}:users_renderer"))


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    tokenizer = PlainTokenizer.of_folder(BASE)
    assert tokenizer is not None
    begun = threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode("word " * 100_000)

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0)  # offers the GIL
        turns += 1
    assert turns > 100
