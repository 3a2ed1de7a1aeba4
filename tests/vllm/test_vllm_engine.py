"""Generation by a real vLLM: what was sampled, from which distribution, under which version."""

import asyncio

import numpy as np
import pytest
from checkpoints import VOCABULARY, make_tokenizer

from raylearner.actors.episode import sample_turn
from raylearner.config.schema import RendererSection
from raylearner.errors import EngineError
from raylearner.tokenization.renderer import Renderer
from raylearner.types import CompletionStop, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("lab", ["tied"], indirect=True, scope="session"),
]

WHOLE = 2
"""The id of `</t>!`, a token whose text goes on after a closing tag."""
END = 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=32),
        Sampling(max_tokens=32, temperature=0.6),
        Sampling(max_tokens=32, temperature=1.3, top_k=7),
        Sampling(max_tokens=32, top_p=0.7),
        Sampling(max_tokens=32, banned_token_ids=tuple(range(1, 60)), seed=5),
        Sampling(max_tokens=32, temperature=0.8, top_k=20, top_p=0.9, banned_token_ids=(1, 70)),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "banned", "all"],
)
async def test_logprobs_are_those_of_the_distribution_sampled_from(lab, sampling) -> None:
    prompt = lab.tokens("user: 1 + 1\nassistant: ")
    completions = await asyncio.gather(*(lab.engine.generate(prompt, sampling) for _ in range(4)))
    for completion in completions:
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert not set(completion.token_ids.tolist()) & set(sampling.banned_token_ids)
        assert (completion.policy_versions == lab.engine.policy_version).all()
        assert lab.gap(prompt, completion, sampling) < 1e-4


async def test_a_repetition_penalty_leaves_finite_logprobs_without_repetition(lab) -> None:
    prompt = lab.tokens("aaaa")
    completion = await lab.engine.generate(
        prompt, Sampling(max_tokens=24, repetition_penalty=1.3, banned_token_ids=(END,))
    )
    assert len(completion.token_ids) == 24
    assert (completion.logprobs <= 0).all()


async def test_greedy_takes_the_likeliest_token_also_beside_random_requests(lab) -> None:
    prompt = lab.tokens("user: 2 + 2\nassistant: ")
    greedy = Sampling(temperature=0.0, max_tokens=48, banned_token_ids=(END,))
    first, _, second = await asyncio.gather(
        lab.engine.generate(prompt, greedy),
        lab.engine.generate(prompt, Sampling(max_tokens=48, top_k=5)),
        lab.engine.generate(prompt, greedy),
    )
    assert first.token_ids.tolist() == second.token_ids.tolist()
    logits = lab.logits(lab.version, prompt, first.token_ids)
    logits[:, END] = -np.inf
    assert logits.argmax(-1).tolist() == first.token_ids.tolist()
    assert np.isfinite(first.logprobs).all()
    assert lab.gap(prompt, first, greedy) < 1e-4


async def test_a_request_without_room_for_an_end_stops_by_length(lab) -> None:
    completion = await lab.engine.generate(
        lab.tokens("abc"), Sampling(max_tokens=9, banned_token_ids=(END,))
    )
    assert completion.stop_reason is CompletionStop.LENGTH
    assert len(completion.token_ids) == 9


async def test_the_token_that_completes_a_stop_string_stays_whole(lab) -> None:
    sampling = Sampling(
        max_tokens=400, stop=("</t>",), banned_token_ids=lab.everything_but("a", "b", "</t>!")
    )
    completion = await lab.engine.generate(lab.tokens("abc"), sampling)
    assert completion.stop_reason is CompletionStop.STOP_STRING
    assert completion.token_ids.tolist().count(WHOLE) == 1
    assert completion.token_ids[-1] == WHOLE
    assert lab.gap(lab.tokens("abc"), completion, sampling) < 1e-4


async def test_a_stop_string_in_a_thought_does_not_end_the_turn(lab) -> None:
    section = RendererSection(reasoning_tags=(("<think>", "</think>"),))
    renderer = Renderer(make_tokenizer(), section)
    sampling = Sampling(
        max_tokens=60,
        stop=("</t>",),
        banned_token_ids=lab.everything_but("a", "b", "</t>!"),
        seed=3,
    )
    prompt = lab.tokens("abc")
    stopped = await sample_turn(lab.engine, renderer, prompt, sampling)
    whole = await sample_turn(lab.engine, renderer, prompt, sampling, opening="<think>")
    assert stopped.stop_reason is CompletionStop.STOP_STRING
    assert (len(whole.token_ids), whole.stop_reason) == (60, CompletionStop.LENGTH)
    assert whole.token_ids[: len(stopped.token_ids)].tolist() == stopped.token_ids.tolist()
    assert whole.token_ids.tolist().count(WHOLE) > 1
    assert lab.gap(prompt, whole, sampling) < 1e-4


async def test_a_stop_string_over_several_tokens_keeps_its_tokens(lab) -> None:
    sampling = Sampling(
        max_tokens=400, stop=("xyx",), banned_token_ids=lab.everything_but("x", "y")
    )
    completion = await lab.engine.generate(lab.tokens("xyx"), sampling)
    assert completion.stop_reason is CompletionStop.STOP_STRING
    text = "".join("x" if token == lab.tokens("x")[0] else "y" for token in completion.token_ids)
    assert text.endswith("xyx")
    assert text.count("xyx") == 1


async def test_end_tokens_end_the_request_and_are_kept(lab) -> None:
    prompt, stop = lab.tokens("abc"), lab.tokens("q")
    own = await lab.engine.generate(
        prompt, Sampling(max_tokens=400, banned_token_ids=lab.everything_but("<|end|>", "a"))
    )
    given = await lab.engine.generate(
        prompt,
        Sampling(
            max_tokens=400,
            stop_token_ids=tuple(stop),
            banned_token_ids=lab.everything_but("q", "a"),
        ),
    )
    for completion, end in ((own, END), (given, stop[0])):
        assert completion.stop_reason is CompletionStop.END
        assert completion.token_ids.tolist().count(end) == 1
        assert completion.token_ids[-1] == end


async def test_aborted_requests_carry_what_was_sampled(lab) -> None:
    prompt = lab.tokens("abc")
    sampling = Sampling(max_tokens=480, banned_token_ids=(END,))
    running = [asyncio.create_task(lab.engine.generate(prompt, sampling)) for _ in range(40)]
    await asyncio.sleep(0.3)
    await lab.engine.abort()
    completions = await asyncio.gather(*running)
    aborted = [c for c in completions if c.stop_reason is CompletionStop.ABORTED]
    sampled = [c for c in aborted if len(c.token_ids) > 0]
    assert sampled, "the abort came too late to interrupt anything"
    assert any(len(c.token_ids) == 0 for c in aborted), "more requests than sequences: some wait"
    for completion in aborted:
        assert len(completion.logprobs) == len(completion.policy_versions)
        assert len(completion.logprobs) == len(completion.token_ids) < 480
    assert lab.gap(prompt, sampled[0], sampling) < 1e-4


async def test_a_cancelled_request_frees_its_place(lab) -> None:
    sampling = Sampling(max_tokens=480, banned_token_ids=(END,))
    running = [
        asyncio.create_task(lab.engine.generate(lab.tokens("a"), sampling)) for _ in range(32)
    ]
    await asyncio.sleep(0.1)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    async with asyncio.timeout(5):
        await lab.engine.generate(lab.tokens("a"), Sampling(max_tokens=1))


async def test_a_prompt_that_is_too_long_is_refused_and_the_engine_lives_on(lab) -> None:
    with pytest.raises(EngineError, match="512"):
        await lab.engine.generate(lab.tokens("a") * 600, Sampling(max_tokens=1))
    completion = await lab.engine.generate(lab.tokens("a"), Sampling(max_tokens=1))
    assert len(completion.token_ids) == 1


async def test_logprobs_under_a_regex_are_of_the_allowed_tokens_alone(lab) -> None:
    """Which a learner that knows no mask would not find again, so that training refuses it."""
    prompt = lab.tokens("user: 3 + 3\nassistant: ")
    sampling = Sampling(max_tokens=32, regex="[ab]{12}")
    completion = await lab.engine.generate(prompt, sampling)
    text = "".join(VOCABULARY[token] for token in completion.token_ids[:12])
    assert set(text) <= {"a", "b"}
    assert len(text) == 12
    allowed = Sampling(banned_token_ids=lab.everything_but("a", "b"))
    masked = lab.reference(lab.version, prompt, completion.token_ids[:12], allowed)
    free = lab.reference(lab.version, prompt, completion.token_ids[:12])
    assert np.abs(masked - completion.logprobs[:12]).max() < 1e-4
    assert np.abs(free - completion.logprobs[:12]).min() > 1.0


async def test_extra_sampling_arguments_reach_the_engine(lab) -> None:
    only = [VOCABULARY.index(text) for text in ("a", "b")]
    sampling = Sampling(max_tokens=9, extra_arguments={"allowed_token_ids": only})
    completion = await lab.engine.generate(lab.tokens("abc"), sampling)
    assert set(completion.token_ids.tolist()) <= set(only)
