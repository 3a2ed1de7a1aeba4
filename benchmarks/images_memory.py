"""Host memory of a run whose groups share page images: each image once, and flat over the steps.

    python benchmarks/images_memory.py [--num-steps 200] [key=value ..]

First puts a group of 8 that shows 6 pages through the replay and to two learner ranks, pickled at
each hop as Ray does it, and counts the copies. Then trains a tiny model that sees, two learner ranks,
on such groups from the scripted engine, and prints the memory of each kind of process. Fails if
there is a second copy, or if memory grows by more than 5% over the second half of the run.
"""

import io
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
import yaml
from PIL import Image

from raylearner.config.schema import ReplaySection
from raylearner.learner.batch.pack import pack
from raylearner.replay.buffer import ReplayBuffer
from raylearner.types import Claim, Prompt, Trajectory

GROUP_SIZE, NUM_PAGES, NUM_RANKS = 8, 6, 2
NUM_PROMPTS = 32
SIDE = 224
"""Pixels: 64 tokens, and 150 kB of noise as PNG."""
PLACEHOLDER = 5
MAX_GROWTH = 0.05
KINDS = {"ReplayActor": "replay actor", "LearnerActor": "learner ranks", "RolloutActor": "actors"}

CONFIG: dict[str, Any] = {
    "run": {"name": "images-memory", "checkpoint_every_steps": 0},
    "cluster": {"num_cpus": 8, "object_store_bytes": 150_000_000},
    "model": {
        "kind": "tiny",
        "num_layers": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "max_length": 640,
        "vision": {},
    },
    "environment": {"kind": "single_turn"},
    "renderer": {
        "max_prompt_tokens": 512,
        "max_response_tokens": 64,
        "images": {"min_pixels": 784, "max_pixels": SIDE * SIDE, "max_images": NUM_PAGES},
    },
    "sampling": {"max_turn_tokens": 64},
    "rewards": {"functions": [{"kind": "response_length", "target_tokens": 12}]},
    "actors": {
        "num_actors": 1,
        "cpus_per_actor": 0.5,
        "engine": {
            "kind": "scripted",
            "script": "raylearner.actors.engines.scripted:RandomTokens",
            "arguments": {"vocab_size": 200},
        },
    },
    "replay": {"groups_per_step": 1, "group_size": GROUP_SIZE, "max_staleness": 1},
    "learner": {
        "num_ranks": NUM_RANKS,
        "cpus_per_rank": 0.5,
        "compute_dtype": "float32",
        "max_tokens_per_micro_batch": 2048,
    },
    "observability": {"tensorboard": False},
}


def make_page(rng: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def make_trajectory(claim: Claim, pages: tuple[bytes, ...]) -> Trajectory:
    token_ids = np.array([0, *[PLACEHOLDER, 0] * len(pages), 1, 2], np.int32)
    mask = np.arange(len(token_ids)) >= len(token_ids) - 2
    return Trajectory(
        group_id=claim.group_id,
        sample_index=claim.sample_index,
        attempt=claim.attempt,
        prompt_id=claim.prompt.prompt_id,
        prompt_text="",
        token_ids=token_ids,
        loss_mask=mask,
        train_mask=mask.copy(),
        behavior_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        claim_policy_version=0,
        reward=float(claim.sample_index % 2),
        images=pages,
        image_token_id=PLACEHOLDER,
    )


def sent(value: Any) -> Any:
    """As Ray sends it: pickled, and another object on arrival."""
    return pickle.loads(pickle.dumps(value, protocol=5))


def copies() -> tuple[int, list[int]]:
    """Distinct copies of the pages in the replay, and in the batch of each learner rank."""
    rng = np.random.default_rng(0)
    pages = tuple(make_page(rng) for _ in range(NUM_PAGES))
    replay = ReplayBuffer(
        ReplaySection(groups_per_step=1, group_size=GROUP_SIZE, max_staleness=1),
        [Prompt(prompt_id="pages", messages=())],
        seed=0,
    )
    for claim in replay.claim("a", 0, GROUP_SIZE).claims:
        assert replay.put(sent([make_trajectory(claim, pages)])) == "accepted"
    stored = [t for g in replay.store.groups for t in replay.store.trajectories(g)]
    take = replay.take(1, 0)
    assert take is not None
    batches = pack(
        sent(take.groups), policy_version=0, num_ranks=NUM_RANKS, max_tokens_per_micro_batch=64
    )
    by_rank = [
        [row.trajectory for m in batch.mini_batches for rows in m.micro_batches for row in rows]
        for batch in map(sent, batches)
    ]
    return num_objects(stored), [num_objects(trajectories) for trajectories in by_rank]


def num_objects(trajectories: list[Trajectory]) -> int:
    return len({id(image) for trajectory in trajectories for image in trajectory.images})


def write_prompts(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    lines: list[str] = []
    for prompt in range(NUM_PROMPTS):
        names = [f"{prompt}-{page}.png" for page in range(NUM_PAGES)]
        for name in names:
            (folder / name).write_bytes(make_page(rng))
        lines.append(json.dumps({"prompt": f"question {prompt}", "answer": "", "image": names}))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def measure(root: psutil.Process) -> dict[str, float]:
    """MB by kind of process; memory that processes share counts for each in its share."""
    found: dict[str, float] = defaultdict(float)
    for process in [root, *root.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            kind = next((k for name, k in KINDS.items() if f"ray::{name}" in title), None)
            if process == root:
                kind = "controller"
            if kind is not None:
                found[kind] += process.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
    return dict(found)


def train(folder: Path, num_steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """By step what `measure` found, with the buffer's images."""
    source = {"kind": "jsonl", "path": str(write_prompts(folder)), "image_column": "image"}
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"data": {"train": source}}))
    run = folder / "run"
    given = [f"run.num_steps={num_steps}", f"run.dir={run}", *overrides]
    command = [sys.executable, "-m", "raylearner", "train", str(folder / "run.yaml"), *given]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    found: list[dict[str, float]] = []
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        if rows and (not found or json.loads(rows[-1])["step"] > found[-1]["step"]):
            row = json.loads(rows[-1])
            memory = measure(psutil.Process(process.pid))
            if set(KINDS.values()) <= set(memory):
                found.append(memory | {"step": row["step"], "images": row["buffer/images"]})
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"the run ended with code {process.returncode}")
    return found


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the run.")] = None,
    num_steps: Annotated[int, typer.Option(help="Learner steps.")] = 200,
) -> None:
    in_replay, in_ranks = copies()
    typer.echo(
        f"copies of the {NUM_PAGES} pages of a group of {GROUP_SIZE}: {in_replay} in the replay, "
        f"{in_ranks} in the learner's ranks"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = train(Path(folder), num_steps, list(overrides or []))
    kinds = [*KINDS.values(), "controller"]
    typer.echo("\n| step | images in the buffer | " + " | ".join(f"{k}, MB" for k in kinds) + " |")
    typer.echo("|" + "---|" * (len(kinds) + 2))
    quarters = {round(place * (len(found) - 1) / 4) for place in range(5)}
    for row in (found[place] for place in sorted(quarters)):
        numbers = " | ".join(f"{row.get(kind, 0):.0f}" for kind in kinds)
        typer.echo(f"| {row['step']:.0f} | {row['images']:.0f} | {numbers} |")
    middle, end = (
        [sum(row.get(kind, 0) for kind in kinds) for row in part]
        for part in (found[len(found) // 2 :][: len(found) // 8], found[-len(found) // 8 :])
    )
    growth = float(np.median(end) / np.median(middle)) - 1
    typer.echo(f"\nmemory over the second half: {growth:+.1%}")
    if in_replay > NUM_PAGES or max(in_ranks) > NUM_PAGES or growth > MAX_GROWTH:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
