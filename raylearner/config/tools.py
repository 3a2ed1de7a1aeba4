"""Sections of the tools, by `kind`, and of the sandbox that runs model-written code."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raylearner.config.section import (
    HttpUrl,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
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


class HttpSection(Section):
    """How a service is called."""

    timeout_s: PositiveFloat = 30.0
    """Longest wait for one reply, connecting included."""
    retries: NaturalInt = 5
    """Further tries after a failed one."""
    retry_delay_s: PositiveFloat = 1.0
    """Wait before the next try."""
    retry_backoff: Annotated[float, Field(ge=1, le=10)] = 1.0
    """The wait grows by this factor with each try; 1 keeps it."""
    max_concurrent: PositiveInt = 256
    """Requests in flight per tool and actor; others wait."""
    max_reply_bytes: PositiveInt = 32 * MIB
    """A longer reply is an error."""
    start_wait_s: NonNegativeFloat = 60.0
    """How long a run waits at its start for the service to answer at all; 0 asks once."""


class _Tool(Section):
    """What all tools with a service or a function behind them share."""

    on_failure: Literal["observation", "fail"] = "observation"
    """After the last retry the policy is told so, or the trajectory fails."""


class CalculatorTool(Section):
    """Exact arithmetic."""

    kind: Literal["calculator"]
    name: str = "calculator"
    """Name in the tool-calling dialect."""
    tag: str = "calc"
    """Tag in the tags dialect."""


class SearchTool(_Tool):
    """Text search service."""

    kind: Literal["search"]
    name: str = "search"
    """Name in the tool-calling dialect."""
    tag: str = "search"
    """Tag in the tags dialect."""
    url: HttpUrl
    """Address of the service, without the path."""
    form: Literal["search", "retrieve"] = "search"
    """`search` posts one query to /search; `retrieve` posts batches to /retrieve (Search-R1)."""
    top_n: PositiveInt = 3
    """Passages per query."""
    batch_window_s: PositiveFloat = 0.003
    """Concurrent queries of the `retrieve` form within this time share one request."""
    max_batch: PositiveInt = 64
    """Queries of one request at most."""
    http: HttpSection = HttpSection()
    """Timeouts, retries and limits."""


class ImageSection(Section):
    """Which images of a service are accepted."""

    min_side: PositiveInt = 8
    """Shorter side at least, in pixels."""
    max_pixels: PositiveInt = 16_777_216
    """Width times height at most; checked before anything is decoded."""
    max_bytes: PositiveInt = 8 * MIB
    """Encoded size at most."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_side**2 > self.max_pixels:
            raise ValueError(
                f"max_pixels must be >= min_side * min_side = {self.min_side**2}, got {self.max_pixels}"
            )
        return self


class PageSearchTool(_Tool):
    """Page search service: a query finds page images or texts within the prompt's document."""

    kind: Literal["page_search"]
    name: str = "page_search"
    """Name in the tool-calling dialect."""
    tag: str = "search"
    """Tag in the tags dialect."""
    url: HttpUrl
    """Address of the service, without the path."""
    top_n: PositiveInt = 3
    """Pages per query."""
    contents: Literal["image", "text"] = "image"
    """What the service sends as a page: an image in base64, or its text."""
    image: ImageSection = ImageSection()
    """Which images are accepted."""
    batch_window_s: PositiveFloat = 0.003
    """Concurrent queries within this time share one request."""
    max_batch: PositiveInt = 64
    """Queries of one request at most."""
    http: HttpSection = HttpSection()
    """Timeouts, retries and limits."""


class PageFetchTool(_Tool):
    """Page fetch service: a page id gives that page's image or text."""

    kind: Literal["page_fetch"]
    name: str = "page_fetch"
    """Name in the tool-calling dialect."""
    tag: str = "fetch"
    """Tag in the tags dialect."""
    url: HttpUrl
    """Address of the service, without the path."""
    contents: Literal["image", "text"] = "image"
    """What the service sends as a page: an image in base64, or its text."""
    image: ImageSection = ImageSection()
    """Which images are accepted."""
    batch_window_s: PositiveFloat = 0.003
    """Concurrent calls within this time share one request."""
    max_batch: PositiveInt = 64
    """Pages of one request at most."""
    http: HttpSection = HttpSection()
    """Timeouts, retries and limits."""


class CodeExecutionTool(_Tool):
    """Runs Python: on a service of the SandboxFusion form, or in the local sandbox."""

    kind: Literal["code_execution"]
    name: str = "code_execution"
    """Name in the tool-calling dialect."""
    tag: str = "code"
    """Tag in the tags dialect."""
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
    """`module:function`, sync or async."""
    name: str | None = None
    """Name in the tool-calling dialect. Default: the function's."""
    tag: str | None = None
    """Tag in the tags dialect. Default: the function's name."""
    timeout_s: PositiveFloat = 30.0
    """A call that takes longer is a failure."""
    max_concurrent: PositiveInt = 32
    """Calls at once; others wait."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to each call as keywords, and not shown to the policy."""


ToolSection = Annotated[
    CalculatorTool | SearchTool | PageSearchTool | PageFetchTool | CodeExecutionTool | FunctionTool,
    Field(discriminator="kind"),
]
