"""`POST /tokenize` and `POST /detokenize`, in the form of vLLM: the tokens of a text or of a conversation, and back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from titan_rl.serving.conversations.caller import caller_of
from titan_rl.serving.conversations.turn import TurnAsk, Turns
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import Body, Many, read
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges
from titan_rl.serving.policy.served_policy import ServedPolicy
from titan_rl.serving.policy.text import Text
from titan_rl.serving.policy.tokenizing import Tokenizing
from titan_rl.serving.protocols.openai.bodies import Chat, Tool
from titan_rl.serving.protocols.openai.messages import begun_in, messages_from, tools_from
from titan_rl.serving.protocols.wire import TemplateKwargs, TokenId, session_id_of, turns_of


class TokenizeBody(Body):
    """A `prompt`, or `messages`: those give the prompt that the chat endpoint would generate from."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Chat], Field(min_length=1)] | None = None
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    """Of a text: those that the tokenizer begins it with, which is so unless told otherwise."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: Many[TokenId]
    model: str | None = None


class TokenizeEndpoint:
    def __init__(
        self, policy: ServedPolicy, exchanges: Exchanges, text: Text | None, turns: Turns | None, tokenizing: Tokenizing
    ) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text
        self._turns = turns
        self._tokenizing = tokenizing

    def __call__(self, request: Request) -> Answer:
        text = _text_of(self._text)
        body = read(request, TokenizeBody)
        self._policy.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "there has to be a prompt or messages, and not both", param="prompt")
        asked = None if body.messages is None else _asked(body, request)
        turns = None if asked is None else turns_of(self._turns)

        async def work(_: Emit | None) -> dict[str, Any]:
            if turns is not None and asked is not None:
                tokens = list((await turns.talk(asked)).prompt_token_ids)
            else:
                prompt, special = body.prompt or "", body.add_special_tokens is not False
                tokens = await self._tokenizing(lambda: text.encode(prompt, add_special_tokens=special), len(prompt))
            return {
                "count": len(tokens),
                "max_model_len": self._policy.max_context,
                "tokens": tokens,
                "token_strs": [text.piece(token) for token in tokens] if body.return_token_strs else None,
            }

        return Answer(self._exchanges, work, num_places=1, stream=False)


class DetokenizeEndpoint:
    def __init__(self, policy: ServedPolicy, exchanges: Exchanges, text: Text | None) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text

    def __call__(self, request: Request) -> Answer:
        text = _text_of(self._text)
        body = read(request, DetokenizeBody)
        self._policy.check_model(body.model)

        async def work(_: Emit | None) -> dict[str, Any]:
            return {"prompt": text.shown(body.tokens)}

        return Answer(self._exchanges, work, num_places=1, stream=False)


def _asked(body: TokenizeBody, request: Request) -> TurnAsk:
    messages = messages_from(body.messages or ())
    begun = begun_in(messages, body.continue_final_message, body.add_generation_prompt)
    return TurnAsk(
        caller_of(request),
        messages,
        tools_from(body.tools),
        session_id=session_id_of(request),
        template_kwargs=body.chat_template_kwargs,
        begun=begun,
    )


def _text_of(text: Text | None) -> Text:
    if text is None:
        raise ApiError(400, "this server has no tokenizer")
    return text
