"""Checks, before a run starts, that a chat template supports its prompts and environment."""

from collections.abc import Sequence

from raylearner.config.schema import EnvironmentSection, ToolUse
from raylearner.errors import ConfigError, RenderError
from raylearner.tokenization.continuation import calls_before, stand_in_result
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.template import STAND_IN_SCHEMA, STAND_IN_TOOL, Json
from raylearner.types import Prompt


def check_template(
    renderer: Renderer, environment: EnvironmentSection, prompts: Sequence[Prompt] = ()
) -> None:
    """Raises `ConfigError` where the chat template does not show an environment's tools, or does not
    let transcripts grow turn by turn.
    """
    if not isinstance(environment, ToolUse):
        return
    tools = [STAND_IN_SCHEMA] if environment.dialect.announces_tools else []
    asked: list[Json] = [{"role": "user", "content": "-"}]
    if tools and STAND_IN_TOOL not in renderer.chat.text(asked, tools):
        raise ConfigError(
            f"environment.dialect.kind: {environment.dialect.kind!r} needs a chat template that announces tools, and the"
            " model's does not; use 'tags', and explain in data.system_prompt how tools are called"
        )
    role = renderer.config.observation_role
    if role == "inline":
        return
    message = stand_in_result(tools) if role == "tool" else {"role": role, "content": "="}
    try:
        renderer.continuation.refuse_rewriting(
            message,
            calls=calls_before([message], tools),
            tools=tools,
            has_system=any(m.role == "system" for prompt in prompts for m in prompt.messages),
        )
    except RenderError as error:
        raise ConfigError(
            f"renderer.observation_role: {role!r} does not work with the model's chat template:"
            f" {error}; choose another (user, tool or inline)"
        ) from error
