"""Words of a shell script: quotes, variables, arithmetic and arrays, read as text. Nothing is run."""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NAME = re.compile(r"[A-Za-z_]\w*")
_END = "\n;|&"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_NUMBER = 10**15


@dataclass(slots=True)
class Word:
    """A word after expansion."""

    text: str
    line: int
    unset: tuple[str, ...] = ()
    """Variables in it that the script does not set."""
    items: "list[Word] | None" = None
    """Words of `name=(...)`, an array."""
    is_quoted: bool = False


@dataclass(slots=True)
class Command:
    """Words up to the end of a command, and the characters that ended it."""

    words: list[Word]
    ended_by: str
    line: int


@dataclass(slots=True)
class Variables:
    """Values that the script sets; those of its caller are unknown."""

    values: dict[str, Word] = field(default_factory=dict[str, Word])

    def get(self, name: str) -> Word | None:
        if name == "HOME":
            return Word("~", 0)
        if name == "PWD":
            return Word(".", 0)
        return self.values.get(name)


def _split(before: str, value: str) -> list[str]:
    """Return the words of a word's beginning and an expansion without quotes; assignments are not split."""
    if not any(map(str.isspace, value)) or _ASSIGNMENT.match(before):
        return [f"{before}{value}"]
    words = value.split()
    first = [f"{before}{words.pop(0)}"] if words and not value[0].isspace() else [before]
    return [*first, *words, *([""] if value[-1].isspace() else [])]


def _named(text: str, unset: list[str]) -> tuple[str, ...]:
    """Return those of the variables whose name is still in a text."""
    return tuple(dict.fromkeys(name for name in unset if f"${name}" in text))


class Reader:
    """Reads commands one by one, expanding variables with the values that they have there."""

    def __init__(self, text: str, variables: Variables, line: int = 1) -> None:
        self._text = text.replace("\r\n", "\n")
        self._variables = variables
        self._position = 0
        self._line = line
        self._documents: list[str] = []
        """Ends of here-documents that begin on the next line."""

    def command(self) -> Command | None:
        """Return the next command; None at the end of the script."""
        words: list[Word] = []
        while True:
            self._skip_blanks()
            if self._position >= len(self._text):
                return Command(words, "", self._line) if words else None
            character = self._peek()
            if character == "#":
                self._skip_comment()
                continue
            if character in _END:
                ended_by = self._operator()
                line = words[0].line if words else self._line
                return Command(words, ended_by, line)
            if character in "<>" or re.match(r"\d+[<>]", self._rest(8)):
                self._redirection()
                continue
            if character in "()":
                self._position += 1
                if words and character == "(" and self._peek() == ")":  # name() begins a function
                    self._position += 1
                    words[-1].text += "()"
                    return Command(words, "()", words[0].line)
                continue
            words += self._word()

    def _peek(self, offset: int = 0) -> str:
        place = self._position + offset
        return self._text[place] if place < len(self._text) else ""

    def _rest(self, count: int) -> str:
        return self._text[self._position : self._position + count]

    def _next(self) -> str:
        character = self._peek()
        self._position += 1
        self._line += character == "\n"
        return character

    def _skip_blanks(self) -> None:
        while self._peek() in (" ", "\t") or self._rest(2) == "\\\n":
            self._position += 1
            if self._peek() == "\n" and self._peek(-1) == "\\":
                self._next()

    def _skip_comment(self) -> None:
        while self._peek() not in ("", "\n"):
            self._position += 1

    def _operator(self) -> str:
        start = self._position
        first = self._next()
        if first == "\n":
            for end in self._documents:
                self._skip_document(end)
            self._documents.clear()
            return first
        while self._peek() in ("|", "&", ";") and self._position - start < 2:
            self._position += 1
        return self._text[start : self._position]

    def _redirection(self) -> None:
        found = re.match(r"\d*(<<-?|<<<|&?>>?|[<>]&?|<)&?\d*-?", self._rest(16))
        assert found is not None
        self._position += found.end()
        self._skip_blanks()
        if found[1].startswith("<<") and found[1] != "<<<":
            self._documents.append(self._word_text())
        elif self._peek() not in (*_END, "") and not re.search(r"&\d*-?$", found[0]):
            self._word()

    def _word_text(self) -> str:
        return "".join(word.text for word in self._word())

    def _skip_document(self, end: str) -> None:
        while self._position < len(self._text):
            line = self._text[self._position :].partition("\n")[0]
            self._position += len(line) + 1
            self._line += 1
            if line.strip() == end:
                return

    def _word(self) -> list[Word]:
        """Read one word; an array in it becomes several."""
        line, parts, unset = self._line, "", list[str]()
        is_quoted = False
        spread, done = list[Word](), list[Word]()
        while (character := self._peek()) and character not in " \t\n;|&<>()":
            if character == "'":
                self._position += 1
                parts += self._until("'")
                is_quoted = True
            elif character == '"':
                self._position += 1
                is_quoted = True
                while self._peek() not in ('"', ""):
                    if self._peek() == "\\" and self._peek(1) in ('"', "\\", "$", "`", "\n"):
                        self._position += 1
                        escaped = self._next()
                        parts += "" if escaped == "\n" else escaped
                    elif self._peek() in ("$", "`"):
                        parts += self._expansion(unset, spread)
                    else:
                        parts += self._next()
                self._position += 1
            elif character == "\\":
                self._position += 1
                escaped = self._next()
                parts += "" if escaped == "\n" else escaped
            elif character in "$`":
                value = self._expansion(unset, spread)
                *ended, parts = _split(parts, value)
                done += [Word(text, line, _named(text, unset)) for text in ended if text]
            else:
                parts += self._next()
        if done and not parts:
            return done
        if self._peek() == "(" and parts.endswith("=") and not is_quoted:
            return [Word(parts, line, tuple(unset), self._array())]
        if spread and not parts:
            return [*done, *spread]
        if not parts and not is_quoted and self._position >= len(self._text):
            return []
        names = _named(parts, unset) if done else tuple(dict.fromkeys(unset))
        return [*done, Word(parts, line, names, None, is_quoted)]

    def _until(self, end: str) -> str:
        found = ""
        while self._peek() not in (end, ""):
            found += self._next()
        self._position += 1
        return found

    def _array(self) -> list[Word]:
        self._position += 1
        items: list[Word] = []
        while self._peek() not in (")", ""):
            if self._peek() in " \t\n" or self._rest(2) == "\\\n":
                self._next()
            elif self._peek() == "#":
                self._skip_comment()
            elif self._peek() in _END + "<>(":
                self._next()
            else:
                items += self._word()
        self._position += 1
        return items

    def _expansion(self, unset: list[str], spread: list[Word]) -> str:
        """Read `$...` or a command substitution, and return its text."""
        if self._next() == "`":
            self._until("`")
            unset.append("`...`")
            return ""
        if self._rest(2) == "((":
            return self._arithmetic(unset)
        if self._peek() == "(":
            inner = self._balanced("(", ")")
            known = self._substituted(inner, unset)
            if known is not None:
                return known
            unset.append(f"$({inner.strip()[:30]})")
            return ""
        if self._peek() == "{":
            return self._braced(self._balanced("{", "}"), unset, spread)
        found = NAME.match(self._text, self._position)
        if found is None:
            if self._peek() in "@*#?!$-" or self._peek().isdigit():
                name = self._next()
                if name not in "@*":
                    unset.append(f"${name}")
                return ""
            return "$"
        self._position = found.end()
        return self._variable(found[0], unset)

    def _variable(self, name: str, unset: list[str]) -> str:
        value = self._variables.get(name)
        if value is None:
            unset.append(name)
            return f"${name}"
        unset += value.unset
        return value.items[0].text if value.items else value.text

    def _balanced(self, opening: str, closing: str) -> str:
        depth, start = 0, self._position
        while self._position < len(self._text):
            character = self._next()
            depth += (character == opening) - (character == closing)
            if not depth:
                break
        return self._text[start + 1 : self._position - 1]

    def _braced(self, inner: str, unset: list[str], spread: list[Word]) -> str:
        """Return the value of `${name}`, `${name:-default}` or `${name[@]}`."""
        found = NAME.match(inner)
        if found is None or inner.startswith(("#", "!")):
            if not re.match(r"@|\*|\d", inner):
                unset.append(f"${{{inner}}}")
                return ""
            name, rest = inner[:1], inner[1:]
        else:
            name, rest = found[0], inner[found.end() :]
        value = self._variables.get(name)
        if rest in ("[@]", "[*]"):
            if value is None or value.items is None:
                return ""
            spread += value.items
            return ""
        if rest[:2] in (":-", ":=") or rest[:1] in ("-", "="):
            if value is not None and (value.text or rest[0] != ":"):
                return self._variable(name, unset)
            default = rest[2:] if rest[0] == ":" else rest[1:]
            return self._nested(default, unset)
        if rest in ("", ":?") or rest.startswith((":?", "?")):
            return self._variable(name, unset)
        if rest.startswith((":+", "+")):
            is_set = value is not None and bool(value.text or value.items)
            return self._nested(rest.partition("+")[2], unset) if is_set else ""
        if value is not None and rest in ("##*/", ",,", "^^"):
            unset += value.unset
            text = value.text
            return {"##*/": text.rsplit("/", 1)[-1], ",,": text.lower(), "^^": text.upper()}[rest]
        unset.append(f"${{{inner}}}")
        return ""

    def _nested(self, text: str, unset: list[str]) -> str:
        reader = Reader(text.replace("\n", " "), self._variables, self._line)
        parts: list[str] = []
        while (command := reader.command()) is not None:
            for word in command.words:
                parts.append(word.text)
                unset += word.unset
        return " ".join(parts)

    def _substituted(self, inner: str, unset: list[str]) -> str | None:
        """Return the output of `pwd`, `basename PATH` or `dirname PATH`."""
        name, _, path = inner.strip().partition(" ")
        if name == "pwd":
            return "."
        if name not in ("basename", "dirname") or "$(" in path or "|" in path:
            return None
        found = self._nested(path, unset).rstrip("/")
        head, _, tail = found.rpartition("/")
        return tail if name == "basename" else head or "."

    def _arithmetic(self, unset: list[str]) -> str:
        inner = self._balanced("(", ")").strip()
        inner = inner.removeprefix("(").removesuffix(")")
        text = re.sub(r"\$\{?(\w+)\}?", r"\1", inner)
        try:
            return str(self._number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError):
            unset.append(f"$(({inner.strip()}))")
            return ""

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                found = value
            case ast.Name(id=name):
                value = self._variables.get(name)
                if value is None:
                    raise ValueError(name)
                found = int(value.text)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                found = -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                found = _ARITHMETIC[type(op)](self._number(left), self._number(right))
            case _:
                raise ValueError(ast.dump(node))
        if abs(found) > MAX_NUMBER:
            raise ValueError("too large")
        return found
