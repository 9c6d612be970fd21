"""What pages in docs/ and README.md hold: their files, and what they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CONTINUES = "<!-- continues the file above -->"


def shown(page: Path) -> Iterator[tuple[str, str, str]]:
    """Each block of a page in a language: the paragraph before it, the language, and the text."""
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
    """What a page shows of one language; a block that continues the one above is a part of that."""
    found = list[str]()
    for told, one, text in shown(page):
        if one == language and CONTINUES in told:
            found[-1] += text
        elif one == language:
            found.append(text)
    return found


def files(page: Path) -> dict[str, str]:
    """What a page tells to write, by name: the block behind a paragraph with a file's name in bold."""
    return {name: text for told, _, text in shown(page) for name in re.findall(r"\*\*(\w+\.\w+)\*\*", told)}
