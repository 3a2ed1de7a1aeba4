"""Launch scripts: the command that trains, with the variables that the script sets. Nothing is run.

Of `if`, the branch whose simple test is known to hold counts; where a test depends on the caller, a
branch sets only variables that have no value yet. Loops are read once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from raylearner.convert.overrides import is_override
from raylearner.convert.shell_words import NAME, Command, Reader, Variables, Word

_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_LEADING = ("then", "do", "else", "{", "}", "!", "time", "exec", "eval", "nohup", "elif")
MAX_LENGTH = 100_000
"""Maximum length of a variable, and of the items of an array; a longer value is not taken."""
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac")


@dataclass(slots=True)
class Script:
    """The training commands of a script, and what may differ when it runs."""

    commands: list[Command] = field(default_factory=list[Command])
    lost: list[Word] = field(default_factory=list[Word])
    """Overrides that the shell would not pass to the command."""


@dataclass(slots=True)
class _Branch:
    verdict: bool | None
    """Whether this branch runs, or None where only the caller knows."""
    was_true: bool = False
    """Whether an earlier branch of the same `if` is known to run."""
    is_if: bool = True


def read_script(text: str, is_training: Callable[[Command], bool]) -> Script:
    """Return the commands of a script that train, variables expanded."""
    script, variables = Script(), Variables()
    reader = Reader(text, variables)
    branches: list[_Branch] = []
    while (command := reader.command()) is not None:
        words = _without_keywords(command.words, branches)
        verdicts = [branch.verdict for branch in branches]
        if not words or False in verdicts:
            continue
        words = _assign(words, variables, only_new=None in verdicts)
        if not words:
            continue
        found = Command(words, command.ended_by, command.line)
        if is_training(found):
            script.commands.append(found)
        elif script.commands and _is_lost(words[0]):
            script.lost += [word for word in words if is_override(word.text)]
    return script


def _is_lost(word: Word) -> bool:
    return is_override(word.text) and "." in word.text.partition("=")[0]


def _without_keywords(words: list[Word], branches: list[_Branch]) -> list[Word]:
    """Take the keywords before a command off, and keep track of the branches that they open."""
    while words and not words[0].is_quoted:
        keyword = words[0].text
        if keyword in ("else", "elif") and branches:
            last = branches[-1]
            was_true = last.was_true or last.verdict is True
            verdict = False if was_true else None
            if not was_true and last.verdict is False:
                verdict = _test(words[1:]) if keyword == "elif" else True
            branches[-1] = _Branch(verdict, was_true)
            if keyword == "elif":
                return []
        elif keyword in _OPENING:
            is_if = keyword == "if"
            branches.append(_Branch(_test(words[1:]) if is_if else None, is_if=is_if))
            return []
        elif keyword in _CLOSING and branches:
            branches.pop()
        elif keyword not in _LEADING:
            return words
        words = words[1:]
    return words


def _test(words: list[Word]) -> bool | None:
    """Return the value of a simple test, or None where it depends on the caller."""
    texts = [word.text for word in words]
    if not texts or texts[0] not in ("[", "[[") or any(word.unset for word in words):
        return None
    match texts[1:-1]:
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "=" | "==" | "-eq", right]:
            return left == right
        case [left, "!=" | "-ne", right]:
            return left != right
        case _:
            return None


def _assign(words: list[Word], variables: Variables, *, only_new: bool) -> list[Word]:
    """Carry out assignments, and return the words of the command after them."""
    if words[0].text in _DECLARE:
        rest = [word for word in words[1:] if not word.text.startswith("-")]
        for word in rest:
            _set(word, variables, only_new)
        return []
    while words and _set(words[0], variables, only_new):
        words = words[1:]
    return words


def _set(word: Word, variables: Variables, only_new: bool) -> bool:
    name, equals, value = word.text.partition("=")
    is_more = name.endswith("+")
    name = name.removesuffix("+")
    if not equals or not NAME.fullmatch(name):
        return False
    old = variables.values.get(name)
    length = len(word.text) + (len(old.text) + len(old.items or ()) if old is not None else 0)
    if max(length, len(word.items or ())) > MAX_LENGTH:
        return True
    if only_new and old is not None:
        return True
    if word.items is not None:
        before = old.items or [] if is_more and old is not None else []
        variables.values[name] = Word("", word.line, (), [*before, *word.items])
    elif is_more and old is not None:
        unset = (*old.unset, *word.unset)
        variables.values[name] = Word(f"{old.text}{value}", word.line, unset)
    else:
        variables.values[name] = Word(value, word.line, word.unset)
    return True
