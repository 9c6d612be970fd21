"""HTML pages from templates. A page holds its script and style, so that it opens without a network."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

_PACKAGE = "titan_rl.run.observability"


def render_page(template: str, **data: object) -> str:
    """The page that `templates/<template>` makes of `data`. Text in it is escaped."""
    return _environment().get_template(template).render(data)


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader(_PACKAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["file"] = _file
    environment.policies["json.dumps_kwargs"] = {"default": asdict}
    return environment


def _file(name: str) -> Markup:
    """A file of this package as it is, with whatever braces it has."""
    return Markup(files(_PACKAGE).joinpath(name).read_text(encoding="utf-8"))
