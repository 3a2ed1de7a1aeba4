"""Images under vLLM: log-probabilities equal the learner's, before and after the tower changes."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import (
    change_tower,
    learner_logprobs,
    make_engine,
    make_folder,
    make_renderer,
    make_update,
    play,
)

from raylearner.learner.images import ImageReader
from raylearner.learner.loading import load_model

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's vision models need torchvision"
)

TOLERANCE = 1e-4


async def test_images_score_alike_before_and_after_a_push_that_changes_the_tower(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path / "model")
    renderer = make_renderer(folder)
    reader = ImageReader.from_pretrained(str(folder))
    assert reader is not None
    model = load_model(str(folder), dtype=torch.float32)
    engine = make_engine(folder)
    await engine.start()
    try:
        before = await play(engine, renderer, temperature=0.7)
        first = learner_logprobs(model, reader, before, temperature=0.7)
        np.testing.assert_allclose(
            before.behavior_logprobs[before.loss_mask], first, rtol=0, atol=TOLERANCE
        )
        change_tower(model)
        await engine.receive(make_update(model, reader, folder, 1, tolerance=TOLERANCE))
        after = await play(engine, renderer, temperature=0.7)
        second = learner_logprobs(model, reader, after, temperature=0.7)
        np.testing.assert_allclose(
            after.behavior_logprobs[after.loss_mask], second, rtol=0, atol=TOLERANCE
        )
        assert set(after.policy_versions[after.loss_mask].tolist()) == {1}
        stale = learner_logprobs(model, reader, before, temperature=0.7)
        assert np.abs(stale - first).max() > 100 * TOLERANCE
    finally:
        await engine.close()
