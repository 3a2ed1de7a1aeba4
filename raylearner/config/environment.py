"""What an episode is: the environment and its tools."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raylearner.config.section import (
    HttpSection,
    HttpUrl,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
)

MIB = 1 << 20


class SandboxSection(Section):
    """Where and within which limits code written by the model runs; limits are per call tree."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs code with the rights of the run itself, and says so in the log at each start."""
    python: str | None = None
    """Interpreter that runs the code. Default: the one that runs raylearner."""
    packages: tuple[str, ...] = ()
    """Folders of packages that the code may import, read-only; by default only Python's own."""
    wall_s: PositiveFloat = 10.0
    """Wall-clock time of one call."""
    cpu_s: PositiveFloat = 10.0
    """CPU time of one call, all its processes together."""
    memory_bytes: PositiveInt = 512 * MIB
    """Memory of all processes of one call and of the files they write."""
    file_bytes: PositiveInt = 16 * MIB
    """Largest single file."""
    folder_bytes: PositiveInt = 64 * MIB
    """All files of the working directory, which lives in memory."""
    max_files: PositiveInt = 1000
    """Files and folders in the working directory."""
    max_processes: PositiveInt = 32
    """Processes and threads alive at once."""
    output_bytes: PositiveInt = MIB
    """Standard output and standard error together."""
    max_concurrent: PositiveInt | None = None
    """Calls that run at once, others wait. Default: twice the CPUs of this process."""


class _NamedTool(Section):
    """What all tools share."""

    name: str | None = None
    """Name of the tool in calls, and of its tag in the tags dialect. Default: its kind; in the tags dialect
    a short form of it."""
    default_tag: ClassVar[str]

    @property
    def function_name(self) -> str:
        """Return the name in the tool-calling dialect."""
        return self.name or str(getattr(self, "kind", ""))

    @property
    def tag(self) -> str:
        """Return the tag in the tags dialect."""
        return self.name or self.default_tag


class CalculatorTool(_NamedTool):
    """Exact arithmetic. Default tag: `calc`."""

    kind: Literal["calculator"]
    default_tag: ClassVar[str] = "calc"


class _Tool(_NamedTool):
    """What tools with a service or a function behind them share."""

    on_failure: Literal["observation", "fail"] = "observation"
    """What follows the last retry: the policy is shown the failure, or the trajectory fails."""


class _ServiceTool(_Tool):
    url: HttpUrl
    """Address of the service, without the path."""
    http: HttpSection = HttpSection()
    """Timeouts, retries and limits."""


class SearchTool(_ServiceTool):
    """Text search service. Default tag: `search`."""

    kind: Literal["search"]
    default_tag: ClassVar[str] = "search"
    form: Literal["search", "retrieve"] = "search"
    """`search` posts one query to /search; `retrieve` posts batches to /retrieve (Search-R1)."""
    top_n: PositiveInt = 3
    """Number of passages per query."""


class _PageTool(_ServiceTool):
    contents: Literal["image", "text"] = "image"
    """Form in which the service sends a page: an image in base64, or its text."""


class PageSearchTool(_PageTool):
    """Page search service: a query finds page images or texts within the prompt's document. Default tag: `search`."""

    kind: Literal["page_search"]
    default_tag: ClassVar[str] = "search"
    top_n: PositiveInt = 3
    """Number of pages per query."""


class PageFetchTool(_PageTool):
    """Page fetch service: a page id gives that page's image or text. Default tag: `fetch`."""

    kind: Literal["page_fetch"]
    default_tag: ClassVar[str] = "fetch"


class CodeExecutionTool(_Tool):
    """Runs Python: on a service of the SandboxFusion form, or in the local sandbox. Default tag: `code`."""

    kind: Literal["code_execution"]
    default_tag: ClassVar[str] = "code"
    url: HttpUrl | None = None
    """Address of the service, without the path. Absent: the local sandbox."""
    sandbox: SandboxSection = SandboxSection()
    """The local sandbox; unused with a service."""
    max_stream_characters: PositiveInt = 1000
    """Standard output and standard error are each cut here."""
    http: HttpSection = HttpSection(timeout_s=60.0)
    """Timeouts, retries and limits."""


class FunctionTool(_Tool):
    """A Python function of the user's; its signature and docstring become the schema."""

    kind: Literal["function"]
    function: str
    """`module:function`, sync or async. Its name is the tool's where `name` gives no other."""
    timeout_s: PositiveFloat = 30.0
    """A call that takes longer is a failure."""
    max_concurrent: PositiveInt = 32
    """Calls at once; others wait."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to each call as keywords, and not shown to the policy."""

    @property
    def function_name(self) -> str:
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]

    @property
    def tag(self) -> str:
        return self.function_name


ToolSection = Annotated[
    CalculatorTool | SearchTool | PageSearchTool | PageFetchTool | CodeExecutionTool | FunctionTool,
    Field(discriminator="kind"),
]


PROGRAM_KEYWORDS = ("base_url", "api_key", "messages", "columns")
"""What a program is called with, by name."""


class SingleTurn(Section):
    """One completion, then the end."""

    kind: Literal["single_turn"]


class TagsDialect(Section):
    """Calls and answers between tags: `<search>query</search>`, `<answer>text</answer>`."""

    kind: Literal["tags"]
    match: Literal["first", "last"] = "first"
    """Which pair counts when a turn has several: the one that closes first, or from the right."""
    precedence: Literal["tool", "answer"] = "tool"
    """Which kind counts in a turn that has both."""
    answer_tag: str = "answer"
    """Tag around the answer."""


class JsonCallsDialect(Section):
    """The model's own tool-calling template: JSON calls, several a turn, run concurrently."""

    kind: Literal["json"]
    answer_tag: str | None = "answer"
    """Tag around the answer; null takes a turn without calls as the answer."""
    max_calls: PositiveInt = 16
    """Calls of one turn that are run."""


DialectSection = Annotated[TagsDialect | JsonCallsDialect, Field(discriminator="kind")]


class ToolUse(Section):
    """Turns with tools, ended by an answer."""

    kind: Literal["tool_use"]
    tools: tuple[ToolSection, ...] = (CalculatorTool(kind="calculator"),)
    """Tools on offer."""
    dialect: DialectSection = TagsDialect(kind="tags")
    """How a turn names its calls and its answer."""
    max_turns: PositiveInt = 4
    """Turns with tools; one last turn without tools follows."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Taken from the reward for each turn that neither calls a tool with arguments that fit nor answers,
    unless its length cut it; never shown."""
    observation_tag: str | None = "result"
    """Tag around what a tool answers; null for none."""


class OpenAiProxy(Section):
    """Any program with an OpenAI client, run as the episode against an endpoint of its own."""

    kind: Literal["openai_proxy"]
    program: Reference | None = None
    """`module:function`, sync (in a thread) or async, called with `base_url`, `api_key`, `messages`
    and `columns` of the prompt by name; returns the answer as text, or None."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to `program` as further keywords."""
    command: tuple[str, ...] = ()
    """In place of `program`: a command line. It finds OPENAI_BASE_URL and OPENAI_API_KEY in its
    environment and the prompt as JSON on its standard input."""
    answer_from: Literal["turn", "stdout"] = "turn"
    """Where rewards find a command's answer: in the policy's last turn, or in what it printed."""
    timeout_s: PositiveFloat = 300.0
    """An episode that takes longer fails; a command is killed with its children."""
    max_calls: PositiveInt = 32
    """Calls that are answered; further ones are told that the length is used up."""


class CustomEnvironment(Section):
    """An environment of the user's."""

    kind: Literal["custom"]
    path: Reference
    """`module:Class` with the methods of `raylearner.environments.protocol.Environment`; made once
    for each episode."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the class as keywords."""
    timeout_s: PositiveFloat = 300.0
    """An episode fails in which one call of `reset`, `step` or `close` takes longer."""


EnvironmentSection = Annotated[
    SingleTurn | ToolUse | OpenAiProxy | CustomEnvironment, Field(discriminator="kind")
]
