"""Plain functions as tools: their schemas, and checks of arguments."""

import enum
import functools
import inspect
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from titan_rl.tasks import ArgumentsError, Tool, tools_of


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


@dataclass
class Place:
    name: str
    floor: int = 0


class Note(TypedDict):
    text: str


class Person(BaseModel):
    age: int = Field(ge=0)


def measure(
    length: float,
    unit: Unit = Unit.METRE,
    mode: Literal["walk", "drive"] = "walk",
    tags: list[str] | None = None,
    place: Place | None = None,
    notes: Annotated[list[Note], "what to remember"] = [],  # noqa: B006
    who: Person | None = None,
) -> str:
    """Measure a way.

    Whatever it leads to.

    Args:
        length: how long it is
        tags: words about it
    """
    return f"{length} {unit.value} {mode} {tags} {place} {notes} {who}"


NAMES = list(inspect.signature(measure).parameters)


def test_schema_is_built_from_type_hints_and_docstring() -> None:
    schema = Tool.of(measure).schema
    function = schema["function"]
    assert (schema["type"], function["name"]) == ("function", "measure")
    assert function["description"] == "Measure a way.\n\nWhatever it leads to."
    parameters = function["parameters"]
    assert set(parameters) == {"type", "properties", "required", "$defs"}
    assert (parameters["type"], parameters["required"]) == ("object", ["length"])
    properties = parameters["properties"]
    assert properties["length"] == {"type": "number", "description": "how long it is"}
    assert properties["mode"] == {"type": "string", "enum": ["walk", "drive"], "default": "walk"}
    assert properties["tags"]["description"] == "words about it"
    assert properties["tags"]["anyOf"] == [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    assert properties["notes"]["description"] == "what to remember"
    assert parameters["$defs"]["Unit"]["enum"] == ["m", "mi"]
    assert parameters["$defs"]["Place"]["properties"]["floor"] == {"type": "integer", "default": 0}


def test_schema_in_the_module_docstring_is_accurate() -> None:
    def multiply(a: float, b: float = 1.0) -> float:
        """Multiply two numbers.

        Args:
            a: the first
            b: the second
        """
        return a * b

    assert Tool.of(multiply).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"description": "the first", "type": "number"},
            "b": {"default": 1.0, "description": "the second", "type": "number"},
        },
        "required": ["a"],
    }


def test_arguments_are_converted_to_declared_types() -> None:
    given = {
        "length": 2,
        "unit": "mi",
        "place": {"name": "hall"},
        "notes": [{"text": "hi"}],
        "who": {"age": 3},
    }
    assert Tool.of(measure).checked(given) == {
        "length": 2.0,
        "unit": Unit.MILE,
        "place": Place("hall"),
        "notes": [{"text": "hi"}],
        "who": Person(age=3),
    }
    assert Tool.of(measure).checked('{"length": "2.5"}') == {"length": 2.5}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "length: Field required"),
        (None, "length: Field required"),
        ({"length": "far"}, "length: Input should be a valid number"),
        ({"length": 1, "width": 2}, "width: Extra inputs are not permitted"),
        ({"length": 1, "who": {"age": -1}}, "who.age: Input should be greater than or equal to 0"),
        ({"length": 1, "mode": "fly"}, "mode: Input should be 'walk' or 'drive'"),
        ("[1]", "not a JSON object"),
        ("{", "not valid JSON:"),
        (3, "not a JSON object"),
    ],
)
def test_invalid_argument_error_names_the_argument(arguments: object, problem: str) -> None:
    with pytest.raises(ArgumentsError, match=problem):
        Tool.of(measure).checked(arguments)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(400), deadline=None)
@given(arguments=JSON | st.text() | JSON.map(json.dumps))
def test_any_arguments_are_accepted_or_rejected_with_arguments_error(arguments: object) -> None:
    with suppress(ArgumentsError):
        assert measure(**Tool.of(measure).checked(arguments))


def test_parameter_names_may_shadow_pydantic_methods() -> None:
    def store(copy: int, schema: str, _hidden: bool = False, model_fields: int = 0) -> None: ...

    tool = Tool.of(store)
    assert list(tool.parameters["properties"]) == ["copy", "schema", "_hidden", "model_fields"]
    assert tool.checked({"copy": 1, "schema": "s", "_hidden": True}) == {"copy": 1, "schema": "s", "_hidden": True}


@pytest.mark.parametrize(
    "docstring",
    [
        "Look up.\n\n    :param word: what to look up",
        "Look up.\n\n    Parameters\n    ----------\n    word : str\n        what to look up",
        "Look up.\n\n    Args:\n        word (str): what to look up",
    ],
)
def test_docstring_styles_describe_parameters(docstring: str) -> None:
    def look(word: str) -> str:
        return word

    look.__doc__ = docstring
    schema = Tool.of(look).schema["function"]
    assert schema["description"] == "Look up."
    assert schema["parameters"]["properties"]["word"]["description"] == "what to look up"


class Opaque:
    """Class without a JSON schema."""


def untyped(a) -> None: ...
def opaque(a: Opaque) -> None: ...
def starred(*args: int) -> None: ...
def keywords(**kwargs: int) -> None: ...
def positional(a: int, /) -> None: ...
def unknown_hint(a: "Nowhere") -> None: ...  # noqa: F821  # pyright: ignore
def strange_default(a: Any = object()) -> None: ...  # noqa: B008


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (untyped, "'untyped': parameter 'a' has no type; declare one"),
        (opaque, "'opaque': JSON schema cannot describe parameter 'a'.*Opaque"),
        (starred, "'starred': parameter .args: int cannot be given by its name"),
        (keywords, "'keywords': parameter ..kwargs: int cannot be given by its name"),
        (positional, "'positional': parameter a: int cannot be given by its name"),
        (unknown_hint, "'unknown_hint': its type hints cannot be read: NameError"),
        (strange_default, "'strange_default': JSON schema cannot describe parameter 'a'"),
        (lambda: 1, "has no name by which it could be called"),
    ],
)
def test_tool_creation_rejects_undescribable_functions(function: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tool.of(function)


class Account:
    """Object whose methods are tools."""

    limit = 5

    def __init__(self) -> None:
        self.balance = 0

    def deposit(self, coins: int) -> int:
        """Put coins in."""
        self.balance += coins
        return self.balance

    @staticmethod
    def currency() -> str:
        """Which coins."""
        return "ducats"

    def _secret(self) -> None: ...

    def close(self) -> None: ...


def test_public_methods_become_tools_sharing_state() -> None:
    one, other = Account(), Account()
    tools = {tool.name: tool for tool in tools_of(one)}
    assert list(tools) == ["currency", "deposit"]
    assert tools["deposit"].function(**tools["deposit"].checked({"coins": 2})) == 2
    assert (one.balance, other.balance) == (2, 0)
    assert list(tools["deposit"].parameters["properties"]) == ["coins"]


def test_tools_of_accepts_functions_lists_and_tools() -> None:
    made = Tool.of(measure)
    assert [tool.name for tool in tools_of([made, Account()])] == ["measure", "currency", "deposit"]
    assert tools_of(measure) == [made]
    assert tools_of(functools.partial(measure, 1.0, tags=["x"]))[0].name == "measure"
    assert tools_of(()) == tools_of(None) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([measure, measure], r"\['measure'\] appear more than once"),
        (Account, "a class; pass an instance: Account()"),
        (3.5, None),
        (object(), "give functions, or an object with public methods"),
    ],
)
def test_tools_of_rejects_objects_without_tools(given: object, problem: str | None) -> None:
    with pytest.raises(ValueError, match=problem):
        tools_of(given)
