"""Text search speaks both wire forms."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from servers import PROMPT, calling

from raylearner.tools.search import NOTHING_FOUND
from raylearner.tools.tool import Tool


def search(body: Any) -> Any:
    if body["query"] == "nothing":
        return []
    return [{"contents": f"{body['query']} {n}\n"} for n in range(body["top_n"])]


def retrieve(body: Any) -> Any:
    documents = [
        [{"id": "1", "contents": f"title\n{query} {n}"} for n in range(body["topk"])]
        for query in body["queries"]
    ]
    return {"result": [[{"document": d, "score": 1.5} for d in row] for row in documents]}


def searching(**settings: Any) -> AbstractAsyncContextManager[tuple[Tool, list[Any]]]:
    return calling("search", {"/search": search, "/retrieve": retrieve}, **settings)


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


async def test_finding_no_passage_is_not_an_error() -> None:
    async with searching() as (tool, _):
        observation = await tool.call("nothing", prompt=PROMPT)
    assert (observation.text, observation.is_error) == (NOTHING_FOUND, False)


async def test_arguments_in_json_have_the_same_effect() -> None:
    async with searching(top_n=1) as (tool, _):
        assert (await tool.call({"query": "a"}, prompt=PROMPT)).text == "a 0"
        assert tool.schema["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("  ", ("query",)),
        ({}, ("query", "NoneType")),
        ({"query": 3}, ("query", "int")),
        ({"q": "a"}, ("'q'", "'query'")),
    ],
)
async def test_bad_arguments_are_observations_and_reach_no_service(
    arguments: Any, words: tuple[str, ...]
) -> None:
    async with searching(on_failure="fail") as (tool, bodies):
        observation = await tool.call(arguments, prompt=PROMPT)
    assert (observation.is_error, bodies) == (True, [])
    assert observation.text.startswith("error: ")
    assert all(word in observation.text for word in words)


async def test_odd_queries_travel_whole() -> None:
    async with searching(top_n=1) as (tool, bodies):
        for query in ("é" * 10_000, "\x00\x01", "</search>"):
            assert not (await tool.call(query, prompt=PROMPT)).is_error
    assert [body["query"] for body in bodies][2:] == ["</search>"]
