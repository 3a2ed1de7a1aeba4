"""Images under vLLM: what it scores equals the learner's, before, after and across pushes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_glm4v, make_qwen3
from pictures import (
    PAGES,
    change_tower,
    learner_logprobs,
    make_folder,
    make_renderer,
    make_update,
    play,
    start_engine,
)

from raylearner.actors.engines.vllm import VllmEngine
from raylearner.errors import WeightTransferError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.loading import load_model
from raylearner.learner.model.policy import PackedModel
from raylearner.types import Completion, Sampling

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's vision models need torchvision"
)

TOLERANCE = 1e-4
NUM_REQUESTS = 12
DELAYS_S = (0.5, 1.0, 2.0, 0.2, 0.1)
"""Of pushes, until one meets requests that have begun and not ended; machines differ in speed."""
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": lambda folder: make_folder(folder / "model"),
    "qwen3_vl": lambda folder: make_qwen3(make_folder(folder / "source"), folder / "model"),
    "glm4v": lambda folder: make_glm4v(folder / "model"),
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_score_alike_before_and_after_a_push_that_changes_the_tower(
    tmp_path: Path, family: str
) -> None:
    folder = FAMILIES[family](tmp_path)
    renderer = make_renderer(folder)
    reader = ImageReader.from_pretrained(str(folder))
    assert reader is not None
    model = load_model(str(folder), dtype=torch.float32)
    engine = await start_engine(folder)
    try:
        before = await play(engine, renderer, temperature=0.7)
        first = learner_logprobs(model, reader, before, temperature=0.7)
        np.testing.assert_allclose(
            before.behavior_logprobs[before.loss_mask], first, rtol=0, atol=TOLERANCE
        )
        change_tower(model)
        receipt = await engine.receive(make_update(model, reader, folder, 1, tolerance=TOLERANCE))
        assert 0 < receipt.logprob_error < TOLERANCE
        after = await play(engine, renderer, temperature=0.7)
        second = learner_logprobs(model, reader, after, temperature=0.7)
        np.testing.assert_allclose(
            after.behavior_logprobs[after.loss_mask], second, rtol=0, atol=TOLERANCE
        )
        assert set(after.policy_versions[after.loss_mask].tolist()) == {1}
        stale = learner_logprobs(model, reader, before, temperature=0.7)
        assert np.abs(stale - first).max() > 100 * TOLERANCE
        if family == "qwen2_5_vl":
            await _push_under_running_requests(engine, model, reader, folder)
            await _lose_images(engine, reader)
            await _keep_the_old_tower(engine, model, reader, folder)
    finally:
        await engine.close()


def _prompts(reader: ImageReader) -> list[list[int]]:
    rng = np.random.default_rng(0)
    block = reader.probe([0])[1]
    return [
        [*block, *rng.integers(30, 200, 5).tolist(), *block, *rng.integers(30, 200, 5).tolist()]
        for _ in range(NUM_REQUESTS)
    ]


async def _generate(engine: VllmEngine, reader: ImageReader, max_tokens: int) -> list[Completion]:
    """Of prompts with two of three images each."""
    images = [reader.probe([number])[0] for number in range(len(PAGES))]
    sampling = Sampling(max_tokens=max_tokens, banned_token_ids=reader.banned_token_ids)
    return await asyncio.gather(
        *(
            engine.generate(
                ids, replace(sampling, seed=n), images=(images[n % 3], images[(n + 1) % 3])
            )
            for n, ids in enumerate(_prompts(reader))
        )
    )


async def _push_under_running_requests(
    engine: VllmEngine, model: PackedModel, reader: ImageReader, folder: Path
) -> None:
    """Each token is scored by the version that sampled it, which saw the images with its own tower."""
    for delay_s in DELAYS_S:
        if await _push_after(delay_s, engine, model, reader, folder):
            return
    pytest.fail(f"no push met a running request after {DELAYS_S} s")


async def _push_after(
    delay_s: float, engine: VllmEngine, model: PackedModel, reader: ImageReader, folder: Path
) -> int:
    """How many completions hold tokens of both versions."""
    old = load_model(str(folder), dtype=torch.float32)
    old.load_state_dict(model.state_dict())
    new = engine.policy_version + 1
    running = asyncio.create_task(_generate(engine, reader, 400))
    await asyncio.sleep(delay_s)
    change_tower(model)
    await engine.receive(make_update(model, reader, folder, new, tolerance=TOLERANCE))
    completions = await running
    images = [reader.probe([number])[0] for number in range(len(PAGES))]
    num_mixed = 0
    for n, (ids, completion) in enumerate(zip(_prompts(reader), completions, strict=True)):
        shown = (images[n % 3], images[(n + 1) % 3])
        prompt = reader.expand(ids, shown)
        whole = np.concatenate([prompt, completion.token_ids])
        tokens = PackedTokens.of(
            [whole], [np.arange(len(whole)) >= len(prompt)], reader=reader, images=[shown]
        )
        by_old, by_new = (
            scorer.score(tokens).logprobs[len(prompt) :].numpy() for scorer in (old, model)
        )
        is_new = completion.policy_versions == new
        num_mixed += 0 < is_new.sum() < len(is_new)
        expected = np.where(is_new, by_new, by_old)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)
    return num_mixed


async def _lose_images(engine: VllmEngine, reader: ImageReader) -> None:
    """As after a request that was cancelled on its way: the core lacks what it is believed to hold."""
    assert engine._llm is not None
    await engine._llm.engine_core.reset_mm_cache_async()
    assert all(len(completion.token_ids) for completion in await _generate(engine, reader, 4))


async def _keep_the_old_tower(
    engine: VllmEngine, model: PackedModel, reader: ImageReader, folder: Path
) -> None:
    """Weights of which the tower's stayed behind are noticed, since a probe shows an image."""
    new = engine.policy_version + 1
    behind = make_update(model, reader, folder, new, tolerance=TOLERANCE)
    change_tower(model)
    probe = make_update(model, reader, folder, new + 1, tolerance=TOLERANCE).probe
    with pytest.raises(WeightTransferError, match=f"policy version {new}"):
        await engine.receive(replace(behind, probe=probe))
