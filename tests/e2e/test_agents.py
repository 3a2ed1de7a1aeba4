"""Every agent's configuration, for a few steps: real services, real engines, a tiny model, exact masks."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import running
from loop import ENVIRONMENT, ROOT, rows, run_cli, wait_for, wait_for_the_end

from raylearner.config.schema import RendererSection
from raylearner.learner.model.mesh import free_port
from raylearner.services.corpora.records import write_records
from raylearner.services.corpora.visual_pages import Kind, write_visual_pages
from raylearner.tokenization.renderer import Renderer

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]

SMALL = (
    "run.num_steps=3",
    "actors.num_actors=1",
    "actors.max_concurrent_episodes=16",
    "replay.groups_per_step=2",
    "evaluation.num_prompts=8",
    "model.warm_start.num_demonstrations=64",
    "model.warm_start.num_steps=60",
    "model.num_layers=1",
)


@dataclass(frozen=True)
class Agent:
    """What a configuration needs beside its files, and what its trajectories must show."""

    configs: tuple[str, ...] = ("{}.yaml", "tiny/cpu.yaml", "tiny/{}.yaml")
    service: str | None = None
    overrides: tuple[str, ...] = ()
    tool: str | None = None
    rewards: tuple[str, ...] = ("exact_answer",)
    engine: str = "VllmEngine"
    sees: bool = False
    is_on_policy: bool = False


BY_TRANSFORMERS: Any = {
    "engine": "TransformersEngine",
    "overrides": ("actors.engine={kind: transformers, dtype: float32}",),
}

AGENTS = {
    "search_qa": Agent(tool="search", service="search"),
    "code_agent": Agent(
        tool="code_execution", overrides=("model.warm_start.num_demonstrations=24",)
    ),
    "openai_agent": Agent(tool="calculator"),
    # Whose prompts and rewards are their own, and the engine's part that of the others.
    "reasoning_gym": Agent(rewards=("reasoning_gym", "answer_format"), **BY_TRANSFORMERS),
    "rloo_math": Agent(rewards=("math_verify",), **BY_TRANSFORMERS),
    "visual_search_tiny": Agent(
        configs=("{}.yaml",),
        service="pages",
        tool="page_search",
        rewards=("exact_answer", "retrieval_hit"),
        sees=True,
        is_on_policy=True,
        overrides=(
            # What a few steps teach for certain: every search finds a page.
            "model.warm_start.turns=['<search>colour</search>', '<answer>{answer}</answer>']",
            "model.warm_start.right_fraction=0.8",
            # Each push changes the tower, and the engine's next images must be seen by the new one.
            "replay.max_staleness=0",
            "learner.learning_rate=2.0e-3",
            "rewards.functions=[{kind: exact_answer}, {kind: retrieval_hit},"
            " {kind: response_length, target_tokens: 20}]",
        ),
    ),
}


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[str]:
    """The address of a service of raylearner that runs meanwhile."""
    port = free_port()
    command = [sys.executable, "-m", f"raylearner.services.{module}", *arguments]
    process = subprocess.Popen([*command, "--port", str(port)], env=ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_ready, what=f"the service {module}")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def search(folder: Path) -> Iterator[tuple[str, ...]]:
    """Overrides that point `search_qa` to a running service and its questions."""
    write_records(folder, num_records=200)
    with serving("search", "--corpus", str(folder / "records.jsonl")) as url:
        yield (
            f"environment.tools=[{{kind: search, url: '{url}', top_n: 1}}]",
            f"data.train.path={folder / 'questions.jsonl'}",
            f"data.evaluation.path={folder / 'questions_held_out.jsonl'}",
        )


@contextmanager
def pages(folder: Path) -> Iterator[tuple[str, ...]]:
    """Overrides that point `visual_search_tiny` to the pages that its questions are about."""
    write_visual_pages(folder, kinds=[Kind.COLOURS])
    with serving("pages", "--folder", str(folder)) as url:
        yield (f"environment.tools=[{{kind: page_search, url: '{url}', top_n: 1}}]",)


SERVICES = {"search": search, "pages": pages}


def train(name: str, folder: Path, address: str) -> str:
    """What the run of an agent printed, on the cluster at `address`, with its service beside it."""
    agent = AGENTS[name]
    with ExitStack() as services:
        overrides = (*SMALL, *agent.overrides)
        if agent.service is not None:
            overrides += services.enter_context(SERVICES[agent.service](folder))
        files = [f"{ROOT}/configs/{c.format(name)}" for c in agent.configs]
        run_dir = f"run.dir={folder / 'run'}"
        environment = {**ENVIRONMENT, "RAY_ADDRESS": address}
        return run_cli("train", *files, run_dir, *overrides, timeout_s=350, environment=environment)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, "Future[str]"]]]:
    """Of the selected agents, two at a time on one cluster: an engine's start is mostly one core's."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    names = [spec.params["name"] for spec in asked if spec is not None and "name" in spec.params]
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    with (
        running(tmp_path_factory.mktemp("cluster"), num_cpus=8) as cluster,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        yield {
            name: (folder, pool.submit(train, name, folder, cluster.address))
            for name, folder in folders.items()
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_an_agent_plays_trains_and_keeps_what_it_wrote(
    name: str, runs: dict[str, tuple[Path, "Future[str]"]]
) -> None:
    agent = AGENTS[name]
    folder, printed = runs[name]
    output = printed.result()
    folder = folder / "run"
    wait_for_the_end(folder / "log.txt")
    assert f"with {agent.engine} runs as process" in output
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert max(row["weights/logprob_error"] for row in metrics) < 1e-3
    on_policy = metrics if agent.is_on_policy else metrics[:1]
    assert max(row["learner/logprob_gap/max"] for row in on_policy) < 1e-4
    assert [row["step"] for row in rows(folder / "eval.jsonl")] == [0, 3]

    played = [
        t for path in sorted((folder / "trajectories").glob("step_*.jsonl")) for t in rows(path)
    ]
    images = {"images": {"min_pixels": 784, "max_pixels": 50_176}}
    section = RendererSection.model_validate(images)
    renderer = Renderer.from_pretrained(str(folder / "model"), section)
    tools: set[str] = set()
    for trajectory in played:
        assert trajectory["error"] is None, trajectory["error"]
        assert set(trajectory["rewards"]) >= set(agent.rewards)
        token_ids, mask = trajectory["token_ids"], trajectory["loss_mask"]
        sampled = [False] * len(token_ids)
        for turn in trajectory["turns"]:
            written = token_ids[turn["start"] : turn["end"]]
            assert renderer.decode(written) == turn["text"]
            sampled[turn["start"] : turn["end"]] = [True] * len(written)
            tools.add(turn["tool"] or "")
        assert sampled == mask
        assert trajectory["num_images"] == (len(trajectory["shown"]) if agent.sees else 0)
    assert any(trajectory["num_images"] for trajectory in played) == agent.sees
    if agent.tool is not None:
        assert agent.tool in tools, f"no trajectory called the tool; called were {tools}"
