"""Text search: a query becomes passages, joined with blank lines."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from raylearner.config.environment import SearchTool
from raylearner.tools.service import (
    BATCH_WINDOW_S,
    MAX_BATCH,
    Batcher,
    Service,
)
from raylearner.tools.tool import Arguments, Observation, Tool, function_schema, text_argument
from raylearner.types import Prompt

NOTHING_FOUND = "no passage found"
_SEARCH_FORM = '[{"contents": text}, ..]'
_RETRIEVE_FORM = '{"result": [[{"document": {"contents": text}, "score": number}, ..], ..]}'


class _Passage(BaseModel):
    contents: str


class _Found(BaseModel):
    document: _Passage


class _Retrieved(BaseModel):
    result: list[list[_Found]]


_SEARCH, _RETRIEVE = TypeAdapter(list[_Passage]), TypeAdapter(_Retrieved)


class Search(Tool):
    """Calls `POST /search` with one query at a time, or Search-R1's `POST /retrieve` in batches."""

    def __init__(self, section: SearchTool) -> None:
        super().__init__(section.function_name, section.tag, on_failure=section.on_failure)
        self._section = section
        self._service = Service(self.name, section.url, section.http, self.metrics)
        self._batcher: Batcher[str, list[str]] = Batcher(
            self._retrieve,
            send_alone=self._retrieve_alone,
            window_s=BATCH_WINDOW_S,
            max_batch=MAX_BATCH,
        )

    @property
    def schema(self) -> dict[str, Any]:
        return function_schema(
            self.name,
            "Searches a collection of texts and returns the best matching passages.",
            {"query": {"type": "string", "description": "What to search for."}},
        )

    async def close(self) -> None:
        await self._batcher.close()
        await self._service.close()

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        query = text_argument(arguments, "query")
        is_batched = self._section.form == "retrieve"
        passages = await (self._batcher.call(query) if is_batched else self._search(query))
        return Observation(text="\n\n".join(passages[: self._section.top_n]) or NOTHING_FOUND)

    async def _search(self, query: str) -> list[str]:
        body = {"query": query, "top_n": self._section.top_n}
        passages = await self._service.post("/search", body, _SEARCH, expected=_SEARCH_FORM)
        return [passage.contents.strip() for passage in passages]

    async def _retrieve(
        self, queries: Sequence[str], *, should_retry: bool = True
    ) -> list[list[str]]:
        body = {"queries": list(queries), "topk": self._section.top_n, "return_scores": True}
        reply = await self._service.post(
            "/retrieve", body, _RETRIEVE, expected=_RETRIEVE_FORM, should_retry=should_retry
        )
        rows = self._service.check_count("/retrieve", reply.result, queries)
        return [[found.document.contents.strip() for found in row] for row in rows]

    async def _retrieve_alone(self, query: str) -> list[str]:
        return (await self._retrieve([query], should_retry=False))[0]
