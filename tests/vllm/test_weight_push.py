"""Weights land under running generations of a real vLLM, and are verified."""

import asyncio
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from raylearner.errors import EngineError, WeightTransferError
from raylearner.types import Sampling
from raylearner.weights.checksums import Checksum
from raylearner.weights.update import WeightUpdate

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
tied = pytest.mark.parametrize("lab", ["tied"], indirect=True, scope="session")
untied = pytest.mark.parametrize("lab", ["untied"], indirect=True, scope="session")
both = pytest.mark.parametrize("lab", ["tied", "untied"], indirect=True, scope="session")

RUNNING = Sampling(max_tokens=300, banned_token_ids=(1,))
"""Never ends early."""


def with_sums(update: WeightUpdate, sums: Mapping[str, Checksum]) -> WeightUpdate:
    return replace(update, payload={**update.payload, "checksums": sums})


async def start_running(lab, prompt: list[int], count: int = 16) -> list[asyncio.Task]:
    running = [asyncio.create_task(lab.engine.generate(prompt, RUNNING)) for _ in range(count)]
    await asyncio.sleep(0.25)
    return running


async def test_a_broadcast_can_be_abandoned_before_it_begins_and_tells_whose_fault_it_was() -> None:
    from raylearner.weights.transports.nccl import LayerSource

    layers = [("a", torch.zeros(1)), ("b", torch.zeros(1))]

    def out_of_memory() -> Iterator[tuple[str, torch.Tensor]]:
        yield layers[0]
        raise RuntimeError("out of memory")

    gathers = iter([iter(layers), iter(layers), out_of_memory()])
    source = LayerSource([("a", (1,)), ("b", (1,))], lambda: next(gathers), torch.float32)
    source.abandon("first")
    source.restart("first")
    with pytest.raises(WeightTransferError, match="abandoned"):
        list(source)
    source.drain()
    source.restart("second")
    assert [name for name, _ in source] == ["a", "b"]
    assert source.failure is None
    source.restart("third")
    with pytest.raises(RuntimeError):
        list(source)
    assert str(source.failure) == "out of memory"


@both
async def test_an_engine_pauses_for_nothing_but_the_change_of_parameters(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must precede the pause and what must follow it, whatever the cache is to be."""
    for should_recompute in (True, False):
        calls: list[str] = []
        with monkeypatch.context() as patch:
            record_calls(patch, lab.engine, calls)
            await lab.push(should_recompute=should_recompute)
        pause, resume = calls.index("pause_scheduler"), calls.index("resume_scheduler")
        assert {"begin_weight_task stage", "poll_weight_task"} <= set(calls[:pause])
        cleared = {"reset_prefix_cache", "reset_encoder_cache"} if should_recompute else set()
        assert set(calls[pause + 1 : resume]) == {"apply_weights", "set_weight_version"} | cleared
        assert {"begin_weight_task report", "poll_weight_task", "request"} <= set(calls[resume:])


def record_calls(patch: pytest.MonkeyPatch, engine, calls: list[str]) -> None:
    """Note every call that reaches vLLM's core."""
    core = engine._llm.engine_core
    utility, add = core._call_utility_async, core.add_request_async

    async def call_utility(method: str, *arguments, engine):
        is_rpc = method == "collective_rpc"
        calls.append(" ".join([arguments[0], *arguments[2][:1]]) if is_rpc else method)
        return await utility(method, *arguments, engine=engine)

    async def add_request(request):
        calls.append("request")
        return await add(request)

    patch.setattr(core, "_call_utility_async", call_utility)
    patch.setattr(core, "add_request_async", add_request)


@both
async def test_each_token_has_the_logprob_of_its_own_version(lab) -> None:
    # Longer than a cache block: what the old weights left in the prefix cache must not be used.
    prompt = lab.tokens("user: what is 1 + 1? " * 8)
    first = lab.version
    running = await start_running(lab, prompt)
    receipt = await lab.push()
    await asyncio.sleep(0.1)
    again = await lab.push()
    completions = await asyncio.gather(*running)
    versions = {tuple(np.unique(c.policy_versions).tolist()) for c in completions}
    assert any(len(seen) >= 2 for seen in versions), f"no request saw two versions: {versions}"
    assert all((np.diff(c.policy_versions) >= 0).all() for c in completions)
    assert max(lab.gap(prompt, c, RUNNING) for c in completions) < 1e-4
    assert receipt.policy_version == first + 1
    assert max(receipt.logprob_error, again.logprob_error) < 1e-4
    assert 0 < receipt.update_s < receipt.pause_s
    assert receipt.stage_s > 0
    assert receipt.num_recomputed > len(running) * len(prompt)
    assert receipt.probe_s > 0
    assert lab.engine.policy_version == lab.version == first + 2

    later = await lab.engine.generate(prompt, RUNNING)
    assert (later.policy_versions == lab.version).all()
    assert lab.gap(prompt, later, RUNNING) < 1e-4


@tied
async def test_a_push_of_the_present_version_verifies_it_again(lab) -> None:
    await lab.push()
    receipt = await lab.engine.receive(lab.update(lab.version))
    assert receipt.policy_version == lab.engine.policy_version == lab.version
    assert receipt.logprob_error < 1e-4


@tied
async def test_an_older_version_can_be_set_again(lab) -> None:
    await lab.engine.receive(lab.update(lab.version - 1))
    assert lab.engine.policy_version == lab.version - 1
    completion = await lab.engine.generate(lab.tokens("abc"), RUNNING)
    assert (completion.policy_versions == lab.version - 1).all()
    assert lab.gap(lab.tokens("abc"), completion, RUNNING) < 1e-4


@tied
async def test_kept_caches_keep_old_key_values_yet_the_new_weights_are_verified(lab) -> None:
    prompt = lab.tokens("user: what is 2 + 2? " * 8)
    first = lab.engine.policy_version
    running = await start_running(lab, prompt, count=4)
    receipt = await lab.push(should_recompute=False)
    # A new request must not use what the old weights computed of the same prompt, nor what the running
    # ones still add to it.
    new = await lab.engine.generate(prompt, RUNNING)
    completions = await asyncio.gather(*running)
    turns = [[*prompt, *c.token_ids[:200].tolist()] for c in completions]
    later = await asyncio.gather(*(lab.engine.generate(turn, RUNNING) for turn in turns))
    assert receipt.logprob_error < 1e-4
    assert receipt.num_recomputed == 0
    assert lab.gap(prompt, new, RUNNING) < 1e-4
    assert all(lab.gap(turn, c, RUNNING) < 1e-4 for turn, c in zip(turns, later, strict=True))
    assert max(lab.gap(prompt, c, RUNNING) for c in completions) > 1e-2
    for completion in completions:
        assert set(completion.policy_versions.tolist()) == {first, lab.version}
        is_old = completion.policy_versions == first
        before = lab.reference(first, prompt, completion.token_ids.tolist(), RUNNING)
        assert np.abs(before - completion.logprobs)[is_old].max() < 1e-4
    await lab.push()
    completion = await lab.engine.generate(prompt, RUNNING)
    assert lab.gap(prompt, completion, RUNNING) < 1e-4


@tied
async def test_an_engine_sleeps_until_its_next_weights_and_goes_on_from_where_it_was(lab) -> None:
    prompt = lab.tokens("user: what is 3 + 3? " * 8)
    first = lab.version
    running = await start_running(lab, prompt, count=4)
    await lab.engine.sleep()
    late = asyncio.create_task(lab.engine.generate(prompt, RUNNING))
    done, _ = await asyncio.wait([*running, late], timeout=0.5)
    assert not done
    await lab.push()
    completions = await asyncio.gather(*running, late)
    assert {v for c in completions for v in c.policy_versions.tolist()} == {first, first + 1}
    assert (completions[-1].policy_versions == first + 1).all()
    assert max(lab.gap(prompt, c, RUNNING) for c in completions) < 1e-4


@tied
async def test_a_probe_passes_requests_that_fill_every_place(lab) -> None:
    prompt = lab.tokens("user: what is 4 + 4? " * 8)
    running = await start_running(lab, prompt, count=96)  # three times as many as places
    await lab.push()
    # Behind the others, a probe would begin when the last of them has a place.
    assert sum(not task.done() for task in running) > 32
    await lab.engine.abort()
    await asyncio.gather(*running)


@tied
async def test_weights_refused_by_name_fail_the_engine(lab) -> None:
    """The last test of this engine."""
    missing = "model.layers.1.self_attn.k_proj.weight"
    running = await start_running(lab, lab.tokens("abc"))
    with pytest.raises(WeightTransferError, match=r"incomplete: .*layers\.1\.self_attn\.qkv_proj"):
        await lab.push(without=missing)
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    async with asyncio.timeout(1):
        with pytest.raises(EngineError, match="policy version"):
            await lab.engine.generate(lab.tokens("abc"), RUNNING)
        with pytest.raises(EngineError, match="policy version"):
            await lab.push()


@untied
async def test_parameters_are_verified_tensor_by_tensor_whatever_the_probe_would_notice(
    lab,
) -> None:
    receipt = await lab.push()
    names = [name for name, _ in lab.model(lab.version).named_parameters()]
    assert receipt.num_verified == len(names)
    held = lab.update(lab.version)
    engine, llm = lab.engine, lab.engine._llm

    # A whole push that was withheld, at the smallest learning rate that people use.
    model = copy.deepcopy(lab.model(lab.version))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-6 * torch.randn_like(parameter).sign()
    moved = lab.sums(model)
    with pytest.raises(WeightTransferError) as caught:
        await engine._weights.verify(llm, with_sums(held, moved))
    assert names[0] in str(caught.value)
    assert f"and {len(names) - 5} more" in str(caught.value)

    # One tensor that was withheld, whether it is fused, a norm, the embedding or the head.
    for name in names:
        mixed = {**held.payload["checksums"], name: moved[name]}
        with pytest.raises(WeightTransferError) as caught:
            await engine._weights.verify(llm, with_sums(held, mixed))
        assert [n for n in names if f"{n} has" in str(caught.value)] == [name]

    # The same on its way: a file that has everything, and one matrix as it was before.
    stale = "model.layers.1.mlp.up_proj.weight"
    right = lab.sums(model)
    dict(model.named_parameters())[stale].data = dict(lab.model(lab.version).named_parameters())[
        stale
    ].data
    wrong = with_sums(replace(held, payload=lab.write(model)), right)
    await engine._weights.replace(llm, wrong)
    with pytest.raises(WeightTransferError, match=stale):
        await engine._weights.verify(llm, wrong)

    # A tensor that is missing, and one that was not sent.
    partly = replace(held, payload=lab.write(model, without=stale) | {"is_partial": True})
    await engine._weights.replace(llm, partly)
    with pytest.raises(WeightTransferError, match=f"{stale} is missing"):
        await engine._weights.verify(llm, with_sums(partly, right))
    await engine._weights.replace(llm, held)
    fewer = {name: sums for name, sums in held.payload["checksums"].items() if name != stale}
    with pytest.raises(WeightTransferError, match=f"{stale} arrived .* was not sent"):
        await engine._weights.verify(llm, with_sums(held, fewer))
    assert await engine._weights.verify(llm, held) == len(names)


@untied
async def test_a_withheld_head_fails_verification_and_the_engine(lab) -> None:
    """The last test of this engine."""
    lab.version += 1
    update = lab.update(lab.version, without="lm_head.weight")
    update = replace(update, payload={**update.payload, "is_partial": True})
    running = await start_running(lab, lab.tokens("abc"))
    with pytest.raises(WeightTransferError, match=r"policy version \d+ failed.*tolerance"):
        await lab.engine.receive(update)
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(outcome, EngineError) for outcome in outcomes)
    with pytest.raises(EngineError, match="differ from the learner's"):
        await lab.engine.generate(lab.tokens("abc"), RUNNING)
