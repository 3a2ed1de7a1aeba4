"""Keys of the previous release that have another name now, or none."""

from collections.abc import Iterator

from raylearner.config.document import Node
from raylearner.config.problems import Problem

RENAMED_KEYS = {
    "actors.engine.is_eager": "eager",
    "actors.engine.should_sleep": "sleep",
    "learner.advantage.should_bootstrap": "bootstrap",
    "learner.kl.is_weighted": "weighted",
    "learner.should_compile": "compile",
    "learner.should_count_rejected": "count_rejected",
    "learner.should_mask_truncated": "mask_truncated",
    "learner.should_offload": "offload",
    "learner.should_reshard": "reshard",
    "model.is_tied": "tie_embeddings",
    "observability.completions.should_log": "log",
    "observability.profile.should_record_memory": "record_memory",
    "observability.profile.should_record_stacks": "record_stacks",
    "replay.should_drop_zero_variance": "drop_zero_variance",
    "replay.should_play_greedy": "play_greedy",
    "rewards.functions.*.should_swap": "swap",
    "run.should_checkpoint_async": "checkpoint_async",
    "weights.proof_statistic": "verify_statistic",
    "weights.proof_tolerance": "verify_tolerance",
}
"""Dotted keys, `*` for any item of a list, and the name that took the last part's place."""

_CACHE = "set weights.cache to recompute (the same as true) or keep (false)"
REMOVED_KEYS: dict[str, str] = {
    "environment.tools.*.batch_window_s": "it is always 0.003",
    "environment.tools.*.http.start_wait_s": "it is always 60",
    "environment.tools.*.image": "images are at least 8 pixels wide and high, and at most 16,777,216 pixels and 8 MiB",
    "environment.tools.*.max_batch": "it is always 64",
    "environment.tools.*.tag": "`name` sets the tag too",
    "learner.advantage.divisor": "scale learner.learning_rate instead",
    "learner.advantage.zero_tail": "it is always true",
    "learner.critic.huber_delta": "it is always 10",
    "learner.loss.behavior_low": "weights have no lower bound",
    "learner.loss.max_log_ratio": "it is always 10",
    "learner.loss.mode": (
        "to mask ratios, set learner.loss to {kind: gpg}, learner.corrections to [{kind: icepop}]"
        " and learner.proximal to behavior"
    ),
    "learner.loss.ratio_low": (
        "to bound ratios from below, set learner.loss to {kind: gpg}, learner.corrections to"
        " [{kind: tis, low: ...}] and learner.proximal to behavior"
    ),
    "rewards.functions.*.device": "the model runs on a GPU where gpus is above 0",
    "rewards.functions.*.max_tokens_parameter": (
        "set max_tokens to null, and extra_arguments.max_completion_tokens to the limit"
    ),
    "weights.clear_caches": _CACHE,
    "weights.should_clear_caches": _CACHE,
    **{
        f"rewards.functions.*.{old}": f"use http.{new}"
        for old, new in (
            ("request_timeout_s", "timeout_s"),
            ("retries", "retries"),
            ("retry_delay_s", "retry_delay_s"),
            ("max_concurrent", "max_concurrent"),
        )
    },
    "rewards.functions.*.start_timeout_s": "it is always 600",
}
"""Dotted keys and what to do without them."""


def changed_keys(tree: Node) -> list[Problem]:
    """A problem for each old key in the tree, with its new name or the reason it was removed."""
    problems: list[Problem] = []
    for pattern, name in RENAMED_KEYS.items():
        for path, node in _matches(tree, tuple(pattern.split("."))):
            new = tree.key((*path[:-1], name))
            problems.append(Problem(node.where, tree.key(path), f"was renamed to {new!r}"))
    for pattern, advice in REMOVED_KEYS.items():
        for path, node in _matches(tree, tuple(pattern.split("."))):
            problems.append(Problem(node.where, tree.key(path), f"was removed; {advice}"))
    return problems


def _matches(
    node: Node, pattern: tuple[str, ...], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    if not pattern:
        yield path, node
    elif pattern[0] == "*" and isinstance(node.value, list):
        for index, item in enumerate(node.value):
            yield from _matches(item, pattern[1:], (*path, index))
    elif (child := node.child(pattern[0])) is not None:
        yield from _matches(child, pattern[1:], (*path, pattern[0]))
