"""Errors of Ray that mean that a process, or the node or object it needed, is gone."""

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

DEATHS = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    LocalRayletDiedError,
    OutOfMemoryError,
    ObjectLostError,
)
"""Their subclasses included: an actor that is unavailable, an object whose owner died."""


def is_death(error: BaseException) -> bool:
    """Return whether a call failed since a process died, its own or one that it had called.

    Errors that the called code raised itself are no deaths.
    """
    if isinstance(error, DEATHS):
        return True
    return isinstance(error, RayTaskError) and is_death(error.cause)
