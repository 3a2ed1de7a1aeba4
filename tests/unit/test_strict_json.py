"""JSON that every reader takes, of what rows and users' functions hold."""

import datetime
import enum
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from raylearner.actors.proxy.program import CommandProgram, Task
from raylearner.config.data import FileData
from raylearner.config.section import HttpSection
from raylearner.data.table import table_prompts
from raylearner.observability import jsonl
from raylearner.text import dump_json, load_json, to_json_types
from raylearner.tools.service import Service
from raylearner.tools.tool import ToolMetrics

UTC = datetime.UTC
HALF = "\ud83d"


class Kind(str, enum.Enum):  # noqa: UP042 - as users write them
    A = "a"


VALUES: list[tuple[object, object]] = [
    (float("nan"), None),
    (-float("inf"), None),
    (np.float32("nan"), None),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.array([[1.5, float("inf")]]), [[1.5, None]]),
    ((1, {"a": float("nan")}), [1, {"a": None}]),
    ({2, 1}, [1, 2]),
    ({3: {None: 1}}, {"3": {"None": 1}}),
    (2**63 - 1, 2**63 - 1),
    (datetime.datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (datetime.time(3, 4), "03:04:00"),
    (datetime.timedelta(seconds=1.5), 1.5),
    (np.datetime64("2026-01-02"), "2026-01-02"),
    (Decimal("1.10"), "1.10"),
    (Decimal("NaN"), None),
    (b"\x00\xff", "AP8="),
    (Kind.A, "a"),
    (None, None),
    (True, True),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=lambda value: repr(value)[:40])
def test_every_value_has_one_form(value: object, expected: object) -> None:
    found = strict(dump_json({"value": value}))["value"]
    assert found == expected
    assert type(found) is type(expected)
    assert strict(jsonl.dumps({"value": value})) == {"value": expected}


def test_half_a_surrogate_pair_is_no_text_for_others() -> None:
    assert strict(dump_json([f"x{HALF}", {HALF: 1}])) == ["x\ufffd", {"\ufffd": 1}]


def test_what_is_not_known_is_text() -> None:
    assert to_json_types(Path("/a")) == "/a"


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "-Infinity", "{", ""])
def test_reading_is_strict_as_well(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_json(text)


async def test_a_program_reads_a_row_of_any_columns_from_its_standard_input(
    tmp_path: Path,
) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": ["2+2?", "3+3?"],
        "when": [datetime.datetime(2026, 1, 2, tzinfo=UTC), None],
        "price": [Decimal("1.10")] * 2,
        "raw": [b"\x00\xff", b""],
        "vector": [[1.5, float("nan")], []],
        "took": [datetime.timedelta(seconds=3)] * 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")  # pyright: ignore[reportUnknownMemberType]
    source = FileData(kind="parquet", path=str(tmp_path / "rows.parquet"))
    prompt = table_prompts(source)[0]
    task = Task(prompt=prompt, base_url="http://127.0.0.1:9/v1", api_key="k")
    given = await CommandProgram(["cat"], answers_on_stdout=True).run(task)
    assert given is not None
    assert strict(given)["columns"] == {
        "when": "2026-01-02T00:00:00+00:00",
        "price": "1.10",
        "raw": "AP8=",
        "vector": [1.5, None],
        "took": 3.0,
    }


async def test_a_service_is_sent_strict_json() -> None:
    received: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(strict(await request.text()))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/run_code", answer)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        service = Service("code", url, HttpSection(), ToolMetrics("code"))
        body = {"code": "print('x')", "limits": [float("inf"), np.int64(1)]}
        await service.post("/run_code", body, TypeAdapter(Any), expected="any")
        await service.close()
    assert received == [{"code": "print('x')", "limits": [None, 1]}]


def strict(text: str) -> Any:
    """What a reader that knows the standard alone makes of it."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text.encode()
    return json.loads(text, parse_constant=refuse)
