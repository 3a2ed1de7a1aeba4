"""A corpus of invented records, which no model has learnt: `python -m
raylearner.services.corpora.records FOLDER`.

Each record gives a name a number. Answers can only be found by search, so scores measure how well a
policy looks up and copies. Questions about one record in eight are held out.
"""

import json
import random
from pathlib import Path
from typing import Annotated

import typer

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
NUM_SYLLABLES = 3
HELD_OUT_EVERY = 8


def invented_name(rng: random.Random) -> str:
    """Make a meaningless word of three syllables."""
    syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(NUM_SYLLABLES))
    return "".join(syllables).capitalize()


def write_records(folder: Path, *, num_records: int = 2000, seed: int = 0) -> None:
    """Write `records.jsonl` for the search service, `questions.jsonl` and
    `questions_held_out.jsonl`."""
    rng = random.Random(seed)
    names: dict[str, int] = {}
    while len(names) < num_records:
        names[invented_name(rng)] = rng.randint(100, 9999)
    passages, questions, held_out = [], [], []
    for index, (name, number) in enumerate(names.items()):
        text = f"{name}\nThe number of {name} is {number}."
        passages.append({"id": f"record-{index}", "contents": text})
        row = {"prompt": f"What is the number of {name}?", "answer": str(number)}
        is_held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        (held_out if is_held_out else questions).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in (
        ("records.jsonl", passages),
        ("questions.jsonl", questions),
        ("questions_held_out.jsonl", held_out),
    ):
        (folder / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the three files.")],
    num_records: Annotated[int, typer.Option(min=8, max=100_000)] = 2000,
    seed: int = 0,
) -> None:
    """Write a corpus of invented records with questions."""
    write_records(folder, num_records=num_records, seed=seed)


if __name__ == "__main__":
    typer.run(main)
