"""Limits hold before the work: what is far too long is neither tokenized whole nor kept."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylearner.config.schema import RendererSection
from raylearner.errors import RenderError
from raylearner.replay.stats import ReplayCounters
from raylearner.tiny.tokenizer import make_tokenizer
from raylearner.tokenization import tokenizer as tokenizers
from raylearner.tokenization.control import ControlTokens
from raylearner.tokenization.renderer import Renderer, unless_long
from raylearner.types import CALLS, FAILURES, Message, StopReason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(4096).save_pretrained(folder)
    return folder


def make_renderer(folder: Path, **limits: int) -> Renderer:
    sizes = {"max_prompt_tokens": 64, "max_response_tokens": 256, "max_observation_tokens": 32}
    return Renderer.from_pretrained(str(folder), RendererSection.model_validate(sizes | limits))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Characters of every text that is tokenized."""
    sizes: list[int] = []
    encode = ControlTokens.encode

    def counted(self: ControlTokens, marked: str) -> list[int]:
        sizes.append(len(marked))
        return encode(self, marked)

    monkeypatch.setattr(ControlTokens, "encode", counted)
    return sizes


@pytest.mark.parametrize(
    "text",
    [
        "a passage of words, 17 numbers and more. ",
        "\u00e9\u4e2d\U0001f600 ",
        " ",
        "x",
        "<|im_end|>",
    ],
    ids=["words", "wide", "spaces", "one letter", "control"],
)
def test_a_long_observation_is_cut_to_the_same_text_without_being_read_whole(
    folder: Path, encoded: list[int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = make_renderer(folder)
    long = text * (5_000_000 // len(text))
    (cut,) = renderer.cut([Message(role="tool", content=long)])
    assert max(encoded) < 10_000
    assert len(renderer.encode(cut.content)) <= 32
    # Against cutting after tokenizing, of a text that is short enough for that.
    part = long[:20_000]
    monkeypatch.setattr(tokenizers, "CHARACTERS_PER_TOKEN", 10**6)
    (whole,) = renderer.cut([Message(role="tool", content=part)])
    assert cut.content == whole.content


def test_a_prompt_far_beyond_its_limit_is_refused_before_it_is_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = make_renderer(folder)
    monkeypatch.setattr(renderer._control, "encode", lambda marked: pytest.fail("was tokenized"))
    with pytest.raises(RenderError, match="max_prompt_tokens"):
        renderer.render([Message(role="user", content="word " * 1_000_000)])
    with pytest.raises(RenderError, match="max_prompt_tokens"):
        renderer.render_chat([{"role": "user", "content": "word " * 1_000_000}])


async def test_long_contents_are_tokenized_beside_the_loop(folder: Path) -> None:
    latest, late_s = time.monotonic(), 0.0

    async def beat() -> None:
        nonlocal latest, late_s
        while True:
            await asyncio.sleep(0.01)
            late_s = max(late_s, time.monotonic() - latest)
            latest = time.monotonic()

    beating = asyncio.create_task(beat())
    work = lambda: time.sleep(0.5)  # noqa: E731
    await unless_long(["x" * 100_000], work)
    assert late_s < 0.4
    beating.cancel()


def make_counters(**limits: float) -> ReplayCounters:
    return ReplayCounters(
        error_window=4,
        max_error_fraction=0.5,
        max_filtered_groups=100,
        **{"max_tool_failure_fraction": 0.9, **limits},
    )


def play(counters: ReplayCounters, calls: float, failures: float) -> None:
    metrics = {f"{CALLS}search": calls, f"{FAILURES}search": failures}
    error = f"search: refused after {calls:g} calls" if failures else None
    counters.count_accepted([Episode(metrics, error)])  # type: ignore[list-item]


class Episode:
    """As much of a trajectory as is counted."""

    stop_reason = StopReason.ANSWER
    error = None
    source = "questions"

    def __init__(self, metrics: dict[str, float], error: str | None = None) -> None:
        self.metrics = metrics
        self.tool_errors = {} if error is None else {"search": error}


def test_a_tool_that_fails_almost_every_call_ends_the_run_by_name() -> None:
    counters = make_counters()
    for _ in range(3):
        play(counters, 2, 2)
        counters.count_accepted([Episode({f"{CALLS}code": 1.0, f"{FAILURES}code": 0.0})])  # type: ignore[list-item]
    assert counters.failure is None
    play(counters, 2, 2)
    assert counters.failure is not None
    assert "'search' failed 8 of its 8 calls" in counters.failure
    assert "search: refused after 2 calls" in counters.failure


def test_a_tool_that_fails_now_and_then_ends_nothing() -> None:
    counters = make_counters()
    for _ in range(20):
        play(counters, 4, 3)
    assert counters.failure is None
    unlimited = make_counters(max_tool_failure_fraction=1.0)
    for _ in range(20):
        play(unlimited, 1, 1)
    assert unlimited.failure is None
    restored = make_counters()
    for _ in range(3):
        play(restored, 1, 1)
    state = restored.state()
    again = make_counters()
    again.restore(state)
    play(again, 1, 1)
    assert again.failure is not None
