"""Sampling that the engine cannot do, or whose log-probabilities would mean something else to the
learner.
"""

import re
from collections.abc import Iterator

from raylearner.config import engine_arguments
from raylearner.config.finding import Finding
from raylearner.config.loss import BEHAVIOR_WEIGHTED
from raylearner.config.schema import RunConfig, SamplingSection, VllmEngine

SHAPING = {
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "extra_args",
}
"""SamplingParams that change the distribution sampled from; what the engine reports is of the changed
one, masks of a regex included: vLLM applies them to the logits before it takes any log-probability."""
HARMLESS = {"ignore_eos", "repetition_detection", "skip_reading_prefix_cache"}
"""SamplingParams that change when a turn ends, or nothing."""


def check_sampling(config: RunConfig) -> Iterator[Finding]:
    """Clashes of both samplings with the engine, and of training's with the learner."""
    yield from _compared(config)
    for key, sampling in (
        ("sampling", config.sampling),
        ("evaluation.sampling", config.evaluation.sampling),
    ):
        yield from _understood(key, sampling, config)
    engine = config.actors.engine
    if isinstance(engine, VllmEngine):
        for name, problem in engine_arguments.problems(engine.extra_arguments):
            yield Finding(f"actors.engine.extra_arguments.{name}", problem)


def _understood(key: str, sampling: SamplingSection, config: RunConfig) -> Iterator[Finding]:
    """What the engine does not take, or raylearner sets itself."""
    engine = config.actors.engine
    if not isinstance(engine, VllmEngine):
        for name in ("regex", "extra_arguments"):
            if getattr(sampling, name):
                yield Finding(
                    f"{key}.{name}",
                    f"needs actors.engine.kind 'vllm', got {engine.kind!r}; remove it",
                )
        return
    for name in sorted(sampling.extra_arguments.keys() - SHAPING - HARMLESS):
        known = ", ".join(sorted(SHAPING | HARMLESS))
        yield Finding(
            f"{key}.extra_arguments.{name}",
            f"is set by raylearner or is no SamplingParams of vLLM; further ones are {known}",
        )
    if sampling.regex is not None:
        try:
            re.compile(sampling.regex)
        except re.error as error:
            yield Finding(f"{key}.regex", f"is no regular expression: {error}")


def _compared(config: RunConfig) -> Iterator[Finding]:
    """Engine and learner must mean the same distribution where log-probabilities are compared."""
    sampling, reason = config.sampling, _why_compared(config)
    if sampling.temperature == 0.0:
        yield Finding(
            "sampling.temperature",
            "must be > 0 in training, got 0.0: greedy tokens carry no probability to learn from; "
            "1.0 is the usual choice",
        )
    if reason is None:
        return
    off = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "regex": (sampling.regex, None),
        **{
            f"extra_arguments.{name}": (value, None)
            for name, value in sampling.extra_arguments.items()
            if name in SHAPING
        },
    }
    for name, (value, neutral) in off.items():
        if value != neutral:
            wanted = "be absent" if neutral is None else f"be {neutral} (off)"
            yield Finding(
                f"sampling.{name}",
                f"must {wanted} in training, got {value!r}: {reason} compares learner and "
                "engine probabilities, and the learner applies the temperature only; "
                "sharpen with sampling.temperature, or restrict in evaluation.sampling alone",
            )


def _why_compared(config: RunConfig) -> str | None:
    """The key by which the engine's log-probabilities enter the objective; None without one."""
    learner = config.learner
    if learner.loss.kind in BEHAVIOR_WEIGHTED:
        return f"learner.loss.kind {learner.loss.kind!r}"
    if learner.corrections:
        return f"learner.corrections, {learner.corrections[0].kind!r},"
    if learner.advantage.kind == "vtrace":
        return "learner.advantage.kind 'vtrace'"
    if learner.proximal != "recomputed":
        return f"learner.proximal {learner.proximal!r}"
    return None
