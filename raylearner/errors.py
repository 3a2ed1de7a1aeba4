"""Every error that raylearner raises on purpose; all of them pickle, since they cross Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class RaylearnerError(Exception):
    """Base of the family: the message alone tells what, where and what to do."""


class ConfigError(RaylearnerError, ValueError):
    """Bad input from the user: YAML, overrides, data rows, model directories. Exit code 2."""


class DialogueError(RaylearnerError, ValueError):
    """Messages that do not make a dialogue: `where` in them, and what is wrong. `is_last` is set for
    a last turn of the assistant where there may be none."""

    def __init__(self, where: str, problem: str, is_last: bool = False) -> None:
        super().__init__(where, problem, is_last)
        self.where = where
        self.is_last = is_last

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class TrajectoryError(RaylearnerError):
    """An episode failed. Recorded on its trajectory and counted by `kind`; never fatal alone."""

    kind = "trajectory"

    @property
    def text(self) -> str:
        """The message behind its kind, as trajectories record it."""
        return f"{self.kind}: {self}"


class EngineError(TrajectoryError):
    """The engine refused or lost a request."""

    kind = "engine"


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
    """A judge's service refused a request in a way that no further request would change."""


class RenderError(TrajectoryError):
    """Messages could not be turned into tokens, or do not fit."""

    kind = "render"


class PromptTooLong(RenderError):
    """A prompt has more tokens than its limit."""


class UserCodeStuck(RaylearnerError):
    """Too many calls of users' code never ended; the process that they are stuck in has to end."""


class ReplayError(RaylearnerError):
    """A trajectory or a call breaks the replay contract; the rule is named."""


class TooManyFailures(RaylearnerError):
    """Too large a share of recent episodes failed for one cause, or too many groups were filtered."""


class WeightTransferError(RaylearnerError):
    """Weights did not arrive, or could not be verified to be the learner's."""


class PushBroken(WeightTransferError):
    """An engine was left hanging in a push by another's failure, or by the learner's: not its fault."""


class CheckpointError(RaylearnerError):
    """A checkpoint is missing, half-written or belongs to another run."""


class StalledError(RaylearnerError):
    """Nobody made progress for `watchdog_s`; the message names who waits for whom."""


class LearnerError(RaylearnerError):
    """A learner step failed in a way that no restart would mend."""


class LearnerDied(RaylearnerError):
    """A learner rank's process is gone; the run may roll back to its last checkpoint."""


class EvaluationIncomplete(RaylearnerError):
    """Held-out prompts were left unplayed, since the actors that were to play them died."""


class StartError(RaylearnerError):
    """Ray did not start, or this machine cannot hold what a run needs."""


class RunStopped(RaylearnerError):
    """The run ended on request, after a checkpoint."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """What lies inside task groups and inside Ray's errors, which carry the original as `cause`."""
    if isinstance(error, BaseExceptionGroup):
        inside: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        for inner in inside:
            yield from causes(inner)
        return
    cause = getattr(error, "cause", None)
    yield cause if isinstance(cause, RaylearnerError | OSError) else error


def summary(error: BaseException) -> str:
    """One line without traces: the first cause, with the path where the system refused one."""
    cause = next(causes(error))
    if isinstance(cause, RaylearnerError):
        return str(cause)
    lines = str(cause).strip().splitlines()
    if isinstance(cause, OSError) and cause.strerror:
        places = [str(place) for place in (cause.filename, cause.filename2) if place is not None]
        return f"{' -> '.join(places)}: {cause.strerror}" if places else cause.strerror
    return f"{type(cause).__name__}: {lines[-1]}" if lines else type(cause).__name__


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Adds `path` to errors of the system that name none, as those of a write to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
