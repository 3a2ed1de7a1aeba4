"""Log-probabilities of 64 sampled trajectories: engine, learner and plain transformers, side by side.

Each variant of the engine runs in a process of its own, on a GPU of its own where there are enough:
it samples, and then the learner (each attention that runs there, packed and one by one) and
transformers (one sequence at a time) score what was sampled.
"""

import asyncio
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.gpu.common import ROOT, Result, end, environment, parser, rows, say, visible_gpus
from benchmarks.stories import write_prompts

VARIANTS = {
    "bf16_float32_head": ("bfloat16", "float32"),
    "bf16": ("bfloat16", "model"),
    "float32": ("float32", "model"),
}
Sequences = list[tuple[np.ndarray, int, np.ndarray]]
"""Token ids, length of the prompt, the engine's log-probabilities of the rest."""


async def sample(model: str, dtype: str, head: str, *, out: Any, cpu: bool) -> Sequences:
    from transformers import AutoTokenizer

    from raylearner.actors.engines.vllm import VllmEngine
    from raylearner.config.schema import VllmEngine as Section
    from raylearner.types import Sampling

    num, length = (6, 24) if cpu else (64, 256)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = write_prompts(
        out / f"parity-{dtype}-{head}.jsonl", num_prompts=num, shortest=20, longest=300
    )
    ids = []
    for row in rows(prompts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    section = Section(
        kind="vllm",
        dtype=dtype,
        head_dtype=head,
        max_model_tokens=512,
        max_sequences=64,
        memory_fraction=0.3,
    )
    started = time.monotonic()
    engine = await VllmEngine.start(
        section, model_path=model, seed=0, weight_transport="shared_files"
    )
    say(engine_start_s=time.monotonic() - started)
    sampling = Sampling(temperature=1.0, max_tokens=length)
    try:
        found = await asyncio.gather(*(engine.generate(p, sampling) for p in ids))
    finally:
        await engine.close()
    return [
        (np.concatenate([np.asarray(p), c.token_ids]).astype(np.int64), len(p), c.logprobs)
        for p, c in zip(ids, found, strict=True)
    ]


def score_learner(
    model: str,
    sequences: Sequences,
    *,
    dtype: str,
    attention: str,
    head: str,
    device: str,
    packed: bool,
) -> list[np.ndarray]:
    import torch

    from raylearner.learner.batch.micro_batch import PackedTokens
    from raylearner.learner.model import mesh
    from raylearner.learner.model.loading import load_sharded
    from raylearner.learner.model.policy import DTYPES, ModelOptions

    network = load_sharded(
        model,
        mesh.connect(device=device),
        dtype=torch.float32,
        compute_dtype=DTYPES[dtype],
        options=ModelOptions(attention=attention, is_head_exact=head == "float32"),
    )
    found: list[np.ndarray] = []
    for start in range(0, len(sequences), 32 if packed else 1):
        part = sequences[start : start + (32 if packed else 1)]
        tokens = PackedTokens.of(
            [ids for ids, _, _ in part],
            [np.arange(len(ids)) >= prompt for ids, prompt, _ in part],
            device=device,
        )
        with torch.no_grad():
            scores = network(tokens)
        rest = scores.logprobs.cpu().numpy()
        for ids, prompt, _ in part:
            found.append(rest[prompt : len(ids)])
            rest = rest[len(ids) :]
    return found


def score_transformers(
    model: str, sequences: Sequences, *, dtype: str, attention: str, device: str
) -> list[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    network.eval()
    found = []
    for ids, prompt, _ in sequences:
        tensor = torch.from_numpy(ids).to(device)
        with torch.no_grad():
            scores = network(tensor[None]).logits[0, :-1].float().log_softmax(-1)
        own = scores.gather(1, tensor[1:, None]).squeeze(1)
        found.append(own[prompt - 1 :].cpu().numpy())
    return found


def gap(a: list[np.ndarray], b: list[np.ndarray]) -> dict[str, float]:
    difference = np.abs(np.concatenate(a).astype(np.float64) - np.concatenate(b))
    return {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "tokens": len(difference),
    }


def run_variant(name: str, arguments: Any) -> None:
    result = Result(arguments.out, f"parity_{name}")
    device = "cpu" if arguments.cpu else "cuda"
    dtype, head = VARIANTS[name]
    sequences = asyncio.run(
        sample(arguments.model, dtype, head, out=arguments.out, cpu=arguments.cpu)
    )
    engine = [logprobs for _, _, logprobs in sequences]
    result.add(
        num_trajectories=len(sequences),
        num_sampled_tokens=sum(map(len, engine)),
        longest=max(len(ids) for ids, _, _ in sequences),
    )
    attentions = ["sdpa"]
    if device == "cuda" and dtype == "bfloat16":
        import importlib.util

        attentions = ["varlen", "sdpa"]
        attentions += ["flash_attn"] if importlib.util.find_spec("flash_attn") else []
    table: dict[str, Any] = {}
    scored: dict[str, list[np.ndarray]] = {}

    def attempt(label: str, call: Any) -> None:
        try:
            scored[label] = call()
            table[f"engine vs {label}"] = gap(engine, scored[label])
        except Exception as error:
            table[f"engine vs {label}"] = f"{type(error).__name__}: {error}"[:400]
        result.add(table=table)

    for attention in attentions:
        for head_dtype in ("float32", "compute") if dtype == "bfloat16" else ("float32",):
            options = {"dtype": dtype, "attention": attention, "head": head_dtype, "device": device}
            label = f"learner {attention}" + ("" if head_dtype == "float32" else " own head")
            for packed in (True, False):
                attempt(
                    f"{label} {'packed' if packed else 'one by one'}",
                    lambda o=options, p=packed: score_learner(
                        arguments.model, sequences, packed=p, **o
                    ),
                )
    for attention in ("sdpa", "eager"):
        attempt(
            f"transformers {attention}",
            lambda a=attention: score_transformers(
                arguments.model, sequences, dtype=dtype, attention=a, device=device
            ),
        )
    if dtype != "float32":
        attempt(
            "learner float32",
            lambda: score_learner(
                arguments.model,
                sequences,
                dtype="float32",
                attention="sdpa",
                head="float32",
                device=device,
                packed=True,
            ),
        )
    for label in list(scored):
        other = label.replace("packed", "one by one")
        if label.endswith("packed") and other in scored:
            table[f"{label} vs one by one"] = gap(scored[label], scored[other])
    for label in [found for found in scored if found.endswith("packed")]:
        if "transformers sdpa" in scored:
            table[f"{label} vs transformers sdpa"] = gap(scored[label], scored["transformers sdpa"])
    result.add(table=table)
    result.done()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--variant", choices=VARIANTS)
    arguments = args.parse_args()
    if arguments.variant:
        run_variant(arguments.variant, arguments)
        return
    result = Result(arguments.out, "parity")
    gpus = visible_gpus()
    names = ["float32"] if arguments.cpu else list(VARIANTS)
    running = {}
    try:
        for index, name in enumerate(names):
            gpu = [gpus[index % len(gpus)]] if gpus else None
            running[name] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.parity", *sys.argv[1:], "--variant", name],
                env=environment(gpu, cpu=arguments.cpu),
                cwd=ROOT,
                start_new_session=True,
            )
            if gpus and len(gpus) < len(names):
                running[name].wait()
        result.add(exit_codes={name: process.wait() for name, process in running.items()})
    finally:
        for process in running.values():
            end(process)
    if not any(result.content["exit_codes"].values()):
        result.done()


if __name__ == "__main__":
    main()
