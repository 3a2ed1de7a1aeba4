"""Tokens wait in the core and leave it whole: nothing is lost, reordered or sent after its version."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from raylearner.actors.engines.vllm_scheduler import PART_TOKENS, _Parts

FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0}


TEXTS = ("one", "two", "></", "?!?", "<end>")


class Tokenizer:
    """The texts of five tokens."""

    def __len__(self) -> int:
        return len(TEXTS)

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return [TEXTS[token] for (token,) in ids]


class Plain:
    """A scheduler that samples one token for each request in a step, and can be paused."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Any] = {}
        self.saw_logprobs = False

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        return [self.requests.pop(name) for name in request_ids]

    def has_requests(self) -> bool:
        return bool(self.requests) and self.pause_state is PauseState.UNPAUSED

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        step = scheduler_output
        self.saw_logprobs = self.saw_logprobs or model_runner_output.logprobs is not None
        outputs = []
        for name, token in step.tokens.items():
            is_last = name in step.ends
            outputs.append(
                EngineCoreOutput(
                    request_id=name,
                    new_token_ids=[token],
                    finish_reason=FinishReason.STOP if is_last else None,
                )
            )
            if is_last:
                del self.requests[name]
        return {0: EngineCoreOutputs(outputs=outputs)}


class Scheduler(_Parts, Plain):
    """The one under test, over `Plain`."""

    def _make_tokenizer(self) -> Tokenizer:
        return Tokenizer()


class Core:
    """Steps a scheduler and collects what each request received, and the steps that sent anything."""

    def __init__(self, *names: str, **parameters: Any) -> None:
        self.scheduler = Scheduler()
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.num_messages = 0
        for name in names:
            self.add(name, **parameters)

    def add(self, name: str, **parameters: Any) -> None:
        values: dict[str, Any] = {"detokenize": False} | FINAL | parameters
        request: Any = SimpleNamespace(
            request_id=name, client_index=0, sampling_params=SamplingParams(**values)
        )
        self.scheduler.add_request(request)

    def step(self, tokens: dict[str, int], ends: tuple[str, ...] = ()) -> None:
        """Sample these tokens by request; a token's log-probability is a thousandth of it, negative."""
        names = list(tokens)
        values = np.array([[-token / 1000] for token in tokens.values()], dtype=np.float32)
        ids = np.array([[token] for token in tokens.values()], dtype=np.int32)
        ran: Any = SimpleNamespace(
            req_id_to_index={name: i for i, name in enumerate(names)},
            logprobs=LogprobsLists(ids, values, np.ones(len(names))) if names else None,
        )
        step: Any = SimpleNamespace(tokens=tokens, ends=ends)
        sent = self.scheduler.update_from_output(step, ran)
        for message in sent.values():
            self.num_messages += 1
            for output in message.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.new_logprobs is not None:
                    assert len(output.new_logprobs.logprobs) == len(output.new_token_ids)
                    assert (
                        output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
                    )
                    self.logprobs.setdefault(output.request_id, []).extend(
                        output.new_logprobs.logprobs[:, 0].tolist()
                    )


def test_a_request_receives_all_its_tokens_in_order_in_few_messages() -> None:
    core = Core("a", "b")
    steps = 5 * PART_TOKENS
    for i in range(steps):
        core.step({"a": i, "b": steps + i})
    core.step({"a": steps, "b": 3 * steps}, ends=("a", "b"))
    assert core.tokens["a"] == list(range(steps + 1))
    assert core.tokens["b"] == [*range(steps, 2 * steps), 3 * steps]
    assert core.logprobs["a"] == [np.float32(-token / 1000) for token in core.tokens["a"]]
    assert core.num_messages <= 2 * 6 + 1
    assert not core.scheduler.saw_logprobs, "the scheduler cuts no arrays"
    assert not core.scheduler._waiting


def test_requests_that_started_together_are_sent_in_different_steps() -> None:
    core = Core(*"abcdefgh")
    counts = []
    for i in range(2 * PART_TOKENS):
        before = sum(map(len, core.tokens.values()))
        core.step(dict.fromkeys("abcdefgh", i))
        counts.append(sum(map(len, core.tokens.values())) - before)
    assert max(counts) <= PART_TOKENS


def test_a_pause_waits_until_everything_is_sent() -> None:
    core = Core("a")
    core.step({"a": 1})  # sent: its share of steps differs
    core.step({"a": 2})
    core.step({"a": 3})
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    assert core.scheduler.has_requests(), "the pause is not complete"
    core.step({})
    assert core.tokens["a"] == [1, 2, 3]
    assert not core.scheduler.has_requests()


def test_a_step_in_flight_at_a_pause_is_sent_with_it() -> None:
    core = Core("a", "b")
    core.step({"a": 1, "b": 5})
    core.step({"a": 2, "b": 6})
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.step({"a": 3, "b": 7})
    assert core.tokens == {"a": [1, 2, 3], "b": [5, 6, 7]}
    assert not core.scheduler.has_requests()


@pytest.mark.parametrize(
    "parameters",
    [
        {"detokenize": True, "stop": ["b", "a\n"]},
        {"detokenize": True, "stop": ["</é"]},
        {"output_kind": RequestOutputKind.DELTA},
    ],
    ids=["stop at a space", "stop beyond ASCII", "streams"],
)
def test_what_is_read_at_once_is_sent_at_once(parameters: dict[str, Any]) -> None:
    core = Core("waits")
    core.add("reads", **parameters)
    for i in range(3):
        core.step({"waits": i, "reads": 10 + i})
        assert core.tokens["reads"] == list(range(10, 11 + i))
    assert core.logprobs["reads"] == [np.float32(-i / 1000) for i in (10, 11, 12)]


def test_a_token_that_may_complete_a_stop_string_is_sent_at_once() -> None:
    core = Core("waits")
    core.add("reads", detokenize=True, stop=["</answer>", "!!"])
    sent = []
    for token in (0, 1, 2, 4, 1, 3, 1):
        before = len(core.tokens.get("reads", []))
        core.step({"waits": 0, "reads": token})
        sent.append((TEXTS[token], len(core.tokens.get("reads", [])) - before))
    assert sent == [
        ("one", 0),
        ("two", 2),  # its first part is short, as others' are not
        ("></", 1),
        ("<end>", 1),
        ("two", 0),
        ("?!?", 2),
        ("two", 0),
    ]


def test_requests_without_logprobs_receive_none() -> None:
    core = Core("with")
    core.add("without", logprobs=None)
    for i in range(3):
        core.step({"with": i, "without": i})
    core.step({"with": 3, "without": 3}, ends=("with", "without"))
    assert core.tokens == {"with": [0, 1, 2, 3], "without": [0, 1, 2, 3]}
    assert set(core.logprobs) == {"with"}


def test_aborted_requests_leave_nothing_behind() -> None:
    core = Core("a", "b")
    core.step({"a": 1, "b": 1})
    core.step({"a": 2, "b": 2})
    core.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.step({})
    assert core.tokens["b"] == [1, 2]
    assert core.tokens["a"] == [1]
