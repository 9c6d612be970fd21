"""Pages in docs/ and README.md: their paths and their code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CONTINUES = "<!-- continues the file above -->"


def shown(page: Path) -> Iterator[tuple[str, str, str]]:
    """Code blocks of a page, each with the paragraph before it and its language: (paragraph, language, text)."""
    paragraph, language, text = list[str](), "", list[str]()
    for line in page.read_text().splitlines():
        if line.startswith("```") and not language:
            language, text = line.removeprefix("```") or "text", []
        elif line == "```":
            yield "\n".join(paragraph), language, "\n".join([*text, ""])
            paragraph, language = [], ""
        elif language:
            text.append(line)
        elif line:
            paragraph = [*paragraph, line] if paragraph and paragraph[-1] else [line]
        elif paragraph and paragraph[-1]:
            paragraph.append("")


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of one language. A block that continues the one above is joined to it."""
    found = list[str]()
    for paragraph, block_language, text in shown(page):
        if block_language == language and CONTINUES in paragraph:
            found[-1] += text
        elif block_language == language:
            found.append(text)
    return found


def files(page: Path) -> dict[str, str]:
    """Files that the reader is to write, by name: each block after a paragraph with a file name in bold."""
    return {name: text for paragraph, _, text in shown(page) for name in re.findall(r"\*\*(\w+\.\w+)\*\*", paragraph)}
