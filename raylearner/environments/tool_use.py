"""Turns with tools written as tags, ended by `<answer>`.

A turn calls a tool (`<calc>12+34</calc>`), answers (`<answer>46</answer>`) or is invalid: then a
correction comes back and is counted. A tool call wins over an answer in the same turn. After
`max_turns` the policy gets one last turn in which tools are not run.
"""

import re
from collections.abc import Mapping, Sequence

from raylearner.config.schema import ToolUse
from raylearner.environments.protocol import Outcome, Reply
from raylearner.tools.protocol import Tool
from raylearner.types import Message, Prompt, StopReason

ANSWER_TAG = "answer"


class ToolUseEnvironment:
    """One episode with tools. Counts turns, valid actions, tool calls, for metrics and penalty."""

    def __init__(self, config: ToolUse, tools: Sequence[Tool]) -> None:
        self._config = config
        self._tools: Mapping[str, Tool] = {tool.tag: tool for tool in tools}
        tags = "|".join(re.escape(tag) for tag in (*self._tools, ANSWER_TAG))
        self._pattern = re.compile(rf"<({tags})>(.*?)</\1>", re.DOTALL)
        self._prompt: Prompt | None = None
        self._num_turns = 0
        self._num_valid = 0
        self._num_tool_calls = 0
        self._has_answer = False

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in (*self._tools, ANSWER_TAG))

    @property
    def is_last_turn(self) -> bool:
        return self._num_turns >= self._config.max_turns

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self._prompt = prompt
        return prompt.messages

    async def step(self, message: Message) -> Reply:
        assert self._prompt is not None, "reset comes first"
        is_last = self.is_last_turn
        self._num_turns += 1
        tag, argument = self._parse(message.content, may_call=not is_last)
        if tag == ANSWER_TAG:
            self._num_valid += 1
            self._has_answer = True
            return Reply(is_done=True, stop_reason=StopReason.ANSWER)
        if is_last:
            return Reply(is_done=True, stop_reason=StopReason.MAX_TURNS, is_valid=False)
        if tag is None:
            return self._reply(self._correction(), tool=None, is_valid=False)
        self._num_valid += 1
        self._num_tool_calls += 1
        tool = self._tools[tag]
        observation = await tool.call(argument, prompt=self._prompt)
        return self._reply(observation.text, tool=tool.name, is_valid=True)

    def outcome(self) -> Outcome:
        num_invalid = self._num_turns - self._num_valid
        return Outcome(
            metrics={
                "turns": float(self._num_turns),
                "valid_actions": float(self._num_valid),
                "tool_calls": float(self._num_tool_calls),
                "finished": float(self._has_answer),
            },
            penalty=self._config.invalid_action_penalty * num_invalid,
        )

    async def close(self) -> None:
        return None

    def _parse(self, text: str, *, may_call: bool) -> tuple[str | None, str]:
        pairs = [(m.group(1), m.group(2)) for m in self._pattern.finditer(text)]
        calls = [p for p in pairs if p[0] != ANSWER_TAG] if may_call else []
        chosen = calls or [p for p in pairs if p[0] == ANSWER_TAG]
        if not chosen:
            return None, ""
        return chosen[0] if self._config.tag_match == "first" else chosen[-1]

    def _correction(self) -> str:
        forms = [f"<{tag}>...</{tag}>" for tag in self._tools]
        tools = f"call a tool with {' or '.join(forms)}, or " if forms else ""
        return f"error: {tools}answer with <{ANSWER_TAG}>...</{ANSWER_TAG}>"

    def _reply(self, text: str, *, tool: str | None, is_valid: bool) -> Reply:
        tag = self._config.observation_tag
        content = f"<{tag}>{text}</{tag}>"
        return Reply(
            messages=(Message(role="user", content=content),), tool=tool, is_valid=is_valid
        )
