"""Constraints on replies in the form of structural tags: tool calls as a model writes them, and JSON of a schema.

The form of a model's calls is derived from its renderer. The renderer renders a call of a made-up tool, and the text
around the name and the arguments is the text around those of every call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from titan_rl.rollout.renderer.types import Renderer
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.text import THINK, THINK_END, Text

Format = dict[str, Any]
"""A format of xgrammar, such as `{"type": "const_string", "value": "a"}`."""

MOST_SPACES = 32
"""Maximum white space in a row between the parts of JSON. Without a limit a model may write it until its budget
ends."""

_NAME, _FIELD, _VALUE = "made_up_tool", "made_up_field", "made_up_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Made up.",
        "parameters": {"type": "object", "properties": {_FIELD: {"type": "string"}}, "required": [_FIELD]},
    },
}
_ARGUMENTS = re.compile(rf'\{{\s*"{_FIELD}"\s*:\s*"{_VALUE}"\s*\}}')


@dataclass(frozen=True, slots=True)
class Constraint:
    """Requirement on a reply: a forced tool call, or JSON of a schema.

    Args:
        tools: Tools of which one must be called. None forces no call.
        schema: JSON schema of the reply's text, unless the reply calls a tool. True is any JSON object. None leaves the
            text free.
        one_call: Whether the reply may have only one call.
        param: Name of the request's field that asks for the constraint.
    """

    param: str
    tools: Sequence[Mapping[str, Any]] | None = None
    schema: Mapping[str, Any] | bool | None = None
    one_call: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of a model's tool calls: `<begin>name<middle>{"arguments": ...}<end>`, with `<between>` between two calls.

    Args:
        between: Text between two calls; None if the model writes only one.
    """

    begin: str
    middle: str
    end: str
    between: str | None


class Constraining:
    """Makes constraints for the replies of one model."""

    def __init__(self, renderer: Renderer, text: Text) -> None:
        self._renderer = renderer
        self._text = text

    def tag(
        self, wanted: Constraint, offered: Sequence[Mapping[str, Any]] | None, prompt_token_ids: Sequence[int]
    ) -> str:
        """Make the structural tag of a constraint for the completion of a prompt.

        Args:
            offered: Tools that the reply may call instead of writing JSON.

        Raises:
            ApiError: With status 400 if the model's calls have no form that a grammar can describe.
        """
        ways: list[Format] = []
        if wanted.tools is None:
            ways.append(self._json({"type": "object"} if wanted.schema is True else wanted.schema or {}))
        callable_tools = offered if wanted.tools is None else wanted.tools
        if callable_tools and (wanted.tools is not None or isinstance(self.call_form, CallForm)):
            ways.append(self._calls(callable_tools, wanted))
        return json.dumps({"type": "structural_tag", "format": self._behind_reasoning(_one_of(ways), prompt_token_ids)})

    @cached_property
    def call_form(self) -> CallForm | str:
        """Form of the model's tool calls, or the reason why none was found."""
        try:
            return self._found_form()
        except Exception as error:  # a renderer may raise anything
            return f"its renderer cannot render one ({type(error).__name__})"

    def _calls(self, tools: Sequence[Mapping[str, Any]], wanted: Constraint) -> Format:
        form = self.call_form
        if isinstance(form, str):
            raise ApiError(
                400,
                f"{wanted.param} forces a tool call, but the form of this model's calls cannot be described by a "
                f"grammar: {form}. Offer the tools without forcing a call",
                param=wanted.param,
                code=UNSUPPORTED_VALUE,
            )
        call = _one_of([self._call(form, tool.get("function", tool)) for tool in tools])
        if wanted.one_call or form.between is None:
            return call
        return _sequence([call, {"type": "star", "content": _sequence([*self._pieces(form.between), call])}])

    def _call(self, form: CallForm, function: Any) -> Format:
        name = json.dumps(function["name"])[1:-1]
        arguments = self._json(function.get("parameters") or {"type": "object"})
        parts = [*self._pieces(form.begin), _const(name + form.middle), arguments, *self._pieces(form.end)]
        return _sequence(parts)

    def _json(self, schema: Mapping[str, Any]) -> Format:
        return {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": MOST_SPACES,
            "excludes": self._text.markup(),
        }

    def _behind_reasoning(self, reply: Format, prompt_token_ids: Sequence[int]) -> Format:
        """Allow reasoning before a reply: if the prompt has begun it, it must end; otherwise a model that can reason
        may."""
        parts = self._text.shown(prompt_token_ids[-64:]).rpartition(THINK)
        is_open = bool(parts[1]) and THINK_END not in parts[2]
        is_over = bool(parts[1]) and not is_open and not parts[2].partition(THINK_END)[2].strip()
        if is_over or THINK not in self._text.markup():
            return reply
        rest = [
            {"type": "any_text", "excludes": self._text.markup()},
            *self._pieces(THINK_END),
            {"type": "regex", "pattern": r"\n{0,2}"},
        ]
        if is_open:
            return _sequence([*rest, reply])
        return _sequence([{"type": "optional", "content": _sequence([*self._pieces(THINK), *rest])}, reply])

    def _pieces(self, text: str) -> list[Format]:
        """Convert a text to formats. The tokenizer's markup must be written as its own tokens, because renderers do not
        recognize it in other tokens."""
        markup = self._text.markup()
        split = (
            re.split(f"({'|'.join(map(re.escape, sorted(markup, key=len, reverse=True)))})", text) if markup else [text]
        )
        return [
            {"type": "token", "token": self._text.token_of(piece)} if piece in markup else _const(piece)
            for piece in split
            if piece
        ]

    def _found_form(self) -> CallForm | str:
        one, two = self._rendered_calls(1), self._rendered_calls(2)
        if isinstance(one, str):
            return one
        begin, middle, end = one
        if isinstance(two, str) or not two[1].startswith(middle):
            return CallForm(begin, middle, end, None)
        between = two[2].partition(end)[2] if end else two[2]
        after, _, rest = between.partition(_NAME)
        seen = after.endswith(begin) and rest.startswith(middle) and bool(_ARGUMENTS.match(rest[len(middle) :]))
        return CallForm(begin, middle, end, after.removesuffix(begin) if seen else None)

    def _rendered_calls(self, count: int) -> tuple[str, str, str] | str:
        """Render calls, and return the text before the name, between name and arguments, and after the arguments up to
        the end of the message. Returns a reason as a string if there is no such form."""
        function = {"name": _NAME, "arguments": {_FIELD: _VALUE}}
        calls = [{"type": "function", "id": f"call_{index}", "function": function} for index in range(count)]
        question, tools = [{"role": "user", "content": "1"}], [_TOOL]
        prompt = list(self._renderer.render_ids(question, tools=tools, add_generation_prompt=True))
        called = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
        token_ids = list(self._renderer.render_ids(called, tools=tools))
        if token_ids[: len(prompt)] != prompt:
            return "a reply that calls a tool does not begin where other replies do"
        reply = token_ids[len(prompt) :]
        stops = set(self._renderer.get_stop_token_ids())
        reply = reply[: next((index for index, token in enumerate(reply) if token in stops), len(reply))]
        parsed = self._renderer.parse_response(reply, tools=tools, prompt_ids=prompt)
        if not getattr(self._renderer, "reads_tool_calls", True) or len(parsed.tool_calls) != count:
            return "its renderer does not parse tool calls; set model.renderer to one that does"
        before, name, rest = self._text.shown(reply).partition(_NAME)
        arguments = _ARGUMENTS.search(rest)
        if not name or arguments is None:
            return "it does not write the arguments of a call as a JSON object"
        begin = before.rpartition(THINK_END)[2].lstrip("\n")  # reasoning is handled separately
        return begin, rest[: arguments.start()], rest[arguments.end() :]


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def _one_of(ways: Sequence[Format]) -> Format:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": list(ways)}
