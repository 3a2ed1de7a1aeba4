"""An engine in two halves, on two GPUs or in two processes, takes new weights in both."""

import asyncio
import logging
from pathlib import Path

import pytest
import torch
from checkpoints import END, VOCABULARY, make_checkpoint, make_model, make_probe

from raylearner.actors.vllm_engine import VllmEngine
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.types import Sampling, WeightUpdate
from raylearner.weights.shared_files import write_weights

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="needs two GPUs or none, 1 is visible"
    ),
]


async def test_pushed_weights_reach_every_rank_of_an_engine(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", is_tied=False)
    section = VllmEngineSection(
        kind="vllm",
        dtype="float32",
        max_model_tokens=512,
        max_sequences=16,
        memory_fraction=0.2,
        tensor_parallel_size=2,
    )
    engine = VllmEngine(
        section, model_path=str(checkpoint), seed=0, weight_transport="shared_files"
    )
    policy = make_model(is_tied=False, seed=1)
    weights = list(policy.named_parameters())
    update = WeightUpdate(
        policy_version=1,
        transport="shared_files",
        payload=write_weights(weights, tmp_path / "pushed", 1, torch.float32),
        probe=make_probe(policy, 1, tolerance=0.05),
    )
    await engine.start()
    try:
        prompt = [VOCABULARY.index(character) for character in "user: what is 1 + 1?"]
        sampling = Sampling(max_tokens=300, banned_token_ids=(VOCABULARY.index(END),))
        running = [asyncio.create_task(engine.generate(prompt, sampling)) for _ in range(4)]
        await asyncio.sleep(0.3)
        receipt = await engine.receive(update)
        log.info("%s", receipt)
        assert receipt.proof_gap < 0.05
        completions = await asyncio.gather(*running)
        assert {v for c in completions for v in c.policy_versions.tolist()} == {0, 1}
    finally:
        await engine.close()
