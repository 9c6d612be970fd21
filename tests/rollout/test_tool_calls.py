"""Formats of tool calls: each parses its own example, and a template's format is detected from a rendered call."""

from __future__ import annotations

import pytest

from titan_rl.rollout.renderer.tool_calls import FORMATS, OK, CallFormat, format_of

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"properties": {"word": {"type": "string"}, "n": {}}}},
}


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_format_parses_its_example(each: CallFormat) -> None:
    example = each.example.replace("look_up {", "look_up\n{")  # the table of formats omits this line break
    read = each.read(example, [TOOL])
    assert read is not None
    assert [(call.name, call.arguments, call.status) for call in read.calls] == [("look_up", {"word": "it"}, OK)]
    assert each.read("It is a word.", [TOOL]) is None


@pytest.mark.parametrize(
    ("rendered", "name"),
    [
        ('<tool_call>\n{"name": "look_up", "arguments": {"word": "it", "count": 3}}\n</tool_call>', "Hermes JSON"),
        (
            "<tool_call>\n<function=look_up>\n<parameter=word>\nit\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            "function tags",
        ),
        (
            "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>it</arg_value>\n"
            "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "GLM's argument tags",
        ),
        ('[TOOL_CALLS]look_up[ARGS]{"word": "it", "count": 3}', "Mistral's named JSON"),
        ('[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "it", "count": 3}}]', "Mistral's JSON list"),
        ('<function_calls>look_up(word="it", count=3)</function_calls>', "OLMo's Python calls"),
        ('{"name": "look_up", "parameters": {"word": "it", "count": 3}}', "Llama's bare JSON"),
        ('look_up\n{"word": "it", "count": 3}', "GLM-4's named JSON"),
        ('<call name="look_up" word="it" count="3"/>', None),
        ('<tool_call>\n{"name": "look_up", "arguments": {"word": "it"}}\n</tool_call>', None),
    ],
)
def test_format_is_detected_from_a_rendered_call(rendered: str, name: str | None) -> None:
    found = format_of(rendered)
    assert (None if found is None else found.name) == name


def by_name(name: str) -> CallFormat:
    return next(each for each in FORMATS if each.name == name)


def test_tagged_arguments_are_strings_when_the_tool_takes_strings() -> None:
    text = "<tool_call><function=look_up><parameter=word>3</parameter><parameter=n>3</parameter></function></tool_call>"
    read = by_name("function tags").read(text, [TOOL])
    assert read is not None
    assert read.calls[0].arguments == {"word": "3", "n": 3}


def test_python_calls_accept_only_literal_arguments() -> None:
    read = by_name("OLMo's Python calls").read("<function_calls>a(x=[1, true])\nb(y=open('f'))</function_calls>", [])
    assert read is not None
    assert [call.status for call in read.calls] == ["malformed_structure"]
    read = by_name("OLMo's Python calls").read("<function_calls>a(x=[1], z=null)\nb(y='f')</function_calls>", [])
    assert read is not None
    assert [(call.name, call.arguments) for call in read.calls] == [("a", {"x": [1], "z": None}), ("b", {"y": "f"})]


def test_json_object_without_a_call_is_text() -> None:
    assert by_name("Llama's bare JSON").read('{"a": 1}', []) is None
    assert by_name("Llama's bare JSON").read("{a}", []) is None
    read = by_name("Llama's bare JSON").read('{"name": ', [])
    assert read is not None
    assert [call.status for call in read.calls] == ["invalid_json"]
