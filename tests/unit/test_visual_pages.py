"""Invented pages: searchable by name, answerable only by looking, with a control that shows nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raylearner.config.data import FileData
from raylearner.data import load_prompts
from raylearner.errors import ConfigError
from raylearner.services.corpora import visual_pages
from raylearner.services.corpora.visual_pages import COLOURS, Kind, write_visual_pages
from raylearner.services.pages import read_pages
from raylearner.services.text_index import TextIndex

CORPORA = Path(visual_pages.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_visual_pages(made, num_documents=16, pages_per_document=5, seed=3)
    return made


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_page_is_found_by_its_name_and_its_text_never_holds_the_answer(folder: Path) -> None:
    pages = read_pages(folder, needs_images=True)
    texts = {(page.doc_id, page.id): page.text.lower() for page in pages}
    index = TextIndex([p.text for p in pages], scopes=[p.doc_id for p in pages])
    asked = rows(folder / "questions.jsonl") + rows(folder / "questions_held_out.jsonl")
    assert len(asked) == 16 * (1 + 1 + 2 + 4 + 5)
    for row in asked:
        assert row["page"] in row["prompt"]
        assert row["answer"].lower() not in texts[row["doc_id"], row["page_id"]].split()
        for query in (row["page"], row["prompt"]):
            hit = index.search(query, top_n=1, scope=row["doc_id"])[0]
            assert (pages[hit.row].doc_id, pages[hit.row].id) == (row["doc_id"], row["page_id"])


def test_one_document_in_eight_is_held_out(folder: Path) -> None:
    trained = {row["doc_id"] for row in rows(folder / "questions.jsonl")}
    held_out = {row["doc_id"] for row in rows(folder / "questions_held_out.jsonl")}
    assert held_out == {"doc-8", "doc-16"}
    assert len(trained) == 14
    assert not trained & held_out


def test_every_kind_draws_what_it_asks_about(folder: Path) -> None:
    pages = read_pages(folder, needs_images=True)
    assert len(pages) == 80
    for page in pages:
        assert page.image is not None
    for row in rows(folder / "questions.jsonl"):
        pixels = np.asarray(Image.open(folder / row["image"]))
        if row["prompt"].startswith("Which colour is page"):
            assert (pixels == COLOURS[row["answer"]]).all()
        elif row["prompt"].startswith("Which colour has the shape"):
            assert (pixels[42, 42] == COLOURS[row["answer"]]).all()
        else:
            assert pixels.std() > 0


def test_the_seed_decides_and_blank_pages_differ_in_nothing_but_their_pixels(
    tmp_path: Path,
) -> None:
    for name, is_blank in (("a", False), ("b", False), ("blank", True)):
        write_visual_pages(
            tmp_path / name, kinds=[Kind.COLOURS], num_documents=8, side=28, is_blank=is_blank
        )
    a, b, blank = (
        {p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("a", "b", "blank")
    )
    assert a == b
    for name, content in a.items():
        if not name.endswith(".png"):
            assert blank[name] == content
    pages = list((tmp_path / "blank" / "images").iterdir())
    assert len(pages) == 80
    for page in pages:
        assert Image.open(page).size == (28, 28)
        assert np.asarray(Image.open(page)).min() == 255


def test_a_row_becomes_a_prompt_of_its_document(folder: Path) -> None:
    (first, *_) = load_prompts([FileData(kind="jsonl", path=str(folder / "questions.jsonl"))])
    row = rows(folder / "questions.jsonl")[0]
    assert first.doc_id == row["doc_id"]
    assert first.answer == row["answer"]
    assert first.columns["page_id"] == row["page_id"]


@pytest.mark.parametrize("kind", ["colour", "visual"])
def test_the_shipped_questions_are_those_of_the_command_in_the_configs(
    tmp_path: Path, kind: str
) -> None:
    write_visual_pages(tmp_path, kinds=[Kind.COLOURS] if kind == "colour" else tuple(Kind))
    for part in ("questions.jsonl", "questions_held_out.jsonl"):
        assert (CORPORA / f"{kind}_{part}").read_text() == (tmp_path / part).read_text()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ({"image": "../image.png"}, "'../image.png' is outside the folder"),
        ({"image": "loop"}, "'loop' cannot be read: .*(loop|levels)"),
        ({"image": "a\0b"}, "cannot be read: embedded null"),
        ({"image": "."}, "'.'"),
        ({"image": "empty.png"}, "'empty.png'"),
        ({"image": None}, "has no image; add one, or serve --contents text"),
        ({"id": "\ud800"}, "surrogate"),
    ],
)
def test_a_page_that_could_not_be_served_is_named_by_its_line(
    tmp_path: Path, page: dict[str, object], words: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty.png").touch()
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    good = {"id": "1", "doc_id": "d", "image": "image.png", "text": "a"}
    lines = [json.dumps(good), json.dumps(good | {"id": "2"} | page)]
    (tmp_path / "pages.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"pages\.jsonl:2: [^:]*{words}"):
        read_pages(tmp_path, needs_images=True)
