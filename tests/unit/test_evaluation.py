"""Evaluations: pinned to a version, by source, on a lent actor that gets its weights afterwards."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from episodes import make_trajectory

from raylearner.config.schema import EvaluationSection, SamplingSection
from raylearner.errors import EngineDead, EvaluationIncomplete, RaylearnerError, ToolError
from raylearner.observability.lines import evaluation_lines
from raylearner.observability.spans import Tracer
from raylearner.run import evaluation
from raylearner.run import evaluation as evaluations
from raylearner.run.evaluation import Evaluations, Evaluator
from raylearner.run.evaluation_metrics import Scoring
from raylearner.types import Claim, Prompt, Trajectory

PROMPTS = [Prompt(prompt_id=f"a{i}", messages=(), source="a") for i in range(6)]
PROMPTS += [Prompt(prompt_id="b0", messages=(), source="b")]


def played(claim: Claim, *, version: int = 3, segment: int = 0, reward: float = 1.0) -> Trajectory:
    return make_trajectory(
        [-1, version], claim=claim, segment=segment, reward=reward, claim_policy_version=version
    )


def make_evaluator(
    prompts: list[Prompt] = PROMPTS,
    *,
    record: Any = None,
    scoring: Scoring | None = None,
    name: str = "",
    **section: Any,
) -> Evaluator:
    return Evaluator(
        EvaluationSection(**section),
        prompts,
        scoring=scoring or Scoring(),
        name=name,
        record_trajectories=record or (lambda step, found: None),
    )


class Actor:
    def __init__(self, *, version: int = 3, failures: int = 0) -> None:
        self.version = version
        self.failures = failures
        self.seen: list[Prompt] = []

    async def __call__(
        self, claims: list[Claim], sampling: SamplingSection, time_limit_s: float
    ) -> list[Trajectory]:
        if self.failures:
            self.failures -= 1
            raise EngineDead("lost")
        self.seen += [claim.prompt for claim in claims]
        first = [
            played(claim, version=self.version, reward=float(claim.prompt.source == "a"))
            for claim in claims
        ]
        return [*first, *(played(claim, version=self.version, segment=1) for claim in claims[:1])]


async def test_a_limit_takes_prompts_of_every_source() -> None:
    evaluator = make_evaluator(num_prompts=3)
    actor = Actor()
    record = await evaluator.evaluate(lambda: {"x": actor}, step=5, policy_version=3)
    assert Counter(p.source for p in actor.seen) == {"a": 2, "b": 1}
    assert (record["step"], record["policy_version"], record["num_prompts"]) == (5, 3, 3)
    assert (record["a/reward/mean"], record["b/reward/mean"]) == (1.0, 0.0)


async def test_the_trajectories_of_an_evaluation_are_recorded() -> None:
    recorded: dict[int, int] = {}
    evaluator = make_evaluator(record=lambda step, found: recorded.update({step: len(found)}))
    await evaluator.evaluate(lambda: {"x": Actor()}, step=5, policy_version=3)
    assert recorded == {5: len(PROMPTS) + 1}


async def test_segments_of_an_episode_count_its_reward_once() -> None:
    record = await make_evaluator().evaluate(lambda: {"x": Actor()}, step=0, policy_version=3)
    assert record["num_prompts"] == len(PROMPTS)
    assert record["reward/mean"] == 6 / 7
    assert record["sampled_tokens/mean"] == 8 / 7


@pytest.mark.parametrize(
    ("rewards", "failed_reward", "mean", "without"),
    [
        ((1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 0.25, 0.25),
        ((1.0, 1.0, None, None, None, None, None, None), 0.0, 0.25, 1.0),
        ((1.0, None, None, None), -1.0, -0.5, 1.0),
        ((1.0, -2.0, None), 0.0, -1.0, -0.5),
        ((None, None), 0.0, 0.0, None),
    ],
)
async def test_episodes_that_fail_count_as_not_solved_and_are_shown(
    caplog: pytest.LogCaptureFixture,
    rewards: tuple[float | None, ...],
    failed_reward: float,
    mean: float,
    without: float | None,
) -> None:
    """None stands for an episode that failed; each has two segments."""
    prompts = [Prompt(prompt_id=f"p{i}", messages=(), source="a") for i in range(len(rewards))]

    async def actor(
        given: list[Claim], sampling: SamplingSection, time_limit_s: float
    ) -> list[Trajectory]:
        segments: list[Trajectory] = []
        for claim in given:
            reward = rewards[int(claim.prompt.prompt_id[1:])]
            whole = [played(claim, segment=n, reward=reward or 0.0) for n in (0, 1)]
            segments += (
                whole if reward is not None else [s.failed(ToolError("down")) for s in whole]
            )
        return segments

    evaluator = make_evaluator(prompts, scoring=Scoring(failed_reward=failed_reward))
    record = await evaluator.evaluate(lambda: {"x": actor}, step=5, policy_version=3)
    for prefix in ("", "a/"):
        assert record[f"{prefix}reward/mean"] == mean
        assert record[f"{prefix}reward/mean_without_failed"] == without
        assert record[f"{prefix}errors"] == rewards.count(None)
        assert record[f"{prefix}failed_fraction"] == rewards.count(None) / len(rewards)
    assert ("tool: down" in caplog.text) == (None in rewards)


async def test_prompts_of_a_dead_engine_are_evaluated_by_the_other_actors() -> None:
    dead, first, second = Actor(failures=99), Actor(), Actor()
    record = await make_evaluator().evaluate(
        lambda: {"dead": dead, "a": first, "b": second}, step=0, policy_version=3
    )
    assert (record["num_prompts"], record["errors"]) == (len(PROMPTS), 0)
    assert dead.failures == 98, "it is asked once"
    assert {p.prompt_id for p in first.seen + second.seen} == {p.prompt_id for p in PROMPTS}


async def test_an_evaluation_waits_for_the_replacement_of_its_only_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "ACTORS_POLL_S", 0.01)
    replacement = Actor()
    looks = iter([{"r0": Actor(failures=9)}, {"r0": Actor(failures=9)}, {}, {"r1": replacement}])
    record = await make_evaluator().evaluate(
        lambda: next(looks), step=0, policy_version=3, wait_s=5
    )
    assert record["num_prompts"] == len(replacement.seen) == len(PROMPTS)


async def test_an_evaluation_that_no_actor_survives_is_incomplete() -> None:
    with pytest.raises(EvaluationIncomplete, match="7 of 7"):
        await make_evaluator().evaluate(lambda: {"r0": Actor(failures=9)}, step=0, policy_version=3)


async def test_tokens_of_another_version_end_the_evaluation() -> None:
    evaluator = make_evaluator()
    with pytest.raises(RaylearnerError, match=r"\[3, 4\]"):
        await evaluator.evaluate(
            lambda: {"x": Actor(), "y": Actor(version=4)}, step=0, policy_version=3
        )


@pytest.mark.parametrize("answers", [True, False])
async def test_episodes_unfinished_at_the_time_limit_are_reported(
    answers: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "ANSWER_TIMEOUT_S", 0.05)

    async def actor(
        given: list[Claim], sampling: SamplingSection, time_limit_s: float
    ) -> list[Trajectory]:
        await asyncio.sleep(time_limit_s if answers else 3600)
        return [played(claim) for claim in given if claim.prompt.prompt_id in ("a0", "a1")]

    evaluator = make_evaluator(time_limit_s=0.1)
    async with asyncio.timeout(5):
        record = await evaluator.evaluate(lambda: {"x": actor}, step=5, policy_version=3)
    num_played = 2 if answers else 0
    assert (record["num_prompts"], record["unfinished"]) == (7, 7 - num_played)
    assert record["reward/mean"] == num_played / 7
    assert (record["a/unfinished"], record["b/unfinished"]) == (6 - num_played, 1)
    assert record["b/reward/mean"] == 0.0
    assert "evaluation.time_limit_s=0.1" in caplog.text


class Run:
    """The actors of a run, with the evaluations made on them."""

    def __init__(self, evaluators: Sequence[Evaluator] = (), **actors: Actor) -> None:
        self.events: list[str] = []
        self.records: list[Mapping[str, Any]] = []
        self.actors = actors

        async def publish() -> None:
            self.events.append("publish")

        async def give_back(actor_id: str) -> None:
            self.events.append(f"back {actor_id}")

        run_actors: Any = SimpleNamespace(
            fleet=SimpleNamespace(actors=actors, evaluators=lambda: dict(actors)),
            learner=SimpleNamespace(policy_version=3),
            publish=publish,
            lend=lambda actor_id: self.events.append(f"lend {actor_id}"),
            give_back=give_back,
        )
        self.evaluations = Evaluations(
            evaluators or [make_evaluator(every_steps=4)],
            actors=run_actors,
            can_lend=True,
            record=self.records.append,
            tracer=Tracer("controller", is_enabled=False),
        )


async def test_one_actor_is_lent_and_given_back_after_its_evaluation() -> None:
    run = Run(r0=Actor(), r1=Actor())
    await run.evaluations.start(4)
    assert run.events == ["publish", "lend r1"]
    await run.evaluations.start(8)
    await run.evaluations.wait()
    assert run.events == ["publish", "lend r1", "publish", "back r1", "lend r1", "back r1"]
    assert [record["step"] for record in run.records] == [4, 8]
    assert run.actors["r0"].seen == []


async def test_a_single_actor_is_not_lent() -> None:
    run = Run(r0=Actor())
    await run.evaluations.start(4)
    assert (run.events, len(run.records)) == (["publish"], 1)


async def test_an_actor_that_lives_is_given_back_after_a_lost_evaluation() -> None:
    run = Run(r0=Actor(), r1=Actor(failures=9))
    await run.evaluations.start(4)
    await run.evaluations.wait()
    assert (run.events[1:], run.records) == (["lend r1", "back r1"], [])


async def test_a_cancelled_evaluation_gives_nothing_back() -> None:
    run = Run(r0=Actor(), r1=Actor())
    await run.evaluations.start(4)
    await asyncio.sleep(0)
    await run.evaluations.cancel()
    assert run.events == ["publish", "lend r1"]


async def test_every_prompt_is_played_several_times_and_its_samples_stay_together() -> None:
    recorded: list[Trajectory] = []
    evaluator = make_evaluator(
        record=lambda step, found: recorded.extend(found), samples_per_prompt=4
    )
    actors = {"x": Actor(), "dead": Actor(failures=9), "y": Actor()}
    record = await evaluator.evaluate(lambda: actors, step=5, policy_version=3)
    assert (record["num_prompts"], record["samples_per_prompt"]) == (7, 4)
    assert (record["a/pass@4"], record["b/pass@4"]) == (1.0, 0.0)
    assert len({t.episode_key for t in recorded}) == 28
    assert {t.sample_index for t in recorded if t.prompt_id == "b0"} == {0, 1, 2, 3}
    assert len({p.prompt_id for p in actors["x"].seen[:9]}) <= 3


async def test_a_limit_that_passes_while_actors_are_replaced_reports_what_was_played() -> None:
    lost = Actor()

    async def dies(claims: list[Claim], *_: Any) -> list[Trajectory]:
        await asyncio.sleep(0.2)
        raise EngineDead("lost")

    evaluator = make_evaluator(time_limit_s=0.1)
    record = await evaluator.evaluate(
        lambda: {"x": lost, "y": dies}, step=5, policy_version=3, wait_s=5
    )
    assert (record["num_prompts"], record["unfinished"]) == (7, 4)


async def test_sets_have_their_own_interval_and_metrics_by_name() -> None:
    sets = [
        make_evaluator(every_steps=4),
        make_evaluator(PROMPTS[:2], name="hard", every_steps=8, samples_per_prompt=2),
    ]
    run = Run(sets, r0=Actor(), r1=Actor())
    assert [step for step in range(1, 9) if run.evaluations.is_due(step)] == [4, 8]
    for step in (4, 8):
        await run.evaluations.start(step)
    await run.evaluations.wait()
    assert [(r["step"], r.get("set")) for r in run.records] == [(4, None), (8, None), (8, "hard")]
    hard = run.records[-1]
    assert (hard["hard/num_prompts"], hard["hard/pass@2"], hard["hard/a/reward/mean"]) == (2, 1, 1)
    assert "reward/mean" not in hard
    assert run.events.count("lend r1") == run.events.count("back r1") == 2
    assert evaluation_lines(hard)[0].startswith("evaluation of hard at step 8: reward")
    await run.evaluations.run(9)
    assert [r["step"] for r in run.records][3:] == [9, 9]
