"""Keys, tokens and passwords: recognised in texts, so that none is stored or shown.

They come from the environment alone. Configurations that contain one are refused, and texts that quote one,
such as the error of a client, are masked where they are written.
"""

import os
import re
from collections.abc import Iterator, Mapping

MASK = "***"
MIN_LENGTH = 8
"""Shorter values of variables are no credentials, and would be found in ordinary text."""
_WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"}
)
_PLACES = frozenset({"PATH", "FILE", "DIR", "FOLDER", "MODE", "NAME", "ID", "URL", "TYPE"})
"""Last words of variables that say where a credential is, or which."""
_KNOWN_FORM = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|xox[abps]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,})"
)
_IN_ADDRESS = re.compile(r"(://)[^\s/@:]*:[^\s/@]+(?=@)")
_IN_HEADER = re.compile(r"\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_IN_QUERY = re.compile(
    r"([?&](?:api[_-]?key|key|token|access_token|password|secret|sig(?:nature)?)=)[^&\s\"'#]+",
    re.IGNORECASE,
)


def is_credential(variable: str) -> bool:
    """Whether an environment variable of this name holds a credential."""
    words = variable.upper().split("_")
    return not _WORDS.isdisjoint(words) and words[-1] not in _PLACES


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that needs none of them, nor a proxy that may contain one."""
    return {
        name: value
        for name, value in environment.items()
        if not is_credential(name) and not name.lower().endswith("_proxy")
    }


def mask(text: str) -> str:
    """Return the text without credentials: those of the environment, and those of a known form."""
    for value in _values(os.environ):
        if value in text:
            text = text.replace(value, MASK)
    text = _IN_ADDRESS.sub(rf"\1{MASK}", text)
    text = _IN_HEADER.sub(rf"\1 {MASK}", text)
    text = _IN_QUERY.sub(rf"\1{MASK}", text)
    return _KNOWN_FORM.sub(MASK, text)


def find(text: str, environment: Mapping[str, str]) -> str | None:
    """Return what kind of credential the text contains, or None."""
    for name, value in environment.items():
        if is_credential(name) and len(value) >= MIN_LENGTH and value in text:
            return f"the value of the environment variable {name}"
    if _IN_ADDRESS.search(text):
        return "a password in an address"
    return "a key" if _KNOWN_FORM.search(text) else None


def _values(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if len(value) >= MIN_LENGTH and is_credential(name):
            yield value
