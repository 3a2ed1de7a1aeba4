"""Log-probabilities of trajectories with images: vLLM against the learner, beside text's of the same model.

A random Qwen2.5-VL of some 300 million parameters plays two turns with images before each, in bfloat16
and in float32; the learner scores what was sampled, packed. Then all of its vision tower changes, is
pushed, and the same is played and scored again: an encoder cache that outlived the push would show.
"""

import asyncio
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.common import Result, parser, say
from raylearner.types import IMAGE_MARK, Claim, Message, Prompt, Sampling, StopReason, Trajectory

MODEL: dict[str, Any] = {
    "kind": "tiny",
    "hidden_size": 1024,
    "num_layers": 16,
    "num_heads": 16,
    "intermediate_size": 2816,
    "max_length": 8192,
    "vision": {"hidden_size": 640, "num_layers": 12, "num_heads": 10, "intermediate_size": 1728},
}
VARIANTS = {"bf16": "bfloat16", "float32": "float32"}
TEMPERATURE = 0.7
CHANGE = 1.0
"""Of the tower's weights, at random, in standard deviations of each tensor."""
RATIO = 1.5
"""Most that the mean gap with images may exceed that of text by."""


def make_image(rng: np.random.Generator, side: int) -> bytes:
    """Blocks of colour with noise, as wide as high within a factor of two."""
    from PIL import Image

    height, width = (int(n) for n in rng.integers(side // 2, side, 2))
    coarse = rng.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3))
    pixels = np.kron(coarse, np.ones((32, 32, 1), np.int64))[:height, :width]
    pixels = (pixels + rng.integers(-20, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_messages(rng: np.random.Generator, num_images: int, side: int) -> tuple[Message, Message]:
    def text() -> str:
        return "".join(rng.choice(list("abcdefgh ijklmnop"), 40))

    def message(role: Any) -> Message:
        parts = [text() for _ in range(num_images + 1)]
        images = tuple(make_image(rng, side) for _ in range(num_images))
        return Message(role=role, content=IMAGE_MARK.join(parts), images=images)

    return message("user"), message("tool")


async def play(
    engine: Any, renderer: Any, messages: tuple[Message, Message], seed: int, num_tokens: int
) -> Trajectory:
    from raylearner.tokenization.transcript import Transcript

    first, reply = messages
    prompt = Prompt(prompt_id=str(seed), messages=(first,))
    claim = Claim(group_id=seed, sample_index=0, attempt=0, prompt=prompt, policy_version=0, seed=0)
    transcript = Transcript(renderer=renderer, claim=claim)
    transcript.open(await renderer.fit_images([first]))
    sampling = Sampling(
        max_tokens=num_tokens,
        seed=seed,
        temperature=TEMPERATURE,
        stop_token_ids=renderer.end_token_ids,
        banned_token_ids=renderer.banned_token_ids,
    )
    for answer in (await renderer.fit_images([reply]), ()):
        completion = await engine.generate(
            transcript.engine_token_ids, sampling, images=transcript.images
        )
        transcript.add_completion(completion)
        assert transcript.add_reply(answer)
    return transcript.close(
        stop_reason=StopReason.END, error=None, metrics={}, started_at_s=0.0, finished_at_s=0.0
    )


class Seeing:
    """A learner that scores and is pushed, and steps only by changing its tower."""

    def __init__(self, folder: Path, *, dtype: str, device: str) -> None:
        import torch

        from raylearner.learner.model import mesh
        from raylearner.learner.model.images import ImageReader
        from raylearner.learner.model.loading import load_sharded
        from raylearner.learner.model.policy import DTYPES, ModelOptions

        self.folder, self.policy_version = folder, 0
        self.reader = ImageReader.from_pretrained(str(folder))
        self._device = device
        self.policy = load_sharded(
            str(folder),
            mesh.connect(device=device),
            dtype=torch.float32,
            compute_dtype=DTYPES[dtype],
            options=ModelOptions(),
        ).requires_grad_(False)

    def change_tower(self) -> None:
        import torch

        from raylearner.learner.optimizer import local

        generator = torch.Generator().manual_seed(self.policy_version)
        for name, parameter in self.policy.causal_lm.named_parameters():
            if "visual" in name:
                shard = local(parameter)
                noise = torch.randn(shard.shape, generator=generator) * CHANGE
                shard.add_(noise.to(shard.device) * shard.std().nan_to_num(1.0))
        self.policy_version += 1

    def score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Of all sampled tokens, four trajectories packed at a time."""
        from raylearner.learner.batch.micro_batch import PackedTokens

        found: list[np.ndarray] = []
        for start in range(0, len(trajectories), 4):
            part = trajectories[start : start + 4]
            tokens = PackedTokens.of(
                [t.token_ids for t in part],
                [t.loss_mask for t in part],
                reader=self.reader,
                images=[t.images for t in part],
                device=self._device,
            )
            scores = self.policy.score(tokens, TEMPERATURE)
            found.append(scores.logprobs[tokens.scored].float().cpu().numpy())
        return np.concatenate(found)


def gap(trajectories: Sequence[Trajectory], scores: np.ndarray) -> dict[str, float]:
    recorded = np.concatenate([t.behavior_logprobs[t.loss_mask] for t in trajectories])
    difference = np.abs(recorded.astype(np.float64) - scores)
    return {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "tokens": len(difference),
    }


async def run_variant(name: str, folder: Path, *, out: Path, cpu: bool) -> dict[str, Any]:
    from raylearner.actors.engines.vllm import VllmEngine
    from raylearner.config.schema import LearnerSection, RendererSection, WeightsSection
    from raylearner.config.schema import VllmEngine as Section
    from raylearner.learner.spec import LearnerSpec
    from raylearner.learner.weight_writer import WeightWriter
    from raylearner.tokenization.renderer import Renderer

    dtype, device = VARIANTS[name], "cpu" if cpu else "cuda"
    side, num_episodes, num_tokens = (120, 2, 8) if cpu else (776, 32, 64)
    limits = {
        "max_prompt_tokens": 3500,
        "max_response_tokens": 4000,
        "images": {"min_pixels": 3136, "max_pixels": 602_112, "max_images": 8},
    }
    renderer = Renderer.from_pretrained(str(folder), RendererSection.model_validate(limits))
    section = {
        "kind": "vllm",
        "dtype": dtype,
        "max_model_tokens": 7680,
        "max_sequences": num_episodes,
        "memory_fraction": 0.4,
    }
    engine = await VllmEngine.start(
        Section.model_validate(section),
        model_path=str(folder),
        seed=0,
        weight_transport="shared_files",
    )
    started = time.monotonic()
    say(engine=name, start_s=time.monotonic() - started)
    learner: Any = Seeing(folder, dtype=dtype, device=device)
    weights = WeightsSection.model_validate({"verify_tolerance": 0.25, "verify_statistic": "mean"})
    spec = LearnerSpec(
        learner=LearnerSection(gpus_per_rank=float(not cpu)),
        model_path=str(folder),
        weights=weights,
        weights_folder=out / "pushed",
        engine_dtype=dtype,
    )
    writer = WeightWriter(learner, spec)
    found: dict[str, Any] = {}
    try:
        for when in ("before", "after"):
            if when == "after":
                learner.change_tower()
                update = writer.write(learner.policy_version)
                assert update is not None
                receipt = await engine.receive(update)
                found["logprob_error"] = receipt.logprob_error
                found["verified"] = {"tensors": receipt.num_verified, "seconds": receipt.verify_s}
            for kind, num_images in (("images", 2), ("text", 0)):
                rng = np.random.default_rng(len(when))
                started = time.monotonic()
                messages = [make_messages(rng, num_images, side) for _ in range(num_episodes)]
                made = time.monotonic()
                trajectories = await asyncio.gather(
                    *(
                        play(engine, renderer, episode, seed, num_tokens)
                        for seed, episode in enumerate(messages)
                    )
                )
                played = time.monotonic()
                scores = learner.score(trajectories)
                found[f"{kind} {when}"] = {
                    **gap(trajectories, scores),
                    "longest": max(t.num_tokens for t in trajectories),
                    "images": sum(len(t.images) for t in trajectories),
                    "play_s": played - made,
                    "score_s": time.monotonic() - played,
                }
                if kind == "images" and when == "before":
                    shown, first = trajectories, scores
                say(variant=name, **{f"{kind} {when}": found[f"{kind} {when}"]})
        changed = np.abs(learner.score(shown) - first).mean()
        found["moved by the tower's change"] = float(changed)
    finally:
        await engine.close()
    return found


def main() -> None:
    from raylearner.config.schema import TinyModel
    from raylearner.tiny.model import make_tiny_model

    arguments = parser(__doc__).parse_args()
    result = Result(arguments.out, "images")
    model = {**MODEL, "hidden_size": 64, "num_heads": 2, "num_layers": 2, "intermediate_size": 128}
    section = TinyModel.model_validate({**model, "vision": {}} if arguments.cpu else MODEL)
    folder = make_tiny_model(section, arguments.out / "images-model", seed=0)
    holds = True
    for name in ["float32"] if arguments.cpu else VARIANTS:
        found = asyncio.run(run_variant(name, folder, out=arguments.out, cpu=arguments.cpu))
        result.add(**{name: found})
        for when in ("before", "after"):
            images, text = found[f"images {when}"]["mean"], found[f"text {when}"]["mean"]
            holds &= images < RATIO * text + 1e-6
        holds &= found["moved by the tower's change"] > 5 * found["images after"]["mean"]
    result.add(holds=holds)
    result.done()


if __name__ == "__main__":
    main()
