"""Run directories as a run leaves them, written directly."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

VOCABULARY = (
    "<|im_start|>",
    "<|im_end|>",
    "user",
    "assistant",
    "\n",
    "1+1?",
    "<calc>1+1</calc>",
    "2",
)


def make_record(**changes: Any) -> dict[str, Any]:
    """Return a trajectory of one turn, three tokens long."""
    return {
        "prompt_id": "p",
        "group_id": 0,
        "sample_index": 1,
        "segment": 0,
        "source": "sums",
        "reward": 0.5,
        "rewards": {"exact_answer": 0.5},
        "advantage": 0.25,
        "prompt": "1+1?",
        "text": "2",
        "stop_reason": "answer",
        "error": None,
        "turns": [
            {"start": 1, "end": 3, "reply_end": 3, "text": "2", "tool": None, "is_valid": True}
        ],
        "token_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "train_mask": [False, True, False],
        "behavior_logprobs": [None, -0.5, -1.0],
        "learner_logprobs": [None, -0.6, -1.0],
        "policy_versions": [-1, 3, 4],
        "metrics": {},
        **changes,
    }


def chat_record(**changes: Any) -> dict[str, Any]:
    """Return a trajectory with a tool call, in tokens of `VOCABULARY` and the markup of ChatML."""
    prompt = [0, 2, 4, 5, 1, 4, 0, 3, 4]
    reply = [1, 4, 0, 2, 4, 7, 1, 4, 0, 3, 4]
    ids = [*prompt, 6, *reply, 7]
    sampled = [i in (9, 21) for i in range(len(ids))]
    text = "".join(VOCABULARY[i] for i in ids)
    return make_record(
        prompt=text[: text.index("<calc>")],
        text="<calc>1+1</calc>22",
        token_ids=ids,
        loss_mask=sampled,
        train_mask=sampled,
        behavior_logprobs=[-0.25 if s else None for s in sampled],
        learner_logprobs=[-0.5 if s else None for s in sampled],
        policy_versions=[3 if s else -1 for s in sampled],
        turns=[
            {
                "start": 9,
                "end": 10,
                "reply_end": 21,
                "text": "<calc>1+1</calc>",
                "reply": "2",
                "tool": "calculator",
                "is_valid": True,
            },
            {"start": 21, "end": 22, "reply_end": 22, "text": "2", "tool": None, "is_valid": True},
        ],
        **changes,
    )


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    folder: Path,
    *,
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    num_steps: int = 2,
    evaluations: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write a run of `num_steps` steps, with the trajectories of some of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        f"run:\n  name: quickstart\n  num_steps: {num_steps}\nmodel:\n  kind: tiny\n"
    )
    rows = [
        {
            "step": step,
            "policy_version": step,
            "time_s": 2.0 * step,
            "rollout/reward/mean": 0.1 * step,
        }
        for step in range(1, num_steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    for name, found in (("trajectories", steps), ("evaluations", evaluations or {})):
        for step, records in found.items():
            write_lines(folder / name / f"step_{step:06d}.jsonl", records)
    return folder


def save_tokenizer(run_dir: Path, vocabulary: Iterable[str] = VOCABULARY) -> None:
    (run_dir / "model").mkdir(exist_ok=True)
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    tokenizer.save(str(run_dir / "model" / "tokenizer.json"))


def write_sweep(folder: Path) -> Path:
    """Write a sweep of two losses by two learning rates by two seeds, with a run for each trial."""
    points = [
        {
            "seed": seed,
            "num_steps": 3,
            "values": {"learner.loss": {"kind": loss}, "learner.learning_rate": rate},
        }
        for loss in ("ppo", "gspo")
        for rate in (0.001, 0.01)
        for seed in (0, 1)
    ]
    trials: list[dict[str, Any]] = []
    for number, point in enumerate(points):
        write_run(folder / "trials" / f"{number:03d}", steps={}, num_steps=3)
        rate = 0.3 if point["values"]["learner.learning_rate"] == 0.01 else 0.0
        value = 0.5 + rate + 0.01 * point["seed"] - 0.1 * (number // 4)
        trials.append(
            {
                "number": number,
                "status": "done",
                "num_attempts": 1,
                "submission_id": None,
                "step": 3,
                "value": value,
                "failed_fraction": 0.0,
                "error": None,
            }
        )
    metric = {"key": "rollout/reward/mean", "goal": "max", "last_steps": 1}
    record = {
        "plan": "0",
        "name": folder.name,
        "metric": metric,
        "points": points,
        "trials": trials,
    }
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder
