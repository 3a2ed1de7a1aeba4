"""The transformers engine: log-probabilities, stops, versions, seeds and the end of requests."""

import asyncio
import io
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from raylearner.actors.engines.token_sampler import Draw, sample
from raylearner.actors.engines.transformers import TransformersEngine
from raylearner.actors.turn import sample_turn
from raylearner.config import schema
from raylearner.errors import EngineError, WeightTransferError
from raylearner.tiny.model import make_tiny_model
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.vision import Vision, load_image_processor
from raylearner.types import BAN_BIAS, Completion, CompletionStop, Probe, Sampling, WeightUpdate
from raylearner.weights.transports.shared_files import write_weights

PROMPTS = [list(range(40, 40 + length)) for length in (1, 2, 5, 9, 9, 17, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = schema.TinyModel(
        kind="tiny", hidden_size=64, num_heads=2, intermediate_size=96, max_length=128
    )
    return make_tiny_model(config, tmp_path_factory.mktemp("tiny"), seed=0)


def make_engine(folder: Path, **changes: object) -> TransformersEngine:
    section = schema.TransformersEngine.model_validate(
        {"kind": "transformers", "max_model_tokens": 128, "max_sequences": 4, **changes}
    )
    return TransformersEngine(section, model_path=str(folder), seed=3)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(folder)
    await engine.start()
    yield engine
    await engine.close()


def plain_logprobs(folder: Path, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of every token but the first, by one forward without cache or padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def update_from(
    folder: Path, target: Path, *, version: int, scale: float = 1.0, **changes: bool
) -> WeightUpdate:
    """Weights of `folder` times `scale`, written to `target`, with a probe that holds."""
    shutil.copytree(folder, target / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(target / "model")
    probe = tuple(range(50, 70))
    return WeightUpdate(
        policy_version=version,
        transport="shared_files",
        payload=write_weights(model.named_parameters(), target, version, torch.float32),
        probe=Probe(
            token_ids=(probe,),
            logprobs=(tuple(plain_logprobs(target / "model", list(probe)).tolist()),),
            tolerance=1e-4,
        ),
        **changes,
    )


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
    sampling = Sampling(temperature=temperature, max_tokens=24)
    for prompt, completion in zip(PROMPTS, await generate_all(engine, sampling), strict=True):
        token_ids = prompt + completion.token_ids.tolist()
        expected = plain_logprobs(folder, token_ids, temperature)[len(prompt) - 1 :]
        assert np.abs(completion.logprobs - expected.numpy()).max() < 1e-5


def make_image(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def test_images_are_seen_and_weights_may_change_under_them(tmp_path: Path) -> None:
    """Requests of text, of one image and of two, together: as one at a time by transformers."""
    config = {"kind": "tiny", "hidden_size": 64, "num_heads": 2, "num_layers": 1, "vision": {}}
    folder = make_tiny_model(schema.TinyModel.model_validate(config), tmp_path / "model", seed=0)
    engine = make_engine(folder, max_model_tokens=96)
    await engine.start()
    vision, processor = Vision.from_pretrained(str(folder)), load_image_processor(str(folder))
    assert vision is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    wide, small = make_image(112, 56), make_image(28, 28)
    start, place, end = (
        vision.start_token_id,
        vision.image_token_id,
        vision.end_token_id,
    )
    calls: list[tuple[list[int], tuple[bytes, ...]]] = [
        ([40, 41, 42], ()),
        ([40, start, place, end, 43], (wide,)),
        ([start, place, end, 44, start, place, end, 45, 46], (small, wide)),
        ([start, place, end, 44, start, place, end, 45, 46], (wide, small)),
    ]
    sampling = Sampling(max_tokens=12, banned_token_ids=vision.banned_token_ids)

    async def play() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(ids, replace(sampling, seed=2), images=i) for ids, i in calls)
        )

    def check(completions: list[Completion]) -> None:
        for (ids, images), completion in zip(calls, completions, strict=True):
            prompt = vision.expand(ids, images)
            token_ids = torch.tensor([prompt + completion.token_ids.tolist()])
            inputs: dict[str, torch.Tensor] = {}
            if images:
                opened = [Image.open(io.BytesIO(image)) for image in images]
                inputs = dict(processor(images=opened, return_tensors="pt"))
                inputs["mm_token_type_ids"] = (token_ids == place).int()
            with torch.no_grad():
                logits = model(input_ids=token_ids, **inputs).logits[0, :-1]
            logits[:, list(vision.banned_token_ids)] += BAN_BIAS
            expected = logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0]
            assert np.abs(completion.logprobs - expected[len(prompt) - 1 :].numpy()).max() < 1e-5

    check(await play())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    probe = tuple(range(50, 60))
    with torch.no_grad():
        logprobs = model(torch.tensor([probe])).logits[0, :-1].log_softmax(-1)
    update = WeightUpdate(
        policy_version=1,
        transport="shared_files",
        payload=write_weights(model.named_parameters(), tmp_path / "pushed", 1, torch.float32),
        probe=Probe(
            token_ids=(probe,),
            logprobs=(tuple(logprobs[range(9), probe[1:]].tolist()),),
            tolerance=1e-4,
        ),
    )
    running = asyncio.create_task(play())
    await asyncio.sleep(0)
    await engine.receive(update)
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


async def test_greedy_takes_the_likeliest_token(engine: TransformersEngine, folder: Path) -> None:
    completion = await engine.generate(PROMPTS[2], Sampling(temperature=0.0, max_tokens=6))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = PROMPTS[2] + completion.token_ids.tolist()
    with torch.no_grad():
        best = model(torch.tensor([token_ids])).logits[0].argmax(-1)
    assert completion.token_ids.tolist() == best[len(PROMPTS[2]) - 1 : -1].tolist()


async def test_a_stop_string_ends_the_completion_and_stays_in_it(
    engine: TransformersEngine, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = Sampling(max_tokens=40, seed=11)
    sampled = (await engine.generate(PROMPTS[5], free)).token_ids.tolist()
    stop = tokenizer.decode(sampled[9:12], skip_special_tokens=False)
    cut = await engine.generate(PROMPTS[5], replace(free, stop=("never", stop)))
    first = next(
        end
        for end in range(1, 41)
        if stop in tokenizer.decode(sampled[:end], skip_special_tokens=False)
    )
    assert cut.stop_reason is CompletionStop.STOP_STRING
    assert cut.token_ids.tolist() == sampled[:first]


async def test_an_end_token_ends_the_completion_and_stays_in_it(
    engine: TransformersEngine,
) -> None:
    free = Sampling(max_tokens=40, seed=11)
    sampled = (await engine.generate(PROMPTS[5], free)).token_ids.tolist()
    cut = await engine.generate(PROMPTS[5], replace(free, stop_token_ids=(sampled[7],)))
    assert cut.stop_reason is CompletionStop.END
    assert cut.token_ids.tolist() == sampled[: sampled.index(sampled[7]) + 1]


async def test_a_full_context_ends_the_completion(engine: TransformersEngine) -> None:
    completion = await engine.generate(list(range(30, 150))[:120], Sampling(max_tokens=100, seed=0))
    assert completion.stop_reason is CompletionStop.LENGTH
    assert len(completion.token_ids) == 8


async def tokens_flow(engine: TransformersEngine) -> None:
    """Returns once a request runs and has a few tokens."""
    while not any(request.num_sampled >= 3 for request in engine._running):  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("should_clear_caches", [True, False])
async def test_an_update_lands_under_running_requests(
    folder: Path, tmp_path: Path, should_clear_caches: bool
) -> None:
    engine = make_engine(folder)
    await engine.start()
    update = update_from(
        folder, tmp_path, version=5, scale=1.1, should_clear_caches=should_clear_caches
    )
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=100, seed=4)))
    await tokens_flow(engine)
    receipt = await engine.receive(update)
    completion = await running
    await engine.close()
    versions = completion.policy_versions.tolist()
    split = versions.index(5)
    assert (receipt.policy_version, engine.policy_version) == (5, 5)
    assert receipt.logprob_error < 1e-4
    assert 3 <= split < 100
    assert versions == [0] * split + [5] * (100 - split)
    token_ids, size = PROMPTS[3] + completion.token_ids.tolist(), len(PROMPTS[3])
    old = plain_logprobs(folder, token_ids)[size - 1 :]
    new = plain_logprobs(tmp_path / "model", token_ids)[size - 1 :]
    assert np.abs(completion.logprobs[:split] - old.numpy()[:split]).max() < 1e-5
    gap = np.abs(completion.logprobs[split:] - new.numpy()[split:]).max()
    assert (gap < 1e-5) == should_clear_caches  # keys and values of old weights show


async def test_an_engine_whose_weights_are_not_verified_fails(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder)
    await engine.start()
    update = update_from(folder, tmp_path, version=1, scale=1.1)
    other = tuple(value - 1.0 for value in update.probe.logprobs[0])
    wrong = replace(update, probe=replace(update.probe, logprobs=(other,)))
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=100)))
    await tokens_flow(engine)
    with pytest.raises(WeightTransferError, match="policy version 1"):
        await engine.receive(wrong)
    for call in (running, engine.generate(PROMPTS[0], Sampling()), engine.resume()):
        with pytest.raises(EngineError, match="did not arrive"):
            await call
    await engine.close()


async def test_a_push_that_kept_old_weights_is_noticed_at_any_learning_rate(
    folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    held = write_weights(model.named_parameters(), tmp_path, 0, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-6 * torch.randn_like(parameter).sign()
    update = update_from(folder, tmp_path, version=1)
    sent = write_weights(model.named_parameters(), tmp_path, 1, torch.float32)["checksums"]
    engine = make_engine(folder)
    await engine.start()
    stale = replace(update, payload={**held, "checksums": sent})
    with pytest.raises(WeightTransferError, match="verification of policy version 1 failed"):
        await engine.receive(stale)
    await engine.close()


async def test_a_file_without_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder)
    await engine.start()
    update = update_from(folder, tmp_path, version=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = list(model.named_parameters())[1:]
    partial = replace(update, payload=write_weights(parts, tmp_path, 1, torch.float32))
    with pytest.raises(WeightTransferError, match=r"never came: lm_head.weight, model.embed"):
        await engine.receive(partial)
    await engine.close()


async def test_pause_freezes_and_resume_goes_on(engine: TransformersEngine) -> None:
    running = asyncio.ensure_future(engine.generate(PROMPTS[3], Sampling(max_tokens=60, seed=1)))
    await tokens_flow(engine)
    await engine.pause()
    before = [request.num_sampled for request in engine._running]
    await asyncio.sleep(0.05)
    assert [request.num_sampled for request in engine._running] == before
    await engine.resume()
    assert len((await running).token_ids) == 60


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


async def test_what_cannot_be_sampled_is_refused_with_its_reason(
    engine: TransformersEngine,
) -> None:
    for token_ids, sampling, images, reason in (
        ([], Sampling(), (), "prompt has 0 tokens"),
        ([1] * 128, Sampling(), (), "prompt has 128 tokens, the engine takes 1 to 127"),
        ([1], Sampling(max_tokens=0), (), "max_tokens must be >= 1"),
        ([1], Sampling(), (b"png",), "reads text alone, and came with images"),
    ):
        with pytest.raises(EngineError, match=reason):
            await engine.generate(token_ids, sampling, images=images)


async def test_a_closed_engine_fails_what_runs_and_what_comes(folder: Path) -> None:
    engine = make_engine(folder)
    with pytest.raises(EngineError, match="has not started"):
        await engine.generate(PROMPTS[0], Sampling())
    await engine.start()
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
    tokens, logprobs = sample(LOGITS.expand(count, -1), draws(sampling, count))
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
    tokens, logprobs = sample(LOGITS.repeat(3, 1) * torch.tensor([[1.0], [1.0], [0.9]]), rows)
    assert tokens.tolist() == [0, 0, 0]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(-1)[0].item())
    assert logprobs[1:].tolist() == [0.0, 0.0]
    penalized = draws(Sampling(repetition_penalty=3.0, top_k=1), 1, token_ids=(0,))
    assert sample(LOGITS[None], penalized)[0].tolist() == [1]


async def test_a_stop_in_a_thought_does_not_end_the_turn(
    engine: TransformersEngine, folder: Path
) -> None:
    section = schema.RendererSection(reasoning_tags=(("<think>", "</think>"),))
    renderer = Renderer.from_pretrained(str(folder), section)
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
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *whole.token_ids.tolist()]])).logits[0]
    logits[:, list(banned)] = -torch.inf
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    found = expected.gather(1, torch.tensor(whole.token_ids.astype(np.int64))[:, None])[:, 0]
    assert np.allclose(whole.logprobs, found.numpy(), atol=1e-4)
