"""What plays whole episodes by itself: a program, the server that it calls, and its limits."""

from dataclasses import dataclass

from raylearner.environments.chat_server import ChatServer
from raylearner.environments.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Shared by all episodes of an actor; the server must have started."""

    server: ChatServer
    program: Program
    timeout_s: float
    max_calls: int
