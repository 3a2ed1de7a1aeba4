"""Rewards of an episode: one section per kind of reward function."""

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from raylearner.config.section import (
    OPEN_KIND,
    HttpSection,
    HttpUrl,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    kind_tag,
)


def _one_part(value: str) -> str:
    if not value or "/" in value or value.isspace():
        raise ValueError("must be a name without a slash")
    return value


MetricName = Annotated[str, AfterValidator(_one_part)]
"""One part of a metric key."""


class _Reward(Section):
    """Keys that all reward functions share."""

    name: MetricName | None = None
    """Name under which the reward is reported. Default: its kind, or the name of the function."""
    weight: float = 1.0
    """Factor in the weighted sum."""

    @property
    def default_name(self) -> str:
        """Return the default of `name`."""
        return str(getattr(self, "kind", "")).rpartition(":")[2].rpartition(".")[2]

    @property
    def sees_groups(self) -> bool:
        """Return whether it is called once per group, with all of its episodes."""
        return False

    @property
    def limits_itself(self) -> bool:
        """Return whether it has its own time limits, which exclude waiting."""
        return False


class _AnswerReward(_Reward):
    answer_tag: str | None = "answer"
    """Tag whose last pair in the last turn holds the answer. With null, or without such a pair, the whole
    turn is the answer."""


class AnswerMatch(_AnswerReward):
    """The answer compared with the prompt's accepted ones, of which the best match counts.

    `exact_answer` is 1 when they are equal, white space around them aside; `exact_match` the same after
    SQuAD's normalisation; `f1` is the F1 of their words after that normalisation.
    """

    kind: Literal["exact_answer", "exact_match", "f1"]


class CheckedAnswer(_AnswerReward):
    """The answer checked by a library, in a separate process.

    `math_verify` is 1 when math-verify finds the answer equal to one of the prompt's, else 0, and None for
    a prompt whose answer it cannot read. `reasoning_gym` is the score from 0 to 1 of a reasoning-gym task,
    and None for prompts of other sources.
    """

    kind: Literal["math_verify", "reasoning_gym"]
    check_timeout_s: PositiveFloat = 10.0
    """Maximum time to check one answer; the process is killed then, and the answer counts as wrong."""
    num_processes: PositiveInt = 1
    """Number of checks that a rollout actor runs at once."""

    @property
    def limits_itself(self) -> bool:
        return True


class AnswerFormat(_Reward):
    """1 when the last turn ends with one answer between tags and leaves no tag open; else 0."""

    kind: Literal["answer_format"]
    answer_tag: str = "answer"
    """Tag around the answer."""
    reasoning_tag: str | None = None
    """Tag that must enclose all text before the answer, such as `think`; a turn need not open it where the
    chat template's header does."""


class ToolUseShaping(_Reward):
    """A bonus for each valid tool call and a penalty for each invalid one, within bounds."""

    kind: Literal["tool_use"]
    valid: float = 0.1
    """Reward of a call that the tool answered."""
    invalid: float = -0.1
    """Reward of a turn with neither a call nor an answer, and of a call that failed."""
    min: float = -0.5
    """Minimum of the sum."""
    max: float = 0.5
    """Maximum of the sum."""


class RetrievalHit(_Reward):
    """The share of the row's right pages that tools showed, 1 for a single one that was looked at.

    None for a row that names none. Pages that no longer fitted the episode were not looked at.
    """

    kind: Literal["retrieval_hit"]
    column: str = "page_id"
    """Column with the id of the right page, or a list of ids."""


class ResponseLength(_Reward):
    """1 at `target_tokens` sampled tokens, falling linearly to 0 at no tokens and at twice as many."""

    kind: Literal["response_length"]
    target_tokens: PositiveInt
    """Number of sampled tokens with the highest reward."""


class RewardModel(_Reward):
    """A sequence-classification model that reads prompt and completion, in its own actor."""

    kind: Literal["model"]
    path: str
    """Checkpoint directory or hub id."""
    label: NaturalInt = 0
    """Index of the output that is the reward, if the model has several."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    max_tokens: PositiveInt = 2048
    """Maximum length of prompt and completion; a longer one fails its trajectory."""
    max_batch: PositiveInt = 16
    """Maximum number of episodes scored at once; others wait for the next batch."""
    cpus: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves for the actor."""
    gpus: NonNegativeFloat = 0.0
    """Number of GPUs of the actor, or a fraction of one to share it; with 0 the model runs on the CPU."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"


def fields_of(template: str) -> set[str]:
    """Return the placeholders of a template. Raises `ValueError` for one that does not parse."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def _template(known: frozenset[str], needed: frozenset[str]) -> AfterValidator:
    def check(template: str) -> str:
        try:
            found = fields_of(template)
        except ValueError as error:
            raise ValueError(
                f"is not a valid template ({error}); write {{{{ and }}}} for braces"
            ) from error
        if not needed <= found <= known:
            must = ", ".join(f"{{{name}}}" for name in sorted(needed))
            may = ", ".join(f"{{{name}}}" for name in sorted(known - needed))
            raise ValueError(f"must have {must} and may have {may}")
        return template

    return AfterValidator(check)


class _Endpoint(_Reward):
    """A chat-completions endpoint of the OpenAI form."""

    url: HttpUrl
    """Address of the API, including `/v1`."""
    model: str
    """Name of the model."""
    api_key_variable: str | None = None
    """Environment variable with the API key, in the process that sends requests. Null: no key.
    """
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. Null: not sent."""
    max_tokens: PositiveInt | None = 512
    """Maximum length of a reply, reasoning included. Null: not sent."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of the request, such as `reasoning_effort`, or `max_completion_tokens` beside
    `max_tokens: null`."""
    http: HttpSection = HttpSection(
        retries=3, retry_delay_s=0.5, retry_backoff=2.0, max_concurrent=32, max_reply_bytes=4 << 20
    )
    """Timeouts, retries and limits. A reply that cannot be read is retried too."""

    @property
    def limits_itself(self) -> bool:
        return True

    @property
    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a request besides `model` and `messages`."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        sent = {name: value for name, value in own.items() if value is not None}
        return {**sent, **self.extra_arguments}


class Judge(_Endpoint):
    """A language model scores the episode, by the number in a tag at the end of its final answer.

    `<score>` in the template stands for that tag, which is different in each request: text of the
    policy that spells it does not count. The reward is the score's place between `min_score` and
    `max_score`, from 0 to 1.
    """

    kind: Literal["judge"]
    template: Annotated[
        str,
        _template(frozenset({"prompt", "completion", "answer"}), frozenset({"completion"})),
    ] = (
        "Judge how well the response answers the question.\n\n# Question\n{prompt}\n\n"
        "# Reference answer\n{answer}\n\n# Response\n{completion}\n\n"
        "Reason briefly, then give a whole number from 0 (useless) to 10 (perfect) as"
        " <score>number</score>."
    )
    """Text of the request, with `{prompt}`, `{completion}` and `{answer}` (empty without an answer)."""
    min_score: float = 0.0
    """Minimum score in the template; becomes 0."""
    max_score: float = 10.0
    """Maximum score; becomes 1."""


class PairwiseJudge(_Endpoint):
    """A language model compares each pair of episodes of a group, naming the better one in a tag.

    `<winner>` in the template stands for that tag, as `<score>` does for a judge.
    The reward is the share of comparisons won, a tie counting half. None for a group of one.
    """

    kind: Literal["pairwise_judge"]
    template: Annotated[
        str,
        _template(
            frozenset({"prompt", "first", "second", "answer"}), frozenset({"first", "second"})
        ),
    ] = (
        "Which response answers the question better?\n\n# Question\n{prompt}\n\n"
        "# Reference answer\n{answer}\n\n# Response A\n{first}\n\n# Response B\n{second}\n\n"
        "Reason briefly, then name the better one: <winner>A</winner>, <winner>B</winner> or"
        " <winner>tie</winner>."
    )
    """Text of the request, with `{prompt}`, `{first}`, `{second}` and `{answer}`."""
    swap: bool = True
    """Compares each pair in both orders, which cancels a preference for the first place."""

    @property
    def sees_groups(self) -> bool:
        return True


class UserFunction(_Reward):
    """A custom function, sync or async."""

    kind: Reference
    """`module:function`. Takes an `EpisodeView`, or lists with the names that TRL uses."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    timeout_s: PositiveFloat | None = None
    """Maximum time of one call, after which its trajectory fails. Default: `rewards.timeout_s`."""
    per: Literal["episode", "group"] = "episode"
    """Calls the function once per episode, or once per group with all of its episodes."""

    @property
    def sees_groups(self) -> bool:
        return self.per == "group"


RewardFunction = Annotated[
    Annotated[AnswerMatch, Tag("exact_answer")]
    | Annotated[AnswerMatch, Tag("exact_match")]
    | Annotated[AnswerMatch, Tag("f1")]
    | Annotated[CheckedAnswer, Tag("math_verify")]
    | Annotated[CheckedAnswer, Tag("reasoning_gym")]
    | Annotated[AnswerFormat, Tag("answer_format")]
    | Annotated[ToolUseShaping, Tag("tool_use")]
    | Annotated[RetrievalHit, Tag("retrieval_hit")]
    | Annotated[ResponseLength, Tag("response_length")]
    | Annotated[RewardModel, Tag("model")]
    | Annotated[Judge, Tag("judge")]
    | Annotated[PairwiseJudge, Tag("pairwise_judge")]
    | Annotated[UserFunction, Tag(OPEN_KIND)],
    Discriminator(kind_tag),
]


class RewardSection(Section):
    """Rewards of episodes."""

    functions: tuple[RewardFunction, ...] = (AnswerMatch(kind="exact_answer"),)
    """Reward functions, whose weighted sum is the reward; a function that returns None does not apply."""
    clip: tuple[float, float] | None = None
    """Minimum and maximum of the weighted sum; values beyond are clipped."""
    timeout_s: PositiveFloat = 30.0
    """Maximum time of a function; a longer call fails its trajectory."""
    failed_reward: float | None = None
    """Reward of failed episodes in reported means, or the minimum of the others if that is lower. Failed
    episodes do not train. Set it to the minimum reward where rewards can be negative. Default: the lower end
    of `clip`, or 0."""

    @property
    def reported_failed_reward(self) -> float:
        """Return `failed_reward` or its default."""
        if self.failed_reward is not None:
            return self.failed_reward
        return 0.0 if self.clip is None else self.clip[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the functions, in order; duplicates are numbered."""
        names: list[str] = []
        for function in self.functions:
            base = function.name or function.default_name
            name, number = base, 2
            while name in names:
                name, number = f"{base}_{number}", number + 1
            names.append(name)
        return tuple(names)

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights by name."""
        return {
            name: function.weight for name, function in zip(self.names, self.functions, strict=True)
        }

    @property
    def sees_groups(self) -> bool:
        """Return whether any function is called with whole groups."""
        return any(function.sees_groups for function in self.functions)

    @property
    def models(self) -> dict[str, RewardModel]:
        """Return the reward models by name."""
        return {
            name: function
            for name, function in zip(self.names, self.functions, strict=True)
            if isinstance(function, RewardModel)
        }
