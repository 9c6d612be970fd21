"""Makes an environment of chat messages one of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from titan_rl.calls.plain import snapshot
from titan_rl.errors import DataError
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, TokenObservation, TokenStep
from titan_rl.rollout.renderer.messages import message_of, renderable
from titan_rl.rollout.renderer.tool_support import require_tool_support
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion, FinishReason


class MessageTokenEnv:
    """A `TokenEnv` over a `MessageEnv`. The next prompt is the last one, the completion, and what comes after.

    A completion ends the rollout without the environment seeing it where it

    - cannot be parsed, breaks off inside its reasoning, or holds a malformed tool call: ERROR_PARSE;
    - used up its token budget: TRUNCATED_LENGTH. What it says is in the transcript.

    Resetting fails where the environment gives tools that the renderer does not show, or whose calls it does not read.

    The environment's methods may be plain functions where it runs in a thread: see `ThreadedEnv`.

    Example:

        rollouter = Rollouter(lambda sample: MessageTokenEnv(SortEnv(sample), renderer), rubric, max_context=512)
    """

    def __init__(self, env: MessageEnv, renderer: Renderer) -> None:
        self.env = env
        self.tools: list[Mapping[str, object]] | None = None  # that the policy may call, once it is reset
        self._renderer = renderer
        self._prompt_token_ids: list[int] = []

    async def reset(self) -> TokenObservation:
        observation: MessageObservation = await _awaited(self.env.reset())
        self.tools = None if observation.tools is None else list(observation.tools)
        if self.tools:
            require_tool_support(self._renderer, observation.messages, self.tools)
        prompt = self._renderer.render_ids(
            renderable(observation.messages), tools=self.tools, add_generation_prompt=True
        )
        self._prompt_token_ids = list(prompt)
        return TokenObservation(list(prompt), observation.messages)

    async def step(self, completion: Completion) -> TokenStep:
        cut_off = completion.finish_reason is FinishReason.LENGTH
        try:
            parsed = self._renderer.parse_response(
                list(completion.token_ids), tools=self.tools, prompt_ids=list(self._prompt_token_ids)
            )
        except Exception:  # the model's doing: a parser may raise anything on malformed output
            return TokenStep(status=RolloutStatus.TRUNCATED_LENGTH if cut_off else RolloutStatus.ERROR_PARSE)
        answer = message_of(parsed)
        if cut_off:
            return TokenStep(status=RolloutStatus.TRUNCATED_LENGTH, messages=[answer])
        if parsed.reasoning_complete is False or any(call.status != "ok" for call in parsed.tool_calls):
            return TokenStep(status=RolloutStatus.ERROR_PARSE, messages=[answer])

        step: MessageStep = await _awaited(self.env.step(snapshot(answer)))
        messages = [answer, *step.messages]
        if step.status is not None:
            return TokenStep(status=step.status, rewards=step.rewards, messages=messages)
        self._prompt_token_ids = self._bridge(completion, step.messages)
        return TokenStep(list(self._prompt_token_ids), rewards=step.rewards, messages=messages)

    async def close(self) -> None:
        await _awaited(self.env.close())

    def _bridge(self, completion: Completion, new_messages: Sequence[Message]) -> list[int]:
        so_far = [*self._prompt_token_ids, *completion.token_ids]
        bridged = self._renderer.bridge_to_next_turn(
            list(self._prompt_token_ids),
            list(completion.token_ids),
            renderable(new_messages),
            tools=self.tools,
        )
        if bridged is None or list(bridged.token_ids[: len(so_far)]) != so_far:
            raise DataError(
                f"{type(self._renderer).__name__} cannot extend this conversation without rendering it again; "
                "set the renderer to keep earlier reasoning (thinking_retention='all') or to leave it out"
            )
        return list(bridged.token_ids)


async def _awaited(answer: Any) -> Any:
    """The methods of an environment that runs in a thread may be plain functions."""
    return await answer if inspect.isawaitable(answer) else answer
