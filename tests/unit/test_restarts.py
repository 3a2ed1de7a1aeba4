"""Budgets of restarts per window of time, pauses between them, and which of Ray's errors are deaths."""

import pytest
from ray import exceptions

from raylearner.deaths import is_death
from raylearner.errors import EngineError
from raylearner.run.restarts import MAX_BACKOFF_S, RestartBudget, backoff_s


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_used_up_by_one_restart_over_its_limit_within_the_window() -> None:
    clock = Clock()
    budget = RestartBudget(2, 100.0, clock=clock)
    assert [budget.count(), budget.is_used_up] == [1, False]
    clock.now += 40
    assert [budget.count(), budget.is_used_up] == [2, False]
    clock.now += 40
    assert [budget.count(), budget.is_used_up, budget.wait_s()] == [3, True, 20.0]
    clock.now += 20
    assert [budget.num_counted, budget.is_used_up, budget.wait_s()] == [2, False, 0.0]
    clock.now += 80
    assert budget.count() == 1


def test_a_budget_of_zero_never_allows_a_restart() -> None:
    clock = Clock()
    budget = RestartBudget(0, 100.0, clock=clock)
    assert not budget.is_used_up
    budget.count()
    assert budget.is_used_up
    assert budget.wait_s() == float("inf")


def test_restarts_on_a_lost_node_are_not_counted() -> None:
    budget = RestartBudget(0, 100.0, clock=Clock())
    budget.count("lost")
    assert budget.is_used_up
    budget.forgive({"lost", "other"})
    assert [budget.num_counted, budget.is_used_up] == [0, False]


def test_the_pause_grows_only_with_consecutive_failures() -> None:
    clock = Clock()
    budget = RestartBudget(100, 3600.0, clock=clock)
    pauses: list[float] = []
    for _ in range(5):
        budget.count()
        pauses.append(budget.backoff_s())
        clock.now += pauses[-1] + 1
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]
    clock.now += 1000
    budget.count()
    assert budget.backoff_s() == 0.0
    assert backoff_s(10_000) == MAX_BACKOFF_S


DEATHS = [
    exceptions.ActorDiedError(),
    exceptions.ActorUnavailableError("unavailable", None),
    exceptions.WorkerCrashedError(),
    exceptions.NodeDiedError("gone"),
    exceptions.LocalRayletDiedError(),
    exceptions.OutOfMemoryError("memory"),
    exceptions.ObjectLostError("0" * 56, None, ""),
    exceptions.OwnerDiedError("0" * 56, None, ""),
    exceptions.ObjectFetchTimedOutError("0" * 56, None, ""),
    exceptions.ObjectReconstructionFailedError("0" * 56, None, "", ""),
]


def in_task(cause: Exception) -> BaseException:
    """Return the error that a call raises whose own code raised `cause`."""
    return exceptions.RayTaskError("call", "traceback", cause).as_instanceof_cause()


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_every_error_of_a_lost_process_node_or_object_is_a_death(error: Exception) -> None:
    assert is_death(error)
    assert is_death(in_task(error))


@pytest.mark.parametrize(
    "error",
    [EngineError("no"), exceptions.TaskCancelledError(), exceptions.GetTimeoutError("no")],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_called_code_are_not_deaths(error: Exception) -> None:
    assert not is_death(error)
    assert not is_death(in_task(error))
