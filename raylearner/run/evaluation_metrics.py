"""The numbers of one evaluation: means with standard errors, pass@k and the majority vote."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from raylearner.config.rewards import AnswerMatch, CheckedAnswer
from raylearner.config.schema import EvaluationKeys, RunConfig, ToolUse
from raylearner.observability.episodes import Episode, mean_reward
from raylearner.rewards.built_in import normalize_words
from raylearner.text import pairs
from raylearner.types import Claim

Key: TypeAlias = tuple[int, int]
"""Number of the prompt and of its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How episodes count."""

    failed_reward: float = 0.0
    """Reward of failed and unfinished episodes, or the lowest of the others if that is lower."""
    solved_reward: float = 1.0
    """Minimum reward of a solved episode."""
    answer_tag: str | None = "answer"
    """Tag around the answer that is voted on; with None, it is that in the last `\\boxed{}` of the last turn,
    or else the whole turn."""

    @classmethod
    def of_run(cls, config: RunConfig, section: EvaluationKeys) -> Self:
        """Return how episodes of a run count in the evaluations of a section."""
        judged = [f for f in config.rewards.functions if isinstance(f, AnswerMatch | CheckedAnswer)]
        tags = [function.answer_tag for function in judged]
        tag = tags[0] if tags else "answer"
        if isinstance(config.environment, ToolUse):
            tag = config.environment.dialect.answer_tag or tag
        return cls(
            failed_reward=config.rewards.reported_failed_reward,
            solved_reward=section.solved_reward,
            answer_tag=tag,
        )


def summarize(
    claims: Sequence[Claim], episodes: Sequence[Episode], *, scoring: Scoring, prefix: str = ""
) -> dict[str, float | int | None]:
    """Return the numbers of the episodes that `claims` asked for, under keys with `prefix`.

    An episode that failed or did not finish counts as not solved, in `reward/mean`, `pass@k` and `majority@n`.
    `reward/mean_without_failed` and the means of single functions leave it out.
    """
    by_key = {episode.first.episode_key[:2]: episode for episode in episodes}
    samples = max(Counter(claim.group_id for claim in claims).values(), default=1)
    num_unfinished = len(claims) - len(episodes)
    num_failed = sum(episode.is_failed for episode in episodes)
    count = max(1, len(episodes))
    mean = mean_reward(episodes, failed_reward=scoring.failed_reward, num_unfinished=num_unfinished)
    known = [e.reward for e in episodes if e.reward is not None]
    lowest = min([scoring.failed_reward, *known])
    rewards: dict[int, list[float]] = defaultdict(list)
    for claim in claims:
        episode = by_key.get(claim.key[:2])
        if episode is None or episode.is_failed:
            rewards[claim.group_id].append(lowest)
        elif episode.reward is not None:
            rewards[claim.group_id].append(episode.reward)
    numbers: dict[str, float | int | None] = {
        "reward/mean": mean,
        "reward/standard_error": None if mean is None else standard_error(rewards),
        "reward/mean_without_failed": sum(known) / len(known) if known else None,
        **_functions(episodes),
        "num_prompts": len({claim.group_id for claim in claims}),
        "unfinished": num_unfinished,
        "errors": num_failed,
        "failed_fraction": num_failed / count,
        "turns/mean": sum(len(e.turns) for e in episodes) / count,
        "sampled_tokens/mean": sum(e.num_sampled_tokens for e in episodes) / count,
    }
    if samples > 1:
        numbers["samples_per_prompt"] = samples
        if mean is not None:
            numbers |= _passes(claims, by_key, rewards, scoring, samples)
    return {f"{prefix}{key}": value for key, value in numbers.items()}


def standard_error(values: Mapping[int, Sequence[float]]) -> float | None:
    """Return the standard error of the mean of all values, clustered by prompt; None for one prompt.

    It is `sqrt(C / (C - 1) * sum_c (sum_i (s_ci - mean))^2) / N` for `N` values of `C` prompts: the clustered
    standard error of Miller, Adding Error Bars to Evals (2024), section 2.2, https://arxiv.org/abs/2411.00640,
    with the usual factor for few clusters. Samples of one prompt are not independent; for one sample per
    prompt it is the ordinary standard error, for equally many that of the prompts' means.
    """
    total = sum(len(found) for found in values.values())
    clusters = [found for found in values.values() if found]
    if len(clusters) < 2:
        return None
    mean = sum(sum(found) for found in clusters) / total
    squares = sum(sum(value - mean for value in found) ** 2 for found in clusters)
    error = math.sqrt(len(clusters) / (len(clusters) - 1) * squares) / total
    return round(error, 12)  # equal values have an error of rounding alone


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that at least one of `k` samples is solved, estimated from `num_samples`.

    It is the unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al., Evaluating Large Language Models
    Trained on Code (2021), https://arxiv.org/abs/2107.03374, for `c` solved of `n` samples.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_sizes(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def majority(votes: Sequence[str | None], solved: Sequence[bool]) -> float:
    """Return whether the most frequent answer is solved; in a tie, the share of the tied ones that are.

    Votes of None do not count; without any other the prompt is not solved. Equal answers may be judged
    differently by rewards that see more than the answer: then it is the share of them that are solved.
    """
    by_answer: dict[str, list[bool]] = defaultdict(list)
    for vote, is_solved in zip(votes, solved, strict=True):
        if vote is not None:
            by_answer[vote].append(is_solved)
    most = max(map(len, by_answer.values()), default=0)
    tied = [sum(found) / most for found in by_answer.values() if len(found) == most]
    return sum(tied) / len(tied) if tied else 0.0


def find_answer(episode: Episode, tag: str | None) -> str | None:
    """Return the answer that an episode votes for, normalized; None where it gave none."""
    if episode.is_failed:
        return None
    text = episode.segments[-1].given_answer
    if text is None:
        text = episode.turns[-1].content if episode.turns else ""
        if tag is None:
            text = _boxed(text) or text
        else:
            found = list(pairs(text, f"<{tag}>", f"</{tag}>"))
            text = text[slice(*found[-1])] if found else ""
    return normalize_words(text) or None


def _boxed(text: str) -> str:
    """Return the content of the last complete `\\boxed{}`; empty without one."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:index]
    return ""


def _functions(episodes: Sequence[Episode]) -> dict[str, float | int]:
    """Return the mean of each reward function, with its error and the number of episodes it applied to."""
    numbers: dict[str, float | int] = {}
    for name in sorted({name for e in episodes for name in e.first.rewards}):
        parts: dict[int, list[float]] = defaultdict(list)
        for episode in episodes:
            if not episode.is_failed and (part := episode.first.rewards.get(name)) is not None:
                parts[episode.first.group_id].append(part)
        values = [part for found in parts.values() for part in found]
        if values:
            numbers[f"reward/{name}/mean"] = sum(values) / len(values)
            if (error := standard_error(parts)) is not None:
                numbers[f"reward/{name}/standard_error"] = error
            numbers[f"reward/{name}/episodes"] = len(values)
    return numbers


def _passes(
    claims: Sequence[Claim],
    by_key: Mapping[Key, Episode],
    rewards: Mapping[int, Sequence[float]],
    scoring: Scoring,
    samples: int,
) -> dict[str, float]:
    """Return pass@k and the majority vote, over prompts that have a reward or a failure."""
    solved: dict[int, list[bool]] = defaultdict(list)
    votes: dict[int, list[str | None]] = defaultdict(list)
    for claim in claims:
        if not rewards.get(claim.group_id):
            continue
        episode = by_key.get(claim.key[:2])
        reward = None if episode is None else episode.reward
        solved[claim.group_id].append(reward is not None and reward >= scoring.solved_reward)
        votes[claim.group_id].append(
            None if episode is None else find_answer(episode, scoring.answer_tag)
        )
    numbers: dict[str, float] = {}
    for k in pass_sizes(samples):
        passed = {i: [pass_at_k(len(found), sum(found), k)] for i, found in solved.items()}
        numbers |= _mean(f"pass@{k}", passed)
    if any(vote is not None for found in votes.values() for vote in found):
        chosen = {i: [majority(votes[i], solved[i])] for i in votes}
        numbers |= _mean(f"majority@{samples}", chosen)
    return numbers


def _mean(key: str, by_prompt: Mapping[int, Sequence[float]]) -> dict[str, float]:
    values = [value for found in by_prompt.values() for value in found]
    error = standard_error(by_prompt)
    return {key: sum(values) / len(values)} | (
        {} if error is None else {f"{key}/standard_error": error}
    )
