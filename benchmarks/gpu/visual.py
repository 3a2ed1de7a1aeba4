"""Whole runs of agents that see, on the GPUs that are visible: one for the learner, the others' engines.

--size tiny   `configs/visual_search_tiny.yaml`, as it is, with the pages service beside it
--size 3B     a random model of Qwen2.5-VL-3B's shape writes 256 tokens about pages of 600,000
              pixels: what a step, a push and the memory of both sides come to at real size
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import ROOT, Result, parser, rows, say
from benchmarks.gpu.training import Run, summary

SHAPE: dict[str, Any] = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [16, 24, 24],
        },
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 2048,
        "hidden_act": "silu",
    },
}
"""Of Qwen2.5-VL-3B, as its configuration on the hub has it."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAGE_SIDE = 776
GROUPS_PER_STEP, GROUP_SIZE = 8, 8


def make_model(folder: Path, tokenizer_folder: str, *, cpu: bool) -> Path:
    """Random weights, and another model's tokenizer with the tokens for images added."""
    import torch
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from raylearner.tiny.vision_model import CHAT_TEMPLATE

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"extra_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    text, vision = dict(SHAPE["text_config"]), dict(SHAPE["vision_config"])
    if cpu:
        text |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 6, 6]}
        vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
        vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2_5_VLConfig(
        text_config={**text, **ends, "bos_token_id": None, "vocab_size": len(tokenizer)},
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cpu" if cpu else "cuda"):
        torch.set_default_dtype(torch.float32 if cpu else torch.bfloat16)
        model = Qwen2_5_VLForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    say(parameters=sum(p.numel() for p in model.parameters()))
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 3136, "longest_edge": 1_003_520}, patch_size=14, merge_size=2
    ).save_pretrained(folder)
    return folder


def large(out: Path, tokenizer_folder: str, *, num_steps: int, cpu: bool) -> dict[str, Any]:
    """The configuration of a run on pages of the generator, each shown with its question."""
    from raylearner.services.corpora.visual_pages import Kind, write_visual_pages

    pages = out / "visual_3B-pages"
    side = 112 if cpu else PAGE_SIDE
    write_visual_pages(pages, kinds=[Kind.TABLES, Kind.LABELS], num_documents=24, side=side)
    length = 16 if cpu else 256
    return {
        "run": {"name": "visual-3B", "num_steps": num_steps, "checkpoint_every_steps": 0},
        "cluster": {"num_cpus": 4} if cpu else {},
        "model": {
            "kind": "pretrained",
            "path": str(make_model(out / "visual_3B-model", tokenizer_folder, cpu=cpu)),
        },
        "data": {
            "train": {
                "kind": "jsonl",
                "path": str(pages / "questions.jsonl"),
                "image_column": "image",
            }
        },
        "environment": {"kind": "single_turn"},
        "renderer": {
            "max_prompt_tokens": 1536,
            "max_response_tokens": length,
            "images": {"min_pixels": 3136, "max_pixels": 602_112},
        },
        "sampling": {"max_turn_tokens": length},
        "rewards": {"functions": [{"kind": "response_length", "target_tokens": length // 2}]},
        "actors": {
            "num_actors": 1,
            "max_concurrent_episodes": 8 if cpu else 128,
            "engine": {
                "kind": "vllm",
                "dtype": "float32" if cpu else "bfloat16",
                "max_model_tokens": 2048,
                "max_sequences": 8 if cpu else 128,
                "eager": True,
            },
        },
        "replay": {
            "groups_per_step": 1 if cpu else GROUPS_PER_STEP,
            "group_size": 2 if cpu else GROUP_SIZE,
            "max_staleness": 2,
        },
        "learner": {
            "learning_rate": 1e-6,
            "compute_dtype": "float32" if cpu else "bfloat16",
            "max_tokens_per_micro_batch": 4096 if cpu else 16_384,
            "activation_checkpointing": "selective",
        },
        "evaluation": {"every_steps": 0},
    }


def tiny(out: Path, *, cpu: bool) -> tuple[Path, list[str]]:
    """The pages that the tiny agent's questions are about, and the overrides that name them."""
    from raylearner.services.corpora.visual_pages import Kind, write_visual_pages

    pages = out / "visual-pages"
    write_visual_pages(pages, kinds=[Kind.COLOURS], num_documents=200)
    overrides = [
        f"data.train.path={pages / 'questions.jsonl'}",
        f"data.evaluation.path={pages / 'questions_held_out.jsonl'}",
        "evaluation.num_prompts=96",
    ]
    if cpu:
        overrides += ["model.warm_start.num_steps=20", "evaluation.num_prompts=4"]
        overrides += ["model.warm_start.num_demonstrations=32", "replay.groups_per_step=1"]
    return pages, overrides


def finish(run: Run, result: Result, *, timeout_s: float, per_step: int, skip: int) -> None:
    started = time.monotonic()
    code = run.wait(timeout_s=timeout_s)
    metrics = run.metrics()
    result.add(exit_code=code, total_s=time.monotonic() - started, tail=run.tail(30))
    result.add(
        evaluations=[
            {k: v for k, v in row.items() if isinstance(v, int | float)}
            for row in rows(run.folder / "eval.jsonl")
        ],
        hits=[row.get("rollout/reward/retrieval_hit/mean") for row in metrics],
        pixel_wait_s=[row.get("learner/pixel_wait_s") for row in metrics][-5:],
        last={k: v for k, v in (metrics[-1] if metrics else {}).items() if "/" in k},
        **summary(metrics, skip=skip, trajectories_per_step=per_step),
    )
    if code == 0:
        result.done()


def main() -> None:
    from benchmarks.agents import service

    args = parser(__doc__)
    args.add_argument("--size", choices=("tiny", "3B"), default="tiny")
    args.add_argument("--steps", type=int, default=None)
    arguments = args.parse_args()
    cpu, out = arguments.cpu, arguments.out
    if arguments.size == "3B":
        result = Result(out, "visual_3B")
        steps = arguments.steps or (2 if cpu else 10)
        config = large(out, arguments.model, num_steps=steps, cpu=cpu)
        run = Run(out / "visual_3B-run", config, cpu=cpu)
        per_step = GROUPS_PER_STEP * GROUP_SIZE
        finish(run, result, timeout_s=400, per_step=per_step, skip=2)
        return
    result = Result(out, "visual")
    pages, overrides = tiny(out, cpu=cpu)
    steps = arguments.steps or (2 if cpu else 60)
    with service("pages", "--folder", str(pages)) as url:
        overrides += [
            f"run.num_steps={steps}",
            f"environment.tools=[{{kind: page_search, url: '{url}', top_n: 1}}]",
        ]
        config_path = ROOT / "configs" / "visual_search_tiny.yaml"
        run = Run(out / "visual-run", config_path, *overrides, cpu=cpu)
        finish(run, result, timeout_s=400 if cpu else 200, per_step=64, skip=0)


if __name__ == "__main__":
    main()
