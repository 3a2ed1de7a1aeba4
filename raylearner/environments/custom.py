"""A user-defined environment class, run by the host of user code, with a time limit for each call."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from raylearner.config.environment import CustomEnvironment
from raylearner.environments.protocol import Environment, Outcome, Reply
from raylearner.errors import EnvironmentFault, TrajectoryError
from raylearner.types import Message, Prompt
from raylearner.user_code import host
from raylearner.user_code.frames import describe

Value = TypeVar("Value")


class HostedEnvironment:
    """One episode of a user-defined class: `reset` creates the object, `close` reads its outcome.

    Every method raises `EnvironmentFault` naming the class, the method and the line; the class's
    own `TrajectoryError`s are passed on.
    """

    def __init__(self, make: Callable[..., Any], config: CustomEnvironment) -> None:
        self._make = partial(make, **config.arguments)
        self._path = config.path
        self._timeout_s = config.timeout_s
        self._own: Environment | None = None
        self._stop: tuple[str, ...] = ()
        self._tool_schemas: tuple[dict[str, Any], ...] = ()
        self._outcome = Outcome()

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings after the last call of the user's class."""
        return self._stop

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        return self._tool_schemas

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        async def reset() -> tuple[Sequence[Message], Any, Any]:
            own = self._own = self._make()
            return await own.reset(prompt), own.stop, own.tool_schemas

        messages, self._stop, self._tool_schemas = await self._call("reset", reset)
        return messages

    async def step(self, message: Message) -> Reply:
        async def step() -> tuple[Reply, Any]:
            assert self._own is not None, "call reset first"
            return await self._own.step(message), self._own.stop

        reply, self._stop = await self._call("step", step)
        return reply

    def outcome(self) -> Outcome:
        """Return the outcome, which `close` reads."""
        return self._outcome

    async def close(self) -> None:
        """Read the outcome, then close, even if reading it fails."""
        own = self._own
        if own is None:  # it was never created
            return

        async def close() -> None:
            try:
                self._outcome = own.outcome()
            finally:
                await own.close()

        await self._call("close", close)

    async def _call(self, method: str, function: Callable[[], Awaitable[Value]]) -> Value:
        name = f"environment {self._path}, {method}"
        try:
            return await host.shared().call(
                function, name=name, timeout_s=self._timeout_s, limit="environment.timeout_s"
            )
        except TrajectoryError:
            raise
        except (host.CallTimeout, host.CallFailed) as error:
            raise EnvironmentFault(f"{name} {error}") from error
        except Exception as error:  # any exception of the user's class
            raise EnvironmentFault(f"{name} {describe(error)}") from error
