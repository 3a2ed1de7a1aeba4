"""The tokenizer of small random models: single bytes, tags as single tokens, a ChatML template."""

from collections.abc import Sequence

from tokenizers import pre_tokenizers
from transformers import AddedToken, Qwen2Tokenizer

TAG_NAMES = ("calc", "search", "fetch", "code", "result", "observation", "answer")
TAGS = tuple(tag for name in TAG_NAMES for tag in (f"<{name}>", f"</{name}>"))
"""The tools' default tags, each an ordinary token."""

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END_OF_TURN)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    max_length: int,
    *,
    special: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> Qwen2Tokenizer:
    """Return a byte-level tokenizer without merges: one token per ASCII character, none unknown.

    `special` are further special tokens. The class is the one that transformers uses for this model
    type, regardless of its files.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={text: index for index, text in enumerate((*SPECIAL, *special, *alphabet))},
        merges=[],
        unk_token=None,  # pyright: ignore[reportArgumentType]
        eos_token=END_OF_TURN,
        pad_token=PAD,
        extra_special_tokens=["<|im_start|>", *special],
        chat_template=chat_template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tags: list[str | AddedToken] = [
        AddedToken(tag, special=False, normalized=False) for tag in TAGS
    ]
    tokenizer.add_tokens(tags)
    return tokenizer
