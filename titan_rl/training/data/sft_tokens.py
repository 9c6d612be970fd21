"""Encoding of demonstrations as the tokens that rollouts with the same messages would have. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, VERSIONS, MaskArray, NumberArray
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import DataError
from titan_rl.rollout.policy_text import PREFIX, joined, text_of, thought_of
from titan_rl.rollout.renderer.text import extended_ids, prompt_ids, text_ids, tokenizer_of
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

    An answer is written by the chat template. If the template does not show the answer's thought, or the answer
    continues a message that is marked as its beginning (`"prefix": True`), it is the text that the policy wrote.

    Raises:
        DataError: The conversation does not begin with a prompt, it has no assistant message or two in a row, or the
            renderer cannot render it as a rollout.
    """
    trained = [message.get("weight") != 0 for message in demonstration.messages]
    messages = renderable(demonstration.messages)
    tools: list[Any] | None = None if demonstration.tools is None else renderable(demonstration.tools)
    token_ids, loss_mask = array(TOKENS), bytearray()
    prompt: list[int] = []
    completion: list[int] = []
    num_rendered = 0  # number of messages in `token_ids`
    for at in _answers(messages):
        new = joined(messages[num_rendered:at])
        try:
            if not num_rendered:
                prompt = prompt_ids(renderer, new, tools)
            else:
                found = extended_ids(renderer, prompt, completion, new, tools)
                if found is None:
                    raise DataError(
                        f"{type(renderer).__name__} cannot extend the conversation by messages[{num_rendered}:{at}] "
                        "without changing earlier tokens, as a rollout could not; use another renderer (model.renderer)"
                    )
                prompt = found
        except DataError:
            raise
        except Exception as error:  # a template may raise anything
            raise DataError(f"the messages before messages[{at}] cannot be rendered: {describe(error)}") from error
        completion = _completion(renderer, messages[: at + 1], tools)
        loss_mask += bytes(len(prompt) - len(token_ids)) + bytes([trained[at]]) * len(completion)
        token_ids = array(TOKENS, [*prompt, *completion])
        num_rendered = at + 1
    return DemonstrationTokens(NumberArray(token_ids), MaskArray(loss_mask))


def _answers(messages: Sequence[Any]) -> Iterator[int]:
    """Indices of the assistant's messages, without beginnings of the next one."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError("it has no assistant message, so there is nothing to train on")
    for before, at in zip([-1, *answers], answers, strict=False):
        if at == 0:
            raise DataError("it begins with the assistant; a rollout has a prompt before each answer")
        if at == before + 1 and not messages[before].get(PREFIX):
            raise DataError(
                f"messages[{before}] and [{at}] are both from the assistant; a rollout has a prompt before each "
                f'answer. If the second continues the first, mark the first with "{PREFIX}": true'
            )
        if at + 1 not in answers or not messages[at].get(PREFIX):
            yield at


def _completion(renderer: Renderer, messages: list[Any], tools: list[Any] | None) -> list[int]:
    """Tokens that the policy would sample for the last message."""
    at, message = len(messages) - 1, messages[-1]
    try:
        before = prompt_ids(renderer, joined(messages[:-1]), tools)
        token_ids = list(renderer.render_ids(joined(messages), tools=tools))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"messages[{at}] cannot be rendered: {describe(error)}") from error
    completion = token_ids[len(before) :] if token_ids[: len(before)] == before else None
    stop_token_ids = renderer.get_stop_token_ids()
    is_text = bool(messages[at - 1].get(PREFIX)) or not _shows_thought(renderer, message, completion)
    if is_text and not message.get("tool_calls") and (text := text_ids(renderer, before, text_of(message))) is not None:
        stops = [token_id for token_id in token_ids if token_id in stop_token_ids]
        completion = [*text, stops[-1] if stops else stop_token_ids[0]]
    if completion is None:
        raise DataError(
            f"messages[{at}] is not rendered as a continuation of its prompt: the text may begin with a space or "
            "line break that merges with it; remove that, or use another renderer (model.renderer)"
        )
    ends = [index for index, token_id in enumerate(completion) if token_id in stop_token_ids]
    if len(ends) > 1:
        raise DataError(f"messages[{at}] contains a stop token in its text; remove it")
    return completion[: ends[0] + 1] if ends else [*completion, stop_token_ids[0]]


def _shows_thought(renderer: Renderer, message: Any, completion: list[int] | None) -> bool:
    """Whether a rendered answer has its thought; True if that is unknown."""
    tokenizer, thought = tokenizer_of(renderer), thought_of(message)
    if tokenizer is None or not thought:
        return True
    return completion is not None and thought in tokenizer.decode(completion)
