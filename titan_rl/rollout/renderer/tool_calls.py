"""Formats of tool calls in the text of an answer, and the choice of the format that a chat template writes.

The template renders a call, and the first format that parses exactly this call from the result is the template's. A
model family needs its own entry only if it writes calls in a new way.

Example: Qwen2.5 and many others write

    <tool_call>
    {"name": "look_up", "arguments": {"word": "it"}}
    </tool_call>
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from titan_rl.rollout.renderer.types import Tools

OK, INVALID_JSON, UNCLOSED, MALFORMED, MISSING_NAME = (
    "ok",
    "invalid_json",
    "unclosed_block",
    "malformed_structure",
    "missing_name",
)
"""Statuses of parsed calls, with the names of the `renderers` package."""


@dataclass(slots=True)
class ParsedCall:
    """The `ParsedToolCall` of `ChatTemplateRenderer`."""

    name: str | None
    arguments: dict[str, Any] | str | None
    status: str = OK
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """Calls of an answer, and the text before the first one."""

    content: str
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """Format of tool calls.

    Args:
        name: Name for messages and the docs.
        example: Example of a call, for the docs.
    """

    name: str
    example: str

    @abstractmethod
    def read(self, text: str, tools: Tools | None) -> ReadCalls | None:
        """Parse the calls in an answer; None if there are none.

        Args:
            text: Text of the answer, including its special tokens.
            tools: Tools, whose schemas give the types of arguments to formats that write them as plain text.
        """


@dataclass(frozen=True, slots=True)
class BlockCalls(CallFormat):
    """Calls in blocks with delimiters.

    Args:
        delimiters: Beginning and end of a block. If the end is empty, a block ends with the answer.
    """

    delimiters: Sequence[str]

    def read(self, text: str, tools: Tools | None) -> ReadCalls | None:
        begin, end = self.delimiters
        before, *blocks = text.split(begin)
        if not blocks:
            return None
        is_closed = all(end in block for block in blocks)
        if end:
            blocks = [block.partition(end)[0] for block in blocks]
        calls = [call for block in blocks for call in self._calls(block, tools) or [ParsedCall(None, block, MALFORMED)]]
        if not is_closed:
            calls[-1] = ParsedCall(calls[-1].name, calls[-1].arguments, UNCLOSED)
        return ReadCalls(before.strip(), tuple(calls))

    @abstractmethod
    def _calls(self, block: str, tools: Tools | None) -> list[ParsedCall]:
        """Calls in the text of a block; a block without any is malformed."""


@dataclass(frozen=True, slots=True)
class JsonCalls(BlockCalls):
    """Blocks with a JSON object for each call, or a list of such objects."""

    def _calls(self, block: str, tools: Tools | None) -> list[ParsedCall]:
        try:
            values = [*_json_values(block.strip())]
        except ValueError:
            return [ParsedCall(None, block, INVALID_JSON)]
        return [
            _call_of(each)
            for value in values
            for each in (cast("list[Any]", value) if isinstance(value, list) else [value])
        ]


@dataclass(frozen=True, slots=True)
class TaggedCalls(BlockCalls):
    """Blocks with a name and a tagged text for each argument, which is JSON unless the tool takes a string.

    Args:
        function: Pattern of a call, with the groups `name` and `body`.
        argument: Pattern of an argument in the body, with the groups `key` and `value`.
    """

    function: re.Pattern[str]
    argument: re.Pattern[str]

    def _calls(self, block: str, tools: Tools | None) -> list[ParsedCall]:
        return [self._call(match, tools) for match in self.function.finditer(block)]

    def _call(self, match: re.Match[str], tools: Tools | None) -> ParsedCall:
        name = match["name"].strip()
        types = _types_of(name, tools)
        arguments = {
            (key := argument["key"].strip()): _value(argument["value"], types.get(key))
            for argument in self.argument.finditer(match["body"])
        }
        return ParsedCall(name or None, arguments, OK if name else MISSING_NAME)


@dataclass(frozen=True, slots=True)
class PythonCalls(BlockCalls):
    """Blocks with calls in Python's syntax, with literals as keyword arguments: one call per line, or a list."""

    def _calls(self, block: str, tools: Tools | None) -> list[ParsedCall]:
        try:
            lines = ast.parse(block.strip()).body
            values = [line.value for line in lines if isinstance(line, ast.Expr)]
            listed = [value.elts if isinstance(value, ast.List | ast.Tuple) else [value] for value in values]
            return [_call_of_python(each) for elements in listed for each in elements]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []


@dataclass(frozen=True, slots=True)
class BareJsonCalls(CallFormat):
    """JSON object that is the whole answer. An object without a name or without arguments is text.

    Args:
        tag: Token that may precede the object.
    """

    tag: str

    def read(self, text: str, tools: Tools | None) -> ReadCalls | None:
        body = text.strip().removeprefix(self.tag).strip()
        if not body.startswith("{"):
            return None
        try:
            parts = [_object(part) for part in _json_values(body)]
        except ValueError:
            return ReadCalls("", (ParsedCall(None, body, INVALID_JSON),)) if '"name"' in body else None
        if any("name" not in part or not {"parameters", "arguments"} & part.keys() for part in parts):
            return None
        return ReadCalls("", tuple(_call_of(part) for part in parts))


@dataclass(frozen=True, slots=True)
class NamedJsonCalls(CallFormat):
    """A name, a separator, and the JSON object of the arguments.

    Args:
        call: Pattern before the arguments, with the group `name`.
        end: Pattern after the arguments of a call.
    """

    call: re.Pattern[str]
    end: re.Pattern[str]

    def read(self, text: str, tools: Tools | None) -> ReadCalls | None:
        first = self.call.search(text)
        if first is None:
            return None
        before, calls, match = text[: first.start()], list[ParsedCall](), first
        while match is not None:
            try:
                arguments, position = _raw_decode(text, match.end())
            except ValueError:
                calls.append(ParsedCall(match["name"], text[match.end() :], INVALID_JSON))
                break
            end = self.end.match(text, position)
            status = OK if end is not None and isinstance(arguments, dict) else MALFORMED
            calls.append(ParsedCall(match["name"], cast("Any", arguments), status))
            match = self.call.search(text, position if end is None else end.end())
        return ReadCalls(before.strip(), tuple(calls))


def _json_values(text: str) -> Iterator[Any]:
    """JSON values, separated by white space or semicolons.

    Raises:
        ValueError: there is other text.
    """
    position = 0
    while position < len(text):
        value, position = _raw_decode(text, position)
        yield value
        while position < len(text) and (text[position].isspace() or text[position] == ";"):
            position += 1


def _raw_decode(text: str, position: int) -> tuple[Any, int]:
    """JSON value that begins at a position of a text, and the position of its end.

    Raises:
        ValueError: no JSON value begins there.
    """
    found: tuple[Any, int] = json.JSONDecoder().raw_decode(text, position)
    return found


def _object(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, otherwise an empty object."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _call_of(value: Any) -> ParsedCall:
    """Call from an object `{"name": ..., "arguments": {...}}`, one of its other spellings, or `{"look_up": {...}}`."""
    parts = _object(value)
    if not parts:
        return ParsedCall(None, str(value), MALFORMED)
    name: Any = parts.get("name", parts.get("tool_name"))
    arguments: Any = parts.get("arguments", parts.get("parameters"))
    if name is None and arguments is None and len(parts) == 1:
        ((name, arguments),) = parts.items()
    if not isinstance(name, str) or not name:
        return ParsedCall(None, arguments, MISSING_NAME)
    written: Any = parts.get("id", parts.get("tool_call_id"))
    call_id = written if isinstance(written, str) and written else None
    if isinstance(arguments, str):  # some models write them as a JSON text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return ParsedCall(name, arguments, INVALID_JSON, call_id)
    given: Any = {} if arguments is None else arguments
    return ParsedCall(name, given, OK if isinstance(given, dict) else MALFORMED, call_id)


def _call_of_python(value: ast.expr) -> ParsedCall:
    if not isinstance(value, ast.Call) or value.args or not isinstance(value.func, ast.Name | ast.Attribute):
        return ParsedCall(None, ast.unparse(value), MALFORMED)
    arguments = {str(each.arg): _literal(each.value) for each in value.keywords}
    return ParsedCall(ast.unparse(value.func), arguments)


_NAMED_LITERALS: Mapping[str, Any] = {"true": True, "false": False, "null": None}


def _literal(value: ast.expr) -> Any:
    """Value of a literal, in which `true`, `false` and `null` may be those of JSON.

    Raises:
        ValueError: the expression is not a literal.
    """
    if isinstance(value, ast.Name) and value.id in _NAMED_LITERALS:
        return _NAMED_LITERALS[value.id]
    return ast.literal_eval(value)


def _types_of(name: str, tools: Tools | None) -> Mapping[str, Any]:
    """Types of a tool's arguments by name, as in its JSON schema."""
    for tool in tools or ():
        function: Any = tool.get("function", tool)
        if function.get("name") == name:
            properties = _object(_object(function.get("parameters")).get("properties"))
            return {key: _object(schema).get("type") for key, schema in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_formats() -> Iterator[CallFormat]:
    kinds = {kind.__name__: kind for kind in (TaggedCalls, JsonCalls, PythonCalls, BareJsonCalls, NamedJsonCalls)}
    for entry in _TABLE["format"]:
        patterns = {name: re.compile(entry[name], re.DOTALL) for name in _PATTERNS & entry.keys()}
        yield kinds[entry.pop("kind")](**entry | patterns)


_PATTERNS = {"function", "argument", "call", "end"}
_TABLE: dict[str, Any] = tomllib.loads(
    files("titan_rl.rollout.renderer").joinpath("tool_calls.toml").read_text("utf-8")
)

FORMATS: Sequence[CallFormat] = tuple(_read_formats())
"""Formats in the order in which they are tried, with specific formats before more general ones."""

PROBE_TOOL: Mapping[str, Any] = _TABLE["probe"]["tool"]
PROBE_ARGUMENTS: Mapping[str, Any] = _TABLE["probe"]["arguments"]


def format_of(rendered: str) -> CallFormat | None:
    """Choose the format that reads exactly the call `look_up(word="it", count=3)` in a rendered answer."""
    for each in FORMATS:
        found = each.read(rendered, [PROBE_TOOL])
        if found is None or len(found.calls) != 1:
            continue
        call = found.calls[0]
        if (call.name, call.arguments, call.status) == ("look_up", PROBE_ARGUMENTS, OK):
            return each
    return None
