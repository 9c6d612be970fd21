"""Renderer for any Hugging Face tokenizer whose chat template can be extended turn by turn."""

from __future__ import annotations

import copy
import json
import re
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, cast

from cachetools import LRUCache

from titan_rl.core.errors import ModelError, RequestError
from titan_rl.rollout.renderer.thoughts import THINK, THINK_END, split_thought
from titan_rl.rollout.renderer.tokenizer import folder_stop_token_ids, load_tokenizer
from titan_rl.rollout.renderer.tool_calls import (
    MALFORMED,
    PROBE_ARGUMENTS,
    PROBE_TOOL,
    CallFormat,
    ReadCalls,
    format_of,
)
from titan_rl.rollout.renderer.types import ParsedToolCall, Tools
from titan_rl.rollout.types import Message

REMEMBERED = 128
"""Number of cached renderings; siblings render the same messages at about the same time."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The `RenderedTokens` of `ChatTemplateRenderer`."""

    token_ids: list[int]  # [num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """Tool calls of a chat template.

    Attributes:
        format: Format of the calls in an answer; None if they cannot be parsed.
        problem: Reason why they cannot be parsed.
        as_text: Whether the template expects arguments as a JSON text instead of an object.
        several: Whether an answer may have more than one call.
    """

    format: CallFormat | None = None
    problem: str | None = None
    as_text: bool = False
    several: bool = False


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

    Example: for a template of the form `<|im_start|>role\ncontent<|im_end|>\n` and a user's "more", these tokens are

        <|im_end|> \n <|im_start|> user \n more <|im_end|> \n <|im_start|> assistant \n

    and the first one is left out if the completion already ends with it.

    Tool calls are parsed if the template renders them in one of the formats of `tool_calls.FORMATS`, and if tool
    results extend the prompt; otherwise `call_problem` gives the reason.

    Stop tokens are the tokenizer's end of sequence, the special token with which the template closes an answer, and
    the stop tokens of the folder's generation_config.json.

    Args:
        tokenizer: Hugging Face tokenizer, or any object with its `apply_chat_template`, `decode`, `eos_token_id`,
            `chat_template` and length.
        template_kwargs: Keywords passed to the template, such as `{"enable_thinking": False}`.
        single_turn: Whether to accept a template that cannot be extended turn by turn. `problem` then gives the reason,
            and `bridge_to_next_turn` raises it.

    Raises:
        ModelError: there is no chat template, or it rewrites earlier messages when new ones are added, so that no
            prompt can begin with the previous one; or answers have several messages, as in the template of gpt-oss.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, single_turn: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ModelError(f"the tokenizer of {self._name!r} has no chat template; add a chat_template.jinja to it")
        if isinstance(template, str) and _HARMONY in template:
            raise ModelError(
                f"the chat template of {self._name!r} divides an answer into several messages ({_HARMONY}), of which "
                'the first would end it; set model.renderer = "renderers:GptOssRenderer"'
            )
        self._rendered: LRUCache[tuple[str, bool], list[int]] = LRUCache(REMEMBERED)
        self._one_at_a_time = threading.RLock()  # tokenizers are not thread-safe
        self._calls: TemplateCalls | None = None  # found when first needed
        self._single_turn = single_turn
        self.problem: str | None = None
        try:
            self._answers = self._find_answers()
            self._stop_token_ids = self._find_stop_token_ids()
        except ModelError as error:
            if not single_turn:
                raise
            self.problem = str(error)
            self._stop_token_ids = self._known_stops()
            if not self._stop_token_ids:
                raise self._refusal("nothing ends an answer: no eos token") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatTemplateRenderer:
        """Copy with its own tokenizer, for another thread."""
        other = copy.copy(self)
        other._tokenizer = copy.deepcopy(self._tokenizer, memo)
        other._rendered, other._one_at_a_time = LRUCache(REMEMBERED), threading.RLock()
        return other

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatTemplateRenderer:
        """Load the tokenizer of a Hugging Face folder.

        Raises:
            ModelError: the folder, its tokenizer or its chat template is missing, or the template cannot be used.
            MissingExtraError: tokenizers or transformers is not installed.
        """
        tokenizer = load_tokenizer(path)
        if not tokenizer.chat_template:
            raise ModelError(f"model folder {str(path)!r} has no chat template; add a chat_template.jinja to it")
        return cls(tokenizer, template_kwargs=template_kwargs)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplateRenderer:
        """Copy with additional template keywords.

        Raises:
            RequestError: the template does not read a keyword, or cannot be extended turn by turn with it.
        """
        from jinja2 import Environment, TemplateError, meta

        try:
            read = meta.find_undeclared_variables(Environment().parse(self._tokenizer.chat_template))
        except TemplateError:  # the template uses an extension of transformers
            read = None
        if read is not None and (unread := sorted(kwargs.keys() - read)):
            raise RequestError(
                f"chat_template_kwargs has {unread[0][:100]!r}, which the chat template does not read; it reads "
                f"{', '.join(sorted(read - _GIVEN)) or 'none'}"
            )
        try:
            return ChatTemplateRenderer(
                self._tokenizer, template_kwargs={**self._template_kwargs, **kwargs}, single_turn=self._single_turn
            )
        except ModelError as error:
            raise RequestError(f"chat_template_kwargs = {dict(kwargs)!r}: {error}") from error

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def render_ids(
        self, messages: Sequence[Message], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render messages. Recent results are cached, since siblings render the same messages."""
        prepared = [self._with_arguments(message) for message in messages]
        offered = None if tools is None else list(tools)
        with self._one_at_a_time:
            try:
                key = (json.dumps([prepared, offered]), add_generation_prompt)
            except TypeError:  # content that is not text
                return self._render(prepared, offered, add_generation_prompt)
            if key not in self._rendered:
                self._rendered[key] = self._render(prepared, offered, add_generation_prompt)
            return list(self._rendered[key])

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

    @property
    def reads_tool_calls(self) -> bool:
        return self.call_format is not None

    @property
    def call_format(self) -> CallFormat | None:
        """Format of the tool calls that the template renders; None if they cannot be parsed."""
        return self._template_calls.format

    @property
    def call_problem(self) -> str | None:
        """Reason why tool calls are not parsed; None if they are."""
        return self._template_calls.problem

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedText:
        """Parse a completion. Special tokens are removed from the text; the part before `</think>` is the reasoning,
        also if the prompt has begun it. Calls are parsed only if there are tools."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stop_token_ids:
            ids.pop()
        # Special tokens are dropped: in an environment's reply they would become control tokens again.
        # Decoding does not change the tokenizer, so it need not wait until another thread has rendered.
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        thought, content = split_thought(text, is_begun=self._begins_thought(prompt_ids or ()))
        if content is None:
            return ParsedText("", thought, reasoning_complete=False)
        found = self._read_calls(ids, tools) if tools else None
        if found is not None:
            return ParsedText(found.content, thought, found.calls)
        return ParsedText(content, thought)

    def _begins_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt has begun the thought of the answer, after its last special token."""
        texts = self._special_tokens
        marks = (THINK, THINK_END)  # special tokens of some tokenizers
        ends = (at for at in range(len(prompt_ids), 0, -1) if texts.get(prompt_ids[at - 1], THINK) not in marks)
        start = next(ends, 0)
        end: str = self._tokenizer.decode(list(prompt_ids[start:]), skip_special_tokens=False)
        return end.rfind(THINK) > end.rfind(THINK_END)

    def _read_calls(self, ids: Sequence[int], tools: Tools) -> ReadCalls | None:
        """Calls after the reasoning of an answer; None if there are none."""
        known = self._template_calls
        if known.format is None:
            return None
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found = known.format.read(text.rpartition("</think>")[2], tools)
        if found is None:
            return None
        calls = found.calls
        if not known.several:
            calls = (*calls[:1], *(replace(call, status=MALFORMED) for call in calls[1:]))
        return ReadCalls(self._special.sub("", found.content), calls)

    @property
    def _special(self) -> re.Pattern[str]:
        """Pattern of the tokenizer's special tokens."""
        contents = sorted(self._special_tokens.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents)) or r"(?!)")

    @cached_property
    def _special_tokens(self) -> Mapping[int, str]:
        """Texts of the tokenizer's special tokens."""
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {token_id: str(token) for token_id, token in added.items() if token.special}

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
        if self.problem is not None:
            raise ModelError(self.problem)
        after = self._tokens_after_answer(new_messages, tools)
        close = next((i for i, token_id in enumerate(after) if token_id in self._stop_token_ids), -1)
        if previous_completion_ids and previous_completion_ids[-1] in self._stop_token_ids:
            after = after[close + 1 :]
        elif self._follows_calls(new_messages):
            after = after[close:]  # the tokens before it are the end of the rendered call
        return PromptTokens([*previous_prompt_ids, *previous_completion_ids, *after])

    def _follows_calls(self, new_messages: Sequence[Message]) -> bool:
        return bool(new_messages) and new_messages[0].get("role") == "tool" and self.reads_tool_calls

    def _tokens_after_answer(self, new_messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Tokens of the template between the end of an answer's text and the start of the next answer. Tool results
        follow an answer with the same number of calls; the tokens then begin with the end of the last call."""
        if self._follows_calls(new_messages):
            return self._common_end(*_with_calls(new_messages), tools)
        conversations = [(_answer(text), *new_messages) for text in self._answers]
        return self._common_end(conversations[0], conversations[1], tools)

    def _common_end(self, one: Sequence[Message], other: Sequence[Message], tools: Tools | None) -> list[int]:
        one_ids, other_ids = (
            self.render_ids([*_QUESTION, *messages], tools=tools, add_generation_prompt=True)
            for messages in (one, other)
        )
        return one_ids[len(one_ids) - _common_prefix(one_ids[::-1], other_ids[::-1]) :]

    @property
    def _template_calls(self) -> TemplateCalls:
        if self._calls is None:
            with self._one_at_a_time:
                try:
                    self._calls = self._find_calls()
                except Exception as error:  # a template may raise any error
                    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                    self._calls = TemplateCalls(problem=f"the chat template cannot render a tool call ({first_line})")
        return self._calls

    def _find_calls(self) -> TemplateCalls:
        """Format of the calls that the template renders, or the reason why none is parsed."""
        tools = [PROBE_TOOL]
        prompt = self._render([*_QUESTION], tools, True)
        if prompt == self._render([*_QUESTION], None, True):
            return TemplateCalls(problem="the chat template shows no tools")
        try:
            as_text = False
            token_ids = self._render([*_QUESTION, _call(PROBE_ARGUMENTS)], tools, False)
        except Exception:
            as_text = True
            token_ids = self._render([*_QUESTION, _call(json.dumps(PROBE_ARGUMENTS))], tools, False)
        reply = token_ids[_common_prefix(prompt, token_ids) :]
        reply = reply[: next((at for at, token_id in enumerate(reply) if token_id in self._stop_token_ids), len(reply))]
        text: str = self._tokenizer.decode(reply, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if (found := format_of(text.rpartition("</think>")[2])) is None:
            if "look_up" not in text:
                return TemplateCalls(problem="the chat template renders no calls of tools")
            return TemplateCalls(problem=f"the chat template writes calls in an unknown format: {text.strip()[:100]!r}")
        self._calls = calls = TemplateCalls(found, as_text=as_text)
        if self.problem is None and (problem := self._result_problem(token_ids, tools)) is not None:
            return TemplateCalls(problem=problem)
        try:
            two = self._render([*_QUESTION, self._with_arguments(_call(PROBE_ARGUMENTS, 2))], tools, False)
        except Exception:  # the template allows at most one call
            return calls
        again = found.read(self._tokenizer.decode(two[_common_prefix(prompt, two) :]), tools)
        return replace(calls, several=again is not None and len(again.calls) == 2)

    def _result_problem(self, called: Sequence[int], tools: Tools) -> str | None:
        """Reason why a result of a tool does not extend the prompt; None if it does."""
        message = {"role": "tool", "name": "look_up", "tool_call_id": CALL_ID.format(1), "content": "a pronoun"}
        after = self._tokens_after_answer([message], tools)
        close = next((i for i, token_id in enumerate(after) if token_id in self._stop_token_ids), None)
        if close is None:
            return "no stop token ends a tool call in the chat template"
        conversation = [*_QUESTION, self._with_arguments(_call(PROBE_ARGUMENTS)), message]
        token_ids = self._render(conversation, list(tools), True)
        earlier = token_ids[: len(token_ids) - len(after) + close]
        if list(called[: len(earlier)]) != earlier or token_ids[len(earlier) :] != after[close:]:
            return "the chat template changes an earlier tool call when its result is added"
        return None

    def _with_arguments(self, message: Message) -> dict[str, Any]:
        """Copy of a message whose calls have their arguments in the form that the template expects."""
        copied: dict[str, Any] = dict(message)
        if not copied.get("tool_calls"):
            return copied
        as_text = self._template_calls.as_text
        copied["tool_calls"] = [_call_with_arguments(call, as_text) for call in copied["tool_calls"]]
        return copied

    def _find_answers(self) -> tuple[str, str]:
        """Two answers that the template renders unchanged, and that differ in exactly one token."""
        starts = self._probe(_QUESTION), self._probe(_QUESTION, True)  # some templates end the former with an eos token
        renders = ((text, self._probe([*_QUESTION, _answer(text), *_QUESTION], True)) for text in self._short_texts())
        for (one, one_ids), (other, other_ids) in pairwise(renders):
            if all(one_ids[: len(start)] != start for start in starts):
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
        stop_token_ids = set(self._known_stops())
        if one and not self._tokenizer.decode(one[:1], skip_special_tokens=True):
            stop_token_ids.add(one[0])
        if not stop_token_ids:
            raise self._refusal("nothing ends an answer: no eos token, and no special token after it")
        return tuple(sorted(stop_token_ids))

    def _known_stops(self) -> tuple[int, ...]:
        """Stop tokens of the tokenizer and its folder."""
        eos = self._tokenizer.eos_token_id
        return tuple(sorted({*(() if eos is None else (eos,)), *folder_stop_token_ids(self._tokenizer)}))

    def _short_texts(self) -> Iterator[str]:
        """Texts of one token in any vocabulary: characters first, then the tokenizer's own words."""
        yield from string.ascii_lowercase + string.digits
        for token_id in range(min(len(self._tokenizer), 2000)):
            text = self._tokenizer.decode([token_id], skip_special_tokens=True).strip()
            if text.isalnum():
                yield text

    def _probe(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        try:
            return self.render_ids(messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template may raise any error
            raise self._refusal(f"it cannot render a user's, an assistant's and a user's message ({error})") from error

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"the chat template of {self._name!r} cannot be extended turn by turn: {why}. "
            "Use another template, or the `renderers` package if it has a renderer for this model"
        )


_GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"}
"""Names in a chat template that are not template keywords."""

_HARMONY = "<|channel|>"

_QUESTION: tuple[Message, ...] = ({"role": "user", "content": "1"},)

CALL_ID = "call{:05}"
"""Id of a call in a probe. Mistral's template requires nine characters."""


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(arguments: Mapping[str, Any] | str, count: int = 1, names: Sequence[str] = ("look_up",)) -> Message:
    functions = [{"name": names[at % len(names)], "arguments": arguments} for at in range(count)]
    calls = [{"type": "function", "id": CALL_ID.format(at), "function": each} for at, each in enumerate(functions, 1)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_calls(new_messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The new messages after made-up calls of the tools whose results they begin with, twice, with two different
    arguments."""
    results = [dict(each) for each in takewhile(lambda message: message.get("role") == "tool", new_messages)]
    ids = [result.setdefault("tool_call_id", CALL_ID.format(1 + at)) for at, result in enumerate(results)]
    names = [str(result.get("name") or "look_up") for result in results]
    both: list[list[Message]] = []
    for word in ("it", "a1"):
        call: Any = _call({"word": word}, len(results), names)
        for each, call_id in zip(call["tool_calls"], ids, strict=True):
            each["id"] = call_id
        both.append([call, *results, *new_messages[len(results) :]])
    return both[0], both[1]


def _call_with_arguments(call: Any, as_text: bool) -> Any:
    """Copy of a tool call with its arguments as a JSON text, or as an object."""
    if not isinstance(call, Mapping):
        return call
    fields = cast("Mapping[str, Any]", call)
    function: Mapping[str, Any] = fields.get("function", fields)
    arguments: Any = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return fields
    changed = {**function, "arguments": arguments}
    return {**fields, "function": changed} if "function" in fields else changed


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
