"""Invented pages whose questions only their images answer: `python -m
raylearner.services.corpora.visual_pages FOLDER`.

Writes a folder for the pages service, `questions.jsonl` and `questions_held_out.jsonl`. The texts
by which pages are found name them and never hold an answer.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw, ImageFont

from raylearner.services.corpora.records import HELD_OUT_EVERY, invented_name

COLOURS = {
    "red": (214, 39, 40),
    "green": (30, 140, 60),
    "blue": (31, 80, 200),
    "yellow": (245, 215, 40),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "grey": (130, 130, 130),
    "pink": (250, 130, 200),
}
SHAPES = {"circle": 0, "triangle": 3, "square": 4, "hexagon": 6}
"""By number of corners; a circle has none."""
PLACES = ("top left", "top right", "bottom left", "bottom right")
ITEMS = ("apples", "boats", "chairs", "doors", "eggs", "forks", "gloves", "hats")
PAPER, INK, FRAME = (255, 255, 255), (20, 20, 20), (150, 150, 150)
FILL = 0.7
"""Share of the page's side that a shape or a line of digits takes."""
MAX_DIGITS = 3
NUM_ROWS = 5

Colour = tuple[int, int, int]


class Kind(StrEnum):
    """Kind of content of a page."""

    COLOURS = "colours"
    DIGITS = "digits"
    SHAPES = "shapes"
    LABELS = "labels"
    TABLES = "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page: its image, the words beside its name by which it is found, and its questions.

    Questions hold `{page}` in place of the page's name, and their answers.
    """

    image: Image.Image
    words: str
    questions: tuple[tuple[str, str], ...]


def colour_page(rng: random.Random, side: int) -> Page:
    """Draw a page of one colour."""
    name = rng.choice(sorted(COLOURS))
    return Page(
        image=Image.new("RGB", (side, side), COLOURS[name]),
        words="a colour",
        questions=(("Which colour is page {page}?", name),),
    )


def digit_page(rng: random.Random, side: int) -> Page:
    """Draw one to three large digits, black on white."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, MAX_DIGITS)))
    image = Image.new("RGB", (side, side), PAPER)
    size = FILL * side / max(1.0, 0.6 * len(digits))
    ImageDraw.Draw(image).text(
        (side / 2, side / 2), digits, INK, font=ImageFont.load_default(size), anchor="mm"
    )
    return Page(
        image=image, words="a number", questions=(("Which number is on page {page}?", digits),)
    )


def shape_page(rng: random.Random, side: int) -> Page:
    """Draw one shape in one colour, on white."""
    shape = rng.choice(sorted(SHAPES))
    colour = rng.choice(sorted(COLOURS.keys() - {"white"}))
    image = Image.new("RGB", (side, side), PAPER)
    draw, middle, radius = ImageDraw.Draw(image), side / 2, FILL * side / 2
    if SHAPES[shape]:
        draw.regular_polygon((middle, middle, radius), SHAPES[shape], fill=COLOURS[colour])
    else:
        draw.circle((middle, middle), radius, fill=COLOURS[colour])
    return Page(
        image=image,
        words="a shape",
        questions=(
            ("Which shape is on page {page}?", shape),
            ("Which colour has the shape on page {page}?", colour),
        ),
    )


def label_page(rng: random.Random, side: int) -> Page:
    """Draw a word in each corner."""
    image = Image.new("RGB", (side, side), PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(side / 12)
    names = [invented_name(rng) for _ in PLACES]
    for place, name in zip(PLACES, names, strict=True):
        x = side / 4 if "left" in place else 3 * side / 4
        y = side / 4 if "top" in place else 3 * side / 4
        draw.text((x, y), name, INK, font=font, anchor="mm")
        draw.rectangle((x - side / 5, y - side / 8, x + side / 5, y + side / 8), outline=FRAME)
    asked = tuple(
        (f"Which label is at the {place} of page {{page}}?", name)
        for place, name in zip(PLACES, names, strict=True)
    )
    return Page(image=image, words="labels", questions=asked)


def table_page(rng: random.Random, side: int) -> Page:
    """Draw items and their numbers, one a line."""
    image = Image.new("RGB", (side, side), PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(side / 14)
    rows = [(item, str(rng.randint(1, 999))) for item in rng.sample(ITEMS, NUM_ROWS)]
    height = side / (NUM_ROWS + 1)
    for number, (item, count) in enumerate(rows):
        y = height * (number + 1)
        draw.text((side / 8, y), item, INK, font=font, anchor="lm")
        draw.text((7 * side / 8, y), count, INK, font=font, anchor="rm")
        draw.line((side / 10, y + height / 2, 9 * side / 10, y + height / 2), FRAME)
    asked = tuple((f"How many {item} does page {{page}} list?", count) for item, count in rows)
    return Page(image=image, words=f"a table of {', '.join(ITEMS)}", questions=asked)


DRAWN: dict[Kind, tuple[Callable[[random.Random, int], Page], int]] = {
    Kind.COLOURS: (colour_page, 56),
    Kind.DIGITS: (digit_page, 84),
    Kind.SHAPES: (shape_page, 84),
    Kind.LABELS: (label_page, 392),
    Kind.TABLES: (table_page, 392),
}
"""Function that draws each kind, and the default side of its pages in pixels."""


def write_visual_pages(
    folder: Path,
    *,
    kinds: Sequence[Kind] = tuple(Kind),
    num_documents: int = 24,
    pages_per_document: int = 10,
    side: int | None = None,
    is_blank: bool = False,
    seed: int = 0,
) -> None:
    """Write pages, kinds taking turns, and their questions.

    A row has `prompt`, `answer`, `doc_id`, `page_id`, `page` (its name) and `image` (its file); one
    document in eight is held out. With `is_blank` every page is white and all else equal: a control
    for learning without images.
    """
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    pages: list[dict[str, str]] = []
    rows: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    names: set[str] = set()
    for number in range(num_documents * pages_per_document):
        document, place = divmod(number, pages_per_document)
        doc_id, page_id = f"doc-{document + 1}", str(place + 1)
        while (name := invented_name(rng)) in names:
            pass
        names.add(name)
        draw, usual_side = DRAWN[kinds[number % len(kinds)]]
        page = draw(rng, side or usual_side)
        image = Image.new("RGB", page.image.size, PAPER) if is_blank else page.image
        file = f"images/{doc_id}-{page_id}.png"
        image.save(folder / file)
        text = f"Page {name}: {page.words}."
        pages.append({"id": page_id, "doc_id": doc_id, "image": file, "text": text})
        is_held_out = document % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        rows[is_held_out].extend(
            {
                "prompt": question.format(page=name),
                "answer": answer,
                "doc_id": doc_id,
                "page_id": page_id,
                "page": name,
                "image": file,
            }
            for question, answer in page.questions
        )
    for file, lines in (
        ("pages.jsonl", pages),
        ("questions.jsonl", rows[0]),
        ("questions_held_out.jsonl", rows[1]),
    ):
        (folder / file).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for pages, images and questions.")],
    kind: Annotated[
        list[Kind] | None, typer.Option(help="Kind of page; repeatable. Default: all kinds.")
    ] = None,
    num_documents: Annotated[int, typer.Option(min=HELD_OUT_EVERY, max=10_000)] = 24,
    pages_per_document: Annotated[int, typer.Option(min=1, max=1000)] = 10,
    side: Annotated[
        int | None, typer.Option(min=28, max=4096, help="Side of a page, in pixels.")
    ] = None,
    blank: Annotated[
        bool, typer.Option("--blank", help="Draw blank pages, as a control without images.")
    ] = False,
    seed: int = 0,
) -> None:
    """Write invented pages with questions that only looking at them answers."""
    write_visual_pages(
        folder,
        kinds=tuple(kind or Kind),
        num_documents=num_documents,
        pages_per_document=pages_per_document,
        side=side,
        is_blank=blank,
        seed=seed,
    )


if __name__ == "__main__":
    typer.run(main)
