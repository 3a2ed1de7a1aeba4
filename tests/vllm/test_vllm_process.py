"""vLLM's processes: a failed start names its cause, and nothing outlives its owner."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engines import start_vllm

from raylearner import leftovers
from raylearner.actors.engines import vllm_process
from raylearner.errors import EngineError

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

WAIT_S = 60.0
OWNER = """
import asyncio, sys
from raylearner.actors.engines.vllm import VllmEngine
from raylearner.config.schema import VllmEngine as Section

async def main():
    section = Section(kind="vllm", dtype="float32", max_model_tokens=512)
    await VllmEngine.start(section, model_path=sys.argv[1], seed=0, weight_transport="shared_files")
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_missing_model_is_named() -> None:
    with pytest.raises(EngineError, match="/nowhere/model"):
        await start_vllm(Path("/nowhere/model"))


async def test_more_bans_than_the_default_runner_takes_choose_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_LOGIT_BIAS_TOKENS

    assert vllm_process.MAX_BANS == MAX_NUM_LOGIT_BIAS_TOKENS
    monkeypatch.setattr(os, "environ", {})
    vllm_process.set_environment(kv_cache_gib=1, num_banned=vllm_process.MAX_BANS)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    vllm_process.set_environment(kv_cache_gib=1, num_banned=vllm_process.MAX_BANS + 1)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.fixture
def owner(tied_checkpoint: Path, tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process with an engine of its own."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    root = str(Path(vllm_process.__file__).parents[3])
    with psutil.Popen(
        [sys.executable, str(script), str(tied_checkpoint)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process
        if process.is_running():
            process.kill()


async def test_a_failed_start_names_its_cause_and_no_process_outlives_its_owner(
    broken_checkpoint: Path, owner
) -> None:
    """Two starts side by side: one fails while loading, the other's owner is then killed."""
    before = set(vllm_process.children())
    with pytest.raises(EngineError, match="surprise"):
        await start_vllm(broken_checkpoint)
    assert set(vllm_process.children()) <= before

    children: list[psutil.Process] = []
    deadline = time.monotonic() + WAIT_S
    # The core and its worker, which watches the owner since before it loads the model.
    while not any("VLLM::Worker" in " ".join(child.cmdline()) for child in children):
        assert owner.is_running(), "the owner ended by itself"
        assert time.monotonic() < deadline, "no worker appeared"
        await asyncio.sleep(0.1)
        children = owner.children(recursive=True)
    assert len(children) >= 2
    segments: set[str] = set()
    while not segments:
        assert time.monotonic() < deadline, "the worker has mapped no shared memory"
        await asyncio.sleep(0.1)
        segments = {name for child in children for name in leftovers._mapped_segments(child.pid)}

    owner.kill()
    deadline = time.monotonic() + WAIT_S
    while left := [child for child in children if not is_gone(child)]:
        assert time.monotonic() < deadline, f"outlived their owner: {left}"
        await asyncio.sleep(0.1)
    assert not [name for name in segments if (leftovers.SHARED_MEMORY / name).exists()]
