"""Tools: plain functions with a schema and checked arguments, and `ToolEnv`, in which the policy calls them.

Example: for this function

    def multiply(a: float, b: float = 1.0) -> float:
        \"\"\"Multiply two numbers.

        Args:
            a: the first
            b: the second
        \"\"\"
        return a * b

`Tool.of(multiply).schema` is

    {"type": "function", "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"description": "the first", "type": "number"},
                "b": {"default": 1.0, "description": "the second", "type": "number"},
            },
            "required": ["a"],
        },
    }}
"""  # noqa: D214, the example contains a docstring

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import to_json

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.calls.user_code import Failure, is_async
from titan_rl.core.errors import TitanRLError
from titan_rl.core.plain_data import plain_json, safe_repr
from titan_rl.rollout.environment.types import MessageObservation, MessageStep
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.tasks.chats import prompt_messages

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ArgumentsError(ValueError):
    """Invalid arguments of a tool call, described for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the policy may call, with its schema.

    Args:
        name: Name of the tool.
        description: Docstring without its section on parameters.
        parameters: JSON schema of the arguments.
        function: Function that is called with keyword arguments; may be async.
        arguments: Model that checks the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    arguments: type[BaseModel]

    @staticmethod
    def of(function: Callable[..., Any]) -> Tool:
        """Make a tool of a function, whose parameters need type hints.

        All types with a JSON schema in pydantic are supported: numbers, text, bool, None, enums, `Literal`, unions,
        lists, dictionaries, dataclasses, TypedDicts (before Python 3.12 those of `typing_extensions`), models.
        A parameter is described in the docstring (in the style of Google, NumPy or Sphinx), by
        `Annotated[int, "number of coins"]`, or by pydantic's `Field(description=...)`.

        Raises:
            ValueError: a parameter or the name cannot be described. Names the function, the parameter and the fix.
        """
        if isinstance(function, Tool):
            return function
        # All objects of a class share the schemas of their methods.
        is_method = inspect.ismethod(function)
        return replace(_described(function.__func__ if is_method else function, is_method), function=function)

    @property
    def schema(self) -> dict[str, Any]:
        """Schema in the form of `MessageObservation.tools` and OpenAI's protocol."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }

    def checked(self, arguments: object) -> dict[str, Any]:
        """Arguments by name, converted to the types that the function declares.

        Args:
            arguments: Arguments from the policy: a mapping, its JSON text, or None.

        Raises:
            ArgumentsError: arguments are missing, unknown or of wrong types. Lists all of them.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ArgumentsError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(arguments, Mapping | None):
            raise ArgumentsError("the arguments are not a JSON object")
        try:
            model = self.arguments.model_validate(dict(cast("Mapping[Any, Any]", arguments or {})))
        except ValidationError as error:
            raise ArgumentsError(_problems(error)) from None
        return {
            str(field.alias): getattr(model, name)
            for name, field in type(model).model_fields.items()
            if name in model.model_fields_set  # otherwise the function's default applies
        }


def call_of(name: str, arguments: Mapping[str, Any] | None = None, content: str = "") -> Message:
    """Make an assistant's message that calls a tool, for a demonstration.

    Example: `call_of("multiply", {"a": 6, "b": 7})`
    """
    function = {"name": name, "arguments": dict(arguments or {})}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def tools_of(given: object) -> list[Tool]:
    """Make tools of a function, of the public methods of an object, or of a list of functions and objects.

    All public methods of an object are tools, including inherited ones, except `close`.

    Raises:
        ValueError: see `Tool.of`; or two tools have the same name, or an object has no public methods.
    """
    tools = [tool for one in _listed(given) for tool in _tools_of_one(one)]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tools {twice} appear more than once; give each a different name")
    return tools


def _listed(given: object) -> Sequence[object]:
    if given is None:
        return ()
    return cast("Sequence[object]", given) if isinstance(given, list | tuple) else [given]


def _tools_of_one(given: object) -> list[Tool]:
    if isinstance(given, Tool):
        return [given]
    if inspect.isclass(given):
        raise ValueError(f"tools are {given.__name__}, a class; pass an instance: {given.__name__}()")
    if inspect.isroutine(given) or isinstance(given, functools.partial):
        return [Tool.of(cast("Callable[..., Any]", given))]
    names = [name for name in dir(type(given)) if not name.startswith("_") and name != "close"]
    methods = [getattr(given, name) for name in names if inspect.isroutine(getattr(type(given), name))]
    if not methods:
        raise ValueError(f"tools are {given!r}; give functions, or an object with public methods")
    return [Tool.of(method) for method in methods]


@functools.lru_cache(maxsize=1024)
def _described(function: Callable[..., Any], is_method: bool) -> Tool:
    import docstring_parser  # here, because its import is slow and only tools need it

    plain: Any = getattr(function, "func", function)  # the function of a partial
    name = getattr(function, "__name__", None) or getattr(plain, "__name__", "")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"tool {function!r} has no name by which it could be called; define it as a function of a module"
        )
    docs = docstring_parser.parse(inspect.getdoc(plain) or "")
    descriptions = {param.arg_name: param.description for param in docs.params if param.description}
    try:
        hints = get_type_hints(inspect.unwrap(plain), include_extras=True)
    except Exception as error:  # annotations may be any expressions
        raise ValueError(f"tool {name!r}: its type hints cannot be read: {type(error).__name__}: {error}") from error
    fields: dict[str, Any] = {}
    for number, parameter in enumerate([*inspect.signature(function).parameters.values()][is_method:]):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {name!r}: parameter {parameter} cannot be given by its name; give each a name")
        annotation = _annotation(name, parameter.name, hints, descriptions.get(parameter.name))
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[f"field{number}"] = (annotation, Field(default, alias=parameter.name))
    for field, (annotation, default) in fields.items():
        try:
            _model(name, {field: (annotation, default)})
        except _UNDESCRIBED as error:
            wrong = str(error).partition("\n")[0]
            raise ValueError(
                f"tool {name!r}: JSON schema cannot describe parameter {default.alias!r}: {wrong}"
            ) from error
    arguments, parameters = _model(name, fields)
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    return Tool(name, (docs.description or "").strip(), parameters, function, arguments)


def _model(name: str, fields: Mapping[str, Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    """Make the model that checks the arguments of a tool.

    Returns:
        The model, and the JSON schema of the arguments.
    """
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **dict(fields))
    return arguments, arguments.model_json_schema(schema_generator=_Schema)


def _annotation(tool: str, parameter: str, hints: Mapping[str, Any], description: str | None) -> Any:
    if parameter not in hints:
        raise ValueError(f"tool {tool!r}: parameter {parameter!r} has no type; declare one, such as {parameter}: int")
    hint = hints[parameter]
    if get_origin(hint) is Annotated:
        description = next((each for each in get_args(hint)[1:] if isinstance(each, str)), description)
    return Annotated[hint, Field(description=description)] if description else hint


def _problems(error: ValidationError) -> str:
    """Description of invalid arguments, such as "a: Field required; b: Input should be a valid number"."""
    return "; ".join(
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


class _NoSchemaError(Exception):
    """A default value cannot be written as JSON."""


class _Schema(GenerateJsonSchema):
    """Generator of schemas without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        raise _NoSchemaError(detail)


_UNDESCRIBED = (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError, _NoSchemaError)


T = TypeVar("T")

FAULTS = (ImportError, NameError, NotImplementedError, MemoryError, TitanRLError)
"""Exceptions that are the fault of a tool's author, regardless of the policy's arguments."""

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")

_threads = DaemonThreads(64, "tool")
_logged: set[tuple[str, str]] = set()  # (tool, kind of failure) pairs that have been logged


class ToolEnv:
    """A `MessageEnv` of one prompt: tool calls are answered until the policy answers without a call.

    A call has one of these outcomes:

    - a result, which becomes the content of a message of role "tool": text unchanged, anything else as JSON;
    - wrong arguments, an unknown name, an exception or a timeout, which count as the policy's error: the message's
      content is "Error: " and a description;
    - an exception of `faults`, which is an error of the environment and ends the rollout.

    The calls of one message are made one after the other, so that their effects are reproducible. If there are tools,
    each step has the rewards "tool_calls" and "tool_errors", which count calls and errors. A rubric with
    `env_reward("tool_errors", weight=0)` records the errors.

    Example: a bank account for each rollout, whose methods are the tools:

        ToolEnv("Pay 3 coins to Ada.", Account(balance=10))

    Args:
        prompt: The user's message, or all opening messages.
        tools: Function, object whose public methods are the tools, or a list of functions and objects; see `tools_of`.
            The `close` method of an object, if it has one, is called at the end of the rollout. Without tools the first
            answer is the last.
        max_calls: Largest number of calls in a rollout; later calls get an error.
        timeout_s: Time limit of an async call, or of a call in a thread.
        in_thread: Whether functions that are not async are called in a thread. For functions that wait, or compute for
            more than a few milliseconds. A call in a thread that takes too long is abandoned.
        max_result_chars: Length to which results are cut. A cut result ends with the number of missing characters.
        faults: Exceptions that are not the policy's error.

    Raises:
        ValueError: a tool cannot be described (see `Tool.of`), or a limit is not positive.
    """

    def __init__(
        self,
        prompt: str | Sequence[Message],
        tools: object = (),
        *,
        max_calls: int = 64,
        timeout_s: float = 30.0,
        in_thread: bool = False,
        max_result_chars: int = 10_000,
        faults: tuple[type[Exception], ...] = FAULTS,
    ) -> None:
        for name, limit in (("max_calls", max_calls), ("timeout_s", timeout_s), ("max_result_chars", max_result_chars)):
            if not limit > 0:
                raise ValueError(f"ToolEnv {name} is {limit!r}; it must be positive")
        self.messages: list[Message] = messages_of(prompt)
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools_of(tools)}
        self._given = _listed(tools)
        self._calls_left = max_calls
        self._timeout_s = timeout_s
        self._in_thread = in_thread
        self._max_result_chars = max_result_chars
        self._faults = faults

    async def reset(self) -> MessageObservation:
        return MessageObservation(self.messages, [tool.schema for tool in self.tools.values()] or None)

    async def step(self, message: Message) -> MessageStep:
        calls: Sequence[Mapping[str, Any]] = (message.get("tool_calls") or ()) if self.tools else ()
        if not calls:
            ended = await self.answered(message)
            none = {"tool_calls": 0.0, "tool_errors": 0.0} if self.tools else {}
            return MessageStep(ended.messages, ended.status, {**none, **ended.rewards})
        answers = [await self._answer(call) for call in calls]
        errors = sum(failed for _, failed in answers)
        counts = {"tool_calls": float(len(calls)), "tool_errors": float(errors)}
        return MessageStep([answer for answer, _ in answers], rewards=counts)

    async def answered(self, message: Message) -> MessageStep:
        """Respond to an answer without a call. A subclass may judge the answer and the changes that the tools have
        made, or ask another question."""
        return MessageStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None:
        for given in self._given:
            close = None if isinstance(given, Tool) or inspect.isroutine(given) else getattr(given, "close", None)
            if callable(close) and inspect.isawaitable(closing := close()):
                await closing

    async def _answer(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        """Answer a call: the tool's message, and whether the call failed."""
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        self._calls_left -= 1
        failed = True
        if self._calls_left < 0:
            text = "Error: no calls are left; answer without one"
        elif (tool := self.tools.get(name)) is None:
            text = f"Error: there is no tool {name!r}; there are {', '.join(self.tools)}"
        else:
            text, failed = await self._result(tool, arguments)
        if (over := len(text) - self._max_result_chars) > 0:
            text = f"{text[: self._max_result_chars]} ... ({over} more characters)"
        return tool_message(call, text), failed

    async def _result(self, tool: Tool, arguments: object) -> tuple[str, bool]:
        try:
            return as_text(await self._made(tool, tool.checked(arguments))), False
        except ArgumentsError as error:
            return f"Error: {error}", True
        except self._faults:
            raise
        except OutOfTimeError:
            return f"Error: the call took longer than {self._timeout_s:g} s", True
        except Exception as error:
            failure = Failure.of(error)
            if (kind := (tool.name, failure.kind)) not in _logged:
                _logged.add(kind)
                logger.warning("tool %r raised %s; the policy gets this as the result", tool.name, failure)
            return f"Error: {failure.error}", True

    async def _made(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        def call() -> Any:
            return tool.function(**arguments)

        in_thread = self._in_thread and not is_async(tool.function)
        result = await _threads.run(call, self._timeout_s) if in_thread else call()
        if not inspect.isawaitable(result):
            return result
        return await bounded(_awaited(result), self._timeout_s, f"tool {tool.name!r}")


def tool_message(call: Mapping[str, Any], text: str) -> Message:
    """Make the tool's message with the result of a call."""
    answer = {"role": "tool", "name": call["function"]["name"], "content": text}
    return answer if call.get("id") is None else {**answer, "tool_call_id": call["id"]}


def messages_of(prompt: str | Sequence[Message], system: str = "") -> list[Message]:
    """Opening messages of a conversation, in the form of OpenAI.

    Args:
        prompt: The user's message, or all messages after the system message.
        system: System message, if any.

    Raises:
        TypeError: the prompt is neither text nor messages.
        DataError: a message has an unknown role or key, or is wrong in another way; see `prompt_messages`.
    """
    if system:
        return [{"role": "system", "content": system}, *messages_of(prompt)]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the prompt is {safe_repr(prompt)}; it must be text, or a list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    return prompt_messages(prompt)


def as_text(result: Any) -> str:
    """Convert a result to text: text unchanged, anything else as JSON, with null for NaN and infinity.

    >>> as_text({"right": True, "left": None})
    '{"right":true,"left":null}'
    """
    if isinstance(result, str):
        return result
    try:
        return to_json(result, inf_nan_mode="null").decode()
    except ValueError:  # pydantic cannot convert it. Addresses are removed, since they differ at each replay.
        return _ADDRESS.sub("", to_json(plain_json(result)).decode())


async def _awaited(result: Awaitable[T]) -> T:
    return await result
