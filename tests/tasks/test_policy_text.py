"""The text that reward functions get: the whole answer as the policy wrote it, with the thought."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from tasks.written import RENDERERS, hiding, opening, plain, play
from tokenizers import AddedToken

import titan_rl
from titan_rl import (
    ChatTemplateRenderer,
    FinishReason,
    PromptTask,
    Rollout,
    RolloutStatus,
    Rows,
    answer_of,
    text_of,
    thought_of,
)
from titan_rl.rollout.policy_text import joined
from titan_rl.rollout.renderer.renderers_package import renderer_of_name
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.tasks.adapters.trl import TRLTask

R1 = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL)
RIGHT = "<think>\n2 + 3 is 5\n</think>\n\n<answer>5</answer>"
TIGHT = "<think>2 + 3</think><answer>5</answer>"
UNCLOSED = "<think>\n2 + 3 is"
heard: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_heard() -> None:
    heard.clear()


def r1_format(row: dict[str, Any], text: str) -> bool:
    heard.append(text)
    return R1.match(text) is not None


def r1_of_trl(completions: list[Any], **_: Any) -> list[float]:
    heard.extend(completions)
    return [float(R1.match(each if isinstance(each, str) else each[0]["content"]) is not None) for each in completions]


# Countdown as in TinyZero: numbers and a target, the last equation in <answer> tags.
def countdown(row: dict[str, Any], text: str) -> float:
    found = list(re.finditer(r"<answer>(.*?)</answer>", text))
    if not found:
        return 0.0
    equation = found[-1].group(1).strip()
    if sorted(map(int, re.findall(r"\d+", equation))) != sorted(row["nums"]):
        return 0.1
    if not re.fullmatch(r"[\d+\-*/().\s]+", equation):
        return 0.1
    value = eval(equation, {"__builtins__": None}, {})
    return 1.0 if abs(value - row["target"]) < 1e-5 else 0.1


# verl's scorer of MATH: the last \boxed{} of the last 300 characters.
def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    heard.append(solution_str)
    at = solution_str[-300:].rfind("\\boxed{")
    return float(at >= 0 and solution_str[-300:][at + 7 :].partition("}")[0] == ground_truth)


def score(row: dict[str, Any], text: str) -> float:
    return compute_score(row["data_source"], text, row["reward_model"]["ground_truth"], row.get("extra_info"))


def look(x: int) -> int:
    """Look."""
    return x


class R1Task(PromptTask):
    held_out: float = 0.0

    def sample(self, rng):
        return 1

    def prompt(self, sample):
        return "2 + 3?"

    def reward(self, sample, text):
        return r1_format(sample, text)


def rows_of(folder: Path, rows: list[dict[str, Any]], reward: str) -> Rows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Rows(path=str(path), reward=f"{__name__}:{reward}", held_out=0.0)


def trl_of(folder: Path, prompt: Any) -> TRLTask:
    path = folder / "trl.jsonl"
    path.write_text(json.dumps({"prompt": prompt}) + "\n")
    return TRLTask(dataset=str(path), reward_funcs=(f"{__name__}:r1_of_trl",), held_out=0.0)


def rewards(rollouts: list[Rollout]) -> list[float | None]:
    return [rollout.reward for rollout in rollouts]


TASKS: dict[str, Callable[[Path], Any]] = {
    "Rows": lambda folder: rows_of(folder, [{"prompt": "2 + 3?"}], "r1_format"),
    "PromptTask": lambda folder: R1Task(),
    "TRLTask, a text": lambda folder: trl_of(folder, "2 + 3?"),
    "TRLTask, messages": lambda folder: trl_of(folder, [{"role": "user", "content": "2 + 3?"}]),
}


@pytest.mark.parametrize("renderer", [hiding, plain])
@pytest.mark.parametrize("task", TASKS)
async def test_format_reward_of_r1_sees_the_thought(
    tmp_path: Path, task: str, renderer: Callable[[], Renderer]
) -> None:
    texts = [RIGHT, TIGHT, "<answer>5</answer>", "<think>2 + 3</think>5", UNCLOSED]
    rollouts = await play(TASKS[task](tmp_path), renderer(), texts)
    assert rewards(rollouts) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [each if isinstance(each, str) else each[0]["content"] for each in heard] == texts


@pytest.mark.parametrize("task", TASKS)
async def test_text_does_not_repeat_a_thought_that_the_prompt_has_begun(tmp_path: Path, task: str) -> None:
    texts = ["2 + 3 is 5\n</think>\n\n<answer>5</answer>", "2 + 3 is"]
    rollouts = await play(TASKS[task](tmp_path), opening(), texts)
    assert [each if isinstance(each, str) else each[0]["content"] for each in heard] == texts
    assert [answer_of(rollout) for rollout in rollouts] == ["<answer>5</answer>", ""]
    assert [thought_of(rollout) for rollout in rollouts] == ["2 + 3 is 5", "2 + 3 is"]


@pytest.mark.parametrize("renderer", RENDERERS)
async def test_countdown_and_math_recipes_earn_the_rewards_of_their_libraries(
    tmp_path: Path, renderer: Callable[[], Renderer]
) -> None:
    task = rows_of(tmp_path, [{"prompt": "Make 24.", "nums": [2, 3, 4], "target": 24}], "countdown")
    texts = ["<think>x</think> <answer>2*3*4</answer>", "<think>x</think><answer>2+3+4</answer>", "<think>2*3*4"]
    assert rewards(await play(task, renderer(), texts)) == [1.0, 0.1, 0.0]
    row = {"data_source": "math", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "5"}}
    task = rows_of(tmp_path, [row], "score")
    texts = ["<think>\nso\n</think>\n\n\\boxed{5}", "<think>\n\\boxed{5}\n</think>\n\n6", "<think>\n\\boxed{5}"]
    assert rewards(await play(task, renderer(), texts)) == [1.0, 1.0, 1.0]
    assert heard == texts


@pytest.mark.parametrize("renderer", [hiding, plain])
async def test_reward_is_called_with_an_unclosed_thought(renderer: Callable[[], Renderer]) -> None:
    (rollout,) = await play(R1Task(), renderer(), [UNCLOSED])
    assert heard == [UNCLOSED]
    assert rollout.status is RolloutStatus.ERROR_PARSE
    assert (answer_of(rollout), thought_of(rollout), text_of(rollout)) == ("", "2 + 3 is", UNCLOSED)


async def test_trl_functions_see_a_thought_that_is_cut_off(tmp_path: Path) -> None:
    await play(trl_of(tmp_path, "2 + 3?"), hiding(), [UNCLOSED], reason=FinishReason.LENGTH)
    assert heard == [UNCLOSED]


@pytest.mark.parametrize("renderer", [hiding, plain])
async def test_empty_thought_is_no_part_of_the_text(renderer: Callable[[], Renderer]) -> None:
    rollouts = await play(R1Task(), renderer(), ["<think>\n\n</think>\n\n5", "<think></think>5"])
    assert heard == ["5", "5"]
    assert [thought_of(rollout) for rollout in rollouts] == ["", ""]


async def test_special_marks_of_a_thought_become_the_usual_ones() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<think>", "</think>")], special_tokens=True)
    renderer = renderer_of_name("qwen3", tokenizer)
    assert renderer is not None
    await play(R1Task(), renderer, [TIGHT, "<think>2 + 3 is", "5"], tokenizer=tokenizer)
    assert heard == ["<think>\n2 + 3\n</think>\n\n<answer>5</answer>", "<think>\n2 + 3 is", "5"]


class Strict(ChatTemplateRenderer):
    """A renderer that can read no answer."""

    def parse_response(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("unreadable")


class WithoutTokenizer(Strict):
    tokenizer = None  # pyright: ignore[reportAssignmentType]


async def test_text_that_the_renderer_cannot_parse_is_rewarded() -> None:
    (rollout,) = await play(R1Task(), Strict(byte_tokenizer()), [RIGHT])
    assert (rollout.status, rollout.reward, heard) == (RolloutStatus.ERROR_PARSE, 1.0, [RIGHT])


async def test_malformed_tool_call_is_not_rewarded_by_its_text() -> None:
    class WithTool(R1Task):
        def tools(self, sample):
            return look

    template = (Path(titan_rl.__file__).parent / "training/tiny_model/chat_template.jinja").read_text()
    renderer = ChatTemplateRenderer(byte_tokenizer(template))
    (rollout,) = await play(WithTool(), renderer, ["<tool_call>\n{look\n</tool_call>"])
    assert (rollout.status, rollout.reward, heard) == (RolloutStatus.ERROR_PARSE, 0.0, [])


async def test_trl_messages_are_parsed_if_there_are_tools(tmp_path: Path) -> None:
    template = (Path(titan_rl.__file__).parent / "training/tiny_model/chat_template.jinja").read_text()
    task = trl_of(tmp_path, [{"role": "user", "content": "2 + 3?"}])
    task = task.model_copy(update={"tools": (f"{__name__}:look",)})
    await play(task, ChatTemplateRenderer(byte_tokenizer(template)), [TIGHT, UNCLOSED])
    assert heard == [
        [{"role": "assistant", "content": "<answer>5</answer>", "reasoning_content": "2 + 3"}],
        [{"role": "assistant", "content": UNCLOSED}],
    ]


async def test_answer_without_a_text_is_not_rewarded() -> None:
    class Generous(R1Task):
        def reward(self, sample, text):
            return 1.0

    (rollout,) = await play(Generous(), WithoutTokenizer(byte_tokenizer()), ["5"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.ERROR_PARSE, 0.0)


@pytest.mark.parametrize("renderer", [hiding, plain])
async def test_usual_texts_are_not_written_twice(renderer: Callable[[], Renderer]) -> None:
    rollouts = await play(R1Task(), renderer(), ["5", RIGHT, TIGHT])
    assert [rollout.messages[-1].get("written") for rollout in rollouts] == [None, None, TIGHT]


def test_beginning_and_rest_of_an_answer_are_joined() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "Let me", "prefix": True}
    rest = {"role": "assistant", "content": "5", "reasoning_content": "see", "written": " see</think>5"}
    assert joined([begun, rest]) == [{"role": "assistant", "content": "<think>\nLet me see</think>5"}]


def test_text_survives_copies() -> None:
    text = text_of(TIGHT)
    for same in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert (same, same.answer, same.thought) == (TIGHT, "<answer>5</answer>", "2 + 3")


def test_parts_of_texts_and_messages() -> None:
    assert (answer_of(TIGHT), thought_of(TIGHT), text_of(TIGHT)) == ("<answer>5</answer>", "2 + 3", TIGHT)
    assert (answer_of("5"), thought_of("5")) == ("5", "")
    message = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    assert text_of(message) == "<think>\n2 + 3\n</think>\n\n5"
    rollout = Rollout("0/0", "0", 0, sample=None, messages=[message, {"role": "user", "content": "Thanks."}])
    assert (answer_of(rollout), thought_of(rollout)) == ("5", "2 + 3")
    assert text_of(Rollout("0/0", "0", 0, sample=None)) == ""
    begun = {"role": "assistant", "content": "So", "prefix": True}
    assert text_of(Rollout("0/0", "0", 0, sample=None, messages=[{"role": "user", "content": "?"}, begun])) == ""
    assert (text_of(rollout).answer, text_of(rollout).thought) == ("5", "2 + 3")
