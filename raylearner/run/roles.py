"""The roles of a run's actors, for the watchdog."""

from dataclasses import dataclass

from raylearner.errors import LearnerDied, ReplayDied, StalledError
from raylearner.run.run_actors import RunActors
from raylearner.run.watchdog import Role


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of one run. A role's actors are looked up when they are needed, since they are replaced."""

    learner: Role
    replay: Role
    rollout: Role

    @classmethod
    def of_run(cls, actors: RunActors) -> "Roles":
        return cls(
            Role("the learner", lambda: actors.learner.actors, LearnerDied),
            Role("the replay actor", lambda: {"replay": actors.replay}, ReplayDied),
            Role("rollout actors", lambda: actors.fleet.actors, StalledError),
        )
