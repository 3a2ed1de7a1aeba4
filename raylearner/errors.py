"""All errors that raylearner raises on purpose. They pickle, since they cross Ray."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from os import PathLike

from raylearner.credentials import mask


class RaylearnerError(Exception):
    """Base class. The message contains the problem, its place and what to do."""


class ConfigError(RaylearnerError, ValueError):
    """Invalid user input: YAML, overrides, data rows, model directories. Exit code 2."""


class DialogueError(RaylearnerError, ValueError):
    """Messages that are not a valid dialogue: `where` in them, and the problem. `is_last` is set for a
    final assistant turn where none is allowed."""

    def __init__(self, where: str, problem: str, is_last: bool = False) -> None:
        super().__init__(where, problem, is_last)
        self.where = where
        self.is_last = is_last

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class TrajectoryError(RaylearnerError):
    """An episode failed. Recorded in its trajectory and counted by `kind`; never fatal on its own."""

    kind = "trajectory"

    @property
    def text(self) -> str:
        """The message with its kind as prefix, as trajectories record it."""
        return mask(f"{self.kind}: {self}")


class EngineError(TrajectoryError):
    """The engine refused or lost a request."""

    kind = "engine"


class EngineDead(EngineError):
    """The engine as a whole has failed. No episode's failure: its actor ends and is replaced, and what it
    played is played again."""


class EngineLost(EngineError):
    """The process of an engine died before it had started; another try may succeed."""


class CompilationError(EngineError):
    """An engine's model could not be compiled, or its CUDA graphs not captured: it can start without."""


class ToolError(TrajectoryError):
    """A tool or the service behind it failed."""

    kind = "tool"


class EnvironmentFault(TrajectoryError):
    """The environment raised."""

    kind = "environment"


class RewardError(TrajectoryError):
    """A reward function raised or timed out."""

    kind = "reward"


class JudgeRefused(RewardError):
    """A judge's service permanently refused a request."""


class RenderError(TrajectoryError):
    """Messages could not be rendered as tokens, or do not fit."""

    kind = "render"


class PromptTooLong(RenderError):
    """A prompt has more tokens than its limit."""


class UserCodeStuck(RaylearnerError):
    """Too many calls of custom code never ended, so their process must end."""


class ReplayError(RaylearnerError):
    """A trajectory or a call violates the replay contract; the message contains the rule."""


class TooManyFailures(RaylearnerError):
    """Too many of the recent episodes failed, or too many groups were filtered."""


class WeightTransferError(RaylearnerError):
    """Weights could not be loaded, or could not be verified to be the learner's."""


class PushBroken(WeightTransferError):
    """An engine was blocked in a push by the failure of another engine or of the learner."""


class CheckpointError(RaylearnerError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class StalledError(RaylearnerError):
    """No progress for `watchdog_s`; the message names what waits for what."""


class LearnerError(RaylearnerError):
    """A learner step failed in a way that a restart would not fix."""


class LearnerDied(RaylearnerError):
    """A learner rank's process is gone; the run may roll back to its last checkpoint."""


class ReplayDied(RaylearnerError):
    """The replay actor's process is gone; the run replaces it and rolls back to its last checkpoint."""


class EvaluationIncomplete(RaylearnerError):
    """Held-out prompts were not played, since their actors died."""


class StartError(RaylearnerError):
    """Ray did not start, or this machine lacks resources for the run."""


class RunStopped(RaylearnerError):
    """The run ended on request; there is a checkpoint to resume from."""


class StoppedEarly(RunStopped):
    """The run ended on request, before there was any checkpoint."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the original errors inside exception groups and Ray's errors."""
    if isinstance(error, BaseExceptionGroup):
        inside: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        for inner in inside:
            yield from causes(inner)
        return
    cause = getattr(error, "cause", None)
    yield cause if isinstance(cause, RaylearnerError | OSError) else error


def summary(error: BaseException) -> str:
    """Return the first cause as one line without a traceback, with the path of a failed file operation."""
    cause = next(causes(error))
    if isinstance(cause, RaylearnerError):
        return str(cause)
    lines = str(cause).strip().splitlines()
    if isinstance(cause, OSError) and cause.strerror:
        places = [str(place) for place in (cause.filename, cause.filename2) if place is not None]
        return f"{' -> '.join(places)}: {cause.strerror}" if places else cause.strerror
    return f"{type(cause).__name__}: {lines[-1]}" if lines else type(cause).__name__


@contextmanager
def naming(path: str | PathLike[str]) -> Generator[None]:
    """Add `path` to an `OSError` without one, as from writing to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
