"""A model's tokenizer: its class, the tokens that end a turn, and sampled tokens as the text of a turn."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from raylearner.config.model_files import read_json
from raylearner.config.schema import RendererSection
from raylearner.tokenization.reasoning import Reasoning, mentioned
from raylearner.tokenization.template import Json, written

CUT_MARK = " ...[cut]"
CHARACTERS_PER_TOKEN = 8
"""Characters of a long text that are read at first for each token that may be shown of it."""
SPARE_TOKENS = 16
"""Tokens read beyond the limit, so that the place where a text was cut does not change those shown."""
QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_TYPES = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl")
"""Model types for which `AutoTokenizer` takes `Qwen2Tokenizer` where the tokenizer's files name it."""


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer in `path` (directory or hub id). Raises `OSError` and `ValueError`.

    Importing `AutoTokenizer` takes seconds in the driver and in every rollout actor, since it imports
    torch; directories of Qwen models do without.
    """
    classes: Any
    if _is_qwen(Path(path)):
        from transformers import Qwen2Tokenizer as classes
    else:
        from transformers import AutoTokenizer as classes
    return classes.from_pretrained(path)


def end_token_ids(path: str) -> tuple[int, ...]:
    """Return the tokens at which engines end a turn by generation_config.json; empty without one.

    Families differ: GLM's turns end with the token that begins the next one.
    """
    ends: int | list[int] | None = _read(path, "generation_config.json").get("eos_token_id")
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def find_end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return eos, pad and the tokens that known chat templates put at the end of a turn."""
    ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
        index = tokenizer.convert_tokens_to_ids(name)
        if index is not None and index != tokenizer.unk_token_id:
            ids.append(index)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def unknown_token_ids(path: str) -> tuple[int, ...]:
    """Return ids that have logits but no token: padding of the vocabulary, and gaps.

    Empty for a directory without a tokenizer. Raises `OSError` and `ValueError`.
    """
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        return ()
    config = _read(path, "config.json")
    size: int = {**config, **config.get("text_config", {})}.get("vocab_size", 0)
    vocabulary: dict[str, int] = load_tokenizer(path).get_vocab()
    known = set(vocabulary.values())
    return tuple(token for token in range(size) if token not in known)


def _read(path: str, name: str) -> dict[str, Any]:
    """Return a JSON file of a model; empty where it has none."""
    folder = Path(path)
    if folder.is_dir():
        return read_json(folder / name)
    from transformers.utils import hub

    files: Any = hub
    found = files.cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return {} if found is None else read_json(Path(found))


def _is_qwen(folder: Path) -> bool:
    model, tokenizer = map(read_json, (folder / "config.json", folder / "tokenizer_config.json"))
    return (
        model.get("model_type") in QWEN_TYPES
        and tokenizer.get("tokenizer_class") in QWEN_CLASSES
        and "auto_map" not in tokenizer
    )


_MARK = "\u2402turn\u2403"
_PROBE: Json = {"role": "user", "content": "-"}


class TurnReader:
    """One tokenizer with its chat template and the reasoning tags that are looked for."""

    def __init__(self, tokenizer: Any, config: RendererSection) -> None:
        self._tokenizer = tokenizer
        self._arguments = config.chat_template_arguments
        header = self._header([_PROBE])
        self._has_header = bool(header.strip())
        if config.reasoning_tags == "auto":
            self.reasoning = Reasoning(mentioned([*self._template_texts(), header]))
        else:
            self.reasoning = Reasoning(config.reasoning_tags or ())
        self._special = self._special_tags()

    def turn_ends(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Leave out the tokens of reasoning tags: they end a thought, not the turn."""
        tags = [tag for pair in self.reasoning.tags for tag in pair]
        unique = dict.fromkeys(token_ids)
        texts = {token: str(self._tokenizer.convert_ids_to_tokens(token)) for token in unique}
        return tuple(t for t in unique if not any(texts[t] in tag for tag in tags))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens other than those of reasoning tags."""
        parts: list[str] = []
        start = 0
        for index, token in enumerate(token_ids):
            if token in self._special:
                parts += [self._plain(token_ids[start:index]), self._special[token]]
                start = index + 1
        return "".join((*parts, self._plain(token_ids[start:])))

    def opening(
        self, messages: Sequence[Json], tools: Sequence[Json] = (), *, prefill: str = ""
    ) -> str:
        """Return the opening tag of the thought in which the turn behind `messages` begins; empty for none.

        The header or `prefill` may leave it open, tags in contents do not count. `messages` are as chat
        templates take them.
        """
        if not self.reasoning.tags:
            return ""
        return self.reasoning.opened_in(self._header(messages, tools) + prefill)

    def opening_behind(self, token_ids: Sequence[int]) -> str:
        """Return the same for the tokens of a reply, which end with the next turn's header."""
        if not self.reasoning.tags or not self._has_header:
            return ""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)).rstrip()
        return next((tag for tag, _ in self.reasoning.tags if text.endswith(tag)), "")

    def _header(self, messages: Sequence[Json], tools: Sequence[Json] = ()) -> str:
        """Return the header of the assistant's turn behind the last message."""
        whole = self._render(messages, tools, opens=True)
        bare = self._render(messages, tools, opens=False)
        if whole != bare:
            return whole[_num_shared(whole, bare) :]
        marked = [*messages[:-1], {**messages[-1], "content": _MARK}]
        return self._render(marked, tools, opens=True).rpartition(_MARK)[2]

    def _render(self, messages: Sequence[Json], tools: Sequence[Json], *, opens: bool) -> str:
        return written(self._tokenizer, self._arguments, messages, tools, opens=opens)

    def _template_texts(self) -> list[str]:
        template: str | dict[str, str] = self._tokenizer.chat_template
        return list(template.values()) if isinstance(template, dict) else [template]

    def _plain(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _special_tags(self) -> dict[int, str]:
        """Map the special tokens of reasoning tags, which plain decoding would drop, to their texts."""
        tags = [tag for pair in self.reasoning.tags for tag in pair]
        pairs = zip(
            self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True
        )
        return {token: text for token, text in pairs if any(text in tag for tag in tags)}


def _num_shared(first: str, second: str) -> int:
    """Count the characters of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class TextCutter:
    """Cuts texts to a number of tokens, with a visible mark."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        """`encode` takes control tokens that a text spells as text."""
        self._tokenizer = tokenizer
        self._encode = encode
        self._mark = encode(CUT_MARK)

    def cut(self, text: str, limit: int) -> tuple[str, int]:
        """Return the text that is shown, and its number of tokens."""
        token_ids = self._first_tokens(text, limit + SPARE_TOKENS)
        if len(token_ids) <= limit:
            return text, len(token_ids)
        keep = max(0, limit - len(self._mark))
        length = len(self._decode(token_ids[:keep]))
        mark = self._decode(self._mark[: limit - keep])
        while length and len(self._encode(text[:length] + mark)) > limit:
            length -= 1  # what is cut may need more tokens than it did as a part
        return text[:length] + mark, limit

    def _first_tokens(self, text: str, number: int) -> list[int]:
        """Return all tokens of the text, or at least `number` of its first ones where it has more.

        Only as much of a long text is read as that takes.
        """
        size = number * CHARACTERS_PER_TOKEN
        while size < len(text):
            token_ids = self._encode(text[:size])
            if len(token_ids) >= number:
                return token_ids
            size *= 2
        return self._encode(text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
