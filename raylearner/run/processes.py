"""The processes of actors on their nodes: found and described, also where they do not respond.

Waits for nothing without a limit, and never raises: it serves reports of what went wrong.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylearner import stacks
from raylearner.errors import summary

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 5.0
"""Maximum wait for an actor to answer a ping."""
EXAMINE_TIMEOUT_S = 10.0
"""Maximum time to find out what one process is doing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether an actor answers, and what its process is doing."""

    name: str
    answers: bool
    lines: list[str]

    @property
    def text(self) -> str:
        verdict = "responds" if self.answers else "does not respond"
        return "\n    ".join([f"{self.name} {verdict}", *self.lines])


@dataclass(frozen=True, slots=True)
class _Place:
    pid: int
    node_id: str
    address: str


async def examine(actors: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each actor, all at once."""
    return list(await asyncio.gather(*(_examine(name, actors[name]) for name in actors)))


def end(actors: Mapping[str, Any]) -> None:
    """Kill actors, those included whose processes are stopped; pending calls fail at once."""
    for name, actor in actors.items():
        try:
            ray.kill(actor)
        except Exception as error:
            logger.warning("%s could not be killed: %s", name, summary(error))


async def answers(actor: Any) -> bool:
    """Return whether an actor answers `ping` in time."""
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await actor.ping.remote()
    except Exception:
        return False
    return True


async def _examine(name: str, actor: Any) -> Finding:
    lines: list[str] = []

    async def look() -> None:
        place = await asyncio.to_thread(_find, actor)
        lines.append(f"process {place.pid} on node {place.address}")
        lines.extend(await _describe_at(place))

    does_answer, problem = await asyncio.gather(answers(actor), _bounded(look()))
    if problem is not None:
        lines.append(f"its process could not be examined: {problem}")
    return Finding(name, does_answer, lines)


async def _bounded(call: Any) -> str | None:
    """Await the call; return why it failed."""
    try:
        async with asyncio.timeout(EXAMINE_TIMEOUT_S):
            await call
    except TimeoutError:
        return f"no response from its node within {EXAMINE_TIMEOUT_S:g} s"
    except Exception as error:  # must not replace what is reported
        return summary(error)
    return None


def _find(actor: Any) -> _Place:
    """Return the place of an actor's process. Raises `LookupError` for one that has none."""
    from ray._private import state  # the public state API needs a dashboard

    found: Any = state.actors(actor._actor_id.hex())
    if not found or not found.get("Pid"):
        raise LookupError("it has no process yet")
    address = found["Address"]
    return _Place(found["Pid"], address["NodeID"], address["IPAddress"])


async def _describe_at(place: _Place) -> list[str]:
    """Describe the process from its own node."""
    if place.node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(stacks.describe, place.pid)
    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    describe: Any = _describe
    return await describe.options(scheduling_strategy=strategy).remote(place.pid)


@ray.remote(num_cpus=0)
def _describe(pid: int) -> list[str]:
    return stacks.describe(pid)
