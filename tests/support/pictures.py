"""A tiny vision-language model, an engine of it, and the learner's side: turns with images, pushes."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import start_vllm
from PIL import Image

from raylearner.actors.engines.vllm import VllmEngine
from raylearner.config.schema import RendererSection, TinyModel, WeightsSection
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.policy import PackedModel
from raylearner.learner.weight_writer import make_probe
from raylearner.replay.validation import trajectory_error
from raylearner.tiny.model import make_tiny_model
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.transcript import Transcript
from raylearner.types import IMAGE_MARK, Claim, Message, Prompt, Sampling, StopReason, Trajectory
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import WeightUpdate


def encode_image(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def make_image(seed: int, width: int, height: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encode_image(Image.fromarray(pixels))


PAGES = (make_image(0, 140, 100), make_image(1, 60, 90), make_image(2, 200, 120))
PROMPT = Message(role="user", content=f"one {IMAGE_MARK} and {IMAGE_MARK}", images=PAGES[:2])
REPLY = Message(role="tool", content=f"page 3\n{IMAGE_MARK} again {IMAGE_MARK}", images=PAGES[1:])


def make_folder(folder: Path) -> Path:
    model = {"kind": "tiny", "hidden_size": 64, "num_heads": 2, "max_length": 1024, "vision": {}}
    return make_tiny_model(TinyModel.model_validate(model), folder, seed=0)


def make_renderer(folder: Path) -> Renderer:
    section = RendererSection.model_validate(
        {
            "max_prompt_tokens": 512,
            "max_response_tokens": 512,
            "images": {"min_pixels": 3_136, "max_pixels": 40_000},
        }
    )
    return Renderer.from_pretrained(str(folder), section)


async def start_engine(folder: Path, **section: object) -> VllmEngine:
    limits = {"max_model_tokens": 1024, "max_sequences": 8}
    return await start_vllm(folder, **limits | section)


async def play(engine: VllmEngine, renderer: Renderer, *, temperature: float) -> Trajectory:
    """Two turns with images before each."""
    prompt = Prompt(prompt_id="p", messages=(PROMPT,))
    claim = Claim(group_id=0, sample_index=0, attempt=0, prompt=prompt, policy_version=0, seed=0)
    transcript = Transcript(renderer=renderer, claim=claim)
    transcript.open(await renderer.fit_images([PROMPT]))
    sampling = Sampling(
        max_tokens=24,
        seed=3,
        temperature=temperature,
        stop_token_ids=renderer.end_token_ids,
        banned_token_ids=renderer.banned_token_ids,
    )
    for reply in (await renderer.fit_images([REPLY]), ()):
        completion = await engine.generate(
            transcript.engine_token_ids, sampling, images=transcript.images
        )
        transcript.add_completion(completion)
        assert transcript.add_reply(reply)
    trajectory = transcript.close(
        stop_reason=StopReason.END, error=None, metrics={}, started_at_s=0.0, finished_at_s=0.0
    )
    assert trajectory_error(trajectory) is None
    assert len(trajectory.images) == 4
    return trajectory


@torch.no_grad()
def learner_logprobs(
    model: PackedModel, reader: ImageReader, trajectory: Trajectory, *, temperature: float
) -> np.ndarray:
    tokens = PackedTokens.of(
        [trajectory.token_ids], [trajectory.loss_mask], reader=reader, images=[trajectory.images]
    )
    scores = model(tokens, temperature)
    return scores.logprobs[tokens.scored].numpy()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The models of a learner that a push reads."""

    folder: Path
    policy: PackedModel
    reader: ImageReader | None


def make_update(
    model: PackedModel, reader: ImageReader, folder: Path, version: int, *, tolerance: float
) -> WeightUpdate:
    source = Source(folder=folder, policy=model, reader=reader)
    config = WeightsSection.model_validate({"verify_tolerance": tolerance})
    weights = list(model.named_weights(torch.float32))
    return WeightUpdate(
        policy_version=version,
        transport="shared_files",
        payload=write_weights(weights, folder / "pushed", version, torch.float32),
        probe=make_probe(source, config, policy_version=version, seed=0),
    )


@torch.no_grad()
def change_tower(model: PackedModel) -> None:
    """By about as much as its weights are large."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.causal_lm.named_parameters():
        if "visual" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
