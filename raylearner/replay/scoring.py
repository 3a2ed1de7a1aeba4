"""Complete groups on their way to the functions that see whole groups, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from raylearner.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One complete group to be scored; `number` is given once."""

    number: int
    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class ScoreDesk:
    """Owns the requests that nobody has fetched, and knows which answers are still wanted."""

    def __init__(self) -> None:
        self._next_number = 0
        self._new: list[ScoreRequest] = []
        self._wanted: dict[int, int] = {}  # number of the latest request, by group_id

    def ask(self, group_id: int, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """An earlier request for the same group is wanted no longer."""
        request = ScoreRequest(
            number=self._next_number,
            group_id=group_id,
            prompt=prompt,
            trajectories=tuple(trajectories),
        )
        self._next_number += 1
        self._wanted[group_id] = request.number
        self._new.append(request)

    def pop_new(self) -> list[ScoreRequest]:
        """Requests since the last call that are still wanted."""
        new = [request for request in self._new if self.is_wanted(request)]
        self._new.clear()
        return new

    def is_wanted(self, request: ScoreRequest) -> bool:
        return self._wanted.get(request.group_id) == request.number

    def forget(self, group_id: int) -> None:
        """The group was answered or dropped."""
        self._wanted.pop(group_id, None)

    def clear(self) -> None:
        self._new.clear()
        self._wanted.clear()
