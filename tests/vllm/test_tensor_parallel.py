"""An engine in two halves, on two GPUs or in two processes, takes new weights in both."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import END, VOCABULARY, make_checkpoint, make_model, make_probe
from engines import start_vllm

from raylearner.actors.engines.vllm import VllmEngine
from raylearner.errors import EngineDead, WeightTransferError
from raylearner.types import Sampling
from raylearner.weights.checksums import Checksum
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.transports.transport import run_task
from raylearner.weights.update import WeightUpdate
from raylearner.weights.verification import verify_weights

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="needs two GPUs or none, 1 is visible"
    ),
]


def refuse_withheld_shards(sent: Mapping[str, Checksum], reports: Sequence[Any]) -> None:
    """One rank's part of one tensor is named; a rank that has what the other one has is noticed."""
    with pytest.raises(WeightTransferError, match=r"embed_tokens\.weight is incomplete"):
        verify_weights(sent, [reports[0], reports[0]], policy_version=1)
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "lm_head.weight",
    ):
        left = {**reports[1], "parts": [part for part in reports[1]["parts"] if part[0] != name]}
        with pytest.raises(WeightTransferError, match=f"{name} is incomplete"):
            verify_weights(sent, [reports[0], left], policy_version=1)


async def refuse_after_the_death_of_the_core(engine: VllmEngine) -> None:
    """Requests in flight and later ones learn that the engine is dead, not that they failed."""
    core = next(p for p in engine._processes if "VLLM::EngineCore" in " ".join(p.cmdline()))
    died = asyncio.create_task(engine.died())
    running = [engine.generate([1, 2, 3], Sampling(max_tokens=300)) for _ in range(4)]
    running = [asyncio.create_task(request) for request in running]
    await asyncio.sleep(0.1)
    core.kill()
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert "core process" in await died
    assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
    with pytest.raises(EngineDead):
        await engine.generate([1, 2, 3], Sampling(max_tokens=2))


async def test_pushed_weights_reach_every_rank_and_the_death_of_an_engine_every_request(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", is_tied=False)
    engine = await start_vllm(
        checkpoint, max_sequences=16, memory_fraction=0.2, tensor_parallel_size=2
    )
    policy = make_model(is_tied=False, seed=1)
    weights = list(policy.named_parameters())
    update = WeightUpdate(
        policy_version=1,
        transport="shared_files",
        payload=write_weights(weights, tmp_path / "pushed", 1, torch.float32),
        probe=make_probe(policy, 1, tolerance=0.05),
    )
    try:
        prompt = [VOCABULARY.index(character) for character in "user: what is 1 + 1?"]
        sampling = Sampling(max_tokens=300, banned_token_ids=(VOCABULARY.index(END),))
        running = [asyncio.create_task(engine.generate(prompt, sampling)) for _ in range(4)]
        await asyncio.sleep(0.3)
        receipt = await engine.receive(update)
        log.info("%s", receipt)
        sent = update.payload["checksums"]
        assert receipt.num_verified == len(sent) == len(weights)
        reports = await run_task(engine._llm, "report")
        assert receipt.logprob_error < 0.05
        completions = await asyncio.gather(*running)
        assert {v for c in completions for v in c.policy_versions.tolist()} == {0, 1}
        refuse_withheld_shards(sent, reports)
        # A rank that kept what it had while the other one took the next version.
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 1e-6 * torch.randn_like(parameter).sign()
        payload = write_weights(policy.named_parameters(), tmp_path / "pushed", 2, torch.float32)
        receipt = await engine.receive(
            replace(
                update,
                policy_version=2,
                payload=payload,
                probe=make_probe(policy, 2, tolerance=0.05),
            )
        )
        assert receipt.num_verified == len(weights)
        later = await run_task(engine._llm, "report")
        for mixed in ([later[0], reports[1]], [reports[0], later[1]]):
            with pytest.raises(WeightTransferError, match=r"embed_tokens"):
                verify_weights(payload["checksums"], mixed, policy_version=2)
        await refuse_after_the_death_of_the_core(engine)
    finally:
        await engine.close()
