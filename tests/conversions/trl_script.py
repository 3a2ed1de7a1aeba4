"""A script with TRL's trainer; it is read and never run."""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script must not run")

MODEL = "Qwen/Qwen3-0.6B"
GROUP = 4 * 2
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=3e-6)
args = parser.parse_args()


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


dataset = load_dataset("owner/tldr", split="train")
config = GRPOConfig(
    output_dir=f"runs/{MODEL.lower()}",
    learning_rate=args.learning_rate,
    num_generations=GROUP,
    per_device_train_batch_size=8,
    max_completion_length=256,
    loss_type="cispo",
    epsilon_high=5.0,
    importance_sampling_level="token",
    lr_scheduler_type="constant_with_warmup",
    max_steps=50,
    chat_template_kwargs={"enable_thinking": False},
)
trainer = GRPOTrainer(
    model=MODEL,
    args=config,
    reward_funcs=[reward_len, "owner/reward-model"],
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
