"""Pages of documents: search finds pages within the prompt's document, fetch shows one by its id."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from raylearner.config.environment import PageFetchTool, PageSearchTool
from raylearner.errors import RenderError
from raylearner.images import BadImage, decode_base64
from raylearner.tools.service import (
    BATCH_WINDOW_S,
    MAX_BATCH,
    Batcher,
    Service,
)
from raylearner.tools.tool import Arguments, Observation, Tool, function_schema, text_argument
from raylearner.types import IMAGE_MARK, Prompt

ERROR_ID = "error"
"""Page id that marks `contents` as an error text for the policy."""
BAD_PAGES = "bad_pages"
NOTHING_FOUND = "no page found"
_PAGE_FORM = '{"contents": text, "id": text}'
_SEARCH_FORM = f"per query a list of {_PAGE_FORM}"
_FETCH_FORM = f"per query one {_PAGE_FORM}"

Row = TypeVar("Row")

ImageCheck: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Raises `RenderError` for an image that does not fit the model; tools do not have its limits."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    doc_id: str


class _Page(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    contents: str
    id: str


class _PageTool(Tool, Generic[Row]):
    """The common part of search and fetch: batches of (query, document id) to one path of a
    service."""

    def __init__(
        self,
        section: PageSearchTool | PageFetchTool,
        check_image: ImageCheck | None,
        *,
        path: str,
        reply: TypeAdapter[list[Row]],
        form: str,
        extra: dict[str, object],
    ) -> None:
        super().__init__(
            section.function_name, section.tag, on_failure=section.on_failure, own=(BAD_PAGES,)
        )
        self._section, self._check_image = section, check_image
        self._path, self._reply, self._form, self._extra = path, reply, form, extra
        self._service = Service(self.name, section.url, section.http, self.metrics)
        self._batcher: Batcher[_Question, Row] = Batcher(
            self._ask,
            send_alone=self._ask_alone,
            window_s=BATCH_WINDOW_S,
            max_batch=MAX_BATCH,
        )

    async def _fetch(self, text: str, prompt: Prompt) -> Row:
        return await self._batcher.call(_Question(text, prompt.doc_id or ""))

    async def _show(self, pages: Sequence[_Page]) -> Observation:
        """Return an observation of pages, best first, each image below the line that names its
        page.

        Errors of the service are shown as text, and so are images that do not decode, which are
        counted.
        """
        lines: list[str] = []
        images: list[bytes] = []
        ids: list[str] = []
        bad = ""
        for page in pages:
            if page.id == ERROR_ID:
                lines.append(_unmarked(page.contents))
            elif self._section.contents == "text":
                lines.append(f"page {page.id}\n{page.contents}")
                ids.append(page.id)
            else:
                try:
                    image = await asyncio.to_thread(decode_base64, page.contents)
                    if self._check_image is not None:
                        await self._check_image(image)
                except (BadImage, RenderError) as error:
                    self._count_bad(page, error)
                    bad = f"page {page.id}: {error}"
                    lines.append(f"page {_unmarked(page.id)}: error: {error}")
                else:
                    images.append(image)
                    lines.append(f"page {_unmarked(page.id)}\n{IMAGE_MARK}")
                    ids.append(page.id)
        return Observation(
            text="\n\n".join(lines) or NOTHING_FOUND,
            images=tuple(images),
            ids=tuple(ids),
            is_error=bool(pages) and not ids,
            is_failure=bool(bad) and not ids,
            cause=bad,
        )

    def _count_bad(self, page: _Page, error: BadImage | RenderError) -> None:
        """Count a bad page and log the first: no call fails, and the policy is shown no image."""
        if self.metrics.count(BAD_PAGES) == 1:
            log.warning("tool %s: page %r: %s", self.name, page.id, error)

    async def close(self) -> None:
        await self._batcher.close()
        await self._service.close()

    async def _ask(self, questions: Sequence[_Question], *, should_retry: bool = True) -> list[Row]:
        body = {
            "query": [question.text for question in questions],
            "id": [question.doc_id for question in questions],
            **self._extra,
        }
        rows = await self._service.post(
            self._path, body, self._reply, expected=self._form, should_retry=should_retry
        )
        return self._service.check_count(self._path, rows, questions)

    async def _ask_alone(self, question: _Question) -> Row:
        return (await self._ask([question], should_retry=False))[0]


def _unmarked(text: str) -> str:
    """Remove image marks from a text of the service."""
    return text.replace(IMAGE_MARK, "")


class PageSearch(_PageTool[list[_Page]]):
    """Finds the pages of the prompt's document that fit a query, by `POST /batch_search`."""

    def __init__(self, section: PageSearchTool, check_image: ImageCheck | None = None) -> None:
        self._top_n = section.top_n
        super().__init__(
            section,
            check_image,
            path="/batch_search",
            reply=TypeAdapter(list[list[_Page]]),
            form=_SEARCH_FORM,
            extra={"top_n": section.top_n},
        )

    @property
    def schema(self) -> dict[str, Any]:
        return function_schema(
            self.name,
            "Searches the pages of the document and shows the best matches.",
            {"query": {"type": "string", "description": "What to search for."}},
        )

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        found = await self._fetch(text_argument(arguments, "query"), prompt)
        return await self._show(found[: self._top_n])


class PageFetch(_PageTool[_Page]):
    """Fetches one page of the prompt's document, by `POST /batch_fetch`."""

    def __init__(self, section: PageFetchTool, check_image: ImageCheck | None = None) -> None:
        super().__init__(
            section,
            check_image,
            path="/batch_fetch",
            reply=TypeAdapter(list[_Page]),
            form=_FETCH_FORM,
            extra={},
        )

    @property
    def schema(self) -> dict[str, Any]:
        return function_schema(
            self.name,
            "Shows one page of the document.",
            {"page": {"type": "string", "description": "Id of the page."}},
        )

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        page = await self._fetch(text_argument(arguments, "page"), prompt)
        return await self._show([page])
