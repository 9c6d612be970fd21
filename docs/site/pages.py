"""Sphinx extension that inserts generated text into the pages of docs/.

A marker in a page, `<!-- made from: settings -->`, is replaced by the generated text. It is a comment, so that it is
invisible in the repository. In the API's pages the marker `<!-- described -->` precedes a line of names to describe.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import api
import command_line
import settings
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = {"settings": settings.markdown, "command line": command_line.markdown}


def setup(app: Any) -> None:
    """Register the extension with Sphinx."""
    app.connect("source-read", read)
    app.add_transform(IndexedSettings)


def read(app: object, name: str, source: list[str]) -> None:
    """Handle Sphinx's event "source-read": change the text of the page `name`, `source[0]`, in place."""
    page = DOCS / f"{name}.md"
    text = inside(source[0], page.parent)
    text = re.sub(r"<!-- made from: ([\w. ]+) -->", lambda match: made(match[1]), text)
    text = re.sub(r"<!-- described -->\n(.+)", lambda match: api.markdown(re.findall(r"`(\w+)`", match[1])), text)
    source[0] = text


class IndexedSettings(SphinxTransform):
    """Add index entries for settings by full and last name, so that a search finds their rows first."""

    default_priority = 800  # before Sphinx collects the index

    def apply(self, **kwargs: Any) -> None:
        if self.env.docname != "reference/settings":
            return
        for row in self.document.findall(nodes.row):
            name = next(iter(row.findall(nodes.literal)), None)
            if name is None or name.parent.parent is not row.children[0]:
                continue  # the head of a table
            full = name.astext()
            target = f"setting-{nodes.make_id(full)}"
            name["ids"].append(target)
            shown = {full, full.rpartition(".")[2]}
            entries = [("single", each, target, "main", None) for each in sorted(shown)]
            name.parent.insert(0, addnodes.index(entries=entries))


def made(source: str) -> str:
    """Text that replaces a marker: generated from the code, or a page outside docs/."""
    return inside((ROOT / source).read_text(), ROOT) if source.endswith(".md") else MADE[source]()


def inside(text: str, folder: Path) -> str:
    """Text of a page of `folder` with the links of the site: relative to docs/, and without links to other files."""

    def link(match: re.Match[str]) -> str:
        bang, label, target = match.groups()
        path, hash, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        full = (folder / path).resolve()
        if full == ROOT / "README.md":
            full = DOCS / "index.md"
        if full.is_relative_to(DOCS) and full.is_file():
            seen_from = DOCS if folder == ROOT else folder
            return f"{bang}[{label}]({os.path.relpath(full, seen_from)}{hash}{anchor})"
        return label if "`" in label else f"`{label}`"

    parts = re.split(r"(^```.*?^```$|`[^`\n]*`(?!\]))", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, part) if not part.startswith("`") else part for part in parts
    )
