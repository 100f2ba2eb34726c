"""How a file is written: the length of its lines, its quotes, the spaces around ``=``; for text that is added to it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass

_NARROW, _WIDE = 79, 120
_LONG_TEXT = 40  # a line that holds such a string says nothing about the length that its author likes
_NO_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


@dataclass(frozen=True)
class Style:
    """A file's own; of a file that does not tell, what formatters write."""

    width: int = 88
    quote: str = '"'
    equals: str = "="  # between a keyword argument's name and its value

    @classmethod
    def of(cls, text: str, tree: ast.Module) -> Style:
        """The style of a module's ``text``, which ``tree`` is of."""
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (tokenize.TokenError, SyntaxError):  # a form feed where it does not expect one
            return cls()
        return cls(_width(tokens), _quote(tokens), _equals(text, tree))

    def of_text(self, text: str) -> str:
        """A piece of code that was written with ``"`` and ``=``."""
        if self.equals != "=":
            text = re.sub(r"\b(\w+)=(?!=)", rf"\1{self.equals}", text)
        return text.replace('"', self.quote)


def _width(tokens: list[tokenize.TokenInfo]) -> int:
    """Return the length of the longest line of code, in reason."""
    ends: Counter[int] = Counter()
    skipped: set[int] = set()
    for token in tokens:
        if token.type == tokenize.STRING and (token.start[0] != token.end[0] or len(token.string) > _LONG_TEXT):
            skipped.update(range(token.start[0], token.end[0] + 1))
        elif token.type not in _NO_CODE:
            ends[token.end[0]] = max(ends[token.end[0]], token.end[1])
    longest = max((end for line, end in ends.items() if line not in skipped), default=0)
    return min(max(longest, _NARROW), _WIDE)


def _quote(tokens: list[tokenize.TokenInfo]) -> str:
    texts = [token.string.lstrip("rRbBuUfF") for token in tokens if token.type == tokenize.STRING]
    short = Counter(text[0] for text in texts if not text.startswith(('"""', "'''")))
    return "'" if short["'"] > short['"'] else '"'


def _equals(text: str, tree: ast.Module) -> str:
    lines = text.encode().splitlines()  # as ast counts them
    spaced: Counter[bool] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            rest = lines[node.lineno - 1][node.col_offset :].decode(errors="replace")
            spaced[rest.startswith(f"{node.arg} = ")] += 1
    return " = " if spaced[True] > spaced[False] else "="
