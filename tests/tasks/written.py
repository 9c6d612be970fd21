"""Renderers of three kinds of chat templates, and policies that write given texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from byte_tokenizer import CHATML, byte_tokenizer

from titan_rl import Completion, FinishReason, Rollout, Rollouter, SamplingParams, Task, VersionSpan
from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.renderers_package import renderer_of_name
from titan_rl.rollout.renderer.types import Renderer

TOKENIZER = byte_tokenizer()
OPENED = CHATML.replace("assistant\n' -}}{%- endif", "assistant\n<think>\n' -}}{%- endif")
"""Template that begins the thought in its generation prompt, as DeepSeek-R1's and Qwen3-Thinking's do."""


def hiding() -> Renderer:
    """Qwen3's own renderer, which leaves a thought out of an answer."""
    renderer = renderer_of_name("qwen3", TOKENIZER)
    assert renderer is not None
    return renderer


def plain() -> Renderer:
    """A template that knows nothing of thoughts."""
    return ChatTemplateRenderer(TOKENIZER)


def opening() -> Renderer:
    """A template whose prompt ends with `<think>`."""
    return ChatTemplateRenderer(byte_tokenizer(OPENED))


RENDERERS: Sequence[Callable[[], Renderer]] = (hiding, plain, opening)


async def play(
    task: Task,
    renderer: Renderer,
    texts: Sequence[str],
    *,
    reason: FinishReason = FinishReason.STOP,
    sample: Any = None,
    tokenizer: Any = TOKENIZER,
) -> list[Rollout]:
    """Play a group whose rollouts answer with the texts, one each."""
    rollouts, _ = await play_prompts(task, renderer, texts, reason=reason, sample=sample, tokenizer=tokenizer)
    return rollouts


async def play_prompts(
    task: Task,
    renderer: Renderer,
    texts: Sequence[str],
    *,
    reason: FinishReason = FinishReason.STOP,
    sample: Any = None,
    tokenizer: Any = TOKENIZER,
) -> tuple[list[Rollout], list[str]]:
    """Play a group, and return its prompts as text, too."""
    said, prompts = iter(texts), list[str]()

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        prompts.append(TOKENIZER.decode(list(prompt_token_ids)))
        end = "<|im_end|>" if reason is FinishReason.STOP else ""
        ids = tokenizer.encode(next(said) + end, add_special_tokens=False)
        return Completion(request_id, ids, [0.0] * len(ids), reason, [VersionSpan(0, len(ids))])

    sample = task.train_sample(0, 0) if sample is None else sample
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=8192)
    sampling = SamplingParams(max_tokens=512)
    group = await rollouter.run_group(generate, sample, group_id="g", group_size=len(texts), sampling=sampling)
    return group.rollouts, prompts
