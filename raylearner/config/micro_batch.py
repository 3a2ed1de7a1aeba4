"""Choose `learner.max_tokens_per_micro_batch`: as many tokens as a learner rank's memory holds, by estimate."""

from raylearner.config.learner import TOKEN_BUDGET, LearnerSection
from raylearner.config.memory import GIB, KEPT_SHARE, choose_chunk, choose_kept, estimate_of
from raylearner.config.schema import PretrainedModel, RunConfig
from raylearner.errors import ConfigError

KEY = "learner.max_tokens_per_micro_batch"
LARGE = (65_536, 32_768, 16_384)
"""Budgets that are worth it where they leave room for all that saves time."""
SMALL = (TOKEN_BUDGET, 4096, 2048, 1024)


def choose_budget(
    config: RunConfig, learner: LearnerSection, *, rank_bytes: float | None
) -> tuple[int, str | None]:
    """Return the budget for `learner`, whose ranks have that much memory of a GPU, and a line about it.

    Without GPUs, or if memory or model are unknown, it is `TOKEN_BUDGET`. Always at least the longest row.
    Raises `ConfigError` if not even that one fits.
    """
    longest = config.max_sequence_tokens
    fallback = max(TOKEN_BUDGET, longest)
    if not isinstance(config.model, PretrainedModel) or rank_bytes is None:
        return fallback, None
    folder, free = config.model.folder, int(rank_bytes)
    chunk = choose_chunk(learner, folder, free=free, is_gpu=True)
    learner = learner.model_copy(update={"logprob_chunk_tokens": chunk})

    def holding(num_tokens: int) -> LearnerSection:
        return learner.model_copy(update={"max_tokens_per_micro_batch": num_tokens})

    def needed(num_tokens: int) -> int:
        found = estimate_of(holding(num_tokens), folder)
        return 0 if found is None else found.total

    if not needed(longest):
        return (
            fallback,
            f"{KEY} is {fallback:,}: the size of the model is not known before the start",
        )
    for each in (per_rank * learner.context_parallel_size for per_rank in LARGE):
        if each >= longest and choose_kept(holding(each), folder, free=free).gradients:
            return each, _line(each, needed(each), free)
    for each in (*(per_rank * learner.context_parallel_size for per_rank in SMALL), longest):
        if each >= longest and needed(each) <= KEPT_SHARE * free:
            return each, _line(each, needed(each), free)
    if needed(longest) <= free:
        return longest, _line(longest, needed(longest), free) + ", which may not suffice"
    raise ConfigError(
        f"{KEY}: auto: a learner rank needs about {needed(longest) / GIB:.1f} GiB for a row of"
        f" {longest:,} tokens, and has {free / GIB:.1f} GiB of a GPU. Set learner.activation_checkpointing:"
        " full, learner.offload: true, a larger learner.num_ranks or learner.context_parallel_size, train"
        " adapters (`learner.lora: {}`), or lower renderer.max_response_tokens; or set"
        f" {KEY} to {longest} to try it nevertheless"
    )


def _line(num_tokens: int, needed: int, free: int) -> str:
    return (
        f"{KEY} is {num_tokens:,}, for which a learner rank needs about {needed / GIB:.1f} of"
        f" {free / GIB:.1f} GiB"
    )
