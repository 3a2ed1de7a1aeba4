"""verl: the form of an episode, its tools and its rewards."""

from pathlib import Path
from typing import Any

from raylearner.convert.draft import Draft
from raylearner.convert.files import is_file, read_yaml
from raylearner.convert.settings import Settings

ROLLOUT = "actor_rollout_ref.rollout"
MULTI = f"{ROLLOUT}.multi_turn"
VERL_SCORE = "raylearner.rewards.foreign:verl_score"
ANSWER = "reward_model.ground_truth"
"""Column of the expected answer in verl's rows."""
DEFAULT_TURNS = 4
CUSTOM = ("reward.custom_reward_function", "custom_reward_function")


def answer_column(s: Settings) -> str:
    return f"{ANSWER}.target" if s.table.name == "search-r1" else ANSWER


def has_own_reward(s: Settings) -> bool:
    return any(s.has(f"{prefix}.path") for prefix in CUSTOM)


def environment(s: Settings, draft: Draft) -> None:
    """Set a single turn, or turns with tools."""
    loop = s.text(f"{ROLLOUT}.agent.default_agent_loop")
    is_multi = s.flag(f"{MULTI}.enable") or loop == "tool_agent"
    custom = s.has(f"{ROLLOUT}.agent.agent_loop_config_path")
    if not is_multi and not custom:
        draft.set("environment.kind", "single_turn")
        return
    origin = s.where(f"{MULTI}.enable", f"{ROLLOUT}.agent.default_agent_loop")
    draft.set("environment.kind", "tool_use", origin)
    if custom:
        draft.decide("environment.kind", "the agent loop is your code; see docs/environments.md.")
    tools, decide = _tools(s)
    draft.set("environment.tools", tools, s.where(f"{MULTI}.tool_config_path"), decide=decide)
    draft.set("environment.dialect", {"kind": "json", "answer_tag": None})
    if s.has(f"{MULTI}.max_parallel_calls"):
        calls = s.whole(f"{MULTI}.max_parallel_calls")
        draft.set("environment.dialect", {**draft.get("environment.dialect"), "max_calls": calls})
    draft.set("environment.observation_tag", None)
    draft.set("renderer.observation_role", "tool")
    turns_key = f"{MULTI}.max_assistant_turns"
    turns = s.whole(turns_key) - 1 if s.has(turns_key) else DEFAULT_TURNS
    origin = f"{turns_key}, less the last turn, which has no tools here" * s.has(turns_key)
    draft.set("environment.max_turns", max(turns, 1), origin)
    if not s.has(turns_key):
        draft.decide("environment.max_turns", "verl has no limit by default.")
    key = f"{MULTI}.max_tool_response_length"
    draft.set("renderer.max_observation_tokens", s.whole(key), f"{key}, in characters there")


def _tools(s: Settings) -> tuple[list[dict[str, Any]], str]:
    """Return the tools of a configuration file, and what to decide about them."""
    key = (
        f"{MULTI}.tool_config_path"
        if s.has(f"{MULTI}.tool_config_path")
        else "data.tool_config_path"
    )
    name = str(s.value(key) or "")
    found = [Path(folder) / name for folder in s.facts.get("folders", ["."])]
    file = next((path for path in found if name and is_file(path)), None)
    listed: Any = None
    if file is not None:
        listed = _entries(file)
    if not isinstance(listed, list):
        reason = f"{name} is not here" if name else "no file of tools is named"
        return [_function("my_tools:call")], f"{reason}; list your tools."
    tools: list[dict[str, Any]] = []
    unknown: list[str] = []
    for entry in listed:
        class_name = str(entry.get("class_name", ""))
        options = entry.get("config") or {}
        tool = _known_tool(class_name.rpartition(".")[2], options)
        if tool is None:
            unknown.append(class_name)
            schema = (entry.get("tool_schema") or {}).get("function") or {}
            tool = _function(f"my_tools:{schema.get('name', 'call')}")
        tools.append(tool)
    text = (
        f"write {', '.join(unknown)} as functions of Python (docs/environments.md)."
        if unknown
        else ""
    )
    return tools, text


def _entries(file: Path) -> Any:
    reading = read_yaml(file, str(file))
    setting = reading.settings.get("tools")
    listed = setting.value if setting is not None and not reading.problems else None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        return None
    return listed


def _function(reference: str) -> dict[str, Any]:
    return {"kind": "function", "function": reference}


def _known_tool(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    match name:
        case "SearchTool" if "retrieval_service_url" in options:
            return search_tool(str(options["retrieval_service_url"]), options.get("topk", 3))
        case "SandboxFusionTool" if "sandbox_fusion_url" in options:
            url = str(options["sandbox_fusion_url"]).removesuffix("/").removesuffix("/run_code")
            return {"kind": "code_execution", "url": url}
        case _:
            return None


def search_tool(url: str, top_n: int) -> dict[str, Any]:
    """Return the search tool of a service in Search-R1's form."""
    url = url.rstrip("/").removesuffix("/retrieve")
    return {"kind": "search", "form": "retrieve", "url": url, "top_n": top_n}


def rewards(s: Settings, draft: Draft) -> None:
    """Set reward functions: the user's, a reward model, or a check of formulas."""
    functions: list[dict[str, Any]] = []
    origins: list[str] = []
    for prefix in CUSTOM:
        if s.has(f"{prefix}.path") and not functions:
            arguments: dict[str, Any] = {
                "path": s.text(f"{prefix}.path"),
                "name": s.text(f"{prefix}.name"),
            }
            options = s.below(f"{prefix}.reward_kwargs")
            if options:
                arguments["options"] = options
            functions.append({"kind": VERL_SCORE, "name": "score", "arguments": arguments})
            origins.append(f"{prefix}.path")
    for enable, path in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if s.flag(enable) and s.has(path):
            functions.append({"kind": "model", "path": s.text(path), "gpus": 1})
            origins.append(path)
    if functions:
        draft.set("rewards.functions", functions, ", ".join(origins))
        return
    draft.set(
        "rewards.functions",
        [{"kind": "math_verify", "answer_tag": None}],
        decide="verl chooses a function by the data_source of a row; this one compares formulas.",
    )
