"""The form of an episode: the environment and its tools."""

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
from raylearner.environments.dialect import DialectSection, TagsDialect

MIB = 1 << 20


class SandboxSection(Section):
    """Sandbox for code written by the model; limits apply to all processes of one call together."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs code with the rights of the run itself, which is logged at each start."""
    python: str | None = None
    """Python interpreter that runs the code. Default: that of raylearner."""
    packages: tuple[str, ...] = ()
    """Folders of packages that the code can import, read-only. Default: only Python's standard library."""
    wall_s: PositiveFloat = 10.0
    """Maximum wall-clock time of a call."""
    cpu_s: PositiveFloat = 10.0
    """Maximum CPU time of a call."""
    memory_bytes: PositiveInt = 512 * MIB
    """Maximum memory of a call, including the files it writes."""
    file_bytes: PositiveInt = 16 * MIB
    """Maximum size of a file."""
    folder_bytes: PositiveInt = 64 * MIB
    """Maximum size of all files in the working directory, which is in memory."""
    max_files: PositiveInt = 1000
    """Maximum number of files and folders in the working directory."""
    max_processes: PositiveInt = 32
    """Maximum number of processes and threads alive at once."""
    output_bytes: PositiveInt = MIB
    """Maximum size of standard output and standard error together."""
    max_concurrent: PositiveInt | None = None
    """Maximum number of calls that run at once; others wait. Default: twice the CPUs of the process."""


class _NamedTool(Section):
    """Keys that all tools share."""

    name: str | None = None
    """Name of the tool in calls, and its tag in the tags dialect. Default: the kind, and a short tag."""
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
    """Keys that tools with a service or a function share."""

    on_failure: Literal["observation", "fail"] = "observation"
    """Consequence of a failed last retry: the policy is shown the failure, or the trajectory fails.
    """


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
    """Address of the service, without the path. Default: the local sandbox."""
    sandbox: SandboxSection = SandboxSection()
    """The local sandbox; not used with a service."""
    max_stream_characters: PositiveInt = 1000
    """Maximum length of standard output and of standard error in the observation."""
    http: HttpSection = HttpSection(timeout_s=60.0)
    """Timeouts, retries and limits."""


class FunctionTool(_Tool):
    """A Python function; its signature and docstring become the schema."""

    kind: Literal["function"]
    function: str
    """`module:function`, sync or async. Its name is the default of `name`."""
    timeout_s: PositiveFloat = 30.0
    """Maximum time of a call; a longer one fails."""
    max_concurrent: PositiveInt = 32
    """Maximum number of calls at once; others wait."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of each call, which the policy is not shown."""

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
"""Names of the keyword arguments that a program is called with."""


class SingleTurn(Section):
    """One completion."""

    kind: Literal["single_turn"]


class ToolUse(Section):
    """Turns with tools until the policy answers."""

    kind: Literal["tool_use"]
    tools: tuple[ToolSection, ...] = (CalculatorTool(kind="calculator"),)
    """Tools that the policy can call."""
    dialect: DialectSection = TagsDialect(kind="tags")
    """Form of calls and answers."""
    max_turns: PositiveInt = 4
    """Maximum number of turns with tools; one last turn without tools follows."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Penalty for each turn that is neither an answer nor a tool call with valid arguments, unless
    it was truncated. The policy is not shown the penalty.
    """
    observation_tag: str | None = "result"
    """Tag around observations; null for none."""


class OpenAiProxy(Section):
    """Any program with an OpenAI client, run as the episode against its own endpoint."""

    kind: Literal["openai_proxy"]
    program: Reference | None = None
    """`module:function`, sync (in a thread) or async, called with the keyword arguments `base_url`,
    `api_key`, `messages` and `columns` of the prompt. Returns the answer as text, or None."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `program`."""
    command: tuple[str, ...] = ()
    """Command line to run instead of `program`. It finds OPENAI_BASE_URL and OPENAI_API_KEY in its
    environment and the prompt as JSON on its standard input."""
    answer_from: Literal["turn", "stdout"] = "turn"
    """Place of a command's answer: the policy's last turn, or the command's standard output."""
    timeout_s: PositiveFloat = 300.0
    """Maximum time of an episode, after which it fails; a command is killed with its children."""
    max_calls: PositiveInt = 32
    """Maximum number of calls answered; later ones get empty replies with `finish_reason: length`.
    """


class CustomEnvironment(Section):
    """A user-defined environment."""

    kind: Literal["custom"]
    path: Reference
    """`module:Class` with the methods of `raylearner.environments.protocol.Environment`; each episode has
    its own instance."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    timeout_s: PositiveFloat = 300.0
    """Maximum time of a call of `reset`, `step` or `close`; a longer one fails the episode."""


EnvironmentSection = Annotated[
    SingleTurn | ToolUse | OpenAiProxy | CustomEnvironment, Field(discriminator="kind")
]
