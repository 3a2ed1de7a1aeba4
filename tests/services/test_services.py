"""The services as real processes: they speak the wire forms that the tools speak."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raylearner.config.environment import (
    CodeExecutionTool,
    PageFetchTool,
    PageSearchTool,
    SearchTool,
)
from raylearner.services import code, pages, search
from raylearner.services.corpora import facts
from raylearner.services.corpora.facts import write_pages
from raylearner.tools.code_execution import CodeExecution
from raylearner.tools.pages import PageFetch, PageSearch
from raylearner.tools.search import Search
from raylearner.types import Prompt

HOSTILE = Path(__file__).parents[1] / "hostile"
PROMPT = Prompt(prompt_id="p", messages=())


@contextmanager
def running(name: str, *arguments: str) -> Iterator[str]:
    """A service on a free port; its address as it prints it."""
    command = [sys.executable, "-m", f"raylearner.services.{name}", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def refused(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: str
) -> str:
    """What a service says on standard error before it exits with code 2."""
    assert main([*arguments]) == 2
    return capsys.readouterr().err.strip()


def fetch(url: str, body: Any = None) -> tuple[int, Any]:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def search_url() -> Iterator[str]:
    with running("search") as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_pages(made)
    return made


@pytest.fixture(scope="module")
def pages_url(folder: Path) -> Iterator[str]:
    with running("pages", "--folder", str(folder)) as url:
        yield url


@pytest.fixture(scope="module")
def code_url() -> Iterator[str]:
    with running("code", "--wall-s", "2", "--cpu-s", "1", "--memory-bytes", str(2**28)) as url:
        yield url


def test_every_service_says_that_it_is_ready(
    search_url: str, pages_url: str, code_url: str
) -> None:
    for name, url in (("search", search_url), ("pages", pages_url), ("code", code_url)):
        assert url.startswith("http://127.0.0.1:")
        assert fetch(f"{url}/health") == (200, {"status": "ok", "service": name})


def test_search_answers_both_wire_forms(search_url: str) -> None:
    status, found = fetch(f"{search_url}/search", {"query": "capital of France", "top_n": 2})
    assert status == 200
    assert len(found) == 2
    assert found[0]["contents"].startswith("France\nFrance is a country in Europe.")
    body = {"queries": ["symbol of Iron", "zzz"], "topk": 1, "return_scores": True}
    status, answer = fetch(f"{search_url}/retrieve", body)
    assert status == 200
    ((hit,), none) = answer["result"]
    assert hit["document"]["id"] == "element-26"
    assert hit["score"] > 0
    assert none == []


@pytest.mark.parametrize(
    "body", [{}, {"query": 3}, {"query": "a", "top_n": 0}, {"query": "a", "top_n": 10**9}, [1]]
)
def test_a_bad_request_is_refused_with_words(search_url: str, body: Any) -> None:
    status, answer = fetch(f"{search_url}/search", body)
    assert status == 422
    assert answer["detail"]


async def test_the_search_tool_finds_the_passage_of_nearly_every_question(search_url: str) -> None:
    rows = [json.loads(line) for line in facts.question_lines(is_held_out=False).splitlines()][::10]
    passages = {fact.id: fact.contents for fact in facts.facts()}
    for form in ("search", "retrieve"):
        tool = Search(SearchTool(kind="search", url=search_url, form=form, top_n=1))
        calls = (tool.call(row["prompt"], prompt=PROMPT) for row in rows)
        texts = [observation.text for observation in await asyncio.gather(*calls)]
        right = [text == passages[row["passage_id"]] for text, row in zip(texts, rows, strict=True)]
        assert sum(right) >= 0.97 * len(right)
        await tool.close()


def test_the_shipped_corpus_is_what_its_tables_make() -> None:
    assert facts.PASSAGES.read_text(encoding="utf-8") == facts.passage_lines()
    for path, is_held_out in ((facts.QUESTIONS, False), (facts.HELD_OUT, True)):
        assert path.read_text(encoding="utf-8") == facts.question_lines(is_held_out=is_held_out)
    assert sum(f.stat().st_size for f in facts.FOLDER.iterdir() if f.is_file()) < 500_000
    for fact in facts.facts():
        for _, answer in fact.questions:
            assert answer in fact.contents


async def test_the_page_tools_show_the_page_that_answers(pages_url: str, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "questions.jsonl").open(encoding="utf-8")][::7]
    find = PageSearch(PageSearchTool(kind="page_search", url=pages_url, top_n=1))
    show = PageFetch(PageFetchTool(kind="page_fetch", url=pages_url))
    for row in rows:
        prompt = Prompt(prompt_id="p", messages=(), doc_id=row["doc_id"])
        found = await find.call(row["prompt"], prompt=prompt)
        shown = await show.call(row["page_id"], prompt=prompt)
        expected = (folder / f"{row['doc_id']}-page-{row['page_id']}.png").read_bytes()
        assert (found.ids, found.images) == ((row["page_id"],), (expected,))
        assert (shown.ids, shown.images) == ((row["page_id"],), (expected,))
    await find.close()
    await show.close()


@pytest.mark.parametrize(
    ("page", "doc_id", "said"),
    [
        ("99", "doc-1", "there is no page '99' in this document"),
        ("1", "doc-99", "there is no page '1' in this document"),
        ("1", None, "there are 4 pages '1': name a document"),
        ("../../etc/passwd", "doc-1", "there is no page '../../etc/passwd' in this document"),
    ],
)
async def test_a_page_that_is_not_there_is_an_error_reply(
    pages_url: str, page: str, doc_id: str | None, said: str
) -> None:
    tool = PageFetch(PageFetchTool(kind="page_fetch", url=pages_url, on_failure="fail"))
    prompt = Prompt(prompt_id="p", messages=(), doc_id=doc_id)
    observation = await tool.call(page, prompt=prompt)
    assert (observation.text, observation.is_error) == (said, True)
    await tool.close()


def test_page_requests_of_unequal_length_are_refused(pages_url: str) -> None:
    status, answer = fetch(f"{pages_url}/batch_fetch", {"query": ["1", "2"], "id": ["doc-1"]})
    assert (status, answer["detail"]) == (422, "2 queries and 1 document ids")


async def test_pages_are_served_as_text_when_asked(folder: Path) -> None:
    with running("pages", "--folder", str(folder), "--contents", "text") as url:
        tool = PageFetch(PageFetchTool(kind="page_fetch", url=url, contents="text"))
        prompt = Prompt(prompt_id="p", messages=(), doc_id="doc-1")
        observation = await tool.call("1", prompt=prompt)
        assert observation.text.startswith("page 1\nHydrogen\nHydrogen is the chemical element")
        await tool.close()


async def test_the_code_tool_runs_programs_of_every_kind(code_url: str) -> None:
    tool = CodeExecution(CodeExecutionTool(kind="code_execution", url=code_url, on_failure="fail"))
    programs = {
        name: (HOSTILE / f"{name}.py").read_text() for name in ("fork_bomb", "endless_loop")
    }
    good, bomb, loop, bad = await asyncio.gather(
        tool.call("print(6 * 7)", prompt=PROMPT),
        tool.call(programs["fork_bomb"], prompt=PROMPT),
        tool.call(programs["endless_loop"], prompt=PROMPT),
        tool.call("1 / 0", prompt=PROMPT),
    )
    assert good.text == "Code output: 42\n\nErrors: "
    assert bomb.is_error
    assert "killed: " in loop.text
    assert "ZeroDivisionError" in bad.text
    await tool.close()


def test_the_code_service_answers_in_the_sandbox_fusion_form(code_url: str) -> None:
    status, answer = fetch(f"{code_url}/run_code", {"code": "print(1)", "language": "python"})
    assert (status, answer["status"]) == (200, "Success")
    run = answer["run_result"]
    assert (run["stdout"], run["stderr"], run["return_code"]) == ("1\n", "", 0)
    assert fetch(f"{code_url}/run_code", {"code": "x", "language": "bash"})[0] == 422


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "corpus.jsonl:2: "),
        ('{"id": "b"}', "corpus.jsonl:2: "),
        ('["b", "c"]', "corpus.jsonl:2: "),
        ('{"id": "a", "contents": "x"}', "corpus.jsonl:2: id 'a' is that of line 1"),
    ],
)
def test_a_corpus_line_that_does_not_parse_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f'{{"id": "a", "contents": "first"}}\n{line}\n')
    assert said in refused(capsys, search.main, "--corpus", str(corpus))


def test_bad_input_ends_a_service_with_code_2_and_no_stack_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raylearner.services.search"]
    command += ["--corpus", str(tmp_path / "none.jsonl")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "none.jsonl: cannot be read" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_bad_folders_and_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--folder", str(tmp_path))
    assert "pages.jsonl: cannot be read" in refused(capsys, pages.main, *folder)
    index = tmp_path / "pages.jsonl"
    index.write_text('{"id": "1", "doc_id": "d", "text": "", "image": "../x"}')
    assert "outside the folder" in refused(capsys, pages.main, *folder)
    index.write_text('{"id": "error", "doc_id": "d", "text": ""}')
    assert "page id 'error'" in refused(capsys, pages.main, *folder)
    index.write_text('{"id": "1", "doc_id": "d", "text": ""}')
    assert "has no image; add one, or serve --contents text" in refused(capsys, pages.main, *folder)
    said = refused(capsys, code.main, "--wall-s", "-1")
    assert "--wall-s: Input should be greater than 0" in said


def test_a_port_that_is_taken_is_refused(
    search_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = search_url.rpartition(":")[2]
    assert f"cannot bind 127.0.0.1:{port}" in refused(capsys, search.main, "--port", port)
