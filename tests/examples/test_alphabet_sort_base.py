"""The base model's tokenizer and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from examples.alphabet_sort import base_model
from examples.alphabet_sort.data import Sample
from examples.alphabet_sort.tokenizer import build_tokenizer
from titan_rl import Message
from titan_rl.config.load import load_config

BASE = Path(base_model.__file__).parent / "base"
SAMPLE = Sample("last", (("AdaWolf", "BenHill"), ("MiaKhan",), ("BenWolf",)))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@given(text=st.text())
def test_any_text_comes_back_exactly(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_first_and_last_names_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("AdaWolf // new name!\nBenHill"))
    assert pieces == ["Ada", "Wolf", "Ġ//ĠnewĠname!", "Ċ", "Ben", "Hill"]


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, prompt: bool = False) -> list[int]:
    chat = [dict(message) for message in messages]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    return cast("list[int]", ids)


def test_a_conversation_begins_with_the_tokens_of_its_beginning(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = base_model.demonstrate(SAMPLE, random.Random(0), shuffled=0.5)
    for answered in (1, 3):
        prompt = rendered(tokenizer, messages[:answered], prompt=True)
        completion = tokenizer.encode(f"{messages[answered]['content']}<|im_end|>")
        longer = rendered(tokenizer, messages[: answered + 2], prompt=True)
        assert longer[: len(prompt) + len(completion)] == prompt + completion


def test_only_the_assistants_tokens_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = base_model.demonstrate(SAMPLE, random.Random(0), shuffled=0.0)
    ids, labels = base_model.encode(tokenizer, messages)
    assert ids == rendered(tokenizer, messages)
    learned = tokenizer.decode([label for label in labels if label != base_model.IGNORED])
    assert learned == "".join(f"{message['content']}<|im_end|>" for message in messages[1::2])


def test_a_shuffled_demonstration_has_the_right_lines_in_any_order() -> None:
    rng = random.Random(0)
    answers = [base_model.demonstrate(SAMPLE, rng, shuffled=1.0)[3]["content"] for _ in range(50)]
    lines = [answer.splitlines()[1:-1] for answer in answers]
    assert {tuple(sorted(given)) for given in lines} == {tuple(sorted(SAMPLE.answer(1)))}
    assert len({tuple(given) for given in lines}) == 6


def test_the_committed_model_is_what_the_script_builds(tokenizer: PreTrainedTokenizerFast) -> None:
    config = AutoConfig.from_pretrained(BASE)
    assert not config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer)
    assert AutoTokenizer.from_pretrained(BASE).get_vocab() == tokenizer.get_vocab()
    longest = max(
        len(base_model.encode(tokenizer, base_model.demonstrate(sample, random.Random(0), 0.0))[0])
        for sample in load_config(BASE.parent / "cpu.toml").tasks[0].task.validation_samples(64)
    )
    assert longest <= 128
