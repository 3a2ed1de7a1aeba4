"""Log-probabilities of sampled tokens without ranks: the numbers are vLLM's own."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from raylearner.actors.engines import vllm_sampler

ROWS, VOCABULARY = 7, 1000


def logits_of(seed: int) -> torch.Tensor:
    """Random logits with banned tokens, also in the form of a bias that leaves them finite."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, ::5] = -torch.inf
    logits[:, 1::5] -= 1e4
    return logits


class Metadata(SamplingMetadata):
    """Settings of one batch, all rows random."""

    def __init__(self, temperature: float, top_p: float | None, top_k: int | None) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors

        super().__init__(
            temperature=torch.full((ROWS,), temperature),
            all_greedy=False,
            all_random=True,
            top_p=None if top_p is None else torch.full((ROWS,), top_p),
            top_k=None if top_k is None else torch.full((ROWS,), top_k, dtype=torch.int32),
            generators={i: torch.Generator().manual_seed(i) for i in range(ROWS)},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=torch.zeros(ROWS),
            presence_penalties=torch.zeros(ROWS),
            repetition_penalties=torch.ones(ROWS),
            output_token_ids=[[] for _ in range(ROWS)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )


def original_gather() -> Callable[..., LogprobsTensors]:
    found = Sampler.gather_logprobs
    # Installed by another test of this process.
    return found.args[0] if isinstance(found, functools.partial) else found


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, None, None), (0.6, 0.8, None), (1.7, 0.95, 20)]
)
def test_the_first_runner_reports_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, temperature: float, top_p: float | None, top_k: int | None
) -> None:
    own = functools.partial(vllm_sampler.gathered_logprobs, pytest.fail)
    outputs = []
    for gather in (original_gather(), own):
        monkeypatch.setattr(Sampler, "gather_logprobs", staticmethod(gather))
        sampler = Sampler("processed_logprobs")
        outputs.append(sampler(logits_of(3), Metadata(temperature, top_p, top_k)))
    vllm, ours = (output.logprobs_tensors for output in outputs)
    assert torch.equal(outputs[0].sampled_token_ids, outputs[1].sampled_token_ids)
    assert torch.equal(vllm.logprob_token_ids, ours.logprob_token_ids)
    assert vllm.logprob_token_ids.dtype == ours.logprob_token_ids.dtype
    assert torch.equal(vllm.logprobs, ours.logprobs)
    assert torch.isfinite(ours.logprobs).all()
    assert vllm.selected_token_ranks.min() >= 1
    assert not ours.selected_token_ranks.any()
    assert vllm.selected_token_ranks.shape == ours.selected_token_ranks.shape


def test_more_tokens_of_a_row_and_rows_of_several_tokens_are_left_to_vllm() -> None:
    called: list[tuple[object, ...]] = []

    def others(*arguments: object, **options: object) -> Any:
        called.append(arguments)
        return "vllm"

    logits, ids = logits_of(1), torch.arange(2, 2 + ROWS)
    assert vllm_sampler.gathered_logprobs(others, logits, 3, ids) == "vllm"
    fail: Any = pytest.fail
    scores = functools.partial(vllm_sampler.topk_scores, others, fail)
    assert scores(logits, 2, ids) == "vllm"
    assert scores(logits, 0, ids, [0, 3, ROWS]) == "vllm"
    assert scores(logits, 0, ids, logits_mode=True) == "vllm"
    assert scores(logits, 0, ids, max_per_req_token_ids=4) == "vllm"
    assert len(called) == 5


def test_the_second_runner_computes_the_sampled_token_alone() -> None:
    logits, ids = logits_of(2), torch.full((ROWS,), 3)

    def compute(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What vLLM's kernel does: the token's logit minus the row's log-sum-exp."""
        return logits.gather(-1, token_ids) - logits.logsumexp(-1, keepdim=True)

    found = vllm_sampler.topk_scores(pytest.fail, compute, logits, 0, ids, None, logits_mode=False)
    expected = logits.log_softmax(-1)[:, 3:4]
    assert (found.logprobs - expected).abs().max() < 1e-5
    assert torch.equal(found.logprob_token_ids, ids[:, None])
    assert not found.selected_token_ranks.any()
