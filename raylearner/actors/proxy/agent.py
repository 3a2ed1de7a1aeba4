"""A program that plays whole episodes by itself, the server that it calls, and its limits."""

from dataclasses import dataclass, field

from raylearner.actors.proxy.chat_server import ChatServer
from raylearner.actors.proxy.program import Program, make_program
from raylearner.config.environment import EnvironmentSection, OpenAiProxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Shared by all episodes of an actor."""

    program: Program
    timeout_s: float
    max_calls: int
    server: ChatServer = field(default_factory=ChatServer)


async def start_agent(config: EnvironmentSection) -> Agent | None:
    """Return the agent of `openai_proxy` with its server started, or None for other environments.

    Raises `ConfigError` for a program that cannot be loaded.
    """
    if not isinstance(config, OpenAiProxy):
        return None
    agent = Agent(
        program=make_program(config), timeout_s=config.timeout_s, max_calls=config.max_calls
    )
    await agent.server.start()
    return agent
