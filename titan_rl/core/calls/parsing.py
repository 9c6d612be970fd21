"""Parsers of JSON, TOML and host names from outside: files, arguments of commands, headers of requests.

The parsers raise the error of their format for any wrong text. Python's own also raise RecursionError for deep nesting,
and a plain ValueError for a number of 4,301 digits.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

T = TypeVar("T")


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        object_pairs_hook: Function that makes an object of its pairs; by default the last of two equal names counts.

    Raises:
        json.JSONDecodeError: the text is not JSON, is nested too deeply, or has a number that is too long.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", "", 0) from None


def parse_json_as(data: bytes, kind: type[T]) -> T:
    """The value of a JSON text, as `kind`.

    Raises:
        msgspec.MsgspecError: the text is not JSON, or not a value of this type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text, which may begin with a byte order mark.

    Raises:
        tomllib.TOMLDecodeError: the text is not TOML, is nested more than 100 levels deep, or has a number that is too
            long.
    """
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None
    except ValueError:  # Python's limit
        raise tomllib.TOMLDecodeError("a number has more than 4,300 digits") from None
    if _is_deeper(table, MAX_LEVELS):  # settings are read recursively
        raise tomllib.TOMLDecodeError(f"nested more than {MAX_LEVELS} levels deep")
    return table


MAX_LEVELS = 100
"""Deepest nesting of tables and lists in TOML."""


def _is_deeper(value: object, levels: int) -> bool:
    """Whether the nesting of tables and lists, including the values in them, has more than `levels` levels."""
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


@lru_cache(64)  # every request names its host
def names_this_machine(host: str | None) -> bool:
    """Whether a host, given without a port, is loopback.

    >>> [names_this_machine(host) for host in ("localhost", "127.0.0.1", "::1", "example.com")]
    [True, True, True, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str | None:
    """Host of a Host header or a URL, or None.

    >>> host_of("[::1]:8000"), host_of("http://localhost:8000")
    ('::1', 'localhost')
    """
    try:
        return urlsplit(header if "//" in header else f"//{header}").hostname
    except ValueError:
        return None


def is_http_url(text: str) -> bool:
    """Whether a text is the URL of an HTTP server, with a host, and a valid port if it has one.

    >>> is_http_url("http://localhost:8000/v1"), is_http_url("http://localhost:80000")
    (True, False)
    """
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is above 65535, or not a number
        return False


def server_root(url: str) -> str:
    """URL of a server without the "/v1" of OpenAI's protocol, with which users may give it.

    >>> server_root("http://localhost:8000/v1"), server_root("http://localhost:8000/")
    ('http://localhost:8000', 'http://localhost:8000')
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


_VERSION = re.compile(r"(?<!/)/v\d[^/]*(?:/|$)")


def openai_base(url: str) -> str:
    """Base URL of OpenAI's protocol at a server: the given URL if its path has a version, or otherwise its "/v1".

    >>> openai_base("http://localhost:8000"), openai_base("https://v2.host/v1beta/openai/")
    ('http://localhost:8000/v1', 'https://v2.host/v1beta/openai')
    """
    base = url.rstrip("/")
    return base if _VERSION.search(base) else f"{base}/v1"
