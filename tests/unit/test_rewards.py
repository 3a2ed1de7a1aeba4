"""Rewards: weights, None, clipping, logs, and failures that belong to their trajectory."""

import asyncio
import logging
import sys
import types
from typing import Any

import numpy as np
import pytest
from episodes import make_turn, make_view

from raylearner.config.rewards import RewardSection
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.catalogue import check_rows
from raylearner.rewards.scorer import Scorer
from raylearner.rewards.user import check_columns
from raylearner.types import EpisodeScore, Message, Prompt


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("user_rewards")

    async def later(episode) -> float:
        await asyncio.sleep(0)
        return 0.5

    def nothing(episode) -> None:
        return None

    def breaks(episode) -> float:
        raise KeyError("gold")

    def words(episode) -> str:
        return "much"

    async def hangs(episode) -> float:
        await asyncio.sleep(60)
        return 1.0

    def logs(episode, *, factor: float, log_extra, log_metric) -> float:
        log_extra("given", episode.turns[-1].text)
        log_metric("length", len(episode.completion))
        return factor

    for function in (later, nothing, breaks, words, hangs, logs):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "user_rewards", module)
    return module


def make_section(*functions: dict[str, Any] | str, **section: Any) -> RewardSection:
    kinds = [{"kind": f} if isinstance(f, str) else f for f in functions]
    return RewardSection.model_validate({"functions": kinds, **section})


def make_scorer(*functions: dict[str, Any] | str, **section: Any) -> Scorer:
    return Scorer(make_section(*functions, **section))


async def score_one(function: dict[str, Any] | str, view) -> float | None:
    return (await make_scorer(function).score(view)).reward


async def score_group(name: str, size: int) -> list[EpisodeScore]:
    """Score a group of this size with a user's function of groups."""
    section = make_section({"kind": f"user_rewards:{name}", "per": "group"})
    return await Scorer(section, sees_groups=True).score_all([make_view("a")] * size)


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
async def test_exact_answer(text: str, reward: float) -> None:
    assert await score_one("exact_answer", make_view(text)) == reward


@pytest.mark.parametrize(
    ("given", "answers", "match", "f1"),
    [
        ("The  Eiffel Tower!", ("eiffel tower",), 1.0, 1.0),
        ("an apple", ("Apple", "pear"), 1.0, 1.0),
        ("a pear", ("Apple", "pear"), 1.0, 1.0),
        ("Paris, France", ("Paris",), 0.0, 2 / 3),
        ("big red fox", ("red fox jumps high",), 0.0, 4 / 7),
        ("the", ("a",), 0.0, 0.0),
        ("a", ("A",), 1.0, 1.0),
        ("", ("x",), 0.0, 0.0),
        ("U.S.", ("US",), 1.0, 1.0),
        ("1,000.", ("1000",), 1.0, 1.0),
        ("E\u0301cole", ("\xe9cole",), 1.0, 1.0),
        ("42", ("42.0",), 1.0, 1.0),
        ("**42**", ("42",), 1.0, 1.0),
        ("**New York**", ("New York",), 1.0, 1.0),
        ("$42$", ("42",), 1.0, 1.0),
    ],
)
async def test_answers_are_compared_after_squad_normalisation(
    given: str, answers: tuple[str, ...], match: float, f1: float
) -> None:
    view = make_view(f"so <answer>{given}</answer>", answers=answers)
    assert await score_one("exact_match", view) == match
    assert await score_one("f1", view) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        *[("-", "+"), ("?", "!"), ("-5", "5"), ("420", "42.0"), ("314", "3.14"), ("12", "1/2")],
        *[("C", "C++"), ("C#", "C++"), ("A-", "A+"), ("x>1", "x<1"), ("(1,2)", "[1,2]")],
        *[("15", "1,5"), ("1030", "10:30"), ("5", "50%"), ("xy", "x-y"), ("vitamin", "Vitamin A")],
        *[("n", "n!"), ("f", "f'"), ("f'", "f''"), ("p", "!p"), ("a", "{a}"), ("5", "$5")],
        *[("fx", "f(x)"), ("the", "A"), ("x2", "x\xb2"), ("None", "nine")],
    ],
)
async def test_normalisation_never_makes_two_different_answers_equal(given: str, gold: str) -> None:
    for answer, accepted in ((given, gold), (gold, given)):
        view = make_view(f"<answer>{answer}</answer>", answers=(accepted,))
        assert await score_one("exact_answer", view) == 0.0
        assert await score_one("exact_match", view) == 0.0
        assert await score_one("f1", view) < 1.0  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["exact_answer", "exact_match", "f1", "math_verify"])
async def test_an_absent_answer_earns_nothing_and_a_row_without_one_has_no_reward(
    kind: str,
) -> None:
    scorer = make_scorer(kind)
    for turns in (("<answer></answer>",), ("<answer> </answer>",), ("",), ("I do not know.",), ()):
        for answers, reward in (((), None), (("",), None), ((" ", ""), None), (("", "46"), 0.0)):
            assert (await scorer.score(make_view(*turns, answers=answers))).reward == reward
    await scorer.close()


@pytest.mark.parametrize(
    ("text", "plain", "with_reasoning"),
    [
        ("hm <answer>1</answer>", 1.0, 0.0),
        ("<think>a\nb</think>\n<answer>1</answer> ", 1.0, 1.0),
        ("<answer>1</answer> done", 0.0, 0.0),
        ("<answer> </answer>", 0.0, 0.0),
        ("<answer>1</answer><answer>2</answer>", 0.0, 0.0),
        ("<think>a<think>b</think><answer>1</answer>", 1.0, 0.0),
        ("no answer", 0.0, 0.0),
    ],
)
async def test_answer_format(text: str, plain: float, with_reasoning: float) -> None:
    assert await score_one("answer_format", make_view(text)) == plain
    strict = {"kind": "answer_format", "reasoning_tag": "think"}
    assert await score_one(strict, make_view(text)) == with_reasoning


async def test_tool_use_counts_answered_and_failed_calls_within_its_bounds() -> None:
    section = {"kind": "tool_use", "valid": 0.2, "invalid": -0.5, "min": -0.6, "max": 0.5}
    two = make_turn("x", tool="search,fetch")
    assert await score_one(section, make_view(two, "y")) == pytest.approx(0.4)
    failed = make_view(two, "y", metrics={"failed_tool_calls": 1.0})
    assert await score_one(section, failed) == pytest.approx(0.2 - 0.5)
    assert await score_one(section, make_view(two, two)) == 0.5
    invalid = make_turn("?", is_valid=False)
    assert await score_one(section, make_view(invalid, invalid)) == -0.6


@pytest.mark.parametrize(
    ("row", "shown", "expected"),
    [
        ({"page_id": "3"}, ("7", "3"), 1.0),
        ({"page_id": 3}, ("3", "3"), 1.0),
        ({"page_id": "3"}, ("33",), 0.0),
        ({"page_id": "3"}, (), 0.0),
        ({"page_id": ["3", "4"]}, ("4",), 0.5),
        ({"page_id": None}, ("3",), None),
        ({"page_id": [None, "4", ""]}, ("None", "4"), 1.0),
        ({"page_id": 3.0}, ("3",), 1.0),
        ({"page_id": "e\u0301"}, ("\xe9",), 1.0),
        ({}, ("3",), None),
    ],
)
async def test_retrieval_hit_is_the_share_of_the_right_pages_that_were_looked_at(
    row: dict[str, object], shown: tuple[str, ...], expected: float | None
) -> None:
    prompt = Prompt(prompt_id="p", messages=(), columns=row)
    view = make_view("<answer>46</answer>", prompt=prompt, shown=shown)
    assert await score_one("retrieval_hit", view) == expected
    section = {"kind": "retrieval_hit", "column": "pages"}
    assert await score_one(section, view) is None


async def test_response_length_falls_on_both_sides() -> None:
    section = {"kind": "response_length", "target_tokens": 4}
    view = make_view("x", completion_ids=(1, 2, 3, 4, 5))
    assert await score_one(section, view) == 0.75
    assert await score_one(section, make_view("x", completion_ids=(1,) * 9)) == 0.0


async def test_weighted_sum_leaves_out_functions_that_do_not_apply() -> None:
    scorer = make_scorer(
        {"kind": "exact_answer", "weight": 2.0},
        "user_rewards:later",
        {"kind": "user_rewards:nothing", "weight": 9.0},
    )
    score = await scorer.score(make_view("<answer>46</answer>"))
    assert score.reward == 2.5
    assert score.rewards == {"exact_answer": 1.0, "later": 0.5, "nothing": None}


async def test_the_sum_is_clipped_and_its_parts_are_not() -> None:
    scorer = make_scorer({"kind": "exact_answer", "weight": 5.0}, clip=(-1.0, 2.0))
    score = await scorer.score(make_view("46"))
    assert (score.reward, score.rewards) == (2.0, {"exact_answer": 1.0})


async def test_async_functions_run_at_the_same_time(functions: types.ModuleType) -> None:
    meeting = asyncio.Barrier(3)

    async def meets(episode) -> float:
        await meeting.wait()
        return 1.0

    functions.meets = meets
    scorer = make_scorer(*["user_rewards:meets"] * 3, timeout_s=5.0)
    assert (await scorer.score(make_view("x"))).reward == 3.0


async def test_a_row_that_no_function_applies_to_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = make_scorer("user_rewards:nothing", "exact_answer")
    prompt = Prompt(prompt_id="data.jsonl:17", source="trivia", messages=())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            score = await scorer.score(make_view("x", prompt=prompt))
    assert score.reward is None
    (message,) = caplog.messages
    assert all(w in message for w in ("'data.jsonl:17'", "'trivia'", "nothing, exact_answer"))


@pytest.mark.parametrize(
    ("name", "timeout_s", "words"),
    [("breaks", 30.0, "KeyError"), ("words", 30.0, "None"), ("hangs", 0.05, "0.05 s")],
)
async def test_a_failing_function_is_a_reward_error_with_its_name(
    name: str, timeout_s: float, words: str
) -> None:
    scorer = make_scorer(f"user_rewards:{name}", timeout_s=timeout_s)
    with pytest.raises(RewardError, match=f"'{name}'.*{words}"):
        await scorer.score(make_view("x"))


async def test_a_function_of_one_episode_logs_columns_and_numbers() -> None:
    scorer = make_scorer({"kind": "user_rewards:logs", "arguments": {"factor": 0.25}})
    score = await scorer.score(make_view("abc"))
    assert score.reward == 0.25
    assert score.columns == {"given": "abc"}
    assert score.metrics == {"logs/length": 3.0}


async def test_trl_functions_get_lists_by_name_and_the_training_state(
    functions: types.ModuleType,
) -> None:
    seen: dict[str, Any] = {}

    def trl(prompts, completions, completion_ids, level, trainer_state, log_extra, **rest):
        seen.update(rest, prompts=prompts, completions=completions, ids=completion_ids)
        seen.update(level=level, step=trainer_state.global_step)
        seen.update(version=trainer_state.policy_version)
        log_extra("where", ["here"])
        return np.array([0.5])

    functions.trl = trl
    prompt = Prompt(
        prompt_id="p",
        messages=(Message(role="system", content="s"), Message(role="user", content="q")),
        answer="42",
        columns={"level": 3},
    )
    view = make_view("a", prompt=prompt, step=9)
    score = await make_scorer("user_rewards:trl").score(view)
    assert (score.reward, score.columns) == (0.5, {"where": "here"})
    assert (seen["prompts"], seen["completions"], seen["ids"]) == (["q"], ["a"], [[1, 2, 3]])
    assert (seen["level"], seen["answer"], seen["prompt_id"]) == ([3], ["42"], ["p"])
    assert (seen["step"], seen["version"]) == (9, 5)


async def test_trl_functions_get_messages_for_rows_of_messages(
    functions: types.ModuleType,
) -> None:
    seen: dict[str, Any] = {}

    async def trl(prompts, completions, **rest):
        seen.update(prompts=prompts, completions=completions)
        return [None]

    functions.trl = trl
    question = Message(role="user", content="q")
    prompt = Prompt(prompt_id="p", messages=(question,), is_conversational=True)
    view = make_view(make_turn("call", reply="result"), "done", prompt=prompt)
    assert await score_one("user_rewards:trl", view) is None
    assert seen["prompts"] == [[{"role": "user", "content": "q"}]]
    assert [m["role"] for m in seen["completions"][0]] == ["assistant", "tool", "assistant"]
    assert seen["completions"][0][1]["content"] == "result"


async def test_a_column_that_a_function_asks_for_and_the_row_lacks_is_named(
    functions: types.ModuleType,
) -> None:
    functions.trl = lambda completions, solution: [1.0]
    prompt = Prompt(prompt_id="p", messages=(), columns={"level": 3})
    with pytest.raises(RewardError, match=r"'solution'.*'p'.*level"):
        await score_one("user_rewards:trl", make_view("x", prompt=prompt))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ({"kind": "no_such_module:f"}, "ModuleNotFoundError"),
        ({"kind": "math:no_such"}, "no_such"),
        ({"kind": "math:pi"}, "math:pi"),
        ({"kind": "user_rewards:logs", "arguments": {"fctor": 1}}, "'fctor'"),
        ({"kind": "math:pow"}, "'y'"),
    ],
)
def test_a_function_that_cannot_be_taken_is_a_config_error(
    function: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.functions\.1: .*{words}"):
        make_scorer("exact_answer", function)
    with pytest.raises(ConfigError, match=rf"rewards\.functions\.1: .*{words}"):
        check_rows(make_section("exact_answer", function), ())


def test_the_same_function_twice_keeps_two_names() -> None:
    section = make_section("f1", "f1", {"kind": "f1", "name": "mine"})
    assert section.names == ("f1", "f1_2", "mine")


async def test_math_verify_sees_equal_values_in_other_forms_and_survives_a_hang() -> None:
    scorer = make_scorer({"kind": "math_verify", "check_timeout_s": 2.0})

    async def score(given: str, *answers: str):
        return await scorer.score(make_view(f"<answer>{given}</answer>", answers=answers))

    try:
        assert (await score("0.5", "\\frac{1}{2}")).reward == 1.0
        assert (await score("1 + x^2", "x^2+1")).reward == 1.0
        assert (await score("47", "46", "47")).reward == 1.0
        assert (await score("48", "46", "47")).reward == 0.0
        hang = await score("$9^{9^{9^{9^{9}}}} - 1$", "46")
        assert (hang.reward, hang.metrics["math_verify/timeouts"]) == (0.0, 1.0)
        after = await score("46", "46")
        assert (after.reward, after.metrics["math_verify/timeouts"]) == (1.0, 0.0)
    finally:
        await scorer.close()


@pytest.mark.parametrize(
    ("returns", "shown"),
    [
        (0.5, "0.5"),
        (None, "None"),
        ([0.5], "[0.5]"),
        ([0.5] * 4, "[0.5, 0.5, 0.5, 0.5]"),
        ({0.5, 0.6, 0.7}, "{0."),
        ([1.0, "0.5", 0.0], "'0.5'"),
        ([1.0, [0.5], 0.0], "[0.5]"),
        ([1.0, {"score": 1.0}, 0.0], "{'score': 1.0}"),
        ([1.0, float("inf"), 0.0], "inf"),
        ([1.0, 1j, 0.0], "1j"),
        (np.ones((3, 1)), "[1.0]"),
        (["x" * 100_000] * 9, "xxx"),
    ],
)
async def test_a_wrong_value_is_an_error_that_names_function_and_value(
    functions: types.ModuleType, returns: object, shown: str
) -> None:
    functions.wrong = lambda prompts, completions, **columns: returns
    with pytest.raises(RewardError) as error:
        await score_group("wrong", 3)
    message = str(error.value)
    assert "'wrong'" in message
    assert shown in message
    assert len(message) < 500


async def test_numbers_of_other_types_are_taken(functions: types.ModuleType) -> None:
    functions.right = lambda completions: (np.float32(1), True, None, np.int64(2), float("nan"))
    scores = await score_group("right", 5)
    assert [score.reward for score in scores] == [1.0, 1.0, None, 2.0, None]


def test_columns_that_a_function_would_never_see_are_refused(functions: types.ModuleType) -> None:
    functions.takes_all = lambda prompts, completions, **columns: [0.0]
    functions.named = lambda completions, level: [0.0]
    functions.views = lambda episode, **arguments: 0.0

    def check(kind: str, columns: dict[str, Any], **section: Any) -> None:
        rewards = make_section({"kind": f"user_rewards:{kind}", **section})
        check_columns(rewards, [Prompt(prompt_id="row-3", messages=(), columns=columns)])

    for column in ("completions", "prompts", "step", "log_extra", "trainer_state"):
        with pytest.raises(ConfigError) as error:
            check("takes_all", {"reward": 3, column: 9})
        assert all(word in str(error.value) for word in ("row-3", column, "takes_all"))
        check("views", {column: 9})
    check("takes_all", {"reward": 3, "answer": 4})
    check("named", {"step": 9})
    with pytest.raises(ConfigError):
        check("named", {"level": 9}, arguments={"level": 1})
    with pytest.raises(ConfigError):
        make_scorer({"kind": "user_rewards:takes_all", "arguments": {"prompts": []}})


async def test_columns_that_two_functions_log_are_both_kept(functions: types.ModuleType) -> None:
    for name in ("first", "second"):

        def logs(episode, *, log_extra, name=name) -> float:
            log_extra("seen", name)
            return 0.0

        setattr(functions, name, logs)
    score = await make_scorer("user_rewards:first", "user_rewards:second").score(make_view("a"))
    assert score.columns == {"seen": "first", "second/seen": "second"}


def test_rows_that_no_function_can_score_are_reported_before_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [
        Prompt(prompt_id=f"row-{i}", messages=(), answer=a) for i, a in enumerate((None, "", "4"))
    ]
    answers = make_section("f1", "math_verify")
    check_rows(make_section("f1", {"kind": "response_length", "target_tokens": 5}), rows[:2])
    assert not caplog.records
    check_rows(answers, rows)
    (message,) = caplog.messages
    assert all(words in message for words in ("2 of 3 rows", "row-0, row-1"))
    with pytest.raises(ConfigError, match="answer_column"):
        check_rows(answers, rows[:2])
