"""Chat templates of many kinds: contents are never control, and replies are what the template writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import FAMILIES, JOINS, MOVES_SYSTEM, MOVES_TOOLS, RENAMES, Family

from raylearner.config.schema import RendererSection, ToolUse
from raylearner.errors import ConfigError
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.template_checks import check_template
from raylearner.types import FunctionCall, Message, Prompt, new_call_id

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Weather of a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
    for name in ("weather", "tides")
]
USER = Message(role="user", content="How warm is it in Ayr?")
OBSERVATIONS = ("12 degrees", '{"sky": "grey"}', "one\ntwo", "  padded \n", "a \\ b é", "<b>&</b>")


@cache
def renderer_of(name: str, role: str = "tool") -> Renderer:
    section = {
        "max_prompt_tokens": 4096,
        "max_response_tokens": 4096,
        "max_observation_tokens": 4096,
        "observation_role": role,
    }
    return Renderer(FAMILIES[name].tokenizer(), RendererSection.model_validate(section))


def make_renderer(family: Family, role: str = "user") -> Renderer:
    section = RendererSection.model_validate({"observation_role": role})
    return Renderer(family.tokenizer(), section)


def whole(
    name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: Any
) -> list[int]:
    """What the template itself makes of a dialogue, by transformers alone."""
    tokenizer = FAMILIES[name].tokenizer()
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, **options
    )
    return tokenizer.encode(text, add_special_tokens=False)


def control_ids(name: str) -> set[int]:
    family = FAMILIES[name]
    texts = [*family.special, "<|im_start|>", "<|im_end|>", "<|endoftext|>", family.end]
    texts += [t for t in family.others if "User" in t or "Assistant" in t or "output" in t]
    return set(family.tokenizer().convert_tokens_to_ids(texts))


def spellings(name: str) -> st.SearchStrategy[str]:
    """Texts made of control tokens, parts of them, and what templates look for in contents."""
    family = FAMILIES[name]
    tokens = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *family.special, *family.others)
    parts = [part for token in tokens for part in (token, token[:3], token[3:], token[:-1])]
    others = ["<think>", "</think>", "<tool_response>", "a", " ", "\n", "&", '"', "\U0010ff00", "é"]
    return st.lists(st.sampled_from([*parts, *others]), max_size=6).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_contents_make_no_control_tokens_and_read_as_the_template_writes_them(
    name: str, data: st.DataObject
) -> None:
    texts = spellings(name)
    renderer, tokenizer = renderer_of(name), FAMILIES[name].tokenizer()
    user, said, asked, described = (data.draw(texts) for _ in range(4))
    messages = [
        Message(role="user", content=user),
        Message(role="assistant", content=said),
        Message(role="user", content=asked),
    ]
    tool = json.loads(json.dumps(TOOLS[0]))
    tool["function"]["description"] = described
    token_ids = renderer.render(messages, tools=[tool])
    plain = [{"role": m.role, "content": "x"} for m in messages]
    frame = renderer.render_chat(plain, tools=TOOLS[:1])
    controls = control_ids(name)
    assert [i for i in token_ids if i in controls] == [i for i in frame if i in controls]
    shown = [{"role": m.role, "content": m.content} for m in messages]
    text = tokenizer.apply_chat_template(
        shown, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    if name != "phi":  # its tokens swallow white space
        assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(contents=st.lists(st.text(max_size=20), min_size=3, max_size=3))
def test_ordinary_contents_are_the_template_own_tokens(name: str, contents: list[str]) -> None:
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    rendered = renderer_of(name).render_chat(messages, tools=TOOLS)
    assert rendered == whole(name, messages, TOOLS, add_generation_prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_results", [1, 2])
def test_replies_of_tools_are_those_of_the_whole_dialogue(name: str, num_results: int) -> None:
    """Two turns of a policy that calls as the template writes calls, ended by its end token."""
    renderer = renderer_of(name)
    has_text = name == "deepseek"
    dialogue: list[dict[str, Any]] = [{"role": "user", "content": USER.content}]
    replies: list[list[Message]] = []
    for content in OBSERVATIONS:
        ids = [new_call_id() for _ in range(num_results)]
        arguments = {"town": "Ayr"}
        calls = [
            {
                "id": i,
                "type": "function",
                "function": {
                    "name": tool["function"]["name"],
                    "arguments": json.dumps(arguments) if has_text else arguments,
                },
            }
            for i, tool in zip(ids, TOOLS, strict=False)
        ]
        results = [
            Message(role="tool", content=content, call_id=i, name=call["function"]["name"])
            for i, call in zip(ids, calls, strict=True)
        ]
        reply = renderer.render_reply(
            results, opening=[USER], replies=replies, tools=TOOLS, last_token_id=None
        )
        if name == "llama3":
            calls = calls[-1:]  # it takes no more in one turn
        dialogue.append({"role": "assistant", "content": "x", "tool_calls": calls})
        dialogue += [
            {"role": "tool", "content": content, "tool_call_id": m.call_id, "name": m.name}
            for m in results
        ]
        replies.append(results)
        tokens = whole(name, dialogue, TOOLS, add_generation_prompt=True)
        assert tokens[-len(reply) :] == reply
        assert FAMILIES[name].tokenizer().convert_ids_to_tokens(reply[0]) == FAMILIES[name].end
        sampled = renderer.render_reply(
            results, opening=[USER], replies=replies[:-1], tools=TOOLS, last_token_id=reply[0]
        )
        assert sampled == reply[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_replies_of_the_user_and_continuations_are_those_of_the_whole_dialogue(name: str) -> None:
    renderer = renderer_of(name, "user")
    opening = [USER]
    if name in ("chatml", "qwen3", "counts"):
        opening = [Message(role="system", content="Be brief."), USER]
    first = renderer.render(opening)
    for content in OBSERVATIONS:
        reply = renderer.render_reply(
            [Message(role="tool", content=content)],
            opening=opening,
            tools=[],
            last_token_id=None,
        )
        history = [{"role": m.role, "content": m.content} for m in opening]
        answer = {"role": "user", "content": content}
        dialogue = [*history, {"role": "assistant", "content": "Mild."}, answer]
        tokens = whole(name, dialogue, add_generation_prompt=True)
        assert reply == tokens[-len(reply) :]
        continued = renderer.render_continuation([answer], history=history, last_token_id=None)
        assert continued == reply
        if name not in ("qwen3", "deepseek", "glm"):  # their headers open thoughts
            assert [*first, *renderer.encode("Mild."), *reply] == tokens


def test_several_contents_do_not_make_one_control_token_together() -> None:
    renderer = make_renderer(Family(template=JOINS))
    end = renderer.encode("<|im_end|>", keeps_special=True)[0]
    parts = [{"role": "tool", "content": text} for text in ("<|im_", "end|>")]
    token_ids = renderer.render_chat([{"role": "user", "content": "x"}, *parts])
    assert token_ids.count(end) == 1
    assert "<|im_end|><|im_start|>" in renderer.decode_all(token_ids)


def test_what_a_template_makes_of_a_content_is_no_control_token_either() -> None:
    changed = FAMILIES["chatml"].template.replace(
        "message.content", "message.content | replace('#', '')"
    )
    renderer = make_renderer(Family(template=changed))
    frame = renderer.render([USER])
    token_ids = renderer.render([Message(role="user", content="<|im_#end|>")])
    end = renderer.encode("<|im_end|>", keeps_special=True)[0]
    assert token_ids.count(end) == frame.count(end)
    assert "<|im_end|><|im_end|>" in renderer.decode_all(token_ids)


def test_calls_and_ids_of_prompts_are_in_the_form_that_the_template_takes() -> None:
    long_id = "call_" + "a" * 24
    called = FunctionCall(call_id=long_id, name="weather", arguments='{"town": "Ayr"}')
    messages = [
        USER,
        Message(role="assistant", content="", calls=(called,)),
        Message(role="tool", content="12", call_id=long_id, name="weather"),
    ]
    for name in FAMILIES:
        renderer = renderer_of(name)
        text = renderer.decode_all(renderer.render(messages, tools=TOOLS))
        has_calls = name not in ("chatml", "escapes", "counts", "phi", "calls first")
        assert ("Ayr" in text.split("?")[1]) == has_calls
        assert (long_id in text) is False
    text = renderer_of("mistral").decode_all(renderer_of("mistral").render(messages))
    call_id, answered_id = (part.split('"')[0] for part in text.split('"id": "')[1:])
    assert call_id == answered_id
    assert len(call_id) == 9


@pytest.mark.parametrize("name", FAMILIES)
def test_results_go_on_behind_earlier_turns_with_several_calls(name: str) -> None:
    """The template refuses several calls of one turn: those that were sampled stay as they are."""
    renderer = renderer_of(name)
    ids = [new_call_id(), new_call_id()]
    made = [
        {"id": i, "type": "function", "function": {"name": "weather", "arguments": {"town": "Ayr"}}}
        for i in ids
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": "12"} for i in ids]
    called = {"role": "assistant", "content": "", "tool_calls": made}
    reply = renderer.render_continuation(
        results[::-1],
        history=[{"role": "user", "content": "x"}, called, *results],
        calls=made,
        tools=TOOLS,
        last_token_id=None,
    )
    assert renderer.decode_all(reply).count("12") == 2


def test_an_end_token_behind_the_results_does_not_end_the_turn() -> None:
    """GLM's turns with calls end with `<|observation|>`; a tokenizer may name `<|user|>` alone."""
    family = FAMILIES["glm"]
    renderer = make_renderer(replace(family, end="<|user|>"), "tool")
    made = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {}}}
    reply = renderer.render_continuation(
        [
            {"role": "tool", "tool_call_id": "123456789", "content": "12 degrees"},
            {"role": "user", "content": "And?"},
        ],
        calls=[made],
        tools=TOOLS,
        last_token_id=None,
    )
    assert renderer.decode_all(reply) == (
        "<|observation|><tool_response>\n12 degrees\n</tool_response><|user|>\nAnd?<|assistant|>"
    )


@pytest.mark.parametrize(
    ("template", "dialect", "role", "has_system", "is_taken"),
    [
        (RENAMES, "tags", "user", False, False),
        (MOVES_TOOLS, "json", "user", False, False),
        (MOVES_TOOLS, "json", "tool", False, True),
        (MOVES_TOOLS, "tags", "user", False, True),
        (MOVES_SYSTEM, "tags", "user", True, False),
        (MOVES_SYSTEM, "tags", "user", False, True),
        (MOVES_SYSTEM, "tags", "inline", True, True),
    ],
)
def test_templates_that_rewrite_history_are_refused_before_anything_starts(
    template: str, dialect: str, role: str, has_system: bool, is_taken: bool
) -> None:
    environment = ToolUse.model_validate({"kind": "tool_use", "dialect": {"kind": dialect}})
    system = [Message(role="system", content="Be brief.")] if has_system else []
    prompts = [Prompt(prompt_id="p", messages=(*system, USER))]
    renderer = make_renderer(Family(template=template), role)
    if is_taken:
        check_template(renderer, environment, prompts)
    else:
        with pytest.raises(ConfigError):
            check_template(renderer, environment, prompts)
