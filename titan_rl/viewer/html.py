"""HTML of the page: served, with its modules as separate files, or as one file that needs no network.

Both are made from the same files in `page/`. Each JavaScript module is imported by a bare name, `viewer/` and its path
without `.js`. An import map resolves it to a URL below `/static/`, or to a `data:` URL.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

STATIC = "/static/"
_PACKAGE = "titan_rl.viewer"
_PAGE = Path(__file__).parent / "page"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}


@dataclass(frozen=True, slots=True)
class Page:
    """HTML, and the Content-Security-Policy that it must be served with."""

    html: str
    policy: str


def served_page() -> Page:
    """Make the page of the server, which serves the files of `page_file` below `/static/` and answers below `/api/`."""
    policy = "default-src 'none'; script-src 'self' {hash}; style-src 'self'; img-src data:; connect-src 'self'"
    return _page(lambda path: STATIC + path, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def report_page(data: Mapping[str, Any], title: str) -> bytes:
    """Make the page as one file in UTF-8 that needs no network.

    Args:
        data: JSON data from which `EmbeddedSource` in `page/source/embedded.js` answers.
        title: Title of the document.
    """
    policy = "default-src 'none'; script-src data: {hash}; style-src data:; img-src data:; base-uri 'none'"
    placeholder = token_hex()  # in a str, each character would take four bytes if one of them is an emoji
    page = _page(_data_url, f"{policy}; form-action 'none'", data=Markup(placeholder), title=title).html.encode()
    return page.replace(placeholder.encode(), _json_in_html(data))


def page_file(path: str) -> tuple[bytes, str]:
    """Return the content and media type of a file of the page.

    Args:
        path: Path relative to `page/`, for example `curves/tab.js`.

    Raises:
        KeyError: There is no such file.
    """
    if path not in page_files():
        raise KeyError(path)
    return _read(path), _media_type(path)


@cache
def page_files() -> tuple[str, ...]:
    """Sorted paths of the modules and styles, relative to `page/`."""
    return tuple(sorted(path.relative_to(_PAGE).as_posix() for path in _PAGE.rglob("*") if path.suffix in _MEDIA_TYPES))


def _page(url: Callable[[str], str], policy: str, data: Markup | None = None, title: str = "titan_rl") -> Page:
    modules = [path for path in page_files() if path.endswith(".js") and not path.startswith(("vendor/", "boot."))]
    imports = {f"viewer/{path.removesuffix('.js')}": url(path) for path in modules}
    import_map = json.dumps({"imports": imports}, indent=1)
    digest = base64.b64encode(sha256(import_map.encode()).digest()).decode()
    policy = policy.replace("{hash}", f"'sha256-{digest}'")
    html = (
        _templates()
        .get_template("shell.html.jinja")
        .render(
            url=url,
            styles=[path for path in page_files() if path.endswith(".css")],
            import_map=Markup(import_map),  # paths of this package and base64 cannot end a script tag
            policy=policy if data is not None else None,
            data=data,
            title=title,
        )
    )
    return Page(html, policy)


@cache
def _templates() -> Environment:
    loader = PackageLoader(_PACKAGE, "page")
    escape = select_autoescape(enabled_extensions=("jinja",))
    return Environment(loader=loader, autoescape=escape, trim_blocks=True, lstrip_blocks=True)


def _json_in_html(data: Mapping[str, Any]) -> bytes:
    """Encode JSON so that no text in it can end the script tag."""
    return msgspec.json.encode(data).replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _data_url(path: str) -> str:
    return f"data:{_media_type(path)};base64,{base64.b64encode(_read(path)).decode()}"


def _read(path: str) -> bytes:
    return (_PAGE / path).read_bytes()


def _media_type(path: str) -> str:
    return f"{_MEDIA_TYPES[PurePosixPath(path).suffix]};charset=utf-8"
