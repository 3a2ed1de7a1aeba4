"""An episode that looks at pages: the pages service, its tools, and a model that sees."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kits import Says, make_claim, make_kit, make_renderer, play_one
from pictures import make_folder
from servers import served

from raylearner.actors.episode import EpisodeKit
from raylearner.config import schema
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.services.corpora.facts import write_pages
from raylearner.services.pages import pages_app, read_pages
from raylearner.types import IMAGE_MARK, Message, Prompt, StopReason

ANSWER = "<answer>42</answer>"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder, num_documents=2, pages_per_document=3)
    app = pages_app(read_pages(folder, needs_images=True), contents="image")
    with served(app) as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def make_stage(
    model: Path, url: str, texts: Sequence[str], *, max_response_tokens: int
) -> tuple[EpisodeKit, Says, EnvironmentFactory]:
    images = {"min_pixels": 3_136, "max_pixels": 78_400}  # at most 100 placeholders
    renderer = make_renderer(model, max_response_tokens=max_response_tokens, images=images)
    script = Says(renderer, texts)
    environment = schema.ToolUse.model_validate(
        {
            "kind": "tool_use",
            "tools": [
                {"kind": "page_search", "url": url, "top_n": 2},
                {"kind": "page_fetch", "url": url},
            ],
            "dialect": {"kind": "tags", "match": "last"},
        }
    )
    factory = EnvironmentFactory(environment)
    return make_kit(renderer, script, make_environment=factory.make), script, factory


CLAIM = make_claim(
    Prompt(
        prompt_id="p",
        messages=(Message(role="user", content="What does page 3 say?"),),
        answer="42",
        doc_id="doc-1",
    )
)


async def test_pages_found_and_fetched_are_shown_and_recorded(model: Path, url: str) -> None:
    texts = ["<search>element symbol country</search>", "<fetch>3</fetch>", ANSWER]
    kit, script, factory = make_stage(model, url, texts, max_response_tokens=1_000)
    trajectory = await play_one(kit, CLAIM)
    await factory.close()
    assert trajectory.error is None
    assert trajectory.stop_reason is StopReason.ANSWER
    place = kit.renderer.banned_token_ids[0]
    assert [prompt.count(place) for prompt in script.prompts] == [0, 2, 3]
    assert len(trajectory.images) == 3
    assert len(trajectory.shown) == 3
    assert trajectory.shown[2] == "3"
    assert trajectory.doc_id == "doc-1"
    assert trajectory.turns[1].reply == f"<result>page 3\n{IMAGE_MARK}</result>"
    vision = kit.renderer.vision
    assert vision is not None
    grids = [vision.grid(image) for image in trajectory.images]
    assert trajectory.is_placeholder.sum() == sum(map(vision.num_placeholders, grids))


async def test_an_episode_ends_cleanly_with_the_pages_that_fitted(model: Path, url: str) -> None:
    texts = ["<search>element symbol country</search>"]
    kit, _, factory = make_stage(model, url, texts, max_response_tokens=220)
    trajectory = await play_one(kit, CLAIM)
    await factory.close()
    assert trajectory.error is None
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert len(trajectory.images) == 1
    assert len(trajectory.shown) == 1
