"""Ids with logits but without a token in the tokenizer: never sampled, and without probability."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCABULARY, make_model, make_tokenizer

from raylearner.actors.engines.transformers import TransformersEngine
from raylearner.actors.rollout_actor import make_sampling
from raylearner.config.schema import RendererSection, SamplingSection
from raylearner.config.schema import TransformersEngine as TransformersEngineSection
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.loading import load_model
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.tokenizer import unknown_token_ids

KNOWN = len(VOCABULARY) + 1
"""The saved tokenizer also has a token for unknown texts."""
PADDED = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary padded to 160; the untrained model prefers the padding."""
    path = tmp_path_factory.mktemp("padded")
    model = make_model(is_tied=False)
    model.resize_token_embeddings(PADDED, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[KNOWN:] *= 20
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_padding_and_gaps_are_found(folder: Path, tmp_path: Path) -> None:
    assert unknown_token_ids(str(folder)) == tuple(range(KNOWN, PADDED))
    make_model(is_tied=True).save_pretrained(tmp_path)
    assert unknown_token_ids(str(tmp_path)) == ()  # without a tokenizer nothing is known
    make_tokenizer().save_pretrained(tmp_path)
    assert unknown_token_ids(str(tmp_path)) == ()


async def test_engine_and_learner_share_a_distribution_without_them(folder: Path) -> None:
    renderer = Renderer.from_pretrained(str(folder), RendererSection())
    section = SamplingSection(temperature=1.3, max_turn_tokens=60)
    sampling = make_sampling(section, renderer)
    assert sampling.banned_token_ids == tuple(range(KNOWN, PADDED))
    engine = await TransformersEngine.start(
        TransformersEngineSection(kind="transformers", max_model_tokens=128),
        model_path=str(folder),
        seed=0,
    )
    completions = [await engine.generate([5, 6, 7], sampling) for _ in range(3)]
    await engine.close()
    model = load_model(str(folder), dtype=torch.float32)
    for completion in completions:
        assert completion.token_ids.max() < KNOWN
        ids = np.array([5, 6, 7, *completion.token_ids], np.int64)
        scores = model.score(PackedTokens.of([ids], [np.arange(len(ids)) >= 3]), 1.3)
        np.testing.assert_allclose(scores.logprobs[3:], completion.logprobs, rtol=0, atol=1e-4)
        assert 0 < scores.entropy[3:].max() <= math.log(KNOWN)
        # The padding would have had most of it.
        everything = model.score(
            PackedTokens.of([ids], [np.arange(len(ids)) >= 3]), 1.3, has_bans=False
        )
        assert (everything.logprobs[3:] < scores.logprobs[3:] - 1e-3).all()
