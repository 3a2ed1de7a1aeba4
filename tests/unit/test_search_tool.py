"""Text search speaks both wire forms."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from raylearner.config.environment import SearchTool
from raylearner.tools.search import NOTHING_FOUND, Search
from raylearner.types import Prompt

PROMPT = Prompt(prompt_id="p", messages=())


@asynccontextmanager
async def searching(**settings: Any) -> AsyncIterator[tuple[Search, list[dict[str, Any]]]]:
    """A search tool and the bodies that its service got."""
    bodies: list[dict[str, Any]] = []

    async def search(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        if body["query"] == "nothing":
            return web.json_response([])
        found = [{"contents": f"{body['query']} {n}\n"} for n in range(body["top_n"])]
        return web.json_response(found)

    async def retrieve(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        rows = [
            [
                {"document": {"id": "1", "contents": f"title\n{query} {n}"}, "score": 1.5}
                for n in range(body["topk"])
            ]
            for query in body["queries"]
        ]
        return web.json_response({"result": rows})

    app = web.Application()
    app.router.add_post("/search", search)
    app.router.add_post("/retrieve", retrieve)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        tool = Search(SearchTool.model_validate({"kind": "search", "url": url, **settings}))
        yield tool, bodies
        await tool.close()


async def test_passages_are_joined_with_blank_lines() -> None:
    async with searching(top_n=2) as (tool, bodies):
        observation = await tool.call("  what ", prompt=PROMPT)
    assert observation.text == "what 0\n\nwhat 1"
    assert bodies == [{"query": "what", "top_n": 2}]


async def test_concurrent_queries_of_the_retrieve_form_share_a_request() -> None:
    async with searching(form="retrieve", top_n=1) as (tool, bodies):
        calls = (tool.call(f"q{n}", prompt=PROMPT) for n in range(3))
        texts = [observation.text for observation in await asyncio.gather(*calls)]
    assert texts == ["title\nq0 0", "title\nq1 0", "title\nq2 0"]
    assert bodies == [{"queries": ["q0", "q1", "q2"], "topk": 1, "return_scores": True}]


async def test_no_passage_is_said_so() -> None:
    async with searching() as (tool, _):
        observation = await tool.call("nothing", prompt=PROMPT)
    assert (observation.text, observation.is_error) == (NOTHING_FOUND, False)


async def test_json_arguments_do_the_same() -> None:
    async with searching(top_n=1) as (tool, _):
        assert (await tool.call({"query": "a"}, prompt=PROMPT)).text == "a 0"
        assert tool.schema["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("  ", "error: query is empty"),
        ({}, "error: expected a text 'query', got NoneType"),
        ({"query": 3}, "error: expected a text 'query', got int"),
        ({"q": "a"}, "error: unknown argument 'q'; expected 'query'"),
    ],
)
async def test_bad_arguments_are_observations_and_reach_no_service(
    arguments: Any, said: str
) -> None:
    async with searching(on_failure="fail") as (tool, bodies):
        observation = await tool.call(arguments, prompt=PROMPT)
    assert (observation.text, observation.is_error, bodies) == (said, True, [])


async def test_odd_queries_travel_whole() -> None:
    async with searching(top_n=1) as (tool, bodies):
        for query in ("é" * 10_000, "\x00\x01", "</search>"):
            assert not (await tool.call(query, prompt=PROMPT)).is_error
    assert [body["query"] for body in bodies][2:] == ["</search>"]
