"""A model of a real size with random weights, on episodes whose lengths the prompts give.

    python -m benchmarks.gpu.real_size --out DIR --model TOKENIZER --layout bare|async|colocated
        [--size 8B] [--staleness 4] [--seconds 90] [--name NAME] [--cpu]

Lengths are log-uniform, 64 to 4,096 tokens at 8B, about 970 on average. `async` gives half of the visible
GPUs to learner ranks and half to engines, or shares one GPU between a rank and an engine; `colocated` is
synchronous, a rank and an engine that sleeps on every GPU. `bare` measures vLLM alone on one GPU, of
whose rate the others report their share; it goes first. Speed options are the defaults.
"""

import asyncio
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bare import run_bare
from benchmarks.gpu.common import Result, parser, visible_gpus
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.training import Run, summary
from raylearner.rewards.functions import EpisodeView

GROUP_SIZE = 8
PROMPT_TOKENS = 128


async def play(
    *, base_url: str, api_key: str, messages: list[dict[str, Any]], columns: dict[str, Any]
) -> None:
    """One completion of as many tokens as the row says. The ends of turns are ignored."""
    import httpx

    async with httpx.AsyncClient(timeout=None, verify=False) as client:
        reply = await client.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={
                "model": "policy",
                "messages": messages,
                "max_tokens": int(columns["num_tokens"]),
            },
        )
        reply.raise_for_status()


def even_share(episode: EpisodeView) -> float:
    """Share of even token ids: it differs between the members of a group, by nothing but chance."""
    ids = episode.completion_ids
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


def log_uniform(generator: random.Random, bounds: tuple[int, int]) -> int:
    return round(math.exp(generator.uniform(math.log(bounds[0]), math.log(bounds[1]))))


def write_prompts(path: Path, *, num_prompts: int, bounds: tuple[int, int]) -> Path:
    generator = random.Random(0)
    with path.open("w") as file:
        for index in range(num_prompts):
            row = {
                "prompt_id": f"length/{index}",
                "prompt": f"Text number {generator.randrange(10**6)}:",
                "num_tokens": log_uniform(generator, bounds),
            }
            file.write(json.dumps(row) + "\n")
    return path


def config(arguments: Any, model: Path, prompts: Path, *, num_gpus: int) -> dict[str, Any]:
    """The run as a configuration file, without any option of speed."""
    cpu, longest = arguments.cpu, arguments.longest
    is_colocated = arguments.layout == "colocated"
    if is_colocated or num_gpus < 2:
        ranks = engines = max(1, num_gpus)
    else:
        ranks = num_gpus // 2
        engines = num_gpus - ranks
    found: dict[str, Any] = {
        "run": {
            "name": "real-size",
            "num_steps": arguments.steps or (3 if cpu else 10_000),
            "checkpoint_every_steps": 0,
        },
        "model": {"kind": "pretrained", "path": str(model)},
        "data": {"train": {"kind": "jsonl", "path": str(prompts)}},
        "environment": {
            "kind": "openai_proxy",
            "program": "benchmarks.gpu.real_size:play",
            "timeout_s": 3600,
        },
        "renderer": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": longest},
        "sampling": {"max_turn_tokens": longest, "extra_arguments": {"ignore_eos": True}},
        "rewards": {"functions": [{"kind": "benchmarks.gpu.real_size:even_share"}]},
        "actors": {
            "num_actors": engines,
            "max_concurrent_episodes": arguments.requests,
            "cpus_per_actor": 0.5,
            "engine": {
                "kind": "vllm",
                "dtype": "float32" if cpu else "bfloat16",
                "max_model_tokens": PROMPT_TOKENS + longest,
                "max_sequences": arguments.requests,
                "sleep": is_colocated,
            },
        },
        "replay": {
            "groups_per_step": arguments.groups,
            "group_size": GROUP_SIZE,
            "max_staleness": 0 if is_colocated else arguments.staleness,
            "group_time_limit_s": 3600,
        },
        "learner": {
            "num_ranks": ranks,
            "learning_rate": 1e-7,
            "cpus_per_rank": 0.5,
            "compute_dtype": "float32" if cpu else "bfloat16",
            "activation_checkpointing": arguments.checkpointing,
        },
        "observability": {"trace": False, "completions": None},
        "evaluation": None,
    }
    if not cpu and (is_colocated or num_gpus < 2):
        found["weights"] = {"transport": "ipc"}
    if cpu:
        found["cluster"] = {"num_cpus": 4}
    return found


def measure_bare(arguments: Any, model: Path, result: Result) -> None:
    generator = random.Random(1)
    found = asyncio.run(
        run_bare(
            str(model),
            lengths=lambda: log_uniform(generator, (arguments.shortest, arguments.longest)),
            num_requests=arguments.requests,
            max_model_tokens=PROMPT_TOKENS + arguments.longest,
            prompt_tokens=24,
            seconds=4 if arguments.cpu else arguments.seconds,
            warm_up_s=2 if arguments.cpu else 30,
            cpu=arguments.cpu,
        )
    )
    result.add(**found)
    if found["tokens_per_s"] > 0:
        result.done()


def measure_run(arguments: Any, model: Path, result: Result) -> None:
    bounds = (arguments.shortest, arguments.longest)
    name = arguments.name
    prompts = write_prompts(arguments.out / f"{name}.jsonl", num_prompts=20_000, bounds=bounds)
    num_gpus = 0 if arguments.cpu else len(visible_gpus())
    found = config(arguments, model, prompts, num_gpus=num_gpus)
    result.add(
        ranks=found["learner"]["num_ranks"],
        engines=found["actors"]["num_actors"],
        max_staleness=found["replay"]["max_staleness"],
    )
    run = Run(arguments.out / f"{name}-run", found, cpu=arguments.cpu)
    skip = 0 if arguments.cpu else 2

    def enough(metrics: list[dict[str, Any]]) -> bool:
        if len(metrics) <= skip + 3:
            return False
        return metrics[-1]["time_s"] - metrics[skip]["time_s"] > arguments.seconds

    code = run.wait(timeout_s=arguments.limit_s, enough=None if arguments.cpu else enough)
    metrics = run.metrics()
    numbers = summary(
        metrics, skip=skip, trajectories_per_step=GROUP_SIZE * arguments.groups
    ) | rates(arguments, metrics[skip:], engines=found["actors"]["num_actors"])
    result.add(exit_code=code, tail=run.tail(), **numbers)
    # A run that was stopped at its time limit counts where it made steps enough for a rate.
    if code in (0, None) and numbers["num_steps"] > skip + 2:
        result.done()


def rates(
    arguments: Any, metrics: list[dict[str, Any]], *, engines: int
) -> dict[str, float | list[float]]:
    """Return tokens per second that were sampled and that trained, and shares of bare vLLM's rate."""
    if len(metrics) < 2:
        return {}
    seconds = metrics[-1]["time_s"] - metrics[0]["time_s"]
    trained = sum(
        GROUP_SIZE
        * arguments.groups
        * step["rollout/sampled_tokens/mean"]
        * (1 - step["buffer/masked_fraction"])
        for step in metrics[1:]
    )
    found: dict[str, float | list[float]] = {
        "trained_tokens_per_s": trained / seconds,
        "step_times_s": [step["time_s"] for step in metrics],
    }
    for key in ("weights/recomputed_tokens", "weights/pause_s"):
        values = [step[key] for step in metrics if step.get(key) is not None]
        if values:
            found[f"{key}/values"] = values
    bare = rows_of(arguments.out / f"real_size_{arguments.size}_bare.json")
    if bare.get("is_done"):
        sampled = sum(step["rollout/tokens_per_s"] for step in metrics) / len(metrics)
        whole = engines * bare["tokens_per_s"]
        found["sampled_share_of_bare"] = sampled / whole
        found["trained_share_of_bare"] = trained / seconds / whole
    return found


def rows_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--layout", choices=("bare", "async", "colocated"), required=True)
    args.add_argument("--size", choices=("8B", "2.3B", "1.5B"), default="8B")
    args.add_argument("--staleness", type=int, default=4)
    args.add_argument("--requests", type=int, default=256, help="at once on each engine")
    args.add_argument("--groups", type=int, default=32, help="per step, of 8 episodes")
    args.add_argument("--shortest", type=int, default=64)
    args.add_argument("--longest", type=int, default=4096)
    args.add_argument("--checkpointing", default="selective")
    args.add_argument("--steps", type=int)
    args.add_argument("--seconds", type=float, default=90, help="measured, after the first steps")
    args.add_argument("--limit-s", type=float, default=300, help="of a run, its start included")
    args.add_argument("--name")
    arguments = args.parse_args()
    arguments.name = arguments.name or f"real_size_{arguments.size}_{arguments.layout}"
    result = Result(arguments.out, arguments.name)
    if arguments.cpu:
        arguments.requests, arguments.groups = 16, 1
        arguments.shortest, arguments.longest, arguments.limit_s = 4, 48, 400
    shape = "tiny" if arguments.cpu else arguments.size
    started = time.monotonic()
    folder = arguments.out / f"random-{shape}"
    model = random_model(folder, shape, tokenizer=arguments.model)
    parameters = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2e9
    result.add(
        layout=arguments.layout,
        size=shape,
        billions=parameters,
        requests=arguments.requests,
        groups=arguments.groups,
        model_s=time.monotonic() - started,
    )
    if arguments.layout == "bare":
        measure_bare(arguments, model, result)
    else:
        measure_run(arguments, model, result)
    if not result.content["is_done"]:
        sys.exit(f"{arguments.name} made too few steps or tokens to be measured")


if __name__ == "__main__":
    main()
