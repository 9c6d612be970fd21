"""Source checks of the page's modules: no markup, links or code are made from a run's text, and imports exist."""

from __future__ import annotations

import re

import pytest

from titan_rl.viewer.html import page_file, page_files

MAKES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTMLUnsafe|srcdoc"
)
MAKES_CODE = re.compile(r"\beval\(|new Function\(|setTimeout\(\s*[\"'`]|javascript:")
OWN = [path for path in page_files() if path.endswith(".js") and not path.startswith("vendor/")]


@pytest.mark.parametrize("path", OWN)
def test_page_modules_build_no_markup_or_code_from_strings(path: str) -> None:
    source = page_file(path)[0].decode()
    assert not MAKES_MARKUP.findall(source)
    assert not MAKES_CODE.findall(source)


@pytest.mark.parametrize("path", [path for path in OWN if path.startswith(("rollouts/", "timeline/"))])
def test_viewer_does_not_turn_run_output_into_links(path: str) -> None:
    assert not re.findall(
        r"\bhref\b|h\(\"a\"|h\(\"(img|iframe|object|embed)\"", page_file(path)[0].decode().replace("location.href", "")
    )


@pytest.mark.parametrize("path", OWN)
def test_page_module_imports_exist(path: str) -> None:
    source = page_file(path)[0].decode()
    for names, module in re.findall(r'import (?:\{([^}]*)\}|\* as \w+) from "viewer/([\w/]+)"', source):
        assert f"{module}.js" in OWN
        exported = re.findall(
            r"^export (?:default )?(?:async )?(?:function\*?|class|const|let) (\w+)",
            page_file(f"{module}.js")[0].decode(),
            re.MULTILINE,
        )
        wanted = {name.split(" as ")[0].strip() for name in names.split(",") if name.strip()}
        assert wanted <= {*exported}, module
