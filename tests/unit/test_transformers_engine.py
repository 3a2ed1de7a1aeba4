"""The transformers engine: log-probabilities, stops, versions, seeds and the end of requests."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits import make_renderer
from pictures import make_image
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from raylearner.actors.engines.drawing import Draw, draw_tokens
from raylearner.actors.engines.transformers import TransformersEngine
from raylearner.actors.episode import sample_turn
from raylearner.config import schema
from raylearner.errors import EngineError, WeightTransferError
from raylearner.tiny.model import make_tiny_model
from raylearner.tokenization.vision import Vision, load_image_processor
from raylearner.types import BAN_BIAS, Completion, CompletionStop, Sampling
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import Probe, WeightUpdate

PROMPTS = [list(range(40, 40 + length)) for length in (1, 2, 5, 9, 9, 17, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = schema.TinyModel(
        kind="tiny", hidden_size=64, num_heads=2, intermediate_size=96, max_length=128
    )
    return make_tiny_model(config, tmp_path_factory.mktemp("tiny"), seed=0)


async def start_engine(folder: Path, **changes: object) -> TransformersEngine:
    section = schema.TransformersEngine.model_validate(
        {"kind": "transformers", "max_model_tokens": 128, "max_sequences": 4, **changes}
    )
    return await TransformersEngine.start(section, model_path=str(folder), seed=3)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = await start_engine(folder)
    yield engine
    await engine.close()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits_of(model: Any, token_ids: list[int], **inputs: Any) -> torch.Tensor:
    """Of every token but the first, by one forward without cache or padding."""
    return model(input_ids=torch.tensor([token_ids]), **inputs).logits[0, :-1]


def logprobs_of(logits: torch.Tensor, token_ids: list[int]) -> np.ndarray:
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0].numpy()


def make_update(
    model: Any, target: Path, *, version: int = 1, probe: range = range(50, 70), **changes: Any
) -> WeightUpdate:
    """The model's weights, with a probe that matches them."""
    tokens = list(probe)
    logprobs = tuple(logprobs_of(logits_of(model, tokens), tokens).tolist())
    return WeightUpdate(
        policy_version=version,
        transport="shared_files",
        payload=write_weights(model.named_parameters(), target, version, torch.float32),
        probe=Probe(token_ids=(tuple(tokens),), logprobs=(logprobs,), tolerance=1e-4),
        **changes,
    )


def scaled(folder: Path, scale: float) -> Any:
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


async def generate_all(engine: TransformersEngine, sampling: Sampling) -> list[Completion]:
    calls = (
        engine.generate(prompt, replace(sampling, seed=index))
        for index, prompt in enumerate(PROMPTS)
    )
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_plain_forward(
    engine: TransformersEngine, folder: Path, temperature: float
) -> None:
    """More requests than slots, of different lengths: rows move, join and leave."""
    model, sampling = load(folder), Sampling(temperature=temperature, max_tokens=24)
    for prompt, completion in zip(PROMPTS, await generate_all(engine, sampling), strict=True):
        token_ids = prompt + completion.token_ids.tolist()
        expected = logprobs_of(logits_of(model, token_ids) / temperature, token_ids)
        assert np.abs(completion.logprobs - expected[len(prompt) - 1 :]).max() < 1e-5


async def test_images_are_encoded_and_weights_may_change_under_them(tmp_path: Path) -> None:
    """Requests of text, of one image and of two, together: as one at a time by transformers."""
    config = {"kind": "tiny", "hidden_size": 64, "num_heads": 2, "num_layers": 1, "vision": {}}
    folder = make_tiny_model(schema.TinyModel.model_validate(config), tmp_path / "model", seed=0)
    engine = await start_engine(folder, max_model_tokens=96)
    vision, processor = Vision.from_pretrained(str(folder)), load_image_processor(str(folder))
    assert vision is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    wide, small = make_image(112, 112, 56), make_image(28, 28, 28)
    place = vision.image_token_id
    image = [vision.start_token_id, place, vision.end_token_id]
    calls: list[tuple[list[int], tuple[bytes, ...]]] = [
        ([40, 41, 42], ()),
        ([40, *image, 43], (wide,)),
        ([*image, 44, *image, 45, 46], (small, wide)),
        ([*image, 44, *image, 45, 46], (wide, small)),
    ]
    sampling = Sampling(max_tokens=12, banned_token_ids=vision.banned_token_ids, seed=2)

    async def play() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(ids, sampling, images=images) for ids, images in calls)
        )

    def check(completions: list[Completion]) -> None:
        for (ids, images), completion in zip(calls, completions, strict=True):
            prompt = vision.expand(ids, images)
            token_ids = prompt + completion.token_ids.tolist()
            inputs: dict[str, torch.Tensor] = {}
            if images:
                opened = [Image.open(io.BytesIO(image)) for image in images]
                inputs = dict(processor(images=opened, return_tensors="pt"))
                inputs["mm_token_type_ids"] = torch.tensor([[t == place for t in token_ids]]).int()
            logits = logits_of(model, token_ids, **inputs)
            logits[:, list(vision.banned_token_ids)] += BAN_BIAS
            expected = logprobs_of(logits, token_ids)[len(prompt) - 1 :]
            assert np.abs(completion.logprobs - expected).max() < 1e-5

    check(await play())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    running = asyncio.create_task(play())
    await asyncio.sleep(0)
    await engine.receive(make_update(model, tmp_path / "pushed", probe=range(50, 60)))
    await running
    check(await play())
    with pytest.raises(EngineError, match="1 placeholders for 2 images"):
        await engine.generate(calls[1][0], sampling, images=(wide, small))
    await engine.close()


async def test_a_seed_fixes_the_tokens_whatever_else_runs(engine: TransformersEngine) -> None:
    sampling = Sampling(max_tokens=16)
    together = await generate_all(engine, sampling)
    alone = await engine.generate(PROMPTS[3], replace(sampling, seed=3))
    assert alone.token_ids.tolist() == together[3].token_ids.tolist()
    assert together[3].token_ids.tolist() != together[4].token_ids.tolist()


async def test_greedy_takes_the_most_likely_token(engine: TransformersEngine, folder: Path) -> None:
    completion = await engine.generate(PROMPTS[2], Sampling(temperature=0.0, max_tokens=6))
    best = logits_of(load(folder), PROMPTS[2] + completion.token_ids.tolist()).argmax(-1)
    assert completion.token_ids.tolist() == best[len(PROMPTS[2]) - 1 :].tolist()


async def test_stops_end_the_completion_and_stay_in_it(
    engine: TransformersEngine, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = Sampling(max_tokens=40, seed=11)
    sampled = (await engine.generate(PROMPTS[5], free)).token_ids.tolist()
    texts = [tokenizer.decode(sampled[:end], skip_special_tokens=False) for end in range(41)]
    stop = tokenizer.decode(sampled[9:12], skip_special_tokens=False)
    cut = await engine.generate(PROMPTS[5], replace(free, stop=("never", stop)))
    assert cut.stop_reason is CompletionStop.STOP_STRING
    assert cut.token_ids.tolist() == sampled[: next(n for n in range(41) if stop in texts[n])]
    ended = await engine.generate(PROMPTS[5], replace(free, stop_token_ids=(sampled[7],)))
    assert ended.stop_reason is CompletionStop.END
    assert ended.token_ids.tolist() == sampled[: sampled.index(sampled[7]) + 1]


async def test_a_full_context_ends_the_completion(engine: TransformersEngine) -> None:
    completion = await engine.generate(list(range(30, 150))[:120], Sampling(max_tokens=100, seed=0))
    assert completion.stop_reason is CompletionStop.LENGTH
    assert len(completion.token_ids) == 8


async def tokens_flow(engine: TransformersEngine) -> None:
    """Returns once a request runs and has a few tokens."""
    while not any(request.num_sampled >= 3 for request in engine._running):  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("should_recompute", [True, False])
async def test_an_update_takes_effect_under_running_requests(
    engine: TransformersEngine, folder: Path, tmp_path: Path, should_recompute: bool
) -> None:
    pushed = scaled(folder, 1.1)
    update = make_update(pushed, tmp_path, version=5, should_recompute=should_recompute)
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=100, seed=4)))
    await tokens_flow(engine)
    receipt = await engine.receive(update)
    completion = await running
    versions = completion.policy_versions.tolist()
    split = versions.index(5)
    assert (receipt.policy_version, engine.policy_version) == (5, 5)
    assert receipt.logprob_error < 1e-4
    assert 3 <= split < 100
    assert versions == [0] * split + [5] * (100 - split)
    token_ids, size = PROMPTS[3] + completion.token_ids.tolist(), len(PROMPTS[3])
    old, new = (
        logprobs_of(logits_of(model, token_ids), token_ids)[size - 1 :]
        for model in (load(folder), pushed)
    )
    assert np.abs(completion.logprobs - old)[:split].max() < 1e-5
    gap = np.abs(completion.logprobs - new)[split:].max()
    assert (gap < 1e-5) == should_recompute  # keys and values of old weights show


async def test_weights_that_fail_verification_fail_the_engine(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    update = make_update(scaled(folder, 1.1), tmp_path)
    other = tuple(value - 1.0 for value in update.probe.logprobs[0])
    wrong = replace(update, probe=replace(update.probe, logprobs=(other,)))
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=100)))
    await tokens_flow(engine)
    with pytest.raises(WeightTransferError, match="policy version 1"):
        await engine.receive(wrong)
    for call in (running, engine.generate(PROMPTS[0], Sampling()), engine.receive(update)):
        with pytest.raises(EngineError, match="policy version 1"):
            await call


async def test_a_push_that_kept_old_weights_is_noticed_at_any_learning_rate(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    model = load(folder)
    update = make_update(model, tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-6 * torch.randn_like(parameter).sign()
    sent = write_weights(model.named_parameters(), tmp_path, 1, torch.float32)["checksums"]
    with pytest.raises(WeightTransferError, match="embed_tokens"):
        await engine.receive(replace(update, payload={**update.payload, "checksums": sent}))


async def test_a_file_without_a_tensor_is_refused(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    model = load(folder)
    parts = list(model.named_parameters())[1:]
    payload = write_weights(parts, tmp_path, 1, torch.float32)
    with pytest.raises(WeightTransferError, match=r"lm_head\.weight, model\.embed"):
        await engine.receive(replace(make_update(model, tmp_path), payload=payload))


async def test_abort_ends_running_and_waiting_requests(engine: TransformersEngine) -> None:
    calls = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=100, seed=1)))
        for prompt in PROMPTS
    ]
    await tokens_flow(engine)
    await engine.abort()
    completions = await asyncio.gather(*calls)
    assert {c.stop_reason for c in completions} == {CompletionStop.ABORTED}
    assert len(completions[0].token_ids) >= 3
    assert len(completions[-1].token_ids) == 0
    assert len((await engine.generate(PROMPTS[0], Sampling(max_tokens=4))).token_ids) == 4


async def test_a_cancelled_request_leaves_its_slot(engine: TransformersEngine) -> None:
    first, *others = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=60, seed=1)))
        for prompt in PROMPTS
    ]
    await tokens_flow(engine)
    first.cancel()
    assert {len(c.token_ids) for c in await asyncio.gather(*others)} == {60}
    assert all(first is not request.done for request in engine._running)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "images", "reason"),
    [
        ([], 1, (), "0 tokens"),
        ([1] * 128, 1, (), "128 tokens.*1 to 127"),
        ([1], 0, (), "max_tokens"),
        ([1], 1, (b"png",), "images"),
    ],
)
async def test_requests_that_cannot_be_sampled_are_refused(
    engine: TransformersEngine,
    token_ids: list[int],
    max_tokens: int,
    images: tuple[bytes, ...],
    reason: str,
) -> None:
    with pytest.raises(EngineError, match=reason):
        await engine.generate(token_ids, Sampling(max_tokens=max_tokens), images=images)


async def test_a_closed_engine_fails_running_and_later_requests(folder: Path) -> None:
    engine = await start_engine(folder)
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=100)))
    await tokens_flow(engine)
    await engine.close()
    await engine.close()
    for call in (running, engine.generate(PROMPTS[0], Sampling())):
        with pytest.raises(EngineError, match="closed"):
            await call


def draws(sampling: Sampling, count: int, token_ids: tuple[int, ...] = ()) -> list[Draw]:
    return [
        Draw(sampling=sampling, generator=np.random.default_rng(i), token_ids=list(token_ids))
        for i in range(count)
    ]


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.7), [0, 1]),
        (Sampling(top_p=0.01), [0]),
        (Sampling(min_p=0.1), [0, 1, 2]),
        (Sampling(banned_token_ids=(0, 2)), [1, 3, 4]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4]),
    ],
)
def test_samples_follow_the_distribution_whose_logprobs_are_reported(
    sampling: Sampling, kept: list[int]
) -> None:
    count = 4000
    tokens, logprobs = draw_tokens(LOGITS.expand(count, -1), draws(sampling, count))
    masked = torch.full_like(LOGITS, -torch.inf)
    masked[kept] = LOGITS[kept] / sampling.temperature
    expected = masked.log_softmax(-1)
    assert torch.allclose(logprobs, expected[tokens])
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert (frequencies - expected.exp()).abs().max() < 0.03


def test_each_row_has_its_own_sampling() -> None:
    rows = [
        *draws(Sampling(temperature=0.0), 1),
        *draws(Sampling(top_k=1, temperature=2.0), 1),
        *draws(Sampling(repetition_penalty=2.0, top_k=1), 1, token_ids=(0, 0, 3)),
    ]
    logits = LOGITS.repeat(3, 1) * torch.tensor([[1.0], [1.0], [0.9]])
    tokens, logprobs = draw_tokens(logits, rows)
    assert tokens.tolist() == [0, 0, 0]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(-1)[0].item())
    assert logprobs[1:].tolist() == [0.0, 0.0]
    penalized = draws(Sampling(repetition_penalty=3.0, top_k=1), 1, token_ids=(0,))
    assert draw_tokens(LOGITS[None], penalized)[0].tolist() == [1]


async def test_a_stop_in_a_thought_does_not_end_the_turn(
    engine: TransformersEngine, folder: Path
) -> None:
    renderer = make_renderer(folder, reasoning_tags=[["<think>", "</think>"]])
    kept = {*renderer.encode("ab")}
    banned = tuple(i for i in range(renderer.vocab_size) if i not in kept)
    sampling = Sampling(max_tokens=30, stop=("bbb",), banned_token_ids=banned, seed=1)
    prompt = renderer.encode("abc")
    stopped = await sample_turn(engine, renderer, prompt, sampling)
    whole = await sample_turn(engine, renderer, prompt, sampling, opening="<think>")
    assert stopped.stop_reason is CompletionStop.STOP_STRING
    assert (len(whole.token_ids), whole.stop_reason) == (30, CompletionStop.LENGTH)
    assert renderer.decode(whole.token_ids.tolist()).count("bbb") > 1
    assert whole.token_ids[: len(stopped.token_ids)].tolist() == stopped.token_ids.tolist()
    token_ids = [*prompt, *whole.token_ids.tolist()]
    logits = logits_of(load(folder), token_ids)
    logits[:, list(banned)] = -torch.inf
    expected = logprobs_of(logits, token_ids)[len(prompt) - 1 :]
    assert np.allclose(whole.logprobs, expected, atol=1e-4)
