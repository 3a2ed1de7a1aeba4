"""Every agent's configuration, for a few steps: real services, real vLLM, a tiny model, exact masks."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from loop import ENVIRONMENT, ROOT, rows, run_cli, wait_for

from raylearner.config.schema import RendererSection
from raylearner.learner.mesh import free_port
from raylearner.services.corpora.records import write_records
from raylearner.tokenization.renderer import Renderer

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]

SMALL = (
    "run.num_steps=3",
    "cluster.num_cpus=4",
    "cluster.object_store_bytes=150000000",
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

    overrides: tuple[str, ...] = ()
    tool: str | None = None
    rewards: tuple[str, ...] = ("exact_answer",)


AGENTS = {
    "search_qa": Agent(tool="search"),
    "code_agent": Agent(
        tool="code_execution", overrides=("model.warm_start.num_demonstrations=24",)
    ),
    "openai_agent": Agent(tool="calculator"),
    "reasoning_gym": Agent(rewards=("reasoning_gym", "answer_format")),
    "rloo_math": Agent(rewards=("math_verify",)),
}


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Overrides that point `search_qa` to a running service and its questions."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, num_records=200)
    port = free_port()
    module = "raylearner.services.search"
    command = [sys.executable, "-m", module, "--corpus", str(folder / "records.jsonl")]
    process = subprocess.Popen([*command, "--port", str(port)], env=ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, what="the search service")
    yield (
        f"environment.tools=[{{kind: search, url: '{url}', top_n: 1}}]",
        f"data.train.path={folder / 'questions.jsonl'}",
        f"data.evaluation.path={folder / 'questions_held_out.jsonl'}",
    )
    process.terminate()
    process.wait(timeout=30)


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_an_agent_plays_trains_and_keeps_what_it_wrote(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    agent = AGENTS[name]
    overrides = (*SMALL, *agent.overrides)
    if name == "search_qa":
        overrides += request.getfixturevalue("search")
    folder = tmp_path / "run"
    configs = (f"{name}.yaml", "tiny/cpu.yaml", f"tiny/{name}.yaml")
    files = [f"{ROOT}/configs/{c}" for c in configs]
    output = run_cli("train", *files, f"run.dir={folder}", *overrides, timeout_s=350)
    assert "with VllmEngine runs as process" in output
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert max(row["weights/proof_gap"] for row in metrics) < 1e-3
    assert [row["step"] for row in rows(folder / "eval.jsonl")] == [0, 3]

    played = [t for path in sorted((folder / "trajectories").iterdir()) for t in rows(path)]
    renderer = Renderer.from_pretrained(str(folder / "model"), RendererSection())
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
    if agent.tool is not None:
        assert agent.tool in tools, f"no trajectory called the tool; called were {tools}"
