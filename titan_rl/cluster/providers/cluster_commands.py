"""Commands of schedulers and clusters, and templates of scripts and manifests."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from titan_rl.core.errors import ProviderError

ANSWER_S = 60.0


async def tool_output(words: Sequence[str]) -> str:
    """Run `run_tool` in a thread."""
    return await asyncio.to_thread(run_tool, words)


def run_tool(words: Sequence[str], given: str = "") -> str:
    """Run a command, and return its standard output.

    Args:
        given: Text for its standard input.

    Raises:
        ProviderError: The command does not exist, fails or does not return in time. The error contains its stderr.
    """
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=ANSWER_S)
    except OSError as error:
        raise ProviderError(f"{words[0]} cannot be run: {error.strerror}; is it on PATH?") from None
    except ValueError as error:  # for arguments that are impossible, such as those with a NUL character
        raise ProviderError(f"{words[0]} cannot be run with {' '.join(words[1:])!r}: {error}") from None
    except subprocess.TimeoutExpired:
        raise ProviderError(f"{' '.join(words[:2])} has not answered in {ANSWER_S:g} s") from None
    if done.returncode:
        raise ProviderError(f"{' '.join(words)} failed with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def rendered(template: str, **given: Any) -> str:
    """Render a template of this folder. Templates quote shell words with `quote(...)`, YAML values with `| tojson`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
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
    """Return the word, extended until it does not occur in the text, as the delimiter of a here-document."""
    while word in text:
        word += "_"
    return word
