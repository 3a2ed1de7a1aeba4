"""Tokens per second, milliseconds per step and start of engines, by mode, on one GPU.

    python -m benchmarks.gpu.engine --out DIR --model SMOLLM2 [--only CASE,..] [--cpu]

Compared are vLLM itself (`vllm`), with and without log-probabilities, and raylearner's engine, by requests
and by whole episodes; eager, with CUDA graphs alone, without async scheduling; and two or four engines on
the GPU, which share the requests. Every case is a process with a time limit; `engine.json` is written after
each, and a case that is there already is not run again.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import ROOT, Result, end, environment, model_folder, parser

GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 258],
    }
}
"""Graphs of steps without prompts, and no compilation: what a shorter start would cost."""
Play = Callable[[int], Awaitable[int]]


@dataclass(frozen=True)
class Case:
    """One way to run a model of `size`; `num_engines` share the GPU."""

    name: str
    size: str
    is_bare: bool = False
    num_engines: int = 1
    eager: bool = False
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    is_profiled: bool = False
    """Writes where the time of the core's steps goes to `profile.txt`; its own times are then too long."""
    limit_s: float = 240.0


def cases() -> list[Case]:
    """Return all cases, the most important first."""
    small, large = "smollm2", "2.3B"
    return [
        Case("smollm2_vllm", small, is_bare=True),
        Case("smollm2", small),
        Case("smollm2_x4", small, num_engines=4),
        Case("smollm2_profile", small, is_profiled=True),
        Case("2.3B_vllm", large, is_bare=True),
        Case("2.3B", large),
        Case("smollm2_x2", small, num_engines=2),
        Case("2.3B_x2", large, num_engines=2),
        Case("smollm2_no_async", small, extra={"async_scheduling": False}),
        Case("2.3B_no_async", large, extra={"async_scheduling": False}),
        Case("smollm2_graphs", small, extra=GRAPHS),
        Case("2.3B_graphs", large, extra=GRAPHS),
        Case("smollm2_eager", small, eager=True),
        Case("2.3B_eager", large, eager=True),
    ]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--only", default="", help="names of cases, with commas")
    args.add_argument("--case", default="", help="run this one here")
    args.add_argument("--member", type=int, default=0, help="number of this engine of the case")
    arguments = args.parse_args()
    if arguments.case:
        case = next(case for case in cases() if case.name == arguments.case)
        asyncio.run(run(case, arguments))
        return
    only = {name for name in arguments.only.split(",") if name}
    path = arguments.out / "engine.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    result = Result(arguments.out, "engine")
    for case in cases():
        if case.name in before and "failed" not in before[case.name]:
            result.add(**{case.name: before[case.name]})
        elif not only or case.name in only:
            result.add(**{case.name: run_members(case, arguments)})
    result.done()


def run_members(case: Case, arguments: Any) -> dict[str, Any]:
    """Run each engine of a case in a process, at the same time; return their numbers together."""
    folder = arguments.out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.*"):
        left.unlink()
    command = [sys.executable, "-m", "benchmarks.gpu.engine", *sys.argv[1:], "--case", case.name]
    members = []
    for member in range(case.num_engines):
        with (folder / f"{member}.log").open("w") as log:
            members.append(
                subprocess.Popen(
                    [*command, "--member", str(member)],
                    cwd=ROOT,
                    env=environment(cpu=arguments.cpu),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + case.limit_s * (3 if arguments.cpu else 1)
    while any(m.poll() is None for m in members) and time.monotonic() < deadline:
        if any(m.poll() not in (None, 0) for m in members):
            break
        time.sleep(0.2)
    codes = [member.poll() for member in members]
    for member in members:
        end(member, grace_s=5.0)
    parts = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    found: dict[str, Any] = {} if codes == [0] * len(codes) else {"failed": codes}
    names = dict.fromkeys(name for part in parts for name in part)
    for name in names:
        values = [part[name] for part in parts if name in part]
        found[name] = sum(values) if name.startswith("tokens_per_s") else max(values)
    return found


async def run(case: Case, arguments: Any) -> None:
    """Measure this process's engine, after all engines of the case have started."""
    path = arguments.out / case.name / f"{arguments.member}.json"
    found: dict[str, float] = {}

    def add(**values: float) -> None:
        found.update(values)
        path.write_text(json.dumps(found))

    imported = time.monotonic()
    import vllm  # noqa: F401 - its time is not the engine's

    started = time.monotonic()
    size = "tiny" if arguments.cpu else case.size
    is_random = size != "smollm2"
    folder = model_folder(arguments.out, size, tokenizer=arguments.model) if is_random else None
    model = str(folder or arguments.model)
    num_tokens, counts = (192, (4,)) if arguments.cpu else (192, (64, 256))
    if case.is_profiled:
        profile_scheduler(path.with_name("profile.txt"))
    section = make_section(case, is_random=is_random, cpu=arguments.cpu)
    ways, close = await (start_bare if case.is_bare else start_ours)(section, model, num_tokens)
    add(import_s=started - imported, start_s=time.monotonic() - started)
    path.with_suffix(".ready").touch()
    await asyncio.to_thread(wait_for_all, case, path.parent)
    for count in counts:
        own = count // case.num_engines
        for way, play in ways.items():
            await asyncio.gather(*(play(8) for _ in range(own)))
            since = time.monotonic()
            tokens = sum(await asyncio.gather(*(play(num_tokens) for _ in range(own))))
            seconds = time.monotonic() - since
            add(
                **{
                    f"tokens_per_s_{way}_{count}": tokens / seconds,
                    f"ms_per_step_{way}_{count}": seconds / num_tokens * 1e3,
                }
            )
    await close()


def profile_scheduler(path: Path) -> None:
    """Let the next engine of this process profile its core."""
    from benchmarks.gpu import engine_profile
    from raylearner.actors.engines import vllm_arguments

    def chosen(section: Any) -> dict[str, Any]:
        name = engine_profile.ProfiledScheduler.__qualname__
        return scheduling(section) | {"scheduler_cls": f"{engine_profile.__name__}.{name}"}

    scheduling = vllm_arguments._scheduling_arguments
    vllm_arguments._scheduling_arguments = chosen
    os.environ[engine_profile.PROFILE_VARIABLE] = str(path)


def wait_for_all(case: Case, folder: Path) -> None:
    while len(list(folder.glob("*.ready"))) < case.num_engines:
        time.sleep(0.05)


def make_section(case: Case, *, is_random: bool, cpu: bool) -> Any:
    from raylearner.config.schema import VllmEngine

    load = {"load_format": "dummy"} if is_random else {}
    return VllmEngine(
        kind="vllm",
        dtype="float32" if cpu else "bfloat16",
        max_model_tokens=512,
        max_sequences=8 if cpu else 256 // case.num_engines,
        memory_fraction=round(0.85 / case.num_engines, 3),
        eager=case.eager or cpu,
        extra_arguments=load | case.extra,
    )


async def start_bare(section: Any, model: str, num_tokens: int) -> tuple[dict[str, Play], Any]:
    """Start vLLM with the same arguments, and neither our scheduler, sampler nor sizes of graphs."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylearner.actors.engines import vllm_process
    from raylearner.actors.engines.vllm_arguments import engine_arguments

    vllm_process.set_environment(kv_cache_gib=1)
    given = engine_arguments(
        section,
        model_path=model,
        seed=0,
        weight_backend="nccl",
        lora_rank=None,
        receives_beside_weights=False,
        max_images=1,
    )
    ours = (
        "worker_extension_cls",
        "weight_transfer_config",
        "scheduler_cls",
        "cudagraph_capture_sizes",
    )
    for name in ours:
        given.pop(name, None)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    ids = iter(range(10**9))

    def way(logprobs: int | None) -> Play:
        async def play(size: int) -> int:
            parameters = SamplingParams(
                temperature=1.0,
                max_tokens=size,
                ignore_eos=True,
                logprobs=logprobs,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            number = next(ids)
            prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids(number)}
            tokens = 0
            async for output in llm.generate(prompt, parameters, str(number)):
                tokens = len(output.outputs[0].token_ids)
            return tokens

        return play

    async def close() -> None:
        llm.shutdown()

    return {"no_logprobs": way(None), "logprobs": way(0)}, close


async def start_ours(section: Any, model: str, num_tokens: int) -> tuple[dict[str, Play], Any]:
    """Start our engine; it is asked by requests, and by episodes of one turn with the same prompts."""
    from raylearner.actors.engines.vllm import VllmEngine
    from raylearner.types import Sampling

    engine = await VllmEngine.start(
        section, model_path=model, seed=0, weight_transport="shared_files"
    )
    ids = iter(range(10**9))
    forced = {"ignore_eos": True}  # a turn is cut where it ends, after vLLM sampled it whole

    async def play(size: int) -> int:
        sampling = Sampling(max_tokens=size, extra_arguments=forced)
        await engine.generate(prompt_ids(next(ids)), sampling)
        return size

    episode = make_episode(engine, model, num_tokens)

    async def play_whole(size: int) -> int:
        await episode(next(ids), Sampling(max_tokens=size, extra_arguments=forced))
        return size

    return {"logprobs": play, "episodes": play_whole}, engine.close


def make_episode(engine: Any, model: str, num_tokens: int) -> Callable[[int, Any], Awaitable[None]]:
    from raylearner.actors.episode import EpisodeKit, play_episode
    from raylearner.config.environment import SingleTurn
    from raylearner.config.schema import RendererSection, RewardSection
    from raylearner.environments.catalogue import EnvironmentFactory
    from raylearner.observability.spans import Tracer
    from raylearner.rewards.scorer import Scorer
    from raylearner.tokenization.renderer import Renderer
    from raylearner.types import Claim, Message, Prompt

    kit = EpisodeKit(
        engine=engine,
        renderer=Renderer.from_pretrained(
            model, RendererSection(max_prompt_tokens=128, max_response_tokens=num_tokens)
        ),
        scorer=Scorer(RewardSection()),
        make_environment=EnvironmentFactory(SingleTurn(kind="single_turn")).make,
        tracer=Tracer("engine", is_enabled=False),
    )

    async def episode(number: int, sampling: Any) -> None:
        words = " ".join(str(i) for i in prompt_ids(number)[:16])
        prompt = Prompt(
            prompt_id=str(number), messages=(Message(role="user", content=words),), answer="1"
        )
        claim = Claim(
            group_id=number,
            sample_index=0,
            attempt=0,
            prompt=prompt,
            policy_version=0,
            seed=number,
        )
        (segment,) = await play_episode(kit, claim, sampling)
        if segment.error is not None:
            raise RuntimeError(segment.error)

    return episode


def prompt_ids(number: int) -> Sequence[int]:
    """Return 64 tokens that no other prompt begins with."""
    return [10 + number % 200, 10 + number // 200 % 200, *range(300, 362)]


if __name__ == "__main__":
    main()
