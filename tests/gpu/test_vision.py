"""Images under vLLM on a GPU: log-probabilities near the learner's, also after the tower changed."""

import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import (
    change_tower,
    learner_logprobs,
    make_folder,
    make_renderer,
    make_update,
    play,
    start_engine,
)

from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.loading import load_model

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("torchvision") is None, reason="vLLM's vision models need torchvision"
    ),
]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 5e-3), ("bfloat16", 0.1)])
async def test_images_score_alike_before_and_after_a_push_that_changes_the_tower(
    tmp_path: Path, dtype: str, most: float
) -> None:
    folder = make_folder(tmp_path / "model")
    renderer = make_renderer(folder)
    reader = ImageReader.from_pretrained(str(folder))
    assert reader is not None
    model = load_model(str(folder), dtype=torch.float32)
    engine = await start_engine(folder, dtype=dtype, memory_fraction=0.3)
    gaps = {}
    try:
        for version in range(2):
            if version:
                change_tower(model)
                await engine.receive(make_update(model, reader, folder, 1, tolerance=1.0))
            seen = await play(engine, renderer, temperature=0.7)
            mine = learner_logprobs(model, reader, seen, temperature=0.7)
            gap = np.abs(seen.behavior_logprobs[seen.loss_mask] - mine)
            gaps[version] = {"mean": float(gap.mean()), "max": float(gap.max())}
            if not version:
                change_tower(model)
                stale = learner_logprobs(model, reader, seen, temperature=0.7)
                moved = float(np.abs(stale - mine).mean())
                model = load_model(str(folder), dtype=torch.float32)
    finally:
        await engine.close()
    log.info("%s: gaps %s; the tower's change moves %.3f on average", dtype, gaps, moved)
    assert max(gap["mean"] for gap in gaps.values()) < most < moved
