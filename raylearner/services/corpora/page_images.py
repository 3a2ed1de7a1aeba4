"""Pages of small documents rendered as images, with questions, in the pages service's layout."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from raylearner.services.corpora.facts import Fact, facts

SIZE = (640, 480)
MARGIN, LINE_HEIGHT, FONT_SIZE = 32, 26, 18
CHARACTERS_PER_LINE = 60
FACTS_PER_PAGE = 3


def write_pages(
    folder: Path, *, num_documents: int = 4, pages_per_document: int = 5
) -> list[dict[str, str]]:
    """Write `pages.jsonl`, the images, and `questions.jsonl`, whose rows are returned.

    Each question has `prompt`, `answer`, `doc_id` and `page_id`; its answer is on the pages of its
    document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = facts()
    step = max(1, len(source) // (num_documents * pages_per_document * FACTS_PER_PAGE))
    chosen = source[::step]
    pages: list[dict[str, str]] = []
    questions: list[dict[str, str]] = []
    for number in range(num_documents * pages_per_document):
        doc_id, page_id = (
            f"doc-{number // pages_per_document + 1}",
            str(number % pages_per_document + 1),
        )
        held = chosen[number * FACTS_PER_PAGE : (number + 1) * FACTS_PER_PAGE]
        name = f"{doc_id}-page-{page_id}.png"
        render(f"{doc_id}, page {page_id}", held).save(folder / name, optimize=True)
        text = "\n\n".join(fact.contents for fact in held)
        pages.append({"id": page_id, "doc_id": doc_id, "image": name, "text": text})
        questions += [
            {"prompt": question, "answer": answer, "doc_id": doc_id, "page_id": page_id}
            for fact in held
            for question, answer in fact.questions
        ]
    _write(folder / "pages.jsonl", pages)
    _write(folder / "questions.jsonl", questions)
    return questions


def render(title: str, held: Sequence[Fact]) -> Image.Image:
    """Draw one page: a title and a paragraph for each fact, black on white."""
    image = Image.new("L", SIZE, 255)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE)
    lines = [title, ""]
    for fact in held:
        lines += [fact.title, *textwrap.wrap(fact.text, CHARACTERS_PER_LINE), ""]
    for number, line in enumerate(lines):
        draw.text((MARGIN, MARGIN + number * LINE_HEIGHT), line, fill=0, font=font)
    return image


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
