"""Ten learner steps on SmolLM2-135M-Instruct with vLLM on the CPU: losses are finite, engine and learner agree.

    python benchmarks/smollm2_cpu.py MODEL_DIR

Prints one line per step and fails when a loss is not finite or the mean gap of recorded and
recomputed log-probabilities of fresh tokens exceeds 1e-3.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
MAX_GAP = 1e-3
OVERRIDES = (
    "run.num_steps=10",
    "run.checkpoint_every_steps=0",
    "cluster.num_cpus=4",
    "replay.groups_per_step=2",
    "replay.group_size=4",
    "replay.max_staleness=0",
    "renderer.max_response_tokens=96",
    "sampling.max_turn_tokens=32",
    "actors.num_actors=1",
    "actors.max_concurrent_episodes=16",
    "actors.engine.max_sequences=16",
    "learner.max_tokens_per_micro_batch=1024",
    "evaluation.num_prompts=4",
    "evaluation.every_steps=0",
    # Right answers may not differ in a group of 4; lengths do, so that every step has gradients.
    "rewards.functions=[{kind: response_length, target_tokens: 24}]",
)


def main(model: Annotated[Path, typer.Argument(help="Checkpoint directory.")]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        configs = [f"{ROOT}/configs/{name}.yaml" for name in ("smollm2_arithmetic", "cpu_float32")]
        command = [sys.executable, "-m", "raylearner", "train", *configs, *OVERRIDES]
        subprocess.run([*command, f"model.path={model}", f"run.dir={run}"], check=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bad = []
    for row in rows:
        loss = row["learner/loss"]
        gap = row.get("learner/on_policy_gap/mean")
        typer.echo(f"step {row['step']:2d}  loss {loss:+.3e}  gap of fresh tokens {gap}")
        if loss is None or not math.isfinite(loss) or (gap is not None and gap > MAX_GAP):
            bad.append(row["step"])
    measured = [row for row in rows if row.get("learner/on_policy_gap/mean") is not None]
    if len(rows) != 10 or bad or not measured:
        typer.echo(f"{len(rows)} steps, at fault: {bad}, measured at {len(measured)} steps")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
