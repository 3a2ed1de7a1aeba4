"""Conversion of requests and outputs between our types and vLLM's."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raylearner.errors import EngineError
from raylearner.images import decode_fitted
from raylearner.types import BAN_BIAS, Completion, CompletionStop, Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


async def prompt(token_ids: Sequence[int], images: Sequence[bytes] = ()) -> dict[str, Any]:
    """Return a prompt in the form of vLLM's own renderer: nothing is tokenized.

    Images are decoded in a thread; vLLM expands their placeholders itself.
    """
    ids = [int(token) for token in token_ids]
    if not images:
        return {"type": "token", "prompt_token_ids": ids}
    shown = await asyncio.to_thread(lambda: [decode_fitted(image) for image in images])
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": shown}}


def sampling_parameters(sampling: Sampling) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    regex = sampling.regex
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logit_bias=dict.fromkeys(sampling.banned_token_ids, BAN_BIAS) or None,
        logprobs=0,
        flat_logprobs=True,
        # Stop strings are searched for in the text, special tokens included.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        **sampling.extra_arguments,
    )


def probe_parameters() -> "SamplingParams":
    """Request log-probabilities of the prompt's tokens, recomputed past the prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )


def probe_logprobs(output: "RequestOutput", num_scored: int) -> list[float]:
    """Return those of the last `num_scored` tokens of a probe. Its images are expanded in the output."""
    size = len(output.prompt_token_ids or ())
    return _own_logprobs(output.prompt_logprobs, size, first=size - num_scored)


def completion(
    output: "RequestOutput", sampling: Sampling, end_token_ids: Collection[int]
) -> Completion:
    """Return the sampled tokens up to and including the first that ends a turn.

    Raises `EngineError` where a token has no weight version or no finite log-probability.
    """
    sampled = output.outputs[0]
    size = len(sampled.token_ids)
    token_ids = np.asarray(sampled.token_ids, dtype=np.int32)
    logprobs = np.asarray(_own_logprobs(sampled.logprobs, size), dtype=np.float32)
    policy_versions = np.full(size, -1, dtype=np.int32)
    for span in sampled.weight_versions or ():
        policy_versions[span.start : span.end] = int(span.version)
    if (policy_versions < 0).any():
        raise EngineError("vLLM reported tokens without a weight version")
    ends = {*end_token_ids, *sampling.stop_token_ids}
    end = next((i + 1 for i, token in enumerate(sampled.token_ids) if token in ends), size)
    found = Completion(
        token_ids=token_ids[:end],
        logprobs=logprobs[:end],
        policy_versions=policy_versions[:end],
        stop_reason=_stop_reason(sampled.finish_reason, sampled.stop_reason),
    )
    if not np.isfinite(found.logprobs).all():
        raise EngineError("vLLM reported a log-probability that is not finite")
    return found


def has_images(prompt: Mapping[str, Any]) -> bool:
    return "multi_modal_data" in prompt


def was_refused(output: "RequestOutput") -> bool:
    """Whether vLLM's core refused it before sampling, as for images that it should have cached."""
    answer = output.outputs[0]
    return answer.finish_reason == "error" and not answer.token_ids


def is_recoverable(error: Exception) -> bool:
    """Whether one request alone failed, as when an image is evicted while another request needs it."""
    from vllm.v1.engine.exceptions import EngineGenerateError

    return isinstance(error.__cause__, EngineGenerateError)


def end_token_ids(llm: "AsyncLLM") -> frozenset[int]:
    """Return the tokens at which vLLM itself stops."""
    ends: set[int] = set()
    tokenizer = llm.tokenizer
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    configured = llm.model_config.try_get_generation_config().get("eos_token_id")
    if configured is not None:
        ends.update([configured] if isinstance(configured, int) else configured)
    return frozenset(ends)


def _own_logprobs(flat: Any, size: int, *, first: int = 0) -> list[float]:
    """Return the log-probability of each position's own token, from `first` on."""
    if size == first:
        return []
    starts = flat.start_indices[first:size]
    if len(starts) != size - first:
        raise EngineError(
            f"vLLM reported {len(starts)} log-probabilities for {size - first} tokens"
        )
    return [flat.logprobs[start] for start in starts]


def _stop_reason(finish_reason: str | None, detail: int | str | None) -> CompletionStop:
    match finish_reason:
        case "stop":
            return CompletionStop.STOP_STRING if isinstance(detail, str) else CompletionStop.END
        case "length":
            return CompletionStop.LENGTH
        case "abort":
            return CompletionStop.ABORTED
        case _:
            raise EngineError(f"vLLM ended a request with {finish_reason!r} ({detail!r})")
