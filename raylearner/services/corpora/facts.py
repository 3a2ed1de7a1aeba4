"""Passages, questions and page images from two tables of public facts.

`python -m raylearner.services.corpora.facts` writes the passages and the questions.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parent
PASSAGES, QUESTIONS = FOLDER / "facts.jsonl", FOLDER / "questions.jsonl"
HELD_OUT = FOLDER / "questions_held_out.jsonl"
_HELD_OUT_EVERY = 8
"""One fact in this many: its questions are for evaluation only."""
_NOBLE_GASES = (2, 10, 18, 36, 54, 86, 118)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One passage and the questions that it answers."""

    id: str
    title: str
    text: str
    questions: tuple[tuple[str, str], ...]

    @property
    def contents(self) -> str:
        return f"{self.title}\n{self.text}"


def facts() -> list[Fact]:
    return [*_elements(), *_countries()]


def _elements() -> Iterator[Fact]:
    for line in (FOLDER / "elements.txt").read_text(encoding="utf-8").splitlines():
        number, symbol, name, mass = line.split()
        period = 1 + sum(int(number) > noble for noble in _NOBLE_GASES)
        yield Fact(
            id=f"element-{number}",
            title=name,
            text=(
                f"{name} is the chemical element with the symbol {symbol} and atomic number"
                f" {number}. It stands in period {period} of the periodic table. The atomic mass of"
                f" {name} is about {mass}."
            ),
            questions=(
                (f"What is the atomic number of {name}?", number),
                (f"Which chemical element has the symbol {symbol}?", name),
                (f"What is the symbol of the chemical element {name}?", symbol),
                (f"In which period of the periodic table does {name} stand?", str(period)),
            ),
        )


def _countries() -> Iterator[Fact]:
    for line in (FOLDER / "countries.txt").read_text(encoding="utf-8").splitlines():
        name, capital, continent, currency = line.split("|")
        yield Fact(
            id=f"country-{name.lower().replace(' ', '-')}",
            title=name,
            text=(
                f"{name} is a country in {continent}. The capital of {name} is {capital}. People in"
                f" {name} pay with the {currency}."
            ),
            questions=(
                (f"What is the capital of {name}?", capital),
                (f"{capital} is the capital of which country?", name),
                (f"On which continent is {name}?", continent),
                (f"With which currency do people in {name} pay?", currency),
            ),
        )


def passage_lines() -> str:
    rows = ({"id": fact.id, "contents": fact.contents} for fact in facts())
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def question_lines(*, is_held_out: bool) -> str:
    rows = (
        {"prompt": question, "answer": answer, "passage_id": fact.id}
        for number, fact in enumerate(facts())
        if (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == is_held_out
        for question, answer in fact.questions
    )
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def main() -> None:
    PASSAGES.write_text(passage_lines(), encoding="utf-8")
    QUESTIONS.write_text(question_lines(is_held_out=False), encoding="utf-8")
    HELD_OUT.write_text(question_lines(is_held_out=True), encoding="utf-8")


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


if __name__ == "__main__":
    main()
