"""The calls of an agent program as segments of tokens, each growing only at its end.

A call whose messages follow a recorded reply continues that reply's segment: its tokens stay as
they were sampled, and only new messages are rendered. A call that rewrites earlier messages, or
follows an earlier reply, starts a new segment, whose beginning does not train again; so does every
call under a chat template that rewrites earlier turns.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from raylearner.actors.engines.engine import Engine
from raylearner.actors.episode import sample_turn
from raylearner.actors.proxy.chat import (
    ChatMessage,
    ChatRefusal,
    ChatReply,
    ChatRequest,
    FinishReason,
    cut_at_stop,
    read_turn,
)
from raylearner.environments.dialect import choose_thoughts
from raylearner.errors import EngineError, PromptTooLong, RenderError, TrajectoryError
from raylearner.observability.spans import Tracer
from raylearner.tokenization.continuation import RewritesHistory
from raylearner.tokenization.renderer import Renderer, unless_long
from raylearner.tokenization.template import template_message
from raylearner.tokenization.transcript import Transcript
from raylearner.types import (
    Claim,
    Completion,
    CompletionStop,
    Sampling,
    StopReason,
    Turn,
)

MAX_EMPTY_REPLIES = 16
"""Empty replies, after the length is used up, before the program is ended."""

Key = tuple[str, ...]


@dataclass(slots=True)
class _Segment:
    transcript: Transcript
    tool: str | None = None
    """Names of the tools that its last turn calls."""
    is_valid: bool = True
    foreign_form: str | None = None
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """The end of a recorded reply in its segment."""

    segment: _Segment
    end: int


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The tokens that one call is answered on, and their segment."""

    token_ids: list[int]
    num_kept: int
    """Number of tokens at the start that are recorded already; 0 for a new segment."""
    segment: _Segment | None
    opening: str = ""
    """Opening tag of the thought that the turn begins in; empty for none."""
    reply: str = ""
    budget: int = 0


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The session of one episode; implements `ChatSession`.

    `over` is set when no further call can be answered; `failure` is then the cause, if there is one.
    """

    engine: Engine
    renderer: Renderer
    claim: Claim
    sampling: Sampling
    max_calls: int
    tracer: Tracer
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failure: TrajectoryError | None = None
    is_aborted: bool = False
    stop_reason: StopReason | None = None
    """Reason why calls were cut short: MAX_TOKENS or MAX_TURNS."""
    first_refusal: str | None = None
    num_calls: int = 0
    num_tool_calls: int = 0
    _segments: list[_Segment] = field(default_factory=list[_Segment])
    _order: list[tuple[_Segment, int]] = field(default_factory=list[tuple[_Segment, int]])
    _places: dict[Key, _Place] = field(default_factory=dict[Key, _Place])
    _running: set["asyncio.Future[Completion]"] = field(
        default_factory=set["asyncio.Future[Completion]"]
    )
    _num_empty: int = 0
    _is_closed: bool = False

    @property
    def transcripts(self) -> list[Transcript]:
        """One transcript per segment, in order of their first call."""
        return [segment.transcript for segment in self._segments]

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of sampling; complete once closed."""
        return [segment.transcript.turns[index] for segment, index in self._order]

    async def complete(
        self, request: ChatRequest, *, is_wanted: Callable[[], Awaitable[bool]]
    ) -> ChatReply:
        """Sample the next message. Raises `ChatRefusal`."""
        self._refuse_when_over()
        place, num_known = self._find(request)
        try:
            plan = await unless_long(
                (message.content for message in request.messages),
                lambda: self._plan(request, place, num_known),
            )
        except RenderError as error:
            self.first_refusal = self.first_refusal or str(error)
            is_long = isinstance(error, PromptTooLong)
            code = "context_length_exceeded" if is_long else "invalid_value"
            raise ChatRefusal(400, str(error), code=code, param="messages") from error
        self._refuse_when_over()
        self._settle(plan, request)
        if plan.budget <= 0:
            return self._cut_short(plan, StopReason.MAX_TOKENS)
        if self.num_calls >= self.max_calls:
            return self._cut_short(plan, StopReason.MAX_TURNS)
        self.num_calls += 1
        if plan.segment is not None:
            plan.segment.is_busy = True
        try:
            completion = await self._sample(plan, request)
            if not await is_wanted():
                self.num_calls -= 1
                raise ChatRefusal(499, "the program disconnected before its reply", code="gone")
            self._refuse_when_over()
            return self._record(plan, request, completion)
        finally:
            if plan.segment is not None:
                plan.segment.is_busy = False

    def close(self) -> None:
        """End calls in progress and every segment's last turn."""
        if self._is_closed:
            return
        for segment in self._segments:
            segment.transcript.end_turn(
                [],
                reply="",
                tool=segment.tool,
                is_valid=segment.is_valid,
                foreign_form=segment.foreign_form,
            )
        self._is_closed = True
        for sampling in self._running:
            sampling.cancel()

    def _refuse_when_over(self) -> None:
        if self.failure is not None:
            raise ChatRefusal(500, f"the engine failed: {self.failure}", code="engine_error")
        if self._is_closed or self.over.is_set():
            raise ChatRefusal(410, "the episode has ended", code="episode_over")

    def _plan(self, request: ChatRequest, place: _Place | None, num_known: int) -> _Plan:
        """Render the call as tokens behind `place`, where the first `num_known` messages are recorded.

        May run in a thread: it changes nothing, and recorded tokens up to a place stay."""
        renderer = self.renderer
        new = [
            replace(message, content=renderer.cut_text(message.content))
            for message in request.messages[num_known:]
        ]
        templates = list(map(template_message, new))
        if place is None:
            return self._plan_segment(request)
        kept = place.segment.transcript.token_ids[: place.end]
        calls = template_message(request.messages[num_known - 1]).get("tool_calls", ())
        try:
            reply_ids = renderer.render_continuation(
                templates,
                history=list(map(template_message, request.messages[: num_known - 1])),
                calls=calls,
                tools=request.tools,
                last_token_id=kept[-1],
            )
        except RewritesHistory:
            return self._plan_segment(request)
        return _Plan(
            token_ids=kept + reply_ids,
            num_kept=len(kept),
            segment=place.segment,
            opening=renderer.turns.opening_behind(reply_ids),
            reply="\n".join(message.content for message in new),
        )

    def _plan_segment(self, request: ChatRequest) -> _Plan:
        if request.may_call_tools:
            self.renderer.refuse_lost_results(request.tools)
        templates = list(map(template_message, request.messages))
        token_ids = self.renderer.render_chat(templates, tools=request.tools)
        self._refuse_long_prompt(request, len(token_ids))
        return _Plan(
            token_ids=token_ids,
            num_kept=0,
            segment=None,
            opening=self.renderer.chat_opening(templates, tools=request.tools),
        )

    def _find(self, request: ChatRequest) -> tuple[_Place | None, int]:
        """Return the place of the last recorded reply among the messages, and the number up to it."""
        keys = request.keys
        for count in range(len(request.messages), 0, -1):
            if request.messages[count - 1].role == "assistant":
                place = self._places.get(keys[: count + 1])
                if place is not None:
                    return place, count
        return None, 0

    def _refuse_long_prompt(self, request: ChatRequest, size: int) -> None:
        """Raises `PromptTooLong` for a prompt without history; history has the limit of the whole."""
        limit = self.renderer.config.max_prompt_tokens
        if size > limit and not any(m.role == "assistant" for m in request.messages):
            raise PromptTooLong(
                f"the messages have {size} tokens, renderer.max_prompt_tokens is {limit}"
            )

    def _settle(self, plan: _Plan, request: ChatRequest) -> None:
        """Continue the segment if nothing was added to it meanwhile, and set the turn's budget."""
        segment = plan.segment
        if segment is not None and (
            segment.is_busy or len(segment.transcript.token_ids) != plan.num_kept
        ):
            plan.segment, plan.num_kept = None, 0
        limits, size = self.renderer.config, len(plan.token_ids)
        room = limits.max_prompt_tokens + limits.max_response_tokens - size
        prompt_length = plan.segment.transcript.prompt_length if plan.segment else size
        room = min(room, limits.max_response_tokens - (size - prompt_length))
        if limits.max_context_tokens is not None and size > limits.max_context_tokens:
            room = 0
        plan.budget = min(room, self.sampling.max_tokens, request.max_tokens or room)

    async def _sample(self, plan: _Plan, request: ChatRequest) -> Completion:
        seed = self.sampling.seed
        sampling = replace(
            self.sampling,
            stop=request.stop,
            max_tokens=plan.budget,
            seed=None if seed is None else seed + self.num_calls - 1,
        )
        with self.tracer.span("generate", group=self.claim.group_id) as span:
            running = asyncio.ensure_future(
                sample_turn(
                    self.engine, self.renderer, plan.token_ids, sampling, opening=plan.opening
                )
            )
            self._running.add(running)
            try:
                completion = await running
            except Exception as error:
                is_typed = isinstance(error, TrajectoryError)
                self.failure = error if is_typed else EngineError(repr(error))
                self.over.set()
                raise ChatRefusal(
                    500, f"the engine failed: {error}", code="engine_error"
                ) from error
            except asyncio.CancelledError:
                if not self._is_closed:
                    running.cancel()
                    raise
                raise ChatRefusal(410, "the episode has ended", code="episode_over") from None
            finally:
                self._running.discard(running)
            span.arguments["tokens"] = len(completion.token_ids)
        if completion.stop_reason is CompletionStop.ABORTED:
            self.is_aborted = True
            self.over.set()
            raise ChatRefusal(503, "the generation was aborted", code="aborted")
        return completion

    def _record(self, plan: _Plan, request: ChatRequest, completion: Completion) -> ChatReply:
        """Record the call. Nothing is awaited here: it is recorded completely or not at all."""
        segment = plan.segment
        if segment is None:
            segment = _Segment(Transcript(renderer=self.renderer, claim=self.claim))
            segment.transcript.open_with(plan.token_ids, opening=plan.opening)
            self._segments.append(segment)
        else:
            segment.transcript.end_turn(
                plan.token_ids[plan.num_kept :],
                reply=plan.reply,
                tool=segment.tool,
                is_valid=segment.is_valid,
                foreign_form=segment.foreign_form,
                opening=plan.opening,
            )
        number = len(self._order)
        self._order.append((segment, len(segment.transcript.turns)))
        segment.transcript.add_completion(completion, number=number)
        turn = segment.transcript.message
        message, invalid = read_turn(
            replace(turn, content=cut_at_stop(turn.content, request.stop)),
            request,
            choose_thoughts(self.renderer.config.reasoning_tags),
        )
        segment.is_valid = invalid is None
        segment.foreign_form = None if invalid is None else invalid.foreign_form
        segment.tool = ",".join(call.name for call in message.calls) or None
        self.num_tool_calls += len(message.calls)
        self._places[(*request.keys, message.key)] = _Place(
            segment, len(segment.transcript.token_ids)
        )
        is_cut = completion.stop_reason is CompletionStop.LENGTH
        is_own_limit = plan.budget == request.max_tokens
        self.stop_reason = StopReason.MAX_TOKENS if is_cut and not is_own_limit else None
        reason: FinishReason = "tool_calls" if message.calls else "stop"
        return ChatReply(
            message=message,
            finish_reason="length" if is_cut else reason,
            num_prompt_tokens=len(plan.token_ids),
            num_completion_tokens=len(completion.token_ids),
            kept=self._describe_kept(request),
        )

    def _cut_short(self, plan: _Plan, reason: StopReason) -> ChatReply:
        self.stop_reason = reason
        self._num_empty += 1
        if self._num_empty >= MAX_EMPTY_REPLIES:
            self.over.set()
        return ChatReply(
            message=ChatMessage(role="assistant", content=""),
            finish_reason="length",
            num_prompt_tokens=len(plan.token_ids),
            num_completion_tokens=0,
        )

    def _describe_kept(self, request: ChatRequest) -> str:
        """Describe parameters of the request that differ from the run's, seeds included."""
        differing = [
            f"{name}={getattr(self.sampling, name)} (requested {value})"
            for name, value in request.requested.items()
            if value != getattr(self.sampling, name)
        ]
        return ", ".join(differing)
