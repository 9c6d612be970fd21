"""Prompts that end with the beginning of the answer: it is continued, and only the rest is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from chatting import play
from models.chats import CHATS
from rollout.test_message_token_env import LetterRenderer
from tasks.test_policy_text import heard, rewards, trl_of
from tasks.written import RENDERERS, TOKENIZER, hiding, opening, plain, play_prompts

from titan_rl import (
    ChatTemplateRenderer,
    Completion,
    Demonstration,
    FinishReason,
    MessageObservation,
    MessageStep,
    MessageTask,
    PromptTask,
    Rollouter,
    RolloutStatus,
    Rows,
    Rubric,
    SamplingParams,
    VersionSpan,
    answer_of,
    build_samples,
    env_reward,
    text_of,
    thought_of,
)
from titan_rl.core.errors import DataError
from titan_rl.rollout.renderer.registry import find_renderer, load_tokenizer_for
from titan_rl.rollout.renderer.renderers_package import renderer_of_name
from titan_rl.rollout.renderer.text import prompt_ids
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.sft.demonstration_sources import read_chats
from titan_rl.training.data.sft_tokens import encode

SO = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "So"}]
THINKS = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "<think>\nLet me see."}]
END = "<|im_end|>"


def is_five(row: dict[str, Any], text: str) -> bool:
    heard.append(text)
    return answer_of(text).strip().endswith("5")


class Begun(PromptTask):
    held_out: float = 0.0

    def sample(self, rng):
        return 1

    def prompt(self, sample):
        return SO

    def reward(self, sample, text):
        return is_five(sample, text)

    def demonstrate(self, sample, messages, rng):
        return " it is 5"


def rows_of(folder: Path) -> Rows:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": SO, "right": " it is 5"}) + "\n")
    return Rows(path=str(path), reward=f"{__name__}:is_five", demonstration="right", held_out=0.0)


def end_of(renderer: Callable[[], Renderer]) -> str:
    """End of a generation prompt."""
    return "<|im_start|>assistant\n" + ("<think>\n" if renderer is opening else "")


@pytest.fixture(autouse=True)
def nothing_heard() -> None:
    heard.clear()


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("make", [lambda _: Begun(), rows_of], ids=["PromptTask", "Rows"])
async def test_beginning_of_the_answer_is_continued_and_not_trained(
    tmp_path: Path, make: Callable[[Path], Any], renderer: Callable[[], Renderer]
) -> None:
    said = [" it is 5", " it is 6"] if renderer is not opening else ["</think> it is 5", "</think> it is 6"]
    rollouts, prompts = await play_prompts(make(tmp_path), renderer(), said)
    assert prompts == [f"<|im_start|>user\n2 + 3?{END}\n{end_of(renderer)}So"] * 2
    assert (rewards(rollouts), heard) == ([1.0, 0.0], said)
    rollouts[0].advantage = 1.0
    (sample,) = build_samples(RolloutGroup("g", None, rollouts[:1]))
    trained = [token for token, learn in zip(sample.token_ids, sample.loss_mask, strict=True) if learn]
    assert TOKENIZER.decode(trained) == said[0] + END


@pytest.mark.parametrize("renderer", RENDERERS)
def test_beginning_of_a_thought_is_continued_and_begun_once(renderer: Callable[[], Renderer]) -> None:
    expected = f"<|im_start|>user\n2 + 3?{END}\n<|im_start|>assistant\n<think>\nLet me see."
    assert TOKENIZER.decode(prompt_ids(renderer(), THINKS)) == expected
    as_field = {"role": "assistant", "content": "", "reasoning_content": "Let me see."}
    assert TOKENIZER.decode(prompt_ids(renderer(), [THINKS[0], as_field])) == expected


@pytest.mark.parametrize("renderer", RENDERERS)
async def test_thought_that_the_prompt_begins_is_read_to_its_end(renderer: Callable[[], Renderer]) -> None:
    class Thinking(Begun):
        def prompt(self, sample):
            return THINKS

    said = [" 2 + 3\n</think>\n\n5", " 2 + 3"]
    rollouts, _ = await play_prompts(Thinking(), renderer(), said)
    assert heard == said
    assert [answer_of(rollout) for rollout in rollouts] == ["5", ""]
    assert [thought_of(rollout) for rollout in rollouts] == ["2 + 3", "2 + 3"]


async def test_trl_completion_is_the_rest_of_an_answer_that_the_prompt_begins(tmp_path: Path) -> None:
    _, prompts = await play_prompts(trl_of(tmp_path, SO), hiding(), [" it is 5"])
    assert prompts[0].endswith("<|im_start|>assistant\nSo")
    assert heard == [[{"role": "assistant", "content": " it is 5"}]]


class Guided:
    """An environment that begins every answer of the policy."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I go "}])

    async def step(self, message):
        self.heard.append(message["content"])
        if len(self.heard) == 2:
            return MessageStep(status=RolloutStatus.COMPLETED, rewards={"won": 1.0})
        return MessageStep([{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Then "}])

    async def close(self) -> None: ...


class Guiding(MessageTask):
    held_out: float = 0.0

    def sample(self, rng):
        return 1

    def env(self, sample):
        return Guided()

    def rubric(self):
        return Rubric([env_reward("won")])

    def demonstrate(self, sample, messages, rng):
        return "left" if len(messages) == 2 else "right"


class TwoTurns:
    """Text of each turn."""

    first = f"<|im_start|>user\nGo.{END}\n<|im_start|>assistant\nI go "
    second = f"{first}left{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\nThen "


@pytest.mark.parametrize("make", [plain, lambda: renderer_of_name("qwen3", TOKENIZER)], ids=["template", "package"])
async def test_environment_may_begin_each_answer(make: Callable[[], Any]) -> None:
    renderer = make()
    prompts: list[str] = []
    texts = iter(["left", "right"])

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        prompts.append(TOKENIZER.decode(list(prompt_token_ids)))
        ids = TOKENIZER.encode(next(texts) + END, add_special_tokens=False)
        return Completion(request_id, ids, [0.0] * len(ids), FinishReason.STOP, [VersionSpan(0, len(ids))])

    task = Guiding()
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=4096)
    group = await rollouter.run_group(generate, 1, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=64))
    (rollout,) = group.rollouts
    assert prompts == [TwoTurns.first, TwoTurns.second]
    assert [message["content"] for message in rollout.messages] == ["Go.", "I go ", "left", "And?", "Then ", "right"]
    assert [bool(message.get("prefix")) for message in rollout.messages] == [False, True, False] * 2
    assert text_of(rollout) == "right"


async def test_policy_of_messages_gets_the_beginning_of_each_answer() -> None:
    ends: list[str] = []

    def say(messages):
        ends.append(messages[-1]["content"])
        return "left"

    rollout = await play(Guiding(), 1, say)
    assert ends == ["I go ", "Then "]
    assert [bool(message.get("prefix")) for message in rollout.messages] == [False, True, False] * 2


def test_rest_of_an_answer_ends_with_the_token_that_closes_a_turn() -> None:
    renderer = ChatTemplateRenderer(byte_tokenizer(eos="<|endoftext|>"))
    (demonstration,) = Begun().demonstrations(1)
    assert learned(renderer, demonstration)[1] == f" it is 5{END}"


def learned(renderer: Renderer, demonstration: Demonstration) -> tuple[str, str]:
    """All text of a demonstration, and its trained parts."""
    tokens = encode(renderer, demonstration)
    trained = [token for token, learn in zip(tokens.token_ids, tokens.loss_mask, strict=True) if learn]
    return TOKENIZER.decode(list(tokens.token_ids)), TOKENIZER.decode(trained)


@pytest.mark.parametrize("renderer", [hiding, plain])
def test_demonstration_teaches_only_the_rest_of_an_answer(renderer: Callable[[], Renderer], tmp_path: Path) -> None:
    for task in (Begun(), rows_of(tmp_path)):
        (demonstration,) = task.demonstrations(1)
        prompt = f"<|im_start|>user\n2 + 3?{END}\n<|im_start|>assistant\nSo"
        assert learned(renderer(), demonstration) == (f"{prompt} it is 5{END}", f" it is 5{END}")
    (demonstration,) = Guiding().demonstrations(1)
    assert learned(renderer(), demonstration) == (f"{TwoTurns.second}right{END}", f"left{END}right{END}")


@pytest.mark.parametrize("renderer", RENDERERS)
async def test_demonstration_of_a_rollout_has_the_text_that_was_written(renderer: Callable[[], Renderer]) -> None:
    class Asked(Begun):
        def prompt(self, sample):
            return "2 + 3?"

    thought = "2 + 3\n</think>\n\n5" if renderer is opening else "<think>\n2 + 3\n</think>\n\n5"
    rollouts, prompts = await play_prompts(Asked(), renderer(), [thought])
    (rollout,) = rollouts
    text, trained = learned(renderer(), Demonstration(json.loads(json.dumps(rollout.messages))))
    assert (text, trained) == (f"{prompts[0]}{thought}{END}", f"{thought}{END}")


def test_renderer_that_cannot_continue_an_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"'So', which LetterRenderer cannot continue.*no attribute tokenizer"):
        prompt_ids(LetterRenderer(), SO)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="ends with a tool call"):
        prompt_ids(plain(), [SO[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])
    with pytest.raises(DataError, match="no message before the beginning of the answer, 'So'"):
        prompt_ids(plain(), SO[1:])


def test_renderer_that_reads_every_answer_as_a_thought_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_for("auto", CHATS["glm4_moe"].write(tmp_path))
    glm, of_template = find_renderer("auto")(tokenizer), find_renderer("chat_template")(tokenizer)
    with pytest.raises(
        DataError, match=r"'So', but GLM45Renderer would read the rest as a thought; set model.renderer"
    ):
        prompt_ids(glm, SO)
    assert tokenizer.decode(prompt_ids(of_template, SO)).endswith("<|assistant|>\nSo")
    for renderer in (glm, of_template):
        assert tokenizer.decode(prompt_ids(renderer, THINKS)).endswith("<|assistant|>\n<think>\nLet me see.")


def test_chats_of_a_file_mark_the_beginning_of_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    rest = {"role": "assistant", "content": " it is 5"}
    rows = [{"messages": [SO[0], each, rest]} for each in ({**SO[1], "prefix": True}, SO[1])]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ((_, marked),) = read_chats(file, 1)
    assert learned(plain(), marked)[1] == f" it is 5{END}"
    with pytest.raises(DataError, match=r'jsonl:2: .*both from the assistant.*mark the first with "prefix": true'):
        read_chats(file, 2)


def test_line_break_of_the_template_precedes_the_beginning_of_an_answer() -> None:
    template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}"
    )
    renderer = ChatTemplateRenderer(byte_tokenizer(template))
    assert TOKENIZER.decode(prompt_ids(renderer, SO)).endswith("<|im_start|>assistant\nSo")
