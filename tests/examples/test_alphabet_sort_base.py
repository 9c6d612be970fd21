"""Demonstrations of alphabet-sort, and the tiny base model that is made for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig

import examples.alphabet_sort
from examples.alphabet_sort.data import Sample, is_held_out
from examples.alphabet_sort.demonstrations import demonstrate
from examples.alphabet_sort.task import AlphabetSort
from titan_rl import ChatTemplateRenderer
from titan_rl.config.load import load_config
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.data.sft_tokens import encode
from titan_rl.training.tiny_model.tokenizer import build_tokenizer

FOLDER = Path(examples.alphabet_sort.__file__).parent
SAMPLE = Sample("last", (("AdaWolf", "BenHill"), ("MiaKhan",), ("BenWolf",)))


@pytest.fixture(scope="module")
def task() -> AlphabetSort:
    task = load_config(FOLDER / "cpu.toml").tasks[0].task
    assert isinstance(task, AlphabetSort)
    return task


def test_demonstration_names_and_instructions_are_single_tokens(task: AlphabetSort) -> None:
    texts = [
        "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in one.messages)
        for one in task.demonstrations(200)
    ]
    tokenizer = build_tokenizer(texts, "word")

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text).ids]

    assert pieces("PiaHill // new name!\nHugoChen") == ["Pia", "Hill", " // new name!\n", "Hugo", "Chen"]
    assert len(pieces("Now sort these names together with all the earlier ones by ")) == 1
    assert len(tokenizer.encode(texts[0]).ids) < 128


def test_shuffled_demonstration_has_the_right_lines_in_any_order() -> None:
    rng = random.Random(0)
    answers = [demonstrate(SAMPLE, rng, shuffled=1.0).messages[3]["content"] for _ in range(50)]
    lines = [answer.splitlines()[1:-1] for answer in answers]
    assert {tuple(sorted(given)) for given in lines} == {tuple(sorted(SAMPLE.answer(1)))}
    assert len({tuple(given) for given in lines}) == 6


def test_right_demonstrations_come_first_and_none_is_held_out(task: AlphabetSort) -> None:
    demonstrations = list(task.demonstrations(60))
    assert demonstrations == list(task.demonstrations(60))
    right = []
    for demonstration in demonstrations:
        asked, answer = demonstration.messages[0]["content"], demonstration.messages[1]["content"]
        names = asked.split("\n\n")[0].splitlines()[1:]
        assert not is_held_out(names)
        right.append(
            answer.splitlines()[1:-1] == Sample("first" if "first" in asked else "last", (tuple(names),)).answer(0)
        )
    assert all(right[:50])
    assert not all(right[50:])


def test_committed_model_fits_the_task(task: AlphabetSort) -> None:
    config, tokenizer = AutoConfig.from_pretrained(FOLDER / "base"), load_tokenizer(FOLDER / "base")
    assert not config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer)
    renderer = ChatTemplateRenderer(tokenizer)
    right = [demonstrate(sample, random.Random(0), shuffled=0.0) for sample in task.validation_samples(64)]
    assert max(len(encode(renderer, one).token_ids) for one in right) <= 128
