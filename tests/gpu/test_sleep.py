"""An engine that shares a GPU: its memory is free while it sleeps, and IPC weights wake it."""

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import END, VOCABULARY, make_checkpoint, make_model, make_probe
from engines import start_vllm
from transformers import Qwen2ForCausalLM

from raylearner.types import Sampling
from raylearner.weights.transports.ipc import IpcShare
from raylearner.weights.update import WeightUpdate

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 2**30


@pytest.mark.parametrize("eager", [True, False])
async def test_memory_is_free_in_sleep_and_running_requests_go_on(
    tmp_path: Path, *, eager: bool
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", is_tied=True)
    engine = await start_vllm(
        checkpoint,
        weight_transport="ipc",
        actor_id="engine",
        memory_fraction=0.3,
        sleep=True,
        eager=eager,
    )
    share = IpcShare()
    try:
        prompt = [VOCABULARY.index(character) for character in "user: what is 1 + 1?"]
        sampling = Sampling(max_tokens=400, banned_token_ids=(VOCABULARY.index(END),))
        running = [asyncio.create_task(engine.generate(prompt, sampling)) for _ in range(8)]
        await asyncio.sleep(0.5)
        awake = torch.cuda.mem_get_info()[0]
        await engine.sleep()
        freed = (torch.cuda.mem_get_info()[0] - awake) / GIB
        log.info("sleep frees %.1f GiB", freed)
        assert freed > 0.2 * torch.cuda.mem_get_info()[1] / GIB
        assert not any(task.done() for task in running)
        policy = make_model(is_tied=True, seed=1).cuda()
        update = make_update(policy, share)
        receipt = await engine.receive(update)
        log.info("%s", receipt)
        assert receipt.logprob_error < 0.05
        share.release()
        assert torch.cuda.mem_get_info()[0] / GIB < awake / GIB + 1
        completions = await asyncio.gather(*running)
        assert {v for c in completions for v in c.policy_versions.tolist()} == {0, 1}
        for completion in completions:
            ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device="cuda")
            with torch.no_grad():
                logits = policy(ids).logits[0, len(prompt) - 1 : -1]
            logits[:, VOCABULARY.index(END)] = -torch.inf
            mine = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
            is_new = completion.policy_versions == 1
            assert np.abs(mine.numpy() - completion.logprobs)[is_new].max() < 0.05
    finally:
        await engine.close()


def make_update(policy: Qwen2ForCausalLM, share: IpcShare) -> WeightUpdate:
    weights = [(name, p.detach()) for name, p in policy.named_parameters()]
    return WeightUpdate(
        policy_version=1,
        transport="ipc",
        payload=share.share(weights, torch.float32, members=["engine"]),
        probe=make_probe(policy, 1, tolerance=0.05),
        is_collective=True,
    )
