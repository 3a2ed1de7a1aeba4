"""CPU time of the Python around one step of an engine: how sampled tokens reach the owner of their request.

    python benchmarks/engine_outputs.py

No engine is started: the outputs of a step are made up, and go through vLLM's own packing and processing, token
by token and in parts.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.sampler import Sampler
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from raylearner.actors.engines.vllm_sampler import gathered_logprobs
from raylearner.actors.engines.vllm_scheduler import PART_TOKENS, _Parts, _Waiting

NUM_STEPS = 20 * PART_TOKENS
VOCABULARY = 49_152


class Parts(_Parts):
    """The part of our scheduler that holds tokens back, without one that schedules them."""

    def __init__(self, names: list[str]) -> None:
        self._waiting = {
            name: _Waiting(
                client_index=0, has_logprobs=True, may_wait=True, room=1 + number % PART_TOKENS
            )
            for number, name in enumerate(names)
        }


def main() -> None:
    for num_requests in (64, 256):
        names = [f"{i}-abcdef01" for i in range(num_requests)]
        say(f"{num_requests} requests, one by one", one_by_one(names, has_logprobs=True))
        say(f"{num_requests} requests, no logprobs", one_by_one(names, has_logprobs=False))
        say(f"{num_requests} requests, in parts", in_parts(names))
        say(f"{num_requests} requests, ranks", ranks(num_requests))


def one_by_one(names: list[str], *, has_logprobs: bool) -> dict[str, float]:
    """Return the milliseconds of each stage for a step whose outputs are cut and sent by vLLM."""
    lists, processor = make_lists(len(names)), make_processor(names, has_logprobs=has_logprobs)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    clock = Clock()
    for _ in range(NUM_STEPS):
        outputs = [EngineCoreOutput(request_id=n, new_token_ids=[i]) for i, n in enumerate(names)]
        clock.start()
        if has_logprobs:
            for i, output in enumerate(outputs):
                output.new_logprobs = lists.slice_request(i, 1)
        clock.stop("core")
        send(outputs, encoder, decoder, processor, clock)
    return clock.mean_ms()


def in_parts(names: list[str]) -> dict[str, float]:
    """Return the same for outputs that our scheduler holds back."""
    lists, processor = make_lists(len(names)), make_processor(names, has_logprobs=True)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    parts, clock = Parts(names), Clock()
    rows = {name: i for i, name in enumerate(names)}
    for _ in range(NUM_STEPS):
        outputs = [EngineCoreOutput(request_id=n, new_token_ids=[i]) for i, n in enumerate(names)]
        clock.start()
        kept = parts._kept(outputs, lists.logprobs[:, 0].tolist(), rows)
        clock.stop("core")
        send(kept, encoder, decoder, processor, clock)
    return clock.mean_ms()


def send(
    outputs: list[EngineCoreOutput],
    encoder: MsgpackEncoder,
    decoder: MsgpackDecoder,
    processor: OutputProcessor,
    clock: "Clock",
) -> None:
    clock.start()
    packed = encoder.encode(EngineCoreOutputs(outputs=outputs, weight_version="1"))
    clock.stop("pack")
    received: Any = decoder.decode(packed)
    clock.stop("unpack")
    processor.process_outputs(received.outputs, 0.0, None, weight_version="1")
    clock.stop("append")


def ranks(num_requests: int) -> dict[str, float]:
    """Return the milliseconds of vLLM's and our log-probabilities of the sampled tokens."""
    torch.set_num_threads(1)
    logprobs = torch.randn(num_requests, VOCABULARY).log_softmax(-1)
    tokens = torch.randint(0, VOCABULARY, (num_requests,))
    clock = Clock()
    for number in range(21):
        clock.start()
        Sampler.gather_logprobs(logprobs, 0, tokens)
        if not number:
            continue  # it compiles
        clock.stop("with ranks")
        gathered_logprobs(Sampler.gather_logprobs, logprobs, 0, tokens)
        clock.stop("without")
    return clock.mean_ms()


class Clock:
    """Adds up this thread's CPU time by stage."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}
        self._since = 0.0

    def start(self) -> None:
        self._since = time.thread_time()

    def stop(self, stage: str) -> None:
        now = time.thread_time()
        self._times.setdefault(stage, []).append(now - self._since)
        self._since = time.thread_time()

    def mean_ms(self) -> dict[str, float]:
        return {stage: 1e3 * sum(found) / len(found) for stage, found in self._times.items()}


def make_lists(size: int) -> LogprobsLists:
    return LogprobsLists(
        np.arange(size, dtype=np.int32)[:, None],
        np.full((size, 1), -1.5, dtype=np.float32),
        np.ones(size, dtype=np.int64),
    )


def make_processor(names: list[str], *, has_logprobs: bool) -> OutputProcessor:
    processor = OutputProcessor(None, log_stats=False)
    for name in names:
        parameters = SamplingParams(
            max_tokens=100_000,
            logprobs=0 if has_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        fields: dict[str, Any] = dict.fromkeys(
            ["mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"]
        )
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1, 2],
            sampling_params=parameters,
            arrival_time=0.0,
            **fields,
        )
        processor.add_request(
            request, None, queue=RequestOutputCollector(parameters.output_kind, name)
        )
    return processor


def say(name: str, times: dict[str, float]) -> None:
    parts = ", ".join(f"{stage} {value:.3f}" for stage, value in times.items())
    sys.stdout.write(f"{name}: {parts} ms\n")


if __name__ == "__main__":
    main()
