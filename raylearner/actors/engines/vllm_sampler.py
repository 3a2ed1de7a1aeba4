"""Log-probabilities of sampled tokens alone: without their ranks, which vLLM counts over the vocabulary.

Both of vLLM's model runners are covered: the first gathers from normalized log-probabilities, the second
computes the normalizer of each row and no other value.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler


def gathered_logprobs(
    others: Callable[..., LogprobsTensors],
    logprobs: torch.Tensor,
    num_logprobs: int,
    token_ids: torch.Tensor,
) -> LogprobsTensors:
    """Return those of `token_ids` (rows,) from `logprobs` (rows, vocabulary), in nats; `others` returns the
    most likely tokens' as well where a request asks for them."""
    if num_logprobs > 0:
        return others(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return _without_ranks(column.to(torch.int32), logprobs.gather(-1, column))


def topk_scores(
    others: Callable[..., LogprobsTensors],
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: Any = None,
    **options: Any,
) -> LogprobsTensors:
    """Return those of the sampled tokens (rows,) by `compute`, of `logits` (rows, vocabulary) and the tokens;
    `others` is used for several rows of a request and for more tokens of a row."""
    is_own = num_logprobs == 0 and cu_num_logits is None and not options.get("logits_mode")
    if not is_own or options.get("max_per_req_token_ids"):
        return others(logits, num_logprobs, sampled_token_ids, cu_num_logits, **options)
    column = sampled_token_ids.unsqueeze(-1)
    return _without_ranks(column, compute(logits, column))


def _without_ranks(column: torch.Tensor, logprobs: torch.Tensor) -> LogprobsTensors:
    ranks = torch.zeros(len(column), dtype=torch.int64, device=column.device)
    return LogprobsTensors(column, logprobs, ranks)


def install() -> None:
    """Replace both functions in this process, once."""
    gather = Sampler.gather_logprobs
    if isinstance(gather, functools.partial):
        return
    Sampler.gather_logprobs = staticmethod(functools.partial(gathered_logprobs, gather))
    if current_platform.is_cuda_alike():
        from vllm.v1.worker.gpu.sample import logprob, sampler

        runner: Any = sampler
        runner.compute_topk_scores = functools.partial(
            topk_scores, logprob.compute_topk_scores, logprob.compute_token_logprobs
        )
