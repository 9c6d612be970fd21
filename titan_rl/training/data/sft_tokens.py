"""Encoding of demonstrations as the tokens that rollouts with the same messages would have. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, VERSIONS, MaskArray, NumberArray
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import DataError
from titan_rl.rollout.renderer.types import Renderer, renderable
from titan_rl.rollout.task import Demonstration
from titan_rl.training.data.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class DemonstrationTokens:
    """Tokens of a conversation, with a mask of the assistant's tokens.

    Example: for "2 + 3?" and the answer "5", which ends with a stop token, the mask is False for all tokens of the
    prompt, and True for two: those of "5" and the stop token.
    """

    token_ids: Sequence[int]  # [num_tokens]
    loss_mask: Sequence[bool]  # [num_tokens]

    def sample(self, name: str) -> TrainingSample:
        """Build a training sample for a loss that uses no advantages.

        Args:
            name: Name of the conversation, unique in its batch.
        """
        nothing = NumberArray[float](array(LOGPROBS, (0.0,)) * len(self.token_ids))
        return TrainingSample(
            group_id=name,
            rollout_id=name,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            behaviour_logprobs=nothing,
            advantages=nothing,
            versions=NumberArray(array(VERSIONS, (0,)) * len(self.token_ids)),
            temperature=1.0,
        )


def encode(renderer: Renderer, demonstration: Demonstration) -> DemonstrationTokens:
    """Encode a conversation as if it were a rollout in which the policy gave the assistant's answers: each answer ends
    with a stop token, and the next prompt begins with all tokens so far.

    Messages after the last answer are left out. An answer with `"weight": 0` is not trained.

    Raises:
        DataError: The conversation does not begin with a prompt, it has no assistant message or two in a row, or the
            renderer cannot render it as a rollout.
    """
    trained = [message.get("weight") != 0 for message in demonstration.messages]
    messages = renderable(demonstration.messages)
    tools: list[Any] | None = None if demonstration.tools is None else renderable(demonstration.tools)
    stop_token_ids = renderer.get_stop_token_ids()
    token_ids, loss_mask = array(TOKENS), bytearray()
    prompt: list[int] | None = []
    completion: list[int] = []
    num_rendered = 0  # number of messages in `token_ids`
    for at in _answers(messages):
        try:
            if not num_rendered:
                prompt = list(renderer.render_ids(messages[:at], tools=tools, add_generation_prompt=True))
            else:
                extended = renderer.bridge_to_next_turn(prompt, completion, messages[num_rendered:at], tools=tools)
                prompt = None if extended is None else list(extended.token_ids)
        except Exception as error:  # a template may raise anything
            raise DataError(f"the messages before messages[{at}] cannot be rendered: {describe(error)}") from error
        if prompt is None:
            raise DataError(
                f"{type(renderer).__name__} cannot extend the conversation by messages[{num_rendered}:{at}] without "
                "changing earlier tokens, as a rollout could not; use another renderer (model.renderer)"
            )
        completion = _completion(renderer, messages[: at + 1], tools, stop_token_ids)
        loss_mask += bytes(len(prompt) - len(token_ids)) + bytes([trained[at]]) * len(completion)
        token_ids = array(TOKENS, [*prompt, *completion])
        num_rendered = at + 1
    return DemonstrationTokens(NumberArray(token_ids), MaskArray(loss_mask))


def _answers(messages: Sequence[Any]) -> Iterator[int]:
    """Indices of the assistant's messages."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError("it has no assistant message, so there is nothing to train on")
    for before, at in zip([-1, *answers], answers, strict=False):
        if at == before + 1:
            problem = "it begins with" if at == 0 else f"messages[{at - 1}] and [{at}] are both from"
            raise DataError(f"{problem} the assistant; a rollout has a prompt before each answer")
        yield at


def _completion(
    renderer: Renderer, messages: list[Any], tools: list[Any] | None, stop_token_ids: Sequence[int]
) -> list[int]:
    """Tokens that the policy would sample for the last message."""
    at = len(messages) - 1
    try:
        before = list(renderer.render_ids(messages[:-1], tools=tools, add_generation_prompt=True))
        token_ids = list(renderer.render_ids(messages, tools=tools))
    except Exception as error:
        raise DataError(f"messages[{at}] cannot be rendered: {describe(error)}") from error
    if token_ids[: len(before)] != before:
        raise DataError(
            f"messages[{at}] is not rendered as a continuation of its prompt: the text may begin with a space or "
            "line break that merges with it; remove that, or use another renderer (model.renderer)"
        )
    completion = token_ids[len(before) :]
    ends = [index for index, token_id in enumerate(completion) if token_id in stop_token_ids]
    if len(ends) > 1:
        raise DataError(f"messages[{at}] contains a stop token in its text; remove it")
    return completion[: ends[0] + 1] if ends else [*completion, stop_token_ids[0]]
