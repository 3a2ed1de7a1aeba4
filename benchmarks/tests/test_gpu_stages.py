"""Scripts that measure on GPUs, at reduced size on the CPU: a lease is no place to find them broken."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from loop import ENVIRONMENT, ROOT, TINY

from raylearner.config.schema import TinyModel
from raylearner.tiny.model import make_tiny_model

STAGES = (
    "throughput_eager_full",
    "head",
    "pushes_2.3B_1to1",
    "agreement_context",
    "broadcast",
    *(("images",) if find_spec("torchvision") else ()),  # without it vLLM shows none
)
"""One of each kind that starts no whole run, as other tests here do."""


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_stages_run_on_the_cpu_and_ranks_of_a_context_group_agree(tmp_path: Path) -> None:
    model = make_tiny_model(TinyModel.model_validate(TINY), tmp_path / "model", seed=3)
    out = tmp_path / "out"
    command = [sys.executable, "benchmarks/gpu_all.py", "--cpu", f"--only={','.join(STAGES)}"]
    command += ["--out", str(out), "--model", str(model)]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=380, check=False
    )
    ended = {
        line["ended"]: line["is_done"]
        for line in map(json.loads, done.stdout.splitlines())
        if "ended" in line
    }
    logs = "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in out.glob("*.stage.log"))
    assert set(ended) >= set(STAGES), logs
    assert all(ended.values()), logs
    found = json.loads((out / "all.json").read_text())
    assert found["agreement_context"]["float32"]["2 ranks vs 1"]["metrics"] < 1e-4
    assert found["pushes_2.3B_1to1"]["is_done"]
    assert "images" not in STAGES or found["images"]["holds"]
