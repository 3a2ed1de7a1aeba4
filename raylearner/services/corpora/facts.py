"""Passages and questions from two tables of public facts: `python -m raylearner.services.corpora.facts`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


if __name__ == "__main__":
    main()
