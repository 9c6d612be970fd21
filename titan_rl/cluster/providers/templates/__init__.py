"""Scripts and manifests, as templates of jinja2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jinja2


def rendered(template: str, **given: Any) -> str:
    """A template of this folder. `quote(...)` is for words of a shell, `| tojson` for values of YAML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(**given, quote=_quote)


def _quote(value: object) -> str:
    return shlex.quote(str(value))


def unused_word(word: str, text: str) -> str:
    """The word, longer where the text has it, to end a here-document with."""
    while word in text:
        word += "_"
    return word
