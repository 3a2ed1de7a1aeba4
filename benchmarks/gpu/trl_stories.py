"""The stories of `benchmarks/stories.py` under TRL's GRPO trainer, synchronous and colocated.

    python -m benchmarks.gpu.trl_stories --out DIR --model SMOLLM2 [--seconds 60] [--sleep]

needs `trl` and `accelerate`. One training process and one vLLM engine share every visible GPU; model,
prompts, reward, lengths, group size, trajectories of a step, learning rate and precision are those of
`stories`. Gradient checkpointing, the reference model and logging of texts are off.
"""

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.common import ROOT, Result, end, environment, mean, parser, visible_gpus
from benchmarks.stories import length_score, write_prompts

PER_STEP = 64
GROUP = 8


def arguments_of(argv: list[str] | None = None) -> Any:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=60.0, help="after the fifth step")
    args.add_argument("--sleep", action="store_true", help="engines sleep while the learner steps")
    args.add_argument("--share", type=float, default=0.4, help="of a GPU's memory for the engine")
    args.add_argument("--name", default="trl_stories")
    args.add_argument("--rank", action="store_true", help="be one of the training processes")
    return args.parse_args(argv)


def train(arguments: Any) -> None:
    """Train as one rank; the first writes the time and the numbers of every step."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cpu = arguments.cpu
    ranks = int(os.environ["WORLD_SIZE"])
    longest = 64 if cpu else 1024
    prompts = load_dataset("json", data_files=str(arguments.out / f"{arguments.name}.jsonl"))
    data = prompts["train"].map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]},
        remove_columns=["prompt_id"],
    )

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            length_score(texts[0]["content"], wanted)
            for texts, wanted in zip(completions, answer, strict=True)
        ]

    result = Result(arguments.out, arguments.name) if os.environ["RANK"] == "0" else None
    steps: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if result is None or "reward" not in (logs or {}):
                return
            steps.append({"time_s": time.monotonic(), "reward": logs["reward"]} | numbers(logs))
            kept = steps[4:]
            if len(kept) > 1:
                seconds = kept[-1]["time_s"] - kept[0]["time_s"]
                result.add(
                    num_steps=len(steps),
                    seconds_measured=seconds,
                    trained_trajectories_per_s=PER_STEP * (len(kept) - 1) / seconds,
                    **{key: mean([step[key] for step in kept]) for key in kept[0]},
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if len(steps) > 5 and steps[-1]["time_s"] - steps[4]["time_s"] > arguments.seconds:
                control.should_training_stop = True

    config = GRPOConfig(
        output_dir=str(arguments.out / f"{arguments.name}-run"),
        per_device_train_batch_size=PER_STEP // ranks,
        num_generations=GROUP,
        max_completion_length=longest,
        max_steps=2 if cpu else 400,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=not cpu,
        use_cpu=cpu,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        log_completions=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.share,
        vllm_max_model_length=256 if cpu else 1152,
        vllm_enable_sleep_mode=arguments.sleep,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        callbacks=[Watch()],
    )
    trainer.train()
    if result is not None:
        result.done()


def numbers(logs: dict[str, Any]) -> dict[str, float]:
    wanted = ("completions/mean_length", "completions/clipped_ratio", "step_time", "kl")
    return {key: float(logs[key]) for key in wanted if key in logs}


def main() -> None:
    arguments = arguments_of()
    arguments.out = arguments.out.resolve()
    if arguments.rank:
        train(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_prompts(
        arguments.out / f"{arguments.name}.jsonl",
        num_prompts=4000,
        shortest=3 if arguments.cpu else 30,
        longest=30 if arguments.cpu else 600,
    )
    ranks = 1 if arguments.cpu else max(1, len(visible_gpus()))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", "-m", "benchmarks.gpu.trl_stories", *sys.argv[1:], "--rank"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(cpu=arguments.cpu), start_new_session=True
    )
    try:
        process.wait(arguments.seconds + 240)
    except subprocess.TimeoutExpired:
        pass
    finally:
        end(process)


if __name__ == "__main__":
    main()
