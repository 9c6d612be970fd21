"""Configuration of Sphinx, which builds docs/ as a site (`make docs`) that fetches nothing from a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

project = "titan_rl"
html_title = "titan_rl"
extensions = ["myst_parser", "pages"]
exclude_patterns = ["site"]
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["wide.css"]
html_css_files = ["wide.css"]
highlight_language = "text"  # of indented blocks: pictures of the planes, and command lines
pygments_style = "friendly"
pygments_dark_style = "monokai"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # a fragment of JSON or TOML with "..." in it
