"""A user-defined Python function as a tool: its signature and docstring become the schema."""

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from raylearner.config.environment import FunctionTool
from raylearner.config.section import load_reference
from raylearner.errors import ConfigError, ToolError
from raylearner.observability import jsonl
from raylearner.text import encodable_values
from raylearner.tools.tool import Arguments, BadArguments, Observation, Tool
from raylearner.types import Prompt
from raylearner.user_code import host
from raylearner.user_code.frames import describe

MAX_PROBLEMS = 3
PROMPT_PARAMETER = "prompt"
"""A parameter of this name receives the episode's prompt, and is not shown to the policy."""


class Function(Tool):
    """Calls the function through the host of user code: async on its loop, sync in a thread.

    Arguments that do not fit the signature are an observation; an exception of the function, or a
    call past its time limit, is a `ToolError`.
    """

    def __init__(self, section: FunctionTool) -> None:
        super().__init__(section.function_name, section.tag, on_failure=section.on_failure)
        self._function = load_function(section.function)
        self._section = section
        self._takes_prompt, self._model = _model(self._function, section)
        self._places = asyncio.Semaphore(section.max_concurrent)

    @property
    def schema(self) -> dict[str, Any]:
        parameters = self._model.model_json_schema()
        parameters.pop("title", None)
        for field in parameters.get("properties", {}).values():
            field.pop("title", None)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(self._function) or "",
                "parameters": parameters,
            },
        }

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        keywords = {**self._validated(arguments), **self._section.arguments}
        if self._takes_prompt:
            keywords[PROMPT_PARAMETER] = prompt
        call = partial(self._function, **keywords)
        async with self._places:
            try:
                value = await host.shared().call(
                    call,
                    name=f"tool {self.name} ({self._section.function})",
                    timeout_s=self._section.timeout_s,
                )
                return _observation(value)
            except (host.CallTimeout, host.CallFailed) as error:
                raise ToolError(f"{self.name}: {self._section.function} {error}") from error
            except Exception as error:  # the user's function may raise anything
                raise ToolError(
                    f"{self.name}: {self._section.function} {describe(error)}"
                ) from error

    def _validated(self, arguments: Arguments) -> dict[str, Any]:
        try:
            given = self._model.model_validate(self._by_name(arguments))
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            messages = [
                f"{'.'.join(map(str, p['loc'])) or 'arguments'}: {p['msg']}"
                for p in problems[:MAX_PROBLEMS]
            ]
            raise BadArguments("; ".join(messages)) from error
        return {name: getattr(given, name) for name in type(given).model_fields}

    def _by_name(self, arguments: Arguments) -> dict[str, Any]:
        """Read text between tags as the only parameter, or as a JSON object of several; text that is
        no object, as the only one without a default."""
        if not isinstance(arguments, str):
            return dict(arguments)
        text = arguments.strip()
        fields = self._model.model_fields
        if not text and not fields:
            return {}
        value = _json_or_text(text)
        if len(fields) > 1 and isinstance(value, dict):
            return cast(dict[str, Any], value)
        main = list(fields) if len(fields) == 1 else [n for n in fields if fields[n].is_required()]
        if len(main) != 1:
            raise BadArguments(f"expected a JSON object with {', '.join(fields)}")
        return {main[0]: text if fields[main[0]].annotation is str else value}


def load_function(path: str) -> Callable[..., Any]:
    """Import the function at `module:function`. Raises `ConfigError`."""
    if ":" not in path:
        raise ConfigError(f"tools.function: {path!r} must be written module:function")
    try:
        return load_reference(path)
    except ConfigError as error:
        raise ConfigError(f"tools.function: {error}") from error


def _model(function: Callable[..., Any], section: FunctionTool) -> tuple[bool, type[BaseModel]]:
    """Return whether the function takes the prompt, and a pydantic model of the policy's
    arguments."""
    try:
        signature, hints = (
            inspect.signature(function),
            get_type_hints(function, include_extras=True),
        )
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tools.function: {section.function!r}: {error}") from error
    unknown = sorted(set(section.arguments) - set(signature.parameters))
    if unknown:
        raise ConfigError(f"tools.arguments: {section.function!r} takes no {unknown[0]!r}")
    fields: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tools.function: {section.function!r} takes {parameter}; expected parameters that"
                " can be passed by name"
            )
        if name == PROMPT_PARAMETER or name in section.arguments:
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    try:
        model = create_model(
            section.function.rpartition(":")[2].replace(".", "_"),
            __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False),
            **fields,
        )
        model.model_json_schema()
    except Exception as error:  # pydantic has many ways to say that a type has no schema
        raise ConfigError(
            f"tools.function: {section.function!r} has a parameter without a JSON schema: {error}"
        ) from error
    return PROMPT_PARAMETER in signature.parameters, model


def _json_or_text(text: str) -> Any:
    try:
        return encodable_values(json.loads(text))
    except (RecursionError, ValueError):
        return text


def _observation(value: object) -> Observation:
    match value:
        case Observation():
            return value
        case None:
            return Observation(text="")
        case str():
            return Observation(text=value)
        case _:
            return Observation(text=jsonl.dumps(value))
