"""Settings of the documentation site: `make docs` builds it into build/site without a network."""

import re
from pathlib import Path
from typing import Any

from sphinx.errors import SphinxError

import raylearner

ROOT = Path(__file__).parents[1]

project = "raylearner"
author = "The raylearner authors"
copyright = author
release = version = raylearner.__version__

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = True
smartquotes = False  # two hyphens begin an option

html_theme = "furo"
html_title = f"raylearner {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp"

OUTSIDE = re.compile(r"\[`?([^\]`]+)`?\]\(\.\./[^)]+\)")
EXTERNAL = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*\""
)
FONT = re.compile(r"@import[^;]*https?:|url\(\s*['\"]?https?:")


def show_path(app: Any, page: str, source: list[str]) -> None:
    """Turn links to code and configurations, which are not pages, into their paths."""
    source[0] = OUTSIDE.sub(r"`\1`", source[0])


def refuse_hosts(app: Any, error: Exception | None) -> None:
    """Fail the build if a page would load anything from another host."""
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir)
    for path in sorted([*folder.rglob("*.html"), *folder.rglob("*.css")]):
        pattern = FONT if path.suffix == ".css" else EXTERNAL
        found = pattern.search(path.read_text(encoding="utf-8"))
        if found and 'rel="canonical"' not in found.group(0):
            raise SphinxError(f"{path.name} loads from another host: {found.group(0)[:200]}")


def setup(app: Any) -> None:
    app.connect("source-read", show_path)
    app.connect("build-finished", refuse_hosts)
