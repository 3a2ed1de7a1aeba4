"""Rewards: weights, None, failures that belong to their trajectory."""

import asyncio
import sys
import types

import pytest

from raylearner.config.schema import RewardFunction, RewardSection
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.functions import EpisodeView, exact_answer
from raylearner.rewards.scorer import Scorer
from raylearner.types import CompletionStop, Message, Prompt, StopReason, Turn


def make_view(text: str, *, answer: str | None = "46") -> EpisodeView:
    turn = Turn(
        start=0,
        end=1,
        reply_end=1,
        text=text,
        reply="",
        stop_reason=CompletionStop.END,
        min_policy_version=0,
        max_policy_version=0,
    )
    prompt = Prompt(
        prompt_id="p", messages=(Message(role="user", content="12+34="),), answer=answer
    )
    return EpisodeView(
        prompt=prompt,
        turns=(turn,),
        response=text,
        completion_ids=(1, 2, 3),
        stop_reason=StopReason.ANSWER,
        policy_version=0,
    )


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("user_rewards")

    async def later(episode: EpisodeView) -> float:
        await asyncio.sleep(0)
        return 0.5

    def nothing(episode: EpisodeView) -> None:
        return None

    def breaks(episode: EpisodeView) -> float:
        raise KeyError("gold")

    def words(episode: EpisodeView) -> str:
        return "much"

    async def hangs(episode: EpisodeView) -> float:
        await asyncio.sleep(60)
        return 1.0

    for function in (later, nothing, breaks, words, hangs):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "user_rewards", module)
    return module


def make_scorer(*kinds: tuple[str, float], timeout_s: float = 30.0) -> Scorer:
    functions = tuple(RewardFunction(kind=kind, weight=weight) for kind, weight in kinds)
    return Scorer(RewardSection(functions=functions, timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>46</answer>", 1.0),
        ("<answer> 46 </answer>", 1.0),
        ("<answer>4</answer><answer>46</answer>", 1.0),
        ("46", 1.0),
        ("<answer>460</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_exact_answer(text: str, reward: float) -> None:
    assert exact_answer(make_view(text)) == reward


def test_exact_answer_does_not_apply_without_an_answer() -> None:
    assert exact_answer(make_view("x", answer=None)) is None


@pytest.mark.usefixtures("functions")
async def test_weighted_sum_leaves_out_functions_that_do_not_apply() -> None:
    scorer = make_scorer(
        ("exact_answer", 2.0), ("user_rewards:later", 1.0), ("user_rewards:nothing", 9.0)
    )
    reward, parts = await scorer.score(make_view("<answer>46</answer>"))
    assert reward == 2.5
    assert parts == {"exact_answer": 1.0, "later": 0.5, "nothing": None}


@pytest.mark.usefixtures("functions")
async def test_no_reward_when_none_applies() -> None:
    reward, _ = await make_scorer(("user_rewards:nothing", 1.0)).score(make_view("x"))
    assert reward is None


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("kind", "words"),
    [("breaks", "raised KeyError"), ("words", "finite number or None"), ("hangs", "longer than")],
)
async def test_a_failing_function_is_a_reward_error_with_its_name(kind: str, words: str) -> None:
    scorer = make_scorer((f"user_rewards:{kind}", 1.0), timeout_s=0.05)
    with pytest.raises(RewardError, match=f"'{kind}'.*{words}"):
        await scorer.score(make_view("x"))


@pytest.mark.parametrize("kind", ["exact_anser", "no_such_module:f", "math:no_such"])
def test_an_unknown_function_is_a_config_error(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.functions"):
        make_scorer((kind, 1.0))


def test_the_same_function_twice_keeps_two_names() -> None:
    assert make_scorer(("exact_answer", 1), ("exact_answer", 2)).names == [
        "exact_answer",
        "exact_answer_2",
    ]
