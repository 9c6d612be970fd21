"""Makes an environment of chat messages one of tokens."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.core.calls.plain import snapshot
from titan_rl.core.errors import PromptTooLongError
from titan_rl.rollout.environment.growing_prompt import GrowingPrompt
from titan_rl.rollout.environment.methods import EnvMethods, require_methods
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, TokenObservation, TokenStep
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import RolloutStatus
from titan_rl.types import Completion, FinishReason


class MessageTokenEnv:
    """A `TokenEnv` over a `MessageEnv`. The next prompt is the last one, the completion, and what comes after.

    A completion ends the rollout without the environment seeing it where it

    - cannot be parsed, breaks off inside its reasoning, or holds a malformed tool call: ERROR_PARSE;
    - used up its token budget: TRUNCATED_LENGTH. What it says is in the transcript.

    Messages that cannot fit into the context, which their length tells, are not tokenized: TRUNCATED_PROMPT.

    Resetting fails where the environment gives tools that the renderer does not show, or whose calls it does not read.

    The environment's methods may be plain functions, which run in a thread of its own: see `EnvMethods`.

    Raises:
        TypeError: the environment lacks one of the methods.

    Example:

        rollouter = Rollouter(lambda sample: MessageTokenEnv(SortEnv(sample), renderer), rubric, max_context=512)
    """

    def __init__(self, env: MessageEnv, renderer: Renderer) -> None:
        require_methods(env)
        self.env = env
        self._methods = EnvMethods(env)
        self.tools: list[Mapping[str, object]] | None = None  # that the policy may call, once it is reset
        self._renderer = renderer
        self._prompt = GrowingPrompt(renderer)

    @property
    def _name(self) -> str:
        return type(self.env).__name__

    async def reset(self) -> TokenObservation:
        observation = await self._methods.call("reset", MessageObservation)
        self.tools = None if observation.tools is None else list(observation.tools)
        self._prompt = GrowingPrompt(self._renderer, self.tools)
        return TokenObservation(await self._prompt.next(observation.messages, self._name), observation.messages)

    async def step(self, completion: Completion) -> TokenStep:
        cut_off = completion.finish_reason is FinishReason.LENGTH
        answer = self._prompt.read(completion)
        said = [] if answer is None else [answer.message]
        if cut_off:
            return TokenStep(status=RolloutStatus.TRUNCATED_LENGTH, messages=said)
        if answer is None or not answer.is_whole:
            return TokenStep(status=RolloutStatus.ERROR_PARSE, messages=said)

        step = await self._methods.call("step", MessageStep, snapshot(answer.message))
        messages = [answer.message, *step.messages]
        if step.status is not None:
            return TokenStep(status=step.status, rewards=step.rewards, messages=messages)
        try:
            prompt = await self._prompt.next(step.messages, self._name)
        except PromptTooLongError as error:
            ended = RolloutStatus.TRUNCATED_PROMPT
            return TokenStep(status=ended, rewards=step.rewards, messages=messages, error=str(error))
        return TokenStep(prompt, rewards=step.rewards, messages=messages)

    async def close(self) -> None:
        await self._methods.close()
