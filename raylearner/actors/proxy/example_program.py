"""An example of a user's agent program: any loop around an OpenAI client.

`configs/openai_agent.yaml` trains with it. It uses only the calculator from raylearner.
"""

import json
from typing import Any

from raylearner.tools.calculator import calculate

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The exact value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


async def play(
    *,
    base_url: str,
    api_key: str,
    messages: list[dict[str, Any]],
    columns: dict[str, Any],
    max_turns: int = 4,
) -> str | None:
    """The policy's answer; None when it calls tools to the end."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        create: Any = client.chat.completions.create
        for _ in range(max_turns):
            reply = await create(model="policy", messages=messages, tools=TOOLS)
            choice = reply.choices[0]
            if choice.finish_reason == "length":
                return None
            if not choice.message.tool_calls:
                return choice.message.content
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [_result(call) for call in choice.message.tool_calls]
    return None


def _result(call: Any) -> dict[str, Any]:
    try:
        content = calculate(str(json.loads(call.function.arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        content = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}
