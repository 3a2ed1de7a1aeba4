"""vLLM's schedulers, which send what requests sampled in parts of many tokens instead of each token.

vLLM sends each token of each request to the process of its owner at once, with three arrays for its
log-probability: packing and unpacking them takes longer than sampling. Nobody reads them before a request
ends, except where the owner searches its text for stop strings: a token that may complete one is sent at once.

A core imports this module because the engine arguments name one of its classes.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from raylearner.actors.engines.vllm_stops import StopTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request, RequestStatus

PART_TOKENS = 32
"""Maximum number of tokens of a request that wait in the core; an aborted request loses those."""


@dataclass(slots=True)
class _Waiting:
    """Tokens of one request that were not sent yet."""

    client_index: int
    has_logprobs: bool
    may_wait: bool
    room: int
    sent_at_once: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def take(self, request_id: str) -> EngineCoreOutput:
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=self.token_ids,
            new_logprobs=own_logprobs(self.token_ids, self.logprobs) if self.has_logprobs else None,
        )
        self.token_ids, self.logprobs, self.room = [], [], PART_TOKENS
        return output


def own_logprobs(token_ids: list[int], logprobs: list[float]) -> LogprobsLists:
    """Return the log-probabilities of sampled tokens in vLLM's form, without their ranks."""
    size = len(token_ids)
    return LogprobsLists(
        np.array(token_ids, dtype=np.int32).reshape(size, 1),
        np.array(logprobs, dtype=np.float32).reshape(size, 1),
        np.zeros(size, dtype=np.int64),
    )


class _Parts:
    """Mixed into a scheduler: holds tokens back until `PART_TOKENS` are there, the request ends, or a pause.

    A pause is complete only when nothing waits, since weights and their version, which vLLM names once for
    each message, change in pauses.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting: dict[str, _Waiting] = {}
        # Requests that start together are sent in different steps.
        self._rooms = itertools.cycle(range(1, PART_TOKENS + 1))
        self._stop_tokens = StopTokens(self._make_tokenizer)

    def add_request(self, request: "Request") -> None:
        super().add_request(request)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = request.sampling_params
        if parameters is None:
            return
        ends = self._stop_tokens.of(parameters.stop) if parameters.stop else frozenset[int]()
        self._waiting[request.request_id] = _Waiting(
            client_index=request.client_index,
            has_logprobs=parameters.num_logprobs is not None,
            may_wait=parameters.output_kind is RequestOutputKind.FINAL_ONLY and ends is not None,
            room=next(self._rooms),
            sent_at_once=ends or frozenset(),
        )

    def finish_requests(
        self, request_ids: "str | Iterable[str] | None", finished_status: "RequestStatus"
    ) -> "list[Request]":
        ended = super().finish_requests(request_ids, finished_status)  # pyright: ignore[reportAttributeAccessIssue]
        for request in ended:
            self._waiting.pop(request.request_id, None)
        return ended

    def has_requests(self) -> bool:
        return super().has_requests() or (self._is_paused and self._is_any_waiting())  # pyright: ignore[reportAttributeAccessIssue]

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        logprobs = model_runner_output.logprobs
        own: list[float] | None = None
        if logprobs is not None and is_one_each(logprobs):
            # The scheduler would cut three arrays for each request.
            own = logprobs.logprobs[:, 0].tolist()
            model_runner_output.logprobs = None
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(  # pyright: ignore[reportAttributeAccessIssue]
            scheduler_output, model_runner_output
        )
        rows = model_runner_output.req_id_to_index
        for index, message in list(messages.items()):
            message.outputs = self._kept(message.outputs, own, rows)
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del messages[index]
        if self._is_paused:
            self._send_all(messages)
        return messages

    def _kept(
        self, outputs: list[EngineCoreOutput], own: list[float] | None, rows: dict[str, int]
    ) -> list[EngineCoreOutput]:
        """Return the outputs to send now; the tokens of all others wait."""
        kept: list[EngineCoreOutput] = []
        for output in outputs:
            request_id = output.request_id
            waiting = self._waiting.get(request_id)
            if waiting is None:
                kept.append(output)
                continue
            logprob = own[rows[request_id]] if own is not None and waiting.has_logprobs else None
            can_wait = waiting.may_wait and (logprob is not None) == waiting.has_logprobs
            if can_wait and is_plain(output):
                waiting.token_ids += output.new_token_ids
                if logprob is not None:
                    waiting.logprobs.append(logprob)
                waiting.room -= 1
                if waiting.room <= 0 or output.new_token_ids[0] in waiting.sent_at_once:
                    kept.append(waiting.take(request_id))
                continue
            if waiting.token_ids:
                kept.append(waiting.take(request_id))
            if logprob is not None and output.new_token_ids:
                output.new_logprobs = own_logprobs(output.new_token_ids, [logprob])
            if output.finish_reason is not None:
                del self._waiting[request_id]
            kept.append(output)
        return kept

    def _send_all(self, messages: dict[int, EngineCoreOutputs]) -> None:
        for request_id, waiting in self._waiting.items():
            if waiting.token_ids:
                message = messages.setdefault(waiting.client_index, EngineCoreOutputs(outputs=[]))
                message.outputs.append(waiting.take(request_id))

    def _make_tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self.vllm_config.model_config)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _is_paused(self) -> bool:
        return self.pause_state is PauseState.PAUSED_ALL  # pyright: ignore[reportAttributeAccessIssue]

    def _is_any_waiting(self) -> bool:
        return any(waiting.token_ids for waiting in self._waiting.values())


def is_one_each(logprobs: LogprobsLists) -> bool:
    """Whether every request has one row, of its sampled token alone."""
    return logprobs.cu_num_generated_tokens is None and logprobs.logprobs.shape[1] == 1


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether it has one token and nothing else to tell, as all but a request's first and last output."""
    return (
        len(output.new_token_ids) == 1
        and output.finish_reason is None
        and output.prefill_stats is None
        and output.events is None
        and output.new_prompt_logprobs_tensors is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
    )


class PartScheduler(_Parts, Scheduler):
    """Schedules a step when the last one has ended."""


class AsyncPartScheduler(_Parts, AsyncScheduler):
    """Schedules a step while the last one runs."""
