# ruff: noqa: RUF001
"""Chat templates that treat messages in the ways that families of models do, as small as can be.

Each is a template, the special tokens that it writes, further tokens that are not declared special,
and the token that ends a turn.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AddedToken

from raylearner.tiny.model import make_tokenizer

_TOOLS = "{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}"
_HERMES = (
    "{% for call in message.tool_calls or () %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_GROUPED = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_SHORT_ID = "{% if ID is not defined or ID | length != 9 %}{{ raise_exception('ids have nine') }}{% endif %}"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROUPS_RESULTS = (
    f"{{% if tools %}}<|im_start|>system\n{_TOOLS}<|im_end|>\n{{% endif %}}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    + _GROUPED
    + "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    + _HERMES
    + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' and"
    " not message.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    f"{{% if tools %}}<|im_start|>system\n{_TOOLS}<|im_end|>\n{{% endif %}}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    + _GROUPED
    + "{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% set thought = message.content.split('</think>')[0].split('<think>')[-1]"
    " if '</think>' in message.content else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    + _HERMES
    + "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
ONE_CALL = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<|header|>assistant<|header_end|>\n\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
    "{{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% elif message.role == 'tool' %}<|header|>ipython<|header_end|>\n\n"
    "{{ message.content | tojson }}<|eot_id|>"
    "{% else %}<|header|>{{ message.role }}<|header_end|>\n\n"
    "{% if loop.first %}" + _TOOLS + "{% endif %}{{ message.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header_end|>\n\n{% endif %}"
)
NINE_LETTERS = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.first and tools %}[TOOLS]" + _TOOLS + "[/TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls is defined %}[CALLS]"
    "{% for call in message.tool_calls %}"
    + _SHORT_ID.replace("ID", "call.id")
    + '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}</s>'
    "{% elif message.role == 'tool' %}"
    + _SHORT_ID.replace("ID", "message.tool_call_id")
    + '[RESULTS]{"content": {{ message.content }}, "id": "{{ message.tool_call_id }}"}[/RESULTS]'
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
TRIMS = (
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}\n"
    "{% if loop.first %}"
    + _TOOLS
    + "{% endif %}{{ message.content | trim }}"
    + _HERMES
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEXT_ARGUMENTS = (
    "{% set ns = namespace(answers=false) %}" + _TOOLS + "{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.answers = false %}"
    "{{ '<｜User｜>' + message.content }}{% endif %}"
    "{% if message.role == 'assistant' and message.tool_calls %}<｜Assistant｜><｜calls｜>"
    "{% for call in message.tool_calls %}{{ call.function.name + '\n' + call.function.arguments }}"
    "<｜call_end｜>{% endfor %}<｜end｜>"
    "{% elif message.role == 'assistant' %}{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ ('' if ns.answers else '<｜Assistant｜>') + content + '<｜end｜>' }}"
    "{% set ns.answers = false %}{% endif %}"
    "{% if message.role == 'tool' %}{% set ns.answers = true %}"
    "{{ '<｜output｜>' + message.content + '<｜output_end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.answers %}<｜Assistant｜><think>\n{% endif %}"
)
ENDS_WITH_THE_NEXT = (
    "[gMASK]" + _TOOLS + "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}<think></think>\n{% endif %}{{ message.content }}"
    + _HERMES
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPACED = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.first %}" + _TOOLS + "{% endif %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ESCAPES = CHATML.replace("{{ message.content }}", "{{ message.content | e }}")
JOINS = (
    "{% for message in messages %}{% if message.role != 'tool' %}<|im_start|>{{ message.role }}\n"
    "{% endif %}{{ message.content }}{% if message.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows what tools said without a frame, so two contents may make one spelling."""
COUNTS = CHATML.replace("{{ message.role }}", "{{ loop.index }} {{ message.role }}").replace(
    "<|im_start|>assistant", "<|im_start|>{{ messages | length + 1 }} assistant"
)
RENAMES = CHATML.replace("{{ message.role }}", "{{ message.role }} said")
"""Its header is another than the one that it shows later."""
CALLS_FIRST = CHATML.replace(
    "{% for message in messages %}",
    "{% set ns = namespace(called='') %}{% for message in messages %}"
    "{% if message.tool_calls %}{% set ns.called = message.tool_calls[-1].function.name %}{% endif %}"
    "{% if message.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}",
).replace(
    "{{ message.role }}",
    "{{ 'functions.' + ns.called if message.role == 'tool' else message.role }}",
)
"""A result stands under the name of the tool that was called before it."""
NO_RESULTS = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
)
MOVES_TOOLS = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'user' and message == users[-1] %}" + _TOOLS + "{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOVES_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last %}{{ system }}{% endif %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template and its tokens."""

    template: str
    special: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Added tokens that are not declared special."""
    end: str = "<|im_end|>"
    strips: bool = False
    """Whether special tokens swallow the white space behind them."""

    def tokenizer(self) -> Any:
        tokenizer = make_tokenizer(4096, special=self.special, chat_template=self.template)
        others: list[str | AddedToken] = [
            AddedToken(text, special=False, normalized=False) for text in self.others
        ]
        tokenizer.add_tokens(others)
        if self.strips:
            tokenizer.add_special_tokens(
                {"extra_special_tokens": [AddedToken(t, rstrip=True) for t in self.special]}
            )
        tokenizer.eos_token = self.end
        return tokenizer

    def save(self, folder: Path) -> Path:
        self.tokenizer().save_pretrained(folder)
        return folder


_HERMES_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

FAMILIES = {
    "chatml": Family(template=CHATML),
    "qwen2.5": Family(template=GROUPS_RESULTS, others=_HERMES_TOKENS),
    "qwen3": Family(template=DROPS_THOUGHTS, others=(*_HERMES_TOKENS, *_THINK)),
    "llama3": Family(
        template=ONE_CALL, special=("<|header|>", "<|header_end|>", "<|eot_id|>"), end="<|eot_id|>"
    ),
    "mistral": Family(
        template=NINE_LETTERS,
        special=(
            *("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]"),
            "</s>",
        ),
        end="</s>",
    ),
    "gemma": Family(
        template=TRIMS, special=("<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>"
    ),
    "deepseek": Family(
        template=TEXT_ARGUMENTS,
        special=("<｜end｜>",),
        others=(
            *("<｜User｜>", "<｜Assistant｜>", "<｜calls｜>", "<｜call_end｜>"),
            *("<｜output｜>", "<｜output_end｜>", *_THINK),
        ),
        end="<｜end｜>",
    ),
    "glm": Family(
        template=ENDS_WITH_THE_NEXT,
        special=("[gMASK]", *_ROLES, "<|observation|>"),
        others=_THINK,
        end="<|observation|>",
    ),
    "phi": Family(
        template=SPACED,
        special=(*_ROLES, "<|tool|>", "<|end|>"),
        end="<|end|>",
        strips=True,
    ),
    "calls first": Family(template=CALLS_FIRST),
    "escapes": Family(template=ESCAPES),
    "counts": Family(template=COUNTS),
}
