"""Renderer for any Hugging Face tokenizer whose chat template can be extended turn by turn."""

from __future__ import annotations

import copy
import json
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_rl.core.errors import ModelError, RequestError
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.types import ParsedToolCall, Tools
from titan_rl.rollout.types import Message

REMEMBERED = 128
"""Number of cached renderings; siblings render the same messages at about the same time."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The `RenderedTokens` of `ChatTemplateRenderer`."""

    token_ids: list[int]  # [num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The `ParsedResponse` of `ChatTemplateRenderer`."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    reasoning_complete: bool = True


class ChatTemplateRenderer:
    r"""Renderer that uses any tokenizer's own chat template.

    The tokens between an answer and the next one are found by rendering a short conversation with the new messages
    twice, with two different answers. They are the common end of both renderings.

    Example: for a template of the form `<|im_start|>role\ncontent<|im_end|>\n` and a user's "more", those tokens are

        <|im_end|> \n <|im_start|> user \n more <|im_end|> \n <|im_start|> assistant \n

    and the first is left out if the completion already ends with it.

    Args:
        tokenizer: a Hugging Face tokenizer, or anything with its `apply_chat_template`, `decode`, `eos_token_id`,
            `chat_template` and length.
        template_kwargs: passed to the template, such as `{"enable_thinking": False}`.

    Tool calls are not parsed: an answer is its text, and `reads_tool_calls` is False. The `renderers` package knows the
    formats of many models.

    Raises:
        ModelError: there is no chat template, or it rewrites earlier messages when new ones are added, so that no
            prompt can begin with the previous one.
    """

    reads_tool_calls = False

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"the tokenizer of {self._name!r} has no chat template; add a chat_template.jinja to it")
        self._rendered: dict[tuple[str, bool], list[int]] = {}  # least recently used first
        self._one_at_a_time = threading.RLock()  # tokenizers are not safe to use in two threads at once
        self._answers = self._find_answers()
        self._stop_token_ids = self._find_stop_token_ids()

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatTemplateRenderer:
        """Copy with its own tokenizer, for another thread."""
        other = copy.copy(self)
        other._tokenizer = copy.deepcopy(self._tokenizer, memo)
        other._rendered, other._one_at_a_time = {}, threading.RLock()
        return other

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatTemplateRenderer:
        """Load the tokenizer of a Hugging Face folder.

        Raises:
            ModelError: names the folder, and whether the tokenizer or its chat template is what is missing.
            MissingExtraError: transformers is not installed.
        """
        tokenizer = load_tokenizer(path)
        if not tokenizer.chat_template:
            raise ModelError(f"model folder {str(path)!r} has no chat template; add a chat_template.jinja to it")
        return cls(tokenizer, template_kwargs=template_kwargs)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplateRenderer:
        """Copy with additional template keywords.

        Raises:
            RequestError: the template reads no such keyword, or cannot be extended turn by turn with it.
        """
        from jinja2 import Environment, TemplateError, meta

        try:
            read = meta.find_undeclared_variables(Environment().parse(self._tokenizer.chat_template))
        except TemplateError:  # it uses an extension of transformers
            read = None
        if read is not None and (unread := sorted(kwargs.keys() - read)):
            raise RequestError(
                f"chat_template_kwargs has {unread[0][:100]!r}, which the chat template does not read; it reads "
                f"{', '.join(sorted(read - _GIVEN)) or 'none'}"
            )
        try:
            return ChatTemplateRenderer(self._tokenizer, template_kwargs={**self._template_kwargs, **kwargs})
        except ModelError as error:
            raise RequestError(f"chat_template_kwargs = {dict(kwargs)!r}: {error}") from error

    def render_ids(
        self, messages: Sequence[Message], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render messages; recent results are cached, since siblings render the same messages."""
        asked = [dict(message) for message in messages]
        offered = None if tools is None else list(tools)
        with self._one_at_a_time:
            try:
                key = (json.dumps([asked, offered]), add_generation_prompt)
            except TypeError:  # content that is not text
                return self._render(asked, offered, add_generation_prompt)
            if (ids := self._rendered.pop(key, None)) is None:
                ids = self._render(asked, offered, add_generation_prompt)
            self._rendered[key] = ids
            if len(self._rendered) > REMEMBERED:
                del self._rendered[next(iter(self._rendered))]
            return list(ids)

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self._template_kwargs,
        )
        return list(ids)

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedText:
        """Text without special tokens; the part before `</think>` is the reasoning."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        # Special tokens are dropped: in an environment's reply they would become control tokens again.
        # Decoding does not change the tokenizer, so it need not wait until another thread has rendered.
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        reasoning, closed, content = text.rpartition("</think>")
        if closed:
            return ParsedText(content.lstrip("\n"), reasoning_content=reasoning.strip().removeprefix("<think>").strip())
        if text.lstrip().startswith("<think>"):
            return ParsedText("", text.strip().removeprefix("<think>").strip(), reasoning_complete=False)
        return ParsedText(text)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stop_token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Tools | None = None,
    ) -> PromptTokens:
        after = self._tokens_after_answer(new_messages, tools)
        if previous_completion_ids and previous_completion_ids[-1] in self._stop_token_ids:
            close = next((i for i, token_id in enumerate(after) if token_id in self._stop_token_ids), -1)
            after = after[close + 1 :]
        return PromptTokens([*previous_prompt_ids, *previous_completion_ids, *after])

    def _tokens_after_answer(self, new_messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Tokens of the template between the end of an answer's text and the start of the next answer."""
        one, other = (
            self.render_ids([*_QUESTION, _answer(text), *new_messages], tools=tools, add_generation_prompt=True)
            for text in self._answers
        )
        return one[len(one) - _common_prefix(one[::-1], other[::-1]) :]

    def _find_answers(self) -> tuple[str, str]:
        """Two answers that the template renders unchanged, and that differ in exactly one token."""
        question = self._probe(_QUESTION)
        renders = ((text, self._probe([*_QUESTION, _answer(text), *_QUESTION], True)) for text in self._short_texts())
        for (one, one_ids), (other, other_ids) in pairwise(renders):
            if one_ids[: len(question)] != question:
                raise self._refusal("it changes earlier messages when new ones are added")
            at = _common_prefix(one_ids, other_ids)
            if one_ids == other_ids or len(one_ids) != len(other_ids) or one_ids[at + 1 :] != other_ids[at + 1 :]:
                continue
            if [self._tokenizer.decode([ids[at]]).lstrip() for ids in (one_ids, other_ids)] == [one, other]:
                return one, other
        raise self._refusal("an answer cannot be found again in what it renders")

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence, and the special token with which the template closes an answer."""
        one, other = (self._tokens_after_answer([{"role": "user", "content": text}]) for text in self._answers)
        if one == other:
            raise self._refusal("what follows an answer does not show the new messages")
        eos = self._tokenizer.eos_token_id
        stop_token_ids: set[int] = set() if eos is None else {eos}
        if one and not self._tokenizer.decode(one[:1], skip_special_tokens=True):
            stop_token_ids.add(one[0])
        if not stop_token_ids:
            raise self._refusal("nothing ends an answer: no eos token, and no special token after it")
        return tuple(sorted(stop_token_ids))

    def _short_texts(self) -> Iterator[str]:
        """Texts of one token, whatever the vocabulary: characters first, then the tokenizer's own words."""
        yield from string.ascii_lowercase + string.digits
        for token_id in range(min(len(self._tokenizer), 2000)):
            text = self._tokenizer.decode([token_id], skip_special_tokens=True).strip()
            if text.isalnum():
                yield text

    def _probe(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        try:
            return self.render_ids(messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template may raise anything
            raise self._refusal(f"it cannot render a user's, an assistant's and a user's message ({error})") from error

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._name!r} cannot be extended turn by turn: {why}. "
            "Use another template, or the `renderers` package if it has a renderer for this model"
        )


_GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"}
"""Names in a chat template that are not keywords."""

_QUESTION: tuple[Message, ...] = ({"role": "user", "content": "1"},)


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
