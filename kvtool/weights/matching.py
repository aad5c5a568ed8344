"""Lists of modules as quantised checkpoints write them: names, globs and `re:` patterns.

Configs are untrusted. A `re:` pattern is read token by token into a form that is matched in linear time
(possessive repeats, the leftmost place of each fixed run); lookarounds, repeated groups, counted repeats
and back references are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PATTERNS = 20_000
MAX_LENGTH = 400
MAX_WORDINGS = 64
"""Ways to expand the alternatives of one pattern."""
_CLASSES = {"d": "0-9", "w": r"\w"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.([0-9]{1,5})(?=\.|$)")
_SET = re.compile(r"(?:0-9|a-z|A-Z|[0-9]-9|0-[0-9]|[A-Za-z0-9_.])+")
_OPERATORS = re.compile(r"[][(){}|*+?^$]")


class NotUnderstoodError(ValueError):
    """A pattern outside what is matched here; its text is why."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One entry: a module by name covers what is below it."""

    text: str
    piece: str = ""
    """What a padded name must contain, where that is all."""
    regexes: tuple[re.Pattern[str], ...] = ()
    layer: int | None = None
    """The one decoder layer that it speaks of; None: perhaps several."""

    def matches(self, name: str) -> bool:
        """Whether it names this module or one around it."""
        if self.piece:
            return self.piece in f".{name}."
        return any(one.search(name) for one in self.regexes)


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """Patterns with what they stand for, by the layer that they speak of."""

    loose: tuple[tuple[Pattern, T], ...] = ()
    by_layer: Mapping[int, tuple[tuple[Pattern, T], ...]] = field(default_factory=dict)

    def find(self, name: str, layer: int) -> tuple[bool, T | None]:
        """(True, value) of the first pattern that matches a module of this layer; else (False, None)."""
        for pattern, value in (*self.by_layer.get(layer, ()), *self.loose):
            if pattern.matches(name):
                return True, value
        return False, None

    def __bool__(self) -> bool:
        return bool(self.loose or self.by_layer)


def table_of(entries: Iterable[tuple[str, T]]) -> Table[T]:
    """The entries in order, compiled."""
    loose: list[tuple[Pattern, T]] = []
    by_layer: dict[int, list[tuple[Pattern, T]]] = {}
    for count, (text, value) in enumerate(entries):
        if count >= MAX_PATTERNS:
            raise NotUnderstoodError(f"a list of more than {MAX_PATTERNS:,} modules")
        pattern = compiled(text)
        held = loose if pattern.layer is None else by_layer.setdefault(pattern.layer, [])
        held.append((pattern, value))
    return Table(tuple(loose), {layer: tuple(held) for layer, held in by_layer.items()})


def compiled(text: str) -> Pattern:
    """A name, a glob (`*`, `?`) or `re:` and a pattern; all other signs of globs stand for themselves."""
    if not text or len(text) > MAX_LENGTH:
        raise NotUnderstoodError(f"a pattern of {len(text):,} characters")
    if text.startswith("re:"):
        body = text[3:]
        regexes = tuple(re.compile(one) for one in _wordings(body))
        return Pattern(text, regexes=regexes, layer=_layer(body.replace("\\.", ".")))
    layer, stem = _layer(text), text.removesuffix("*")
    if "*" not in stem and "?" not in stem:
        end = "" if stem != text else "."
        # compressed-tensors and ModelOpt write prefixes with a star, transformers without one.
        return Pattern(text, piece=f".{stem}{end}", layer=layer)
    tokens = [
        ("*", "") if c == "*" else (".", "") if c == "?" else (re.escape(c), "") for c in text
    ]
    return Pattern(
        text, regexes=(re.compile(_joined(tokens, r"(?:^|(?<=\.))", r"(?=\.|$)")),), layer=layer
    )


def _layer(text: str) -> int | None:
    """The layer's number, where it stands before any sign that may mean several."""
    found = _LAYER.search(text)
    sign = _OPERATORS.search(text)
    if found is None or (sign is not None and sign.start() <= found.end()):
        return None
    return int(found[1])


Tokens = list[tuple[str, str]]
"""(a set of characters as a regex, its repeat); ("*", "") is any text."""


def _wordings(body: str) -> Iterator[str]:
    """Each way to choose among the alternatives, as a regex in linear time, anchored at the start."""
    count = 0
    for branch in _split(body):
        for plain in _expand(branch):
            count += 1
            if count > MAX_WORDINGS:
                raise NotUnderstoodError("more alternatives than are tried")
            whole = plain.endswith("$") and not plain.endswith("\\$")
            tokens = list(_tokens(plain.removeprefix("^").removesuffix("$" if whole else "")))
            yield _joined(tokens, "^", "$" if whole else "")


def _split(body: str) -> list[str]:
    """Alternatives of the outermost level."""
    branches, depth, start, i = [], 0, 0, 0
    while i < len(body):
        if body[i] == "\\":
            i += 1
        elif body[i] in "()":
            depth += 1 if body[i] == "(" else -1
        elif body[i] == "|" and not depth:
            branches.append(body[start:i])
            start = i + 1
        i += 1
    if depth:
        raise NotUnderstoodError("a pattern with a group that is not closed")
    return [*branches, body[start:]]


def _expand(branch: str) -> Iterator[str]:
    """The same without groups, of which none may be repeated."""
    found = re.search(r"(?<!\\)\((\?:)?([^()?]*)\)(?![*+?{])", branch)
    if found is None:
        if re.search(r"(?<!\\)[()]", branch):
            raise NotUnderstoodError("a pattern with a group that is not a choice of words")
        yield branch
        return
    for count, one in enumerate(found[2].split("|")):
        if count >= MAX_WORDINGS:
            raise NotUnderstoodError("more alternatives than are tried")
        yield from _expand(branch[: found.start()] + one + branch[found.end() :])


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """`.`, literals, `\\d`, `\\w` and sets, each with `*`, `+` or `?` behind it."""
    i = 0
    while i < len(text):
        one, i = _token(text, i)
        repeat = text[i] if i < len(text) and text[i] in "*+?" else ""
        i += len(repeat)
        if repeat and i < len(text) and text[i] == "?":
            i += 1  # lazy: the same texts match
        if one == ".":
            if repeat == "?":
                raise NotUnderstoodError("a pattern with '.?'")
            if repeat != "*":
                yield ".", ""
            if repeat:
                yield "*", ""
        else:
            yield one, repeat


def _token(text: str, i: int) -> tuple[str, int]:
    c = text[i]
    if c == "[":
        end = text.find("]", i)
        inner = text[i + 1 : end]
        if end < 0 or not _SET.fullmatch(inner):
            raise NotUnderstoodError("a pattern with a set of signs")
        return f"[{inner}]", end + 1
    if c == "\\" and i + 1 < len(text):
        c = text[i + 1]
        if c in _CLASSES:
            return f"[{_CLASSES[c]}]", i + 2
        if c.isalnum():
            raise NotUnderstoodError(f"a pattern with '\\{c}'")
        return re.escape(c), i + 2
    if c in "{}()|*+?^$\\":
        raise NotUnderstoodError(f"a pattern with '{c}'")
    return (c if c == "." else re.escape(c)), i + 1


def _joined(tokens: Tokens, start: str, end: str) -> str:
    """Fixed runs between any texts: all but the last are looked for from the left, and never again."""
    runs = [""]
    for i, (one, repeat) in enumerate(tokens):
        if one == "*":
            runs += [""] if runs[-1] or len(runs) == 1 else []
            continue
        if repeat:
            _check_repeat(one, tokens[i + 1] if i + 1 < len(tokens) else None)
            repeat += "+"  # possessive: nothing behind it could match less
        runs[-1] += one + repeat
    first, *more = runs
    if not more:
        return start + first + end
    last = more.pop()
    middle = "".join(f"(?>.*?{one})" for one in more)
    return f"{start}{first}{middle}.*{last}{end}" if last or end else start + first + middle


def _check_repeat(one: str, after: tuple[str, str] | None) -> None:
    """What follows a repeat must be one sign that the repeat cannot take, or `.`, which stands for a dot."""
    if after is None or after[0] in ("*", ".") or not after[0]:
        return
    literal = re.fullmatch(r"\\?(.)", after[0])
    if literal is None or after[1] or re.fullmatch(one, literal[1]):
        raise NotUnderstoodError("a pattern whose repeats run into each other")
