"""What an episode is worth: one section per kind of reward function."""

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
    """What all reward functions share."""

    name: MetricName | None = None
    """Under which it is reported. Default: its kind, or the name of the user's function."""
    weight: float = 1.0
    """Factor in the weighted sum."""

    @property
    def default_name(self) -> str:
        """What it is called unless `name` says otherwise."""
        return str(getattr(self, "kind", "")).rpartition(":")[2].rpartition(".")[2]

    @property
    def sees_groups(self) -> bool:
        """Whether it is called once per group, with all episodes of it."""
        return False

    @property
    def limits_itself(self) -> bool:
        """Whether it has time limits of its own, which leave out the wait for its turn."""
        return False


class _AnswerReward(_Reward):
    answer_tag: str | None = "answer"
    """Tag whose last pair in the last turn holds the answer; without one, or with null, the turn."""


class AnswerMatch(_AnswerReward):
    """The answer compared with the prompt's accepted ones, of which the best match counts.

    `exact_answer` is 1 when they are equal, white space around them aside; `exact_match` the same after
    SQuAD's normalisation; `f1` is the F1 of their words after that normalisation.
    """

    kind: Literal["exact_answer", "exact_match", "f1"]


class CheckedAnswer(_AnswerReward):
    """The answer checked by a library, in a process of its own.

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
    """1 when the last turn ends with one answer between tags, and nothing is left open; else 0."""

    kind: Literal["answer_format"]
    answer_tag: str = "answer"
    """Tag around the answer."""
    reasoning_tag: str | None = None
    """Tag that must be around all that precedes the answer, such as `think`; where the chat template's
    header opens it, the turn need not."""


class ToolUseShaping(_Reward):
    """A bonus for each valid tool call and a penalty for each invalid one, within bounds."""

    kind: Literal["tool_use"]
    valid: float = 0.1
    """For a call that the tool answered."""
    invalid: float = -0.1
    """For a turn with neither a call nor an answer, and for a call that failed."""
    min: float = -0.5
    """Least sum."""
    max: float = 0.5
    """Greatest sum."""


class RetrievalHit(_Reward):
    """The share of the row's right pages that tools showed, 1 for a single one that was looked at.

    None for a row that names none. Pages that no longer fitted the episode were not looked at.
    """

    kind: Literal["retrieval_hit"]
    column: str = "page_id"
    """Column with the id of the right page, or a list of ids."""


class ResponseLength(_Reward):
    """1 at `target_tokens` sampled tokens, falling linearly to 0 at none or twice as many."""

    kind: Literal["response_length"]
    target_tokens: PositiveInt
    """Sampled tokens of the best length."""


class RewardModel(_Reward):
    """A sequence-classification model that reads prompt and completion, in an actor of its own."""

    kind: Literal["model"]
    path: str
    """Checkpoint directory or hub id."""
    label: NaturalInt = 0
    """Which output is the reward, where the model has several."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    max_tokens: PositiveInt = 2048
    """A longer prompt and completion is an error of its trajectory."""
    max_batch: PositiveInt = 16
    """Episodes scored at once; those that come while the model is busy wait for the next batch."""
    cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for the actor."""
    gpus: NonNegativeFloat = 0.0
    """GPUs of the actor, a fraction of one to share it; the model runs on the CPU with 0."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"


def fields_of(template: str) -> set[str]:
    """The placeholders of a template. Raises `ValueError` for one that does not parse."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def _template(known: frozenset[str], needed: frozenset[str]) -> AfterValidator:
    def check(template: str) -> str:
        try:
            found = fields_of(template)
        except ValueError as error:
            raise ValueError(f"is no template ({error}); write {{{{ and }}}} for braces") from error
        if not needed <= found <= known:
            must = ", ".join(f"{{{name}}}" for name in sorted(needed))
            may = ", ".join(f"{{{name}}}" for name in sorted(known - needed))
            raise ValueError(f"must hold {must} and may hold {may}")
        return template

    return AfterValidator(check)


class _Endpoint(_Reward):
    """A chat-completions endpoint of the OpenAI form."""

    url: HttpUrl
    """Address up to and with `/v1`."""
    model: str
    """Name of the model there."""
    api_key_variable: str | None = None
    """Environment variable with the key, read in the process that asks. None: no key is sent."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. Null: not sent."""
    max_tokens: PositiveInt | None = 512
    """Longest reply of the judge, its thoughts included. Null: not sent."""
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
        """Fields of a request beside `model` and `messages`."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        sent = {name: value for name, value in own.items() if value is not None}
        return {**sent, **self.extra_arguments}


class Judge(_Endpoint):
    """A language model scores the episode, by the number in a tag at the end of its final answer.

    `<score>` in the template stands for that tag, which is another for each request: text of the
    policy that spells it does not count. The reward is the score's place between `min_score` and `max_score`, from 0 to 1.
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
    """The request, with `{prompt}`, `{completion}` and `{answer}` (empty where there is none)."""
    min_score: float = 0.0
    """Least score that the template asks for; becomes 0."""
    max_score: float = 10.0
    """Greatest score; becomes 1."""


class PairwiseJudge(_Endpoint):
    """A language model compares each two episodes of a group, and names the better one in a tag.

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
    """The request, with `{prompt}`, `{first}`, `{second}` and `{answer}`."""
    swap: bool = True
    """Asks for each pair in both orders, which cancels a liking for the first place."""

    @property
    def sees_groups(self) -> bool:
        return True


class UserFunction(_Reward):
    """A function of the user's, sync or async."""

    kind: Reference
    """`module:function`. Takes an `EpisodeView`, or lists by the names that TRL uses."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function as keywords."""
    timeout_s: PositiveFloat | None = None
    """Maximum time of one call, after which its trajectory fails. Default: `rewards.timeout_s`."""
    per: Literal["episode", "group"] = "episode"
    """Called once per episode as it ends, or once per group with all episodes of it."""

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
    """What an episode is worth."""

    functions: tuple[RewardFunction, ...] = (AnswerMatch(kind="exact_answer"),)
    """Summed by weight; None means that a function does not apply."""
    clip: tuple[float, float] | None = None
    """Least and greatest weighted sum; what lies beyond is set to it."""
    timeout_s: PositiveFloat = 30.0
    """A function that takes longer is an error of its trajectory."""
    failed_reward: float | None = None
    """What an episode that failed counts as in reported means, or less where another has less; it never
    trains. Set it to the least reward where rewards can be negative. Default: the lower end of `clip`,
    or 0."""

    @property
    def reported_failed_reward(self) -> float:
        """`failed_reward` with its default."""
        if self.failed_reward is not None:
            return self.failed_reward
        return 0.0 if self.clip is None else self.clip[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, in order; what would occur twice gets a number."""
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
        """By name."""
        return {
            name: function.weight for name, function in zip(self.names, self.functions, strict=True)
        }

    @property
    def sees_groups(self) -> bool:
        """Whether any function is called with whole groups."""
        return any(function.sees_groups for function in self.functions)

    @property
    def models(self) -> dict[str, RewardModel]:
        """Reward models by name."""
        return {
            name: function
            for name, function in zip(self.names, self.functions, strict=True)
            if isinstance(function, RewardModel)
        }
