"""Text search over a JSONL corpus: `python -m raylearner.services.search --corpus FILE --port N`.

Answers `POST /search` with `{"query", "top_n"}` by `[{"contents", "id"}]`, and Search-R1's `POST
/retrieve` with `{"queries", "topk", "return_scores"}` by `{"result": [[{"document": {"contents",
"id"}, "score"}]]}`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI
from pydantic import BaseModel, Field

from raylearner.errors import ConfigError
from raylearner.services.server import Queries, Query, make_app, make_parser, serve
from raylearner.services.text_index import TextIndex

MAX_RESULTS = 1000
SHIPPED = Path(__file__).parent / "corpora" / "facts.jsonl"
"""The corpus that comes with raylearner."""

TopN = Annotated[int, Field(ge=1, le=MAX_RESULTS)]


@dataclass(frozen=True, slots=True)
class Passage:
    """One line of a corpus."""

    id: str
    contents: str


class SearchRequest(BaseModel):
    """One query."""

    query: Query
    top_n: TopN = 3


class RetrieveRequest(BaseModel):
    """A batch of queries, in Search-R1's words."""

    queries: Queries
    topk: TopN = 3
    return_scores: bool = False


def read_corpus(path: Path) -> list[Passage]:
    """Read the passages of a file. Raises `ConfigError` naming the bad line."""
    passages: list[Passage] = []
    lines: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                passage = _passage(line, f"{path}:{number}")
                if passage.id in lines:
                    raise ConfigError(
                        f"{path}:{number}: id {passage.id!r} is that of line {lines[passage.id]};"
                        " ids must be distinct"
                    )
                lines[passage.id] = number
                passages.append(passage)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not passages:
        raise ConfigError(f"{path}: has no passages")
    return passages


def _passage(line: str, where: str) -> Passage:
    form = 'expected {"id": text, "contents": text}'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {form}") from error
    fields = cast(dict[str, Any], value if isinstance(value, dict) else {})
    passage_id, contents = fields.get("id"), fields.get("contents")
    if isinstance(passage_id, int):
        passage_id = str(passage_id)
    if not isinstance(passage_id, str) or not isinstance(contents, str):
        raise ConfigError(f"{where}: {line.strip()[:80]!r}; {form}")
    return Passage(passage_id, contents)


def search_app(passages: Sequence[Passage]) -> FastAPI:
    index = TextIndex([passage.contents for passage in passages])
    app = make_app("search")

    @app.post("/search")
    def search(request: SearchRequest) -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
        hits = index.search(request.query, top_n=request.top_n)
        found = [passages[hit.row] for hit in hits]
        return [{"contents": passage.contents, "id": passage.id} for passage in found]

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        rows: list[list[dict[str, Any]]] = []
        for query in request.queries:
            row: list[dict[str, Any]] = []
            for hit in index.search(query, top_n=request.topk):
                passage = passages[hit.row]
                found: dict[str, Any] = {
                    "document": {"id": passage.id, "contents": passage.contents}
                }
                row.append(found | ({"score": hit.score} if request.return_scores else {}))
            rows.append(row)
        return {"result": rows}

    return app


def main(arguments: Sequence[str] | None = None) -> int:
    command = make_parser("Serve text search over a JSONL corpus with one passage per line.")
    command.add_argument(
        "--corpus",
        type=Path,
        default=SHIPPED,
        help='JSONL file of {"id", "contents"} (default: the one that comes with raylearner)',
    )
    options = command.parse_args(arguments)
    return serve(lambda: search_app(read_corpus(options.corpus)), options)


if __name__ == "__main__":
    sys.exit(main())
