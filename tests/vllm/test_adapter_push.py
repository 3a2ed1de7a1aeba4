"""LoRA adapters land alone, under running generations, in the place of the one before."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from checkpoints import VOCABULARY, make_checkpoint, make_model, make_probe
from engines import start_vllm

from raylearner.actors.engines.vllm import VllmEngine
from raylearner.config.learner import LoraSection
from raylearner.errors import WeightTransferError
from raylearner.learner.model import lora
from raylearner.types import Completion, Sampling
from raylearner.weights.transports import discard_files
from raylearner.weights.transports.adapter import write_adapter
from raylearner.weights.update import Probe, WeightReceipt, WeightUpdate

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
RUNNING = Sampling(max_tokens=300, banned_token_ids=(1,))
SECTION = LoraSection(rank=4, alpha=16)


class AdapterLab:
    """An engine of the base model, and adapters of one model by version."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.model = make_model(is_tied=True)
        lora.inject(self.model, SECTION, base_dtype=torch.float32)
        self.payloads: list[dict] = []

    def set_version(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if lora.is_adapter(name):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def logprobs(
        self, version: int, token_ids: Sequence[int], first: int, banned: Sequence[int] = ()
    ) -> np.ndarray:
        self.set_version(version)
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = self.model(ids).logits[0]
        logits[:, list(banned)] = -torch.inf
        logprobs = logits.log_softmax(-1)
        return logprobs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].numpy()

    def gap(self, prompt: Sequence[int], completion: Completion) -> float:
        tokens = [*prompt, *completion.token_ids.tolist()]
        gaps = []
        for version in np.unique(completion.policy_versions).tolist():
            mine = self.logprobs(version, tokens, len(prompt), RUNNING.banned_token_ids)
            own = completion.policy_versions == version
            gaps.append(np.abs(mine - completion.logprobs)[own].max())
        return float(max(gaps))

    def write(self, version: int) -> dict:
        self.set_version(version)
        return write_adapter(
            lora.adapter_weights(self.model, torch.float32),
            lora.adapter_config(self.model, base="base"),
            self.folder,
            version,
            torch.float32,
        )

    async def push(self, version: int, *, probe_of: int | None = None) -> WeightReceipt:
        self.set_version(version if probe_of is None else probe_of)
        probe = make_probe(self.model, version, tolerance=1e-4)
        payload = self.write(version)
        self.payloads.append(payload)
        return await self.engine.receive(
            WeightUpdate(policy_version=version, transport="adapter", payload=payload, probe=probe)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdapterLab]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("base"), is_tied=True)
    engine = await start_vllm(checkpoint, weight_transport="adapter", lora_rank=4)
    yield AdapterLab(engine, tmp_path_factory.mktemp("adapters"))
    await engine.close()


async def test_each_token_has_the_logprob_of_its_own_adapter(lab: AdapterLab) -> None:
    await lab.push(1)
    prompt = [VOCABULARY.index(c) for c in "user: what is 1 + 1? " * 8]
    receipts, version, completions = [], 1, []
    for _ in range(5):  # on a busy machine a push may miss all requests
        running = [asyncio.create_task(lab.engine.generate(prompt, RUNNING)) for _ in range(8)]
        await asyncio.sleep(0.2)
        while not all(task.done() for task in running):
            version += 1
            receipts.append(await lab.push(version))
        completions = await asyncio.gather(*running)
        if any(len(np.unique(c.policy_versions)) >= 2 for c in completions):
            break
    for payload in lab.payloads[:-1]:
        discard_files(payload)  # nothing may need them any more
    assert any(len(np.unique(c.policy_versions)) >= 2 for c in completions)
    assert max(lab.gap(prompt, c) for c in completions) < 1e-4
    assert max(receipt.logprob_error for receipt in receipts) < 1e-4
    assert all(0 < receipt.update_s < receipt.pause_s for receipt in receipts)
    later = await lab.engine.generate(prompt, RUNNING)
    assert set(later.policy_versions.tolist()) == {version}
    assert lab.gap(prompt, later) < 1e-4


async def test_adapters_are_verified_in_their_slots(lab: AdapterLab) -> None:
    receipt = await lab.push(2000)
    names = [name for name, _ in lora.adapter_weights(lab.model, torch.float32)]
    assert receipt.num_verified == len(names)
    llm, held = lab.engine._llm, lab.payloads[-1]
    payload = AdapterLab(lab.engine, lab.folder).write(2001)

    def update(path: str, sums: dict) -> WeightUpdate:
        return WeightUpdate(
            policy_version=2001,
            transport="adapter",
            payload={"path": path, "checksums": sums},
            probe=Probe(token_ids=(), logprobs=(), tolerance=1.0),
        )

    receiver = lab.engine._weights
    # The file is the new one, and the engine never loaded it.
    with pytest.raises(WeightTransferError, match="not in its slot"):
        await receiver.verify(llm, update(payload["path"], payload["checksums"]))
    # The file is not what was sent.
    with pytest.raises(WeightTransferError, match="another checksum"):
        await receiver.verify(llm, update(held["path"], payload["checksums"]))
    one = {**held["checksums"], names[3]: payload["checksums"][names[3]]}
    with pytest.raises(WeightTransferError) as caught:
        await receiver.verify(llm, update(held["path"], one))
    assert [name for name in names if name in str(caught.value)] == [names[3]]


async def test_the_probe_detects_another_adapter(lab: AdapterLab) -> None:
    """The last test of this engine, which then has failed."""
    with pytest.raises(WeightTransferError, match="policy version 1001"):
        await lab.push(1001, probe_of=1000)
