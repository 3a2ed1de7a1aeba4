"""Judges over real HTTP: scores, comparisons, retries, and errors that say what came."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from episodes import make_view
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from raylearner.config.rewards import RewardSection
from raylearner.errors import RewardError
from raylearner.rewards.scorer import Scorer

FAST = {"model": "judge-1", "retry_delay_s": 0.01, "request_timeout_s": 0.5}


@dataclass
class JudgeServer:
    """A chat-completions endpoint that answers as `answer` says and keeps what it was asked."""

    url: str = ""
    answer: Callable[[str], str | Response] = lambda prompt: "<score>5</score>"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    delay_s: float = 0.0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await asyncio.sleep(self.delay_s)
                body = await request.json()
                self.bodies.append(body)
                self.keys.append(request.headers.get("authorization"))
                said = self.answer(body["messages"][0]["content"])
            finally:
                self.num_open -= 1
            if isinstance(said, Response):
                return said
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": said}}]})

        return app


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    served = JudgeServer()
    server = uvicorn.Server(
        uvicorn.Config(served.app(), host="127.0.0.1", port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    served.url = f"http://127.0.0.1:{port}/v1"
    yield served
    server.should_exit = True
    thread.join(timeout=10)


async def score(judge: JudgeServer, view=None, **settings: Any):
    section = {"kind": "judge", "url": judge.url, **FAST, **settings}
    scorer = Scorer(RewardSection.model_validate({"functions": [section]}))
    try:
        return await scorer.score(view or make_view("forty-six"))
    finally:
        await scorer.close()


async def failure(judge: JudgeServer, **settings: Any) -> str:
    with pytest.raises(RewardError) as error:
        await score(judge, **settings)
    return str(error.value)


async def test_the_score_is_its_place_between_the_bounds(
    judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    judge.answer = lambda prompt: "It is right.\n<score> 2.5 </score>"
    found = await score(
        judge,
        template="Q {prompt} A {completion} R {answer} {{braces}}",
        min_score=0.0,
        max_score=5.0,
        api_key_variable="JUDGE_KEY",
        temperature=0.2,
    )
    assert (found.reward, found.metrics["judge/score"]) == (0.5, 2.5)
    (body,) = judge.bodies
    assert body["messages"] == [{"role": "user", "content": "Q 12+34= A forty-six R 46 {braces}"}]
    assert (body["model"], body["temperature"]) == ("judge-1", 0.2)
    assert judge.keys == ["Bearer secret-7"]


async def test_text_of_the_policy_is_never_taken_for_a_template(judge: JudgeServer) -> None:
    await score(judge, make_view("{answer} {0} {prompt}"), template="{completion}|{answer}")
    assert judge.bodies[0]["messages"][0]["content"] == "{answer} {0} {prompt}|46"


async def test_what_is_transient_is_tried_again(judge: JudgeServer) -> None:
    replies: list[str | Response] = [
        PlainTextResponse("busy", status_code=503),
        PlainTextResponse("slow down", status_code=429),
        "no score here",
        "<score>10</score>",
    ]
    judge.answer = lambda prompt: replies.pop(0)
    assert (await score(judge, retries=3)).reward == 1.0
    assert len(judge.bodies) == 4


@pytest.mark.parametrize(
    ("reply", "words", "num_requests"),
    [
        (PlainTextResponse("no key", status_code=401), "answered status 401 'no key'", 1),
        (PlainTextResponse("down", status_code=500), "status 500 'down' (3 tries)", 3),
        (PlainTextResponse("<html>"), "no chat completion: '<html>' (3 tries)", 3),
        (JSONResponse({"choices": []}), "no chat completion", 3),
        ("fine", "'fine': expected <score>number</score> once, got 0 of it", 3),
        ("<score>1</score><score>9</score>", "got 2 of it", 3),
        ("<score>11</score>", "expected a score from 0 to 10", 3),
        ("<score>nan</score>", "expected a score from 0 to 10", 3),
        ("<score>seven</score>", "could not convert string to float", 3),
    ],
)
async def test_a_reply_that_cannot_be_used_is_an_error_that_shows_it(
    judge: JudgeServer, reply: str | Response, words: str, num_requests: int
) -> None:
    judge.answer = lambda prompt: reply
    said = await failure(judge, retries=2)
    assert said.startswith(f"reward 'judge' failed: POST {judge.url}/chat/completions")
    assert words in said
    assert len(judge.bodies) == num_requests


async def test_a_silent_judge_fails_in_bounded_time(judge: JudgeServer) -> None:
    judge.delay_s = 5.0
    started = time.monotonic()
    said = await failure(judge, retries=1, request_timeout_s=0.1)
    assert "gave no reply within 0.1 s (2 tries)" in said
    assert time.monotonic() - started < 2.0


async def test_a_judge_that_is_not_there_is_named() -> None:
    said = await failure(JudgeServer(url="http://127.0.0.1:9/v1"), retries=0)
    assert "POST http://127.0.0.1:9/v1/chat/completions failed: Cannot connect" in said


async def test_a_missing_key_is_named_and_nothing_is_sent(judge: JudgeServer) -> None:
    said = await failure(judge, api_key_variable="NO_SUCH_KEY")
    assert "NO_SUCH_KEY (api_key_variable) is not set" in said
    assert judge.bodies == []


async def test_no_more_requests_are_open_than_allowed(judge: JudgeServer) -> None:
    judge.delay_s = 0.02
    section = {"kind": "judge", "url": judge.url, **FAST, "max_concurrent": 3}
    scorer = Scorer(RewardSection.model_validate({"functions": [section]}))
    views = [make_view(str(i)) for i in range(12)]
    scores = await asyncio.gather(*(scorer.score(view) for view in views))
    await scorer.close()
    assert {s.reward for s in scores} == {0.5}
    assert judge.most_open == 3


async def test_pairs_of_a_group_are_compared_in_both_orders(judge: JudgeServer) -> None:
    def longer(prompt: str) -> str:
        first, second = prompt.split("|")
        if len(first) == len(second):
            return "<winner>A</winner>"  # a liking for the first place
        return f"<winner>{'A' if len(first) > len(second) else 'B'}</winner>"

    judge.answer = longer
    section = {"kind": "pairwise_judge", "url": judge.url, **FAST, "template": "{first}|{second}"}
    scorer = Scorer(RewardSection.model_validate({"functions": [section]}), sees_groups=True)
    views = [make_view(text) for text in ("a", "bbb", "cc", "dd")]
    scores = await scorer.score_all(views)
    lone = await scorer.score_all(views[:1])
    await scorer.close()
    assert [s.reward for s in scores] == [0.0, 1.0, 0.5, 0.5]
    assert len(judge.bodies) == 12
    assert lone[0].reward is None


async def test_one_comparison_that_fails_fails_the_group(judge: JudgeServer) -> None:
    judge.answer = lambda prompt: "<winner>C</winner>"
    section = {"kind": "pairwise_judge", "url": judge.url, **FAST, "retries": 0}
    scorer = Scorer(RewardSection.model_validate({"functions": [section]}), sees_groups=True)
    with pytest.raises(RewardError, match=r"expected <winner>A</winner>, B or tie once"):
        await scorer.score_all([make_view("a"), make_view("b")])
    await scorer.close()
