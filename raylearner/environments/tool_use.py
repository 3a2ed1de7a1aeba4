"""Turns with tools, ended by an answer.

A turn calls tools, answers, or is invalid: then a correction comes back and is counted. After
`max_turns` the policy gets one last turn in which tools are not run.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from raylearner.config.environment import ToolUse
from raylearner.environments.dialect import Action, Answer, Dialect, Invalid, ToolCall
from raylearner.environments.protocol import Outcome, Reply
from raylearner.tools.protocol import Observation, Tool
from raylearner.types import Message, Prompt, StopReason, new_call_id


class ToolUseEnvironment:
    """One episode with tools. Counts turns, valid actions and calls; lists what was shown."""

    def __init__(self, config: ToolUse, tools: Sequence[Tool], dialect: Dialect) -> None:
        self._config = config
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._dialect = dialect
        self._prompt: Prompt | None = None
        self._num_turns = 0
        self._num_valid = 0
        self._num_tool_calls = 0
        self._num_failed_calls = 0
        self._has_answer = False
        self._shown: list[str] = []

    @property
    def stop(self) -> tuple[str, ...]:
        return self._dialect.stop

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        if self._config.dialect.kind == "tags":
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
        if is_last:
            actions = [action for action in actions if not isinstance(action, ToolCall)]
        answered = any(isinstance(action, Answer) for action in actions)
        is_valid = any(not isinstance(action, Invalid) for action in actions)
        self._num_valid += is_valid
        if answered:
            self._has_answer = True
            return Reply(is_done=True, stop_reason=StopReason.ANSWER)
        if is_last:
            return Reply(is_done=True, stop_reason=StopReason.MAX_TURNS, is_valid=False)
        observations = await asyncio.gather(*(self._observe(action) for action in actions))
        names = [action.name for action in actions if isinstance(action, ToolCall)]
        return Reply(
            messages=tuple(map(self._message, actions, observations)),
            tool=",".join(names) or None,
            is_valid=is_valid,
            num_shown=sum(len(observation.ids) for observation in observations),
        )

    def outcome(self) -> Outcome:
        num_invalid = self._num_turns - self._num_valid
        return Outcome(
            metrics={
                "turns": float(self._num_turns),
                "valid_actions": float(self._num_valid),
                "tool_calls": float(self._num_tool_calls),
                "failed_tool_calls": float(self._num_failed_calls),
                "finished": float(self._has_answer),
            },
            penalty=self._config.invalid_action_penalty * num_invalid,
            shown=tuple(self._shown),
        )

    async def close(self) -> None:
        return None

    async def _observe(self, action: ToolCall | Answer | Invalid) -> Observation:
        assert self._prompt is not None, "reset comes first"
        assert not isinstance(action, Answer), "an answer ends the episode"
        if isinstance(action, Invalid):
            return Observation(text=f"error: {action.reason}", is_error=True)
        self._num_tool_calls += 1
        observation = await self._tools[action.name].call(action.arguments, prompt=self._prompt)
        self._num_failed_calls += observation.is_error
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
