"""Reference of the public names in Markdown: their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import titan_rl

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):(?: +(.+))?$")
INHERITED = (object, BaseException, Exception, tuple, str, int, dict)


def markdown(names: Sequence[str]) -> str:
    return "\n".join(line for name in names for line in _named(name, getattr(titan_rl, name)))


def _named(name: str, value: Any) -> Iterator[str]:
    yield f"\n### {name}\n"
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        yield f"```python\n{name} = {_annotation(value)}\n```\n"
        return
    yield f"```python\n{_signature(name, value)}\n```\n"
    yield prose(_own_doc(value))
    if not inspect.isclass(value):
        return
    if issubclass(value, enum.Enum):
        yield "\n".join(f"- `{member.name}`: `{member.value!r}`" for member in value) + "\n"
    for method_name, method in vars(value).items():
        function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        doc = inspect.getdoc(function.fget if isinstance(function, property) else function)
        if (
            method_name.startswith("_")
            or not doc
            or not (inspect.isfunction(function) or isinstance(function, property))
        ):
            continue
        shown = method_name if isinstance(function, property) else _signature(method_name, function)
        yield f"```python\n{shown}\n```\n"
        yield _quoted(prose(doc))


def _own_doc(value: Any) -> str:
    """Docstring of a class or function, without the ones that dataclasses and pydantic generate."""
    doc = value.__doc__ or ""
    made = dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}(")
    return "" if made else inspect.cleandoc(doc)


def _signature(name: str, value: Any) -> str:
    head = "class " if inspect.isclass(value) else "async def " if inspect.iscoroutinefunction(value) else "def "
    if inspect.isclass(value) and issubclass(value, BaseException | enum.Enum):
        return f"class {name}({value.__bases__[0].__name__})"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return head + name
    if getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    given = list(_parameters(signature))
    result = "" if inspect.isclass(value) or signature.return_annotation is inspect.Signature.empty else " -> "
    result += _annotation(signature.return_annotation) if result else ""
    line = f"{head}{name}({', '.join(given)}){result}"
    return line if len(line) < 100 else f"{head}{name}(\n    " + ",\n    ".join(given) + f",\n){result}"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    for before, one in zip([None, *parameters], parameters, strict=False):
        if one.kind is one.KEYWORD_ONLY and (before is None or before.kind is before.POSITIONAL_OR_KEYWORD):
            yield "*"
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
        default = "" if one.default is one.empty else f" = {re.sub('<.*>', '...', repr(one.default))}"
        yield f"{stars}{one.name}{kind}{default if kind else default.replace(' ', '')}"


def _annotation(annotation: Any) -> str:
    if not isinstance(annotation, str):  # type hints are without what checks a setting
        bare = typing.get_type_hints(type("Holder", (), {"__annotations__": {"held": annotation}}))["held"]
        annotation = inspect.formatannotation(bare)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", annotation)


def prose(doc: str) -> str:
    """A docstring as Markdown: sections such as `Args:` become lists."""
    made: list[str] = []
    in_list = False
    for line in doc.splitlines():
        if match := SECTION.match(line.strip()):
            made += ["", f"**{match[1]}**" + (f": {match[2]}" if match[2] else ""), ""]
            in_list = True
        elif in_list and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(":")
            made.append(
                f"- `{name}`: {rest.strip()}" if colon and re.fullmatch(r"[\w, .*]+", name) else f"- {line.strip()}"
            )
        elif in_list and line.strip() and line.startswith("     "):
            made.append(f"  {line.strip()}")
        else:
            in_list = in_list and not line.strip()
            made.append(line)
    return "\n".join(made).strip() + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines()) + "\n"
