"""Tiny models with their own tokenizer, and two engines for the whole session, one after another."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from checkpoints import VOCABULARY, make_checkpoint, make_model, make_probe
from engines import start_vllm
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from raylearner.actors.engines import vllm_process
from raylearner.actors.engines.vllm import VllmEngine
from raylearner.types import Completion, Sampling
from raylearner.weights.checksums import Checksum
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import WeightReceipt, WeightUpdate


class Lab:
    """One engine, and the learner's side of it: models by version, pushes, references."""

    def __init__(self, engine: VllmEngine, folder: Path, *, is_tied: bool) -> None:
        self.engine = engine
        self.is_tied = is_tied
        self.folder = folder
        self.version = 0
        self._models = {0: make_model(is_tied=is_tied)}

    def tokens(self, text: str) -> list[int]:
        return [VOCABULARY.index(character) for character in text]

    def everything_but(self, *kept: str) -> tuple[int, ...]:
        return tuple(i for i, text in enumerate(VOCABULARY) if text not in kept)

    def model(self, version: int) -> Qwen2ForCausalLM:
        """The policy at a version: other weights in every tensor."""
        return self._models.setdefault(version, make_model(is_tied=self.is_tied, seed=version))

    def update(
        self, version: int, *, without: str | None = None, should_recompute: bool = True
    ) -> WeightUpdate:
        model = self.model(version)
        return WeightUpdate(
            policy_version=version,
            transport="shared_files",
            payload=self.write(model, without=without),
            probe=make_probe(model, version, tolerance=1e-4),
            should_recompute=should_recompute,
        )

    def write(self, model: Qwen2ForCausalLM, *, without: str | None = None) -> dict[str, Any]:
        tensors = [(name, t) for name, t in model.named_parameters() if name != without]
        return write_weights(tensors, self.folder, self.version, torch.float32)

    def sums(self, model: Qwen2ForCausalLM) -> dict[str, Checksum]:
        return self.write(model)["checksums"]

    async def push(self, **arguments: Any) -> WeightReceipt:
        self.version += 1
        return await self.engine.receive(self.update(self.version, **arguments))

    def logits(self, version: int, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *(int(token) for token in token_ids)]])
        with torch.no_grad():
            return self.model(version)(ids).logits[0, len(prompt) - 1 : -1]

    def reference(
        self,
        version: int,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        sampling: Sampling | None = None,
    ) -> np.ndarray:
        """Log-probabilities by transformers, of the distribution that the settings describe."""
        sampling = sampling or Sampling()
        logits = self.logits(version, prompt, token_ids)
        logits[:, list(sampling.banned_token_ids)] = -torch.inf
        logits /= sampling.temperature or 1.0
        if sampling.top_k:
            smallest = logits.topk(sampling.top_k).values[:, -1:]
            logits[logits < smallest] = -torch.inf
        if sampling.top_p < 1:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            is_out = ordered.cumsum(-1) - ordered >= sampling.top_p
            logits[is_out.gather(-1, order.argsort(-1))] = -torch.inf
        chosen = torch.tensor([int(token) for token in token_ids])[:, None]
        return logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()

    def gap(
        self, prompt: Sequence[int], completion: Completion, sampling: Sampling | None = None
    ) -> float:
        """The largest |engine - transformers|, each token by the model of its own version."""
        assert len(completion.token_ids) > 0
        gaps = []
        for version in set(completion.policy_versions.tolist()):
            learner = self.reference(version, prompt, completion.token_ids.tolist(), sampling)
            is_own = completion.policy_versions == version
            gaps.append(np.abs(learner - completion.logprobs)[is_own].max())
        return float(max(gaps))


@pytest.fixture(scope="session")
def broken_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an unknown tensor: the core of its engine starts, and fails while loading."""
    folder = make_checkpoint(tmp_path_factory.mktemp("broken"), is_tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.surprise.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    """Parametrised with "tied" or "untied": pytest runs all tests of one engine, then the other's."""
    is_tied = request.param == "tied"
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(request.param), is_tied=is_tied)
    before = set(vllm_process.children())
    engine = await start_vllm(checkpoint)
    try:
        yield Lab(engine, tmp_path_factory.mktemp("weights"), is_tied=is_tied)
    finally:
        started = set(vllm_process.children()) - before
        await engine.close()
    assert started, "vLLM ran without processes of its own"
    assert not [process for process in started if process.is_running()]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
