"""Long-tailed writing: stories of about N words, N log-uniform in 30 to 600, rewarded by their length.

    python benchmarks/stories.py --out DIR --model SMOLLM2 [--engines 6 --tuned] [--steps 60] [--cpu]

makes the prompts, runs `python -m raylearner train` on the GPUs that are visible (one for the learner,
the engines share the others) and reports trained trajectories per second, lengths and idle fractions.
No option of speed is set; `--tuned` sets some by hand.
"""

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.common import Result, parser
from benchmarks.gpu.training import Run, summary
from raylearner.rewards.functions import EpisodeView

TOPICS = [
    "a lighthouse keeper",
    "a lost dog",
    "the first snow",
    "a train at night",
    "an old clockmaker",
    "a garden",
    "two sisters",
    "a letter that came late",
    "the sea",
    "a chess game",
    "a robot",
    "a mountain village",
    "a baker",
    "a storm",
    "a library",
    "an island",
    "a violin",
    "the moon",
    "a bridge",
    "a stolen painting",
    "a river",
    "a teacher",
    "a desert caravan",
    "a fox",
    "a spaceship",
    "a market",
    "a kite",
    "a king",
    "a mirror",
    "an apple tree",
]


def length_score(text: str, wanted: str | None) -> float:
    """1 at the number of words asked for, falling with the ratio between asked and written."""
    written = max(1, len(text.split()))
    return math.exp(-abs(math.log(written / float(wanted or 1))))


def length_reward(episode: EpisodeView) -> float:
    return length_score(episode.completion, episode.prompt.answer)


def write_prompts(path: Path, *, num_prompts: int, shortest: int, longest: int) -> Path:
    generator = random.Random(0)
    with path.open("w") as file:
        for index in range(num_prompts):
            low, high = math.log(shortest), math.log(longest)
            words = round(math.exp(generator.uniform(low, high)))
            text = f"Write a story of about {words} words about {generator.choice(TOPICS)}."
            row = {"prompt_id": f"story/{index}", "prompt": text, "answer": str(words)}
            file.write(json.dumps(row) + "\n")
    return path


def config(
    prompts: Path,
    *,
    model: str,
    num_steps: int,
    engines: int | None,
    max_staleness: int,
    groups_per_step: int,
    cpu: bool,
    tuned: bool = False,
    episodes: int = 128,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """The run as the configuration file that it is. Further sections are merged in by key.

    Without `engines` and `tuned`, the run decides everything that changes only its speed.
    """
    longest = 64 if cpu else 1024
    engine: dict[str, Any] = {
        "kind": "vllm",
        "dtype": "float32" if cpu else "bfloat16",
        "max_model_tokens": 256 if cpu else 1152,
        "max_sequences": 16 if cpu else episodes,
    }
    if tuned and not cpu:
        # CUDA graphs of whole decode steps without compilation: most of the speed, little start.
        engine["eager"] = False
        engine["extra_arguments"] = {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128],
            }
        }
    found: dict[str, Any] = {
        "run": {"name": "stories", "num_steps": num_steps, "checkpoint_every_steps": 0},
        "model": {"kind": "pretrained", "path": model},
        "data": {"train": {"kind": "jsonl", "path": str(prompts)}},
        "environment": {"kind": "single_turn"},
        "renderer": {"max_prompt_tokens": 128, "max_response_tokens": longest},
        "sampling": {"max_turn_tokens": longest},
        "rewards": {"functions": [{"kind": "benchmarks.stories:length_reward"}]},
        "actors": {
            "max_concurrent_episodes": 16 if cpu else episodes,
            "cpus_per_actor": 0.5,
            "engine": engine,
        },
        "replay": {
            "groups_per_step": groups_per_step,
            "group_size": 8,
            "max_staleness": max_staleness,
        },
        "learner": {
            "learning_rate": 1e-6,
            "cpus_per_rank": 0.5,
            "compute_dtype": "float32" if cpu else "bfloat16",
        },
        "observability": {"trace": False},
        "evaluation": {"every_steps": 0},
    }
    if engines is not None:
        found["actors"]["num_actors"] = engines
    if tuned and not cpu:
        found["learner"] |= {"max_tokens_per_micro_batch": 16_384, "logprob_chunk_tokens": 4096}
    for key, section in sections.items():
        found[key] = {**found.get(key, {}), **section}
    return found


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--engines", type=int, help="as many as the run decides without")
    args.add_argument("--steps", type=int, default=60)
    args.add_argument("--episodes", type=int, default=128, help="at once on each engine")
    args.add_argument("--tuned", action="store_true")
    args.add_argument("--on-stale", default="mask", choices=("mask", "wait"))
    args.add_argument("--name", default="stories")
    arguments = args.parse_args()
    cpu = arguments.cpu
    result = Result(arguments.out, arguments.name)
    prompts = write_prompts(
        arguments.out / f"{arguments.name}.jsonl",
        num_prompts=4000,
        shortest=30 if not cpu else 3,
        longest=600 if not cpu else 30,
    )
    started = time.monotonic()
    run = Run(
        arguments.out / f"{arguments.name}-run",
        config(
            prompts,
            model=arguments.model,
            num_steps=2 if cpu else arguments.steps,
            engines=1 if cpu else arguments.engines,
            max_staleness=4,
            groups_per_step=1 if cpu else 8,
            cpu=cpu,
            tuned=arguments.tuned,
            episodes=arguments.episodes,
            replay={"on_stale": arguments.on_stale},
            **({"cluster": {"num_cpus": 4}} if cpu else {}),
        ),
        cpu=cpu,
    )
    code = run.wait(timeout_s=400)
    result.add(engines=arguments.engines, exit_code=code, total_s=time.monotonic() - started)
    numbers = summary(run.metrics(), skip=0 if cpu else 5, trajectories_per_step=8 if cpu else 64)
    result.add(tail=run.tail(), **numbers)
    if code == 0:
        result.done()


if __name__ == "__main__":
    main()
