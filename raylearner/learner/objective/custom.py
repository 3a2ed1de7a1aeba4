"""User-defined losses, advantages and corrections: `kind: custom` with `function: module:name`.

A function is called with the inputs of its type and with its options. Where its second parameter is
annotated with a pydantic model, options are validated with it and arrive as its instance; otherwise
they arrive as a mapping.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from raylearner.config.problems import Finding, did_you_mean, shown
from raylearner.config.section import Reference, Section, load_reference
from raylearner.errors import ConfigError


class CustomFunction(Section):
    """Fields that all sections of kind `custom` share."""

    function: Reference
    """`module:name` of a function of the inputs and the options, importable where the learner runs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed as the second argument; validated where that is annotated with a pydantic model."""

    def call(self, inputs: object) -> Any:
        """Call the function on every micro-batch or batch; its module is imported once."""
        function, options = _resolve(self.function, json.dumps(self.options))
        return function(inputs, options)


def check_custom(section: object, key: str) -> Iterator[Finding]:
    """Find functions that cannot be imported or called, and invalid options."""
    if not isinstance(section, CustomFunction):
        return
    try:
        model = _options_model(load_reference(section.function))
    except ConfigError as error:
        yield Finding(f"{key}.function", str(error))
        return
    if model is None:
        return
    try:
        _validate(model, json.dumps(section.options))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = ".".join(map(str, (key, "options", *detail["loc"])))
            yield Finding(path, _explain(detail, model))


@lru_cache(maxsize=64)
def _resolve(path: str, options: str) -> tuple[Callable[[Any, Any], Any], Any]:
    function = load_reference(path)
    model = _options_model(function)
    return function, json.loads(options) if model is None else _validate(model, options)


def _validate(model: type[BaseModel], options: str) -> BaseModel:
    return model.model_validate_json(options, strict=True)


def _options_model(function: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the annotation of the second parameter, if that is a pydantic model."""
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"must take two arguments, the inputs and the options: {error}") from None
    parameters = list(signature.parameters.values())
    annotation: Any = parameters[1].annotation if len(parameters) > 1 else None
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except Exception as error:  # an annotation may be any expression
            raise ConfigError(
                f"its second parameter's annotation {annotation!r} cannot be resolved: {error!r}; "
                "import it outside of TYPE_CHECKING"
            ) from error
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _explain(detail: Any, model: type[BaseModel]) -> str:
    match detail["type"]:
        case "extra_forbidden":
            valid = list(model.model_fields)
            near = did_you_mean(detail["loc"][-1], valid)
            return f"unknown key{near}" if near else f"unknown key; valid here: {', '.join(valid)}"
        case "missing":
            return "required, but missing"
        case _:
            message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            return f"must be {message}, got {shown(detail['input'])}"
