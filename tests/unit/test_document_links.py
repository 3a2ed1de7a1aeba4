"""Links in documents lead to files and headings that exist, and the site's menu has every page."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """Return the text without blocks and spans of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "code", text, flags=re.DOTALL)


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        anchor, number = slug(heading), 0
        while (candidate := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.append(candidate)
    return frozenset(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    broken: list[str] = []
    for target in LINK.findall(prose(document.read_text())):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_menu_once() -> None:
    menu = re.findall(
        r"```\{toctree\}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL
    )
    entries = re.findall(r"^[a-z_]+$", "\n".join(menu), re.MULTILINE)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert len(entries) == len(set(entries))
    assert set(entries) == pages


def test_a_link_without_its_heading_is_found() -> None:
    assert "the-twenty-keys-that-people-set" in anchors(ROOT / "docs" / "configuration.md")
    assert slug("`/batch_search`") == "batch_search"
    assert slug("What `check` refuses") == "what-check-refuses"
    assert LINK.findall(prose("`[x](y.md)` [a](b.md#c) ![p](q.svg)")) == ["b.md#c", "q.svg"]
