"""Turns with tools, ended by an answer.

A turn calls tools, answers, or is invalid: then a correction is shown and counted. A turn cut at
its token limit before its action is not invalid, and the correction names the limit. After
`max_turns` the policy gets one last turn in which tools are not run.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raylearner.config.environment import ToolUse
from raylearner.environments.dialect import Action, Answer, Dialect, Invalid, ToolCall
from raylearner.environments.protocol import Outcome, Reply
from raylearner.tools.tool import Observation, Tool
from raylearner.types import CALLS, FAILURES, Message, Prompt, StopReason, new_call_id

CUT = Invalid("the turn reached its token limit before a complete tool call or answer; write less")


class ToolUseEnvironment:
    """One episode with tools. Counts turns, valid actions and calls; lists the pages and passages
    shown."""

    def __init__(self, config: ToolUse, tools: Sequence[Tool], dialect: Dialect) -> None:
        self._config = config
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._dialect = dialect
        self._prompt: Prompt | None = None
        self._num_turns = 0
        self._num_valid = 0
        self._num_invalid = 0
        self._num_tool_calls = 0
        self._num_failed_calls = 0
        self._num_calls: Counter[str] = Counter()
        self._num_failures: Counter[str] = Counter()
        self._tool_errors: dict[str, str] = {}
        self._has_answer = False
        self._shown: list[str] = []

    @property
    def stop(self) -> tuple[str, ...]:
        return self._dialect.stop

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        if not self._config.dialect.announces_tools:
            return ()
        return tuple(tool.schema for tool in self._tools.values())

    @property
    def is_last_turn(self) -> bool:
        return self._num_turns >= self._config.max_turns

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self._prompt = prompt
        return prompt.messages

    async def step(self, message: Message) -> Reply:
        is_last = self.is_last_turn
        self._num_turns += 1
        actions = self._dialect.parse(message.content)
        foreign = next((a.foreign_form for a in actions if isinstance(a, Invalid)), None)
        if message.is_cut:
            actions = [a for a in actions if not (isinstance(a, Invalid) and a.is_unfinished)]
        if not actions:
            return self._cut(is_last=is_last)
        if is_last:
            actions = [action for action in actions if not isinstance(action, ToolCall)]
        if any(isinstance(action, Answer) for action in actions):
            return self._answered(is_cut=message.is_cut)
        if is_last:
            self._num_invalid += 1
            return Reply(
                is_done=True,
                stop_reason=StopReason.MAX_TURNS,
                is_valid=False,
                foreign_form=foreign,
            )
        observations = await asyncio.gather(*(self._observe(action) for action in actions))
        called = [
            action.name
            for action, observation in zip(actions, observations, strict=True)
            if isinstance(action, ToolCall) and not observation.is_refused
        ]
        self._num_valid += bool(called)
        self._num_invalid += not called
        return Reply(
            messages=tuple(map(self._message, actions, observations)),
            tool=",".join(called) or None,
            is_valid=bool(called),
            foreign_form=foreign,
            num_shown=sum(len(observation.ids) for observation in observations),
        )

    def _answered(self, *, is_cut: bool) -> Reply:
        """End the episode with an answer; one without a tag is incomplete where the turn was
        cut."""
        if is_cut and self._config.dialect.answer_tag is None:
            return Reply(is_done=True, stop_reason=StopReason.MAX_TOKENS)
        self._num_valid += 1
        self._has_answer = True
        return Reply(is_done=True, stop_reason=StopReason.ANSWER)

    def _cut(self, *, is_last: bool) -> Reply:
        """Reply to a turn cut before its action: neither valid nor invalid."""
        if is_last:
            return Reply(is_done=True, stop_reason=StopReason.MAX_TOKENS)
        observation = Observation(text=f"error: {CUT.reason}", is_error=True)
        return Reply(messages=(self._message(CUT, observation),))

    def outcome(self) -> Outcome:
        return Outcome(
            metrics={
                "turns": float(self._num_turns),
                "valid_actions": float(self._num_valid),
                "tool_calls": float(self._num_tool_calls),
                "failed_tool_calls": float(self._num_failed_calls),
                "finished": float(self._has_answer),
                **{f"{CALLS}{name}": float(count) for name, count in self._num_calls.items()},
                **{f"{FAILURES}{name}": float(n) for name, n in self._num_failures.items()},
            },
            penalty=self._config.invalid_action_penalty * self._num_invalid,
            shown=tuple(self._shown),
            tool_errors=self._tool_errors,
        )

    async def close(self) -> None:
        return None

    async def _observe(self, action: ToolCall | Answer | Invalid) -> Observation:
        assert self._prompt is not None, "call reset first"
        assert not isinstance(action, Answer), "an answer ends the episode"
        if isinstance(action, Invalid):
            return Observation(text=f"error: {action.reason}", is_error=True)
        observation = await self._tools[action.name].call(action.arguments, prompt=self._prompt)
        if observation.is_refused:
            return observation
        self._num_tool_calls += 1
        self._num_failed_calls += observation.is_error
        self._num_calls[action.name] += 1
        self._num_failures[action.name] += observation.is_failure
        if observation.is_failure:
            self._tool_errors[action.name] = observation.cause or observation.text
        self._shown.extend(observation.ids)
        return observation

    def _message(self, action: Action, observation: Observation) -> Message:
        tag = self._config.observation_tag
        text = observation.text if tag is None else f"<{tag}>{observation.text}</{tag}>"
        return Message(
            role="tool",
            content=text,
            images=observation.images,
            call_id=new_call_id(),
            name=action.name if isinstance(action, ToolCall) else None,
        )
