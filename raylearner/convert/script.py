"""Python scripts of TRL: the arguments of `GRPOConfig(...)`, `GRPOTrainer(...)` and their like, as text.

The script is parsed and never run. A value that is not written in it, or is computed, is not known.
"""

import ast
from typing import Any

from raylearner.config.problems import Problem, Where
from raylearner.convert.settings import Reading, Setting

CONFIGS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo"}
TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo"}
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
_DEPTH = 20
_MAX_VALUES = 100_000
"""Maximum number of values that a script is read for."""
_SPLITS = ("dataset_train_split", "dataset_test_split")


class _Unknown(Exception):
    """Raised for a value that only running the script would tell."""


def read_python(text: str, label: str) -> Reading:
    """Return the settings of a script."""
    reading = Reading()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        message = str(getattr(error, "msg", error))
        reading.problems.append(
            Problem(Where(0, line, label), "", f"is not valid Python: {message}")
        )
        return reading
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(call, _name(call.func)) for call in calls]
    if not any(name in CONFIGS or name in TRAINERS for _, name in names):
        where = Where(0, 0, label)
        text = "has no GRPOConfig, RLOOConfig, GRPOTrainer or RLOOTrainer of TRL"
        reading.problems.append(Problem(where, "", text))
        return reading
    reader = _Script(reading, label, _assigned(tree), _defaults(calls))
    reading.facts["project"] = "trl"
    for call, name in names:
        if name in CONFIGS or name in TRAINERS:
            reading.facts["method"] = CONFIGS.get(name) or TRAINERS[name]
        if name in CONFIGS:
            reader.arguments(call)
        elif name in TRAINERS:
            reader.trainer(call)
        elif name == "LoraConfig":
            reader.lora(call)
        elif name == "load_dataset":
            reader.dataset(call)
    reader.note_unknown()
    return reading


def _name(node: ast.expr) -> str:
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


def _defaults(calls: list[ast.Call]) -> dict[str, ast.expr]:
    """Return the defaults of the script's own arguments, by name."""
    found: dict[str, ast.expr] = {}
    for call in calls:
        if _name(call.func) != "add_argument" or not call.args:
            continue
        default = next((k.value for k in call.keywords if k.arg == "default"), None)
        first = call.args[0]
        if default is not None and isinstance(first, ast.Constant):
            found[str(first.value).lstrip("-").replace("-", "_")] = default
    return found


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of names that are assigned once in the whole script."""
    found: dict[str, ast.expr] = {}
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                counts[target.id] = counts.get(target.id, 0) + 1
                found[target.id] = value
    return {name: value for name, value in found.items() if counts[name] == 1}


class _Script:
    def __init__(
        self,
        reading: Reading,
        label: str,
        assigned: dict[str, ast.expr],
        defaults: dict[str, ast.expr],
    ) -> None:
        self._reading, self._label = reading, label
        self._assigned, self._defaults = assigned, defaults
        self._unknown: list[str] = []
        self._num_values = 0

    def arguments(self, call: ast.Call) -> None:
        """Add all keyword arguments of a configuration."""
        for keyword in call.keywords:
            if keyword.arg is not None:
                self._add(keyword.arg, keyword.value)
            elif isinstance(keyword.value, ast.Dict | ast.Name):
                self._spread(keyword.value)

    def trainer(self, call: ast.Call) -> None:
        """Add model, reward functions and tools of a trainer."""
        for keyword in call.keywords:
            if keyword.arg == "model":
                self._add("model_name_or_path", keyword.value)
            elif keyword.arg in ("reward_funcs", "tools"):
                names = self._references(keyword.value)
                self._set(keyword.arg, names, keyword.value)
            elif keyword.arg == "peft_config":
                self._set("use_peft", True, keyword.value)
            elif keyword.arg == "environment_factory":
                self._set("environment_factory", self._references(keyword.value)[0], keyword.value)
            elif keyword.arg == "eval_dataset" and not _is_none(keyword.value):
                self._reading.facts["has_evaluation"] = True

    def lora(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg in LORA:
                self._add(LORA[keyword.arg], keyword.value)
            elif keyword.arg is not None:
                self._add(f"lora_{keyword.arg}".replace("lora_lora_", "lora_"), keyword.value)
        self._set("use_peft", True, call)

    def dataset(self, call: ast.Call) -> None:
        """Add the first dataset that is loaded."""
        if "dataset_name" in self._reading.settings or not call.args:
            return
        self._add("dataset_name", call.args[0])
        if len(call.args) > 1:
            self._add("dataset_config", call.args[1])
        for keyword in call.keywords:
            if keyword.arg == "split" and isinstance(keyword.value, ast.List):
                for key, part in zip(_SPLITS, keyword.value.elts, strict=False):
                    self._add(key, part)
            elif keyword.arg == "split":
                self._add("dataset_train_split", keyword.value)
            elif keyword.arg == "name":
                self._add("dataset_config", keyword.value)

    def _spread(self, node: ast.expr) -> None:
        source = self._assigned.get(node.id) if isinstance(node, ast.Name) else node
        if not isinstance(source, ast.Dict):
            self._note("**", node)
            return
        for key, value in zip(source.keys, source.values, strict=True):
            if isinstance(key, ast.Constant):
                self._add(str(key.value), value)

    def _references(self, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the names of functions or models in a list."""
        if isinstance(node, ast.Name) and node.id in self._assigned and depth < _DEPTH:
            source = self._assigned[node.id]
            if isinstance(source, ast.List | ast.Tuple | ast.Constant):
                return self._references(source, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [name for item in node.elts for name in self._references(item, depth + 1)]
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.Call):
            return [_name(node.func)]
        return [_name(node) or "function"]

    def _add(self, key: str, node: ast.expr) -> None:
        try:
            self._set(key, self._value(node), node)
        except _Unknown:
            self._note(key, node)

    def _note(self, key: str, node: ast.expr) -> None:
        self._unknown.append(f"{key} (line {node.lineno})")

    def note_unknown(self) -> None:
        """Note all arguments whose value only a run of the script would tell."""
        if self._unknown:
            names = ", ".join(self._unknown)
            self._reading.notes.append(
                f"{self._label}: computed by the script, write by hand: {names}"
            )

    def _set(self, key: str, value: Any, node: ast.expr) -> None:
        self._reading.add(Setting(key, value, Where(0, node.lineno, self._label)))

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        self._num_values += 1
        if depth > _DEPTH or self._num_values > _MAX_VALUES:
            raise _Unknown
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._assigned:
                return self._value(self._assigned[name], depth + 1)
            case ast.Attribute(attr=name) if name in self._defaults:
                return self._value(self._defaults[name], depth + 1)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, depth + 1) for item in items]
            case ast.Dict(keys=keys, values=values):
                return {
                    str(self._value(key, depth + 1)): self._value(value, depth + 1)
                    for key, value in zip(keys, values, strict=True)
                    if key is not None
                }
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, depth)
            case ast.BinOp(left=left, op=op, right=right):
                return self._computed(op, self._number(left, depth), self._number(right, depth))
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part, depth + 1)) for part in parts)
            case ast.FormattedValue(value=value):
                return self._value(value, depth + 1)
            case _:
                raise _Unknown

    def _number(self, node: ast.expr, depth: int) -> float:
        value = self._value(node, depth + 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Unknown
        return value

    def _computed(self, op: ast.operator, left: float, right: float) -> float:
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div() if right:
                return left / right
            case ast.FloorDiv() if right:
                return left // right
            case _:
                raise _Unknown


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
