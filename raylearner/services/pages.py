"""Page search and fetch over a folder: `python -m raylearner.services.pages --folder DIR --port N`.

The folder holds `pages.jsonl`, one page a line: `{"id": page id, "doc_id": document id, "image":
file in the folder, "text": the page's text}`; `image` may be left out where `--contents text` is
all that is served. `POST /batch_search` takes `{"query": [..], "top_n": k, "id": [document id ..]}`
and answers per query a list of `{"contents": url-safe base64 image, "id": page id}`; `POST
/batch_fetch` takes `{"query": [page id ..], "id": [document id ..]}` and answers one of them per
query, or `{"contents": why, "id": "error"}`. An empty document id searches all of them.
"""

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from fastapi import FastAPI, HTTPException
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, Field

from raylearner.errors import ConfigError
from raylearner.images import FORMATS
from raylearner.services.server import MAX_QUERIES, Queries, make_app, make_parser, serve
from raylearner.services.text_index import TextIndex

INDEX = "pages.jsonl"
MAX_RESULTS = 100
ERROR_ID = "error"
_FORM = 'expected {"id": text, "doc_id": text, "image": file name, "text": text}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One line of `pages.jsonl`; the image's path is whole."""

    id: str
    doc_id: str
    image: Path | None
    text: str


class BatchSearch(BaseModel):
    """Queries, and the document of each."""

    query: Queries
    top_n: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 3
    id: Annotated[list[str | None], Field(max_length=MAX_QUERIES)]


class BatchFetch(BaseModel):
    """Page ids, and the document of each."""

    query: Queries
    id: Annotated[list[str | None], Field(max_length=MAX_QUERIES)]


def read_pages(folder: Path, *, needs_images: bool) -> list[Page]:
    """Read the pages of a folder. Raises `ConfigError` naming the bad line."""
    index = folder / INDEX
    pages: list[Page] = []
    seen: dict[tuple[str, str], int] = {}
    try:
        lines = index.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{index}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        page = _page(line, folder, f"{index}:{number}", needs_images=needs_images)
        key = (page.doc_id, page.id)
        if key in seen:
            raise ConfigError(
                f"{index}:{number}: page {page.id!r} of {page.doc_id!r} is that of line {seen[key]}"
            )
        seen[key] = number
        pages.append(page)
    if not pages:
        raise ConfigError(f"{index}: has no pages")
    return pages


def _page(line: str, folder: Path, where: str, *, needs_images: bool) -> Page:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {_FORM}") from error
    fields = cast(dict[str, Any], value if isinstance(value, dict) else {})
    named = [fields.get(key) for key in ("id", "doc_id", "text")]
    name = fields.get("image")
    if not all(isinstance(part, str) for part in named) or not isinstance(name, str | None):
        raise ConfigError(f"{where}: {line.strip()[:80]!r}; {_FORM}")
    if named[0] == ERROR_ID:
        raise ConfigError(f"{where}: the page id {ERROR_ID!r} is reserved for errors")
    page_id, doc_id, text = cast(list[str], named)
    if not all(map(_is_unicode, (page_id, doc_id, text))):
        raise ConfigError(f"{where}: has an unpaired surrogate, which a reply cannot contain")
    image = None
    if needs_images:
        if name is None:
            raise ConfigError(f"{where}: has no image; add one, or serve --contents text")
        image = _image(folder, name, where)
    return Page(id=page_id, doc_id=doc_id, image=image, text=text)


def _image(folder: Path, name: str, where: str) -> Path:
    """Return the path of an image with a valid header: decoding a large folder would take
    minutes."""
    which = f"{where}: image {name!r}"
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"{which} is outside the folder")
        if not path.is_file():
            raise ConfigError(f"{which} is not a file in {folder}")
        with Image.open(path, formats=FORMATS):
            return path
    except ConfigError:
        raise
    except UnidentifiedImageError as error:
        raise ConfigError(f"{which} is not one of {', '.join(FORMATS)}") from error
    except (OSError, ValueError, RuntimeError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{which} cannot be read: {error}") from error


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def pages_app(pages: Sequence[Page], *, contents: Literal["image", "text"]) -> FastAPI:
    index = TextIndex([page.text for page in pages], scopes=[page.doc_id for page in pages])
    by_key = {(page.doc_id, page.id): page for page in pages}
    by_id: dict[str, list[Page]] = {}
    for page in pages:
        by_id.setdefault(page.id, []).append(page)
    app = make_app("pages")

    def shown(page: Page) -> dict[str, str]:
        if contents == "text" or page.image is None:
            return {"contents": page.text, "id": page.id}
        encoded = base64.urlsafe_b64encode(page.image.read_bytes())
        return {"contents": encoded.decode("ascii"), "id": page.id}

    def search_one(query: str, doc_id: str | None, top_n: int) -> list[dict[str, str]]:
        if doc_id and not index.has_scope(doc_id):
            return [_error(f"there is no document {doc_id!r}")]
        hits = index.search(query, top_n=top_n, scope=doc_id or None)
        return [shown(pages[hit.row]) for hit in hits]

    def fetch_one(page_id: str, doc_id: str | None) -> dict[str, str]:
        asked = page_id.strip()
        if doc_id:
            page = by_key.get((doc_id, asked))
            return shown(page) if page else _error(f"there is no page {asked!r} in this document")
        found = by_id.get(asked, [])
        if len(found) > 1:
            return _error(f"there are {len(found)} pages {asked!r}: name a document")
        return shown(found[0]) if found else _error(f"there is no page {asked!r}")

    @app.post("/batch_search")
    def batch_search(request: BatchSearch) -> list[list[dict[str, str]]]:  # pyright: ignore[reportUnusedFunction]
        _same_length(request.query, request.id)
        pairs = zip(request.query, request.id, strict=True)
        return [search_one(query, doc_id, request.top_n) for query, doc_id in pairs]

    @app.post("/batch_fetch")
    def batch_fetch(request: BatchFetch) -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
        _same_length(request.query, request.id)
        return [fetch_one(*pair) for pair in zip(request.query, request.id, strict=True)]

    return app


def _error(text: str) -> dict[str, str]:
    return {"contents": text, "id": ERROR_ID}


def _same_length(queries: Sequence[object], ids: Sequence[object]) -> None:
    if len(queries) != len(ids):
        raise HTTPException(422, f"{len(queries)} queries and {len(ids)} document ids")


def main(arguments: Sequence[str] | None = None) -> int:
    command = make_parser(f"Serve search and fetch over the pages that {INDEX} in a folder lists.")
    command.add_argument("--folder", type=Path, required=True, help=f"folder with {INDEX}")
    command.add_argument(
        "--contents",
        choices=("image", "text"),
        default="image",
        help="form in which pages are sent (default: %(default)s)",
    )
    options = command.parse_args(arguments)

    def make() -> FastAPI:
        pages = read_pages(options.folder, needs_images=options.contents == "image")
        return pages_app(pages, contents=options.contents)

    return serve(make, options)


if __name__ == "__main__":
    sys.exit(main())
