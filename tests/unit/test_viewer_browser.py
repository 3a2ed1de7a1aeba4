"""The viewer in a real browser: what a person sees, clicks and types, and text that stays text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_directories import (
    VOCABULARY,
    chat_record,
    make_record,
    save_tokenizer,
    write_lines,
    write_run,
    write_sweep,
)
from servers import served

from raylearner.observability.viewer import snapshot
from raylearner.observability.viewer.app import make_app
from raylearner.observability.viewer.runs import Library

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium in PATH")

HOSTILE = ("<!-- <script>", "</script>", "<img src=x onerror=alert(1)>", "\x1b[2J\x1b]0;owned\x07")
HOSTILE += ("\u202egnp.exe", "]]>-->")
LONG = 5000
IMAGE = "a" * 32 + ".png"
REWARD = ".chart:has-text('reward') .chart-legend b"


def sampled_record(ids: list[int], **changes: Any) -> dict[str, Any]:
    size = len(ids)
    return make_record(
        token_ids=ids,
        loss_mask=[True] * size,
        train_mask=[True] * size,
        behavior_logprobs=[-0.5] * size,
        learner_logprobs=[-0.75] * size,
        policy_versions=[3] * size,
        turns=[{"start": 0, "end": size, "reply_end": size, "tool": None, "is_valid": True}],
        **changes,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    groups = [
        chat_record(
            group_id=group, sample_index=sample, reward=float(sample > group), prompt_id=str(group)
        )
        for group in range(2)
        for sample in range(4)
    ]
    played = [chat_record(prompt_id="p0", reward=1.0)]
    first = write_run(root / "first", steps={1: groups, 2: groups}, evaluations={0: played})
    save_tokenizer(first)
    write_run(root / "bare", steps={})
    text = "".join(HOSTILE)
    ids = [*range(len(HOSTILE)), *[0] * LONG]
    record = sampled_record(ids, prompt=text, error=f"tool: {text}", answer=text, source=text)
    hostile = write_run(root / "hostile", steps={1: [record]})
    save_tokenizer(hostile, HOSTILE)
    write_lines(hostile / "failures.jsonl", [{"step": 1, "error": text}])
    write_sweep(root / "grid")
    write_run(root / "pictures", steps={1: [make_record(image_token_id=5, images=[IMAGE])]})
    (root / "pictures/trajectories/images").mkdir()
    Image.new("RGB", (7, 5), "red").save(root / "pictures/trajectories/images" / IMAGE)
    return root


class Browser:
    """A page of the viewer; script errors, dialogs and requests to other hosts are collected."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
        self.url = url
        self.problems: list[str] = []
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", lambda request: self._check(request.url))

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.problems.append(url)

    def open(self, place: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#/{place}")
        return self.page

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with served(make_app(Library([root]))) as address:
        yield address


@pytest.fixture
def browser(chromium: Any, url: str) -> Iterator[Browser]:
    opened = Browser(chromium, url)
    yield opened
    opened.page.close()
    assert opened.problems == []


def test_charts_follow_a_live_run_and_runs_stand_side_by_side(browser: Browser, root: Path) -> None:
    browser.page.clock.install()
    page = browser.open("run/first")
    page.wait_for_selector(".chart svg path.line")
    assert browser.text(REWARD) == "0.2"
    row = {"step": 3, "policy_version": 3, "time_s": 6.0, "rollout/reward/mean": 0.75}
    with (root / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + '{"step": 4, "rol')
    page.clock.run_for(9000)
    expect(page.locator(REWARD).first).to_have_text("0.75")
    page = browser.open("")
    page.wait_for_selector("table.runs a")
    for name in ("first", "bare"):
        page.get_by_label(f"Choose {name}").check()
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector(".chart svg path.line")
    assert page.locator(".chart").first.locator("path.line").count() == 2
    assert page.locator(".run-keys a").all_inner_texts() == ["first", "bare"]


def test_a_group_is_found_filtered_and_opened_by_keys(browser: Browser) -> None:
    page = browser.open("run/first/trajectories?step=2")
    page.wait_for_selector(".rows .row")
    assert page.locator(".rows .row").count() == 2
    assert browser.text(".rows .question") == "1+1?"
    assert browser.text(".rows .row >> nth=0 >> .number") == "0.75 ± 0.43"
    page.get_by_label("reward min").fill("1")
    page.get_by_label("reward min").press("Enter")
    page.get_by_role("button", name="trajectories", exact=True).click()
    expect(page.locator(".rows .row")).to_have_count(5)
    assert "reward_min=1" in page.url
    assert "by=trajectories" in page.url
    page.reload()
    expect(page.locator(".rows .row")).to_have_count(5)
    page.locator("body").press("b")
    expect(page.locator(".rows .row")).to_have_count(2)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".columns .column")
    assert page.locator(".columns .column").count() == 4
    assert "/group/2/0" in page.url


def test_a_trajectory_shows_turns_and_the_values_of_tokens_on_hover(browser: Browser) -> None:
    page = browser.open("run/first/step/2/1?colour=gap")
    page.wait_for_selector(".part.policy")
    assert page.locator(".part .role").all_inner_texts() == [
        "user",
        "assistant",
        "tool calculator",
        "assistant",
    ]
    assert "im_start" not in page.locator(".parts").inner_text()
    token = page.locator(".part.policy .tokens span").first
    token.hover()
    assert "gap\t0.25" in browser.text("#tip")
    assert "policy version\t3" in browser.text("#tip")
    assert "rgba(226, 62, 40" in token.evaluate("e => getComputedStyle(e).backgroundColor")
    page.keyboard.press("m")
    expect(page.locator(".parts")).to_contain_text("im_start")
    page.keyboard.press("c")
    assert "colour=logprob&markup=1" in page.url
    page.keyboard.press("j")
    page.wait_for_url("**/step/2/2?*colour=logprob*")
    page.locator(".term", has_text="stop reason").hover()
    assert "How the episode ended" in browser.text("#tip")


def test_images_stand_where_their_placeholders_do(browser: Browser, root: Path) -> None:
    save_tokenizer(root / "pictures")
    page = browser.open("run/pictures/step/1/1")
    picture = page.locator(".part:not(.policy) .tokens img")
    expect(picture).to_have_js_property("naturalWidth", 7)
    assert picture.get_attribute("alt") == "image 1"


def test_text_of_models_stays_text_in_every_place(browser: Browser) -> None:
    for place in ("trajectories?step=1", "step/1/1", "group/1/0", "failures"):
        page = browser.open(f"run/hostile/{place}")
        expect(page.locator("main")).to_contain_text("onerror")
        shown = page.locator("main").inner_text()
        assert "\\x1b[2J" in shown
        assert "\\u202e" in shown
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
        assert page.locator("main img, main script").count() == 0
    page = browser.open("run/hostile/step/1/1")
    page.get_by_role("button", name=f"{LONG + len(HOSTILE) - 2000:,} more tokens").click()
    assert page.locator(".tokens span").count() == 4000


def test_what_is_missing_is_said_and_dark_is_remembered(browser: Browser) -> None:
    page = browser.open("run/bare/trajectories")
    page.wait_for_selector(".notice")
    assert "trajectories_every_steps" in browser.text(".notice")
    page = browser.open("run/first/step/2/99")
    page.wait_for_selector(".notice.bad")
    assert "99" in browser.text(".notice.bad")
    page = browser.open("run/first/trajectories?kind=evaluation")
    page.wait_for_selector(".rows .row")
    assert page.locator(".rows .row").count() == 1
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.keyboard.press("d")
    assert page.evaluate(back) != light
    page.reload()
    page.wait_for_selector(".rows .row")
    assert page.evaluate(back) != light
    page.keyboard.press("?")
    assert "next row" in browser.text("#help")
    assert VOCABULARY[5] in page.locator(".rows").inner_text()


def test_a_sweep_joins_means_of_numbers_but_not_of_categories(browser: Browser) -> None:
    page = browser.open("sweep/grid")
    page.wait_for_selector(".parallel path.trial")
    assert page.locator(".parallel path.trial").count() == 8
    assert page.locator(".parallel .axis").count() == 3
    numbers = page.locator(".sweep-charts .chart", has_text="learner.learning_rate")
    kinds = page.locator(".sweep-charts .chart", has_text="learner.loss")
    assert (numbers.locator("path.line").count(), kinds.locator("path.line").count()) == (2, 0)
    assert (numbers.locator("path.interval").count(), kinds.locator("path.interval").count()) == (
        4,
        2,
    )
    first = page.locator("table.settings tbody tr").first.inner_text()
    assert first.split("\t")[:2] == ["ppo", "0.01"]
    assert first.split("\t")[3] == "2 of 2"
    expect(
        page.locator(".sweep-charts .chart", has_text="learning curves").locator("path.band")
    ).to_have_count(2)
    page.locator(".parallel path.trial").first.dispatch_event("click")
    page.wait_for_url("**/run/grid*trials*")


def test_a_step_in_a_file_needs_no_server(chromium: Any, root: Path, tmp_path: Path) -> None:
    for name, shown in (("first", "1+1?"), ("hostile", "onerror")):
        snapshot.write(root / name, tmp_path / f"{name}.html")
        browser = Browser(chromium, (tmp_path / f"{name}.html").as_uri())
        page = browser.page
        page.goto(browser.url)
        expect(page.locator(".rows")).to_contain_text(shown)
        page.locator(".rows .square").first.click()
        page.wait_for_selector(".part.policy")
        page.get_by_role("link", name="side by side").click()
        page.wait_for_selector(".columns .column")
        page.close()
        assert browser.problems == []
