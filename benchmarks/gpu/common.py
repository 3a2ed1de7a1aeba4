"""What the stages of `gpu_all.py` share: arguments, results that survive a kill, models of a size."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "2.3B": {
        "vocab_size": 49_152,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 49_152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}
"""Dense Qwen2-like models by size."""


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--out", type=Path, required=True, help="folder for this stage's results")
    found.add_argument("--model", required=True, help="SmolLM2 or the like, a directory")
    found.add_argument("--cpu", action="store_true", help="reduced size, on the CPU")
    return found


class Result:
    """One stage's numbers in a JSON file, written again whenever one is added."""

    def __init__(self, out: Path, name: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / f"{name}.json"
        self._started = time.monotonic()
        self.content: dict[str, Any] = {"stage": name, "is_done": False, "card": card()}

    def add(self, **values: Any) -> None:
        self.content |= values
        self.content["seconds"] = round(time.monotonic() - self._started, 1)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, default=float) + "\n")
        partial.replace(self._path)
        say(**values)

    def done(self) -> None:
        self.add(is_done=True)


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values, default=float) + "\n")
    sys.stdout.flush()


def card() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "cpu"


def visible_gpus() -> list[str]:
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [gpu for gpu in value.split(",") if gpu]


def environment(gpus: Sequence[str] | None = None, *, cpu: bool = False) -> dict[str, str]:
    """Of a child: the repository importable, the given GPUs visible, no network looked for."""
    env = dict(os.environ)
    paths = [
        str(ROOT),
        *(str(Path(p).resolve()) for p in env.get("PYTHONPATH", "").split(":") if p),
    ]
    env["PYTHONPATH"] = ":".join(dict.fromkeys(paths))
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("RAY_AUTH_MODE", "token")
    env.setdefault("RAY_raylet_start_wait_time_s", "120")
    env.pop("RAY_ADDRESS", None)
    if cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("OMP_NUM_THREADS", "1")
    elif gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


def end(process: "subprocess.Popen[Any]", *, grace_s: float = 20.0) -> None:
    """Ask a child's process group to end, then make it."""
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            try:
                os.killpg(process.pid, sign)
                process.wait(wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def model_folder(out: Path, size: str, *, tokenizer: str) -> Path:
    """A directory with the configuration of a model of that size and a tokenizer, without weights."""
    from transformers import AutoTokenizer, Qwen2Config

    folder = out / f"model-{size}"
    if not (folder / "config.json").exists():
        partial = out / f"model-{size}.{os.getpid()}"
        Qwen2Config(
            **SHAPES[size],
            max_position_embeddings=32_768,
            use_sliding_window=False,
            architectures=["Qwen2ForCausalLM"],
            dtype="bfloat16",
            bos_token_id=1,
            eos_token_id=2,
        ).save_pretrained(partial)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial)
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may be growing."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
