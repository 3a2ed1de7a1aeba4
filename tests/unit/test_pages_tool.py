"""Pages: document scope, error replies as text, and images that no model should see."""

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pictures import encode_image
from PIL import Image, PngImagePlugin
from servers import answering

from raylearner.config.environment import PageFetchTool, PageSearchTool
from raylearner.errors import RenderError
from raylearner.images import MAX_BYTES, BadImage, check_image
from raylearner.tools.pages import NOTHING_FOUND, ImageCheck, PageFetch, PageSearch
from raylearner.types import IMAGE_MARK, Prompt


def prompt(doc_id: str | None = "doc-1") -> Prompt:
    return Prompt(prompt_id="p", messages=(), doc_id=doc_id)


def image(width: int = 32, height: int = 32, kind: str = "PNG") -> bytes:
    return encode_image(Image.effect_noise((width, height), 64).convert("RGB"), kind)


def animated() -> bytes:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    return encode_image(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode()


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes whose header asks for gigabytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        whole = kind + content
        return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(10**6))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def png_with_long_text() -> bytes:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("a", "x" * 10**8, zip=True)
    return encode_image(Image.new("L", (32, 32)), pnginfo=notes)


BAD_IMAGES: dict[str, Callable[[], str]] = {
    "bomb": lambda: encoded(png_that_claims(60_000, 60_000)),
    "bomb_within_pillow's_limit": lambda: encoded(png_that_claims(9_000, 9_000)),
    "text_bomb": lambda: encoded(png_with_long_text()),
    "one_pixel": lambda: encoded(image(1, 1)),
    "thin": lambda: encoded(image(4000, 10)),
    "truncated_base64": lambda: encoded(image())[:-7],
    "truncated_image": lambda: encoded(image()[:-500]),
    "corrupt_image": lambda: encoded(image()[:400] + bytes(200) + image()[600:]),
    "no_base64": lambda: "???",
    "not_ascii": lambda: "é" * 100,
    "no_image": lambda: encoded(b"GIF89a is not enough"),
    "other_format": lambda: encoded(image(kind="BMP")),
    "animated": lambda: encoded(animated()),
    "script": lambda: encoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n"),
    "empty": lambda: "",
    "too_long": lambda: "A" * (MAX_BYTES * 4 // 3 + 100),
}


@asynccontextmanager
async def pages(
    reply: Callable[[str, str, str], Any], check_image: ImageCheck | None = None, **settings: Any
) -> AsyncIterator[tuple[PageSearch, PageFetch, list[dict[str, Any]]]]:
    """Both tools against a service that answers `reply(path, query, document)`, and its bodies."""

    def answer(path: str) -> Callable[[Any], Any]:
        return lambda body: [
            reply(path, *pair) for pair in zip(body["query"], body["id"], strict=True)
        ]

    async with answering({p: answer(p) for p in ("/batch_search", "/batch_fetch")}) as (
        url,
        bodies,
    ):
        common = {"url": url, **settings}
        search = PageSearch(PageSearchTool(kind="page_search", **common), check_image)
        fetch = PageFetch(PageFetchTool(kind="page_fetch", **common), check_image)
        yield search, fetch, bodies
        await search.close()
        await fetch.close()


async def test_a_search_shows_images_with_their_page_ids() -> None:
    first, second = image(), image(kind="JPEG")

    def reply(path: str, query: str, doc_id: str) -> Any:
        return [{"contents": encoded(first), "id": "7"}, {"contents": encoded(second), "id": 9}]

    async with pages(reply) as (search, _, bodies):
        observation = await search.call("what", prompt=prompt())
    assert observation.images == (first, second)
    assert observation.ids == ("7", "9")
    assert observation.text == f"page 7\n{IMAGE_MARK}\n\npage 9\n{IMAGE_MARK}"
    assert bodies == [{"query": ["what"], "id": ["doc-1"], "top_n": 3}]


async def test_each_call_of_a_batch_keeps_its_own_document() -> None:
    def reply(path: str, query: str, doc_id: str) -> Any:
        return {"contents": f"{query} of {doc_id}", "id": query}

    async with pages(reply, contents="text") as (_, fetch, bodies):
        calls = (fetch.call(str(n), prompt=prompt(f"doc-{n}")) for n in range(3))
        observations = await asyncio.gather(*calls, fetch.call("9", prompt=prompt(None)))
    assert [o.text for o in observations][:2] == ["page 0\n0 of doc-0", "page 1\n1 of doc-1"]
    assert bodies == [{"query": ["0", "1", "2", "9"], "id": ["doc-0", "doc-1", "doc-2", ""]}]


async def test_an_error_reply_is_shown_as_text() -> None:
    def reply(path: str, query: str, doc_id: str) -> Any:
        page = {"contents": f"no page {query}", "id": "error"}
        return page if path == "/batch_fetch" else [page]

    async with pages(reply, on_failure="fail") as (search, fetch, _):
        for tool in (search, fetch):
            observation = await tool.call("12", prompt=prompt())
            assert (observation.text, observation.images) == ("no page 12", ())
            assert observation.is_error


@pytest.mark.parametrize("bad", BAD_IMAGES)
async def test_a_bad_image_is_an_error_observation(bad: str) -> None:
    contents, good = BAD_IMAGES[bad](), image()

    def reply(path: str, query: str, doc_id: str) -> Any:
        page = {"contents": contents, "id": "3"}
        return page if path == "/batch_fetch" else [page, {"contents": encoded(good), "id": "4"}]

    async with pages(reply, on_failure="fail") as (search, fetch, _):
        alone = await fetch.call("3", prompt=prompt())
        beside = await search.call("x", prompt=prompt())
        counts = fetch.drain_metrics() | search.drain_metrics()
    assert alone.text.startswith("page 3: error: image")
    for name in ("page_fetch", "page_search"):
        assert [counts[f"tools/{name}/{key}"] for key in ("bad_pages", "errors")] == [1, 0]
    assert (alone.images, alone.ids, alone.is_error, alone.is_failure) == ((), (), True, True)
    assert alone.cause.startswith("page 3: image")
    assert (beside.images, beside.ids, beside.is_error) == ((good,), ("4",), False)
    assert not beside.is_failure


async def test_a_page_that_does_not_fit_the_model_is_an_error_observation() -> None:
    strip, good = image(6000, 40), image()
    check_image(strip)

    async def refuse_strips(shown: bytes) -> None:
        if shown == strip:
            raise RenderError("image of 6000x40 does not fit")

    def reply(path: str, query: str, doc_id: str) -> Any:
        return [{"contents": encoded(i), "id": n} for i, n in ((strip, "3"), (good, "4"))]

    async with pages(reply, refuse_strips, on_failure="fail") as (search, _, _):
        observation = await search.call("x", prompt=prompt())
        assert search.drain_metrics()["tools/page_search/bad_pages"] == 1
    assert observation.text.startswith("page 3: error: image of 6000x40 does not fit\n\npage 4")
    assert (observation.images, observation.ids) == ((good,), ("4",))


def test_a_bomb_costs_no_memory() -> None:
    import tracemalloc

    bomb = png_that_claims(60_000, 60_000)
    tracemalloc.start()
    with pytest.raises(BadImage):
        check_image(bomb)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


def test_whole_images_pass() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        check_image(image(kind=kind))


async def test_no_more_pages_are_shown_than_were_requested() -> None:
    found = [{"contents": f"text {n}", "id": n} for n in range(9)]
    async with pages(lambda *_: found, contents="text") as (search, _, _):
        assert (await search.call("x", prompt=prompt())).ids == ("0", "1", "2")


async def test_a_search_without_results_reports_it() -> None:
    async with pages(lambda *_: []) as (search, _, _):
        assert (await search.call("x", prompt=prompt())).text == NOTHING_FOUND


async def test_an_empty_argument_reaches_no_service() -> None:
    async with pages(lambda *_: []) as (search, fetch, bodies):
        assert (await search.call("", prompt=prompt())).text == "error: query is empty"
        assert (await fetch.call({"page": " "}, prompt=prompt())).text == "error: page is empty"
    assert bodies == []
