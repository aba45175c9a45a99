r"""Where the boxes of a text are: `\boxed{...}` and `\fbox{...}`, in time that grows with its length only."""

import re

BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
Span = tuple[int, int, str]
"""Start, end, content."""


def boxes(text: str) -> list[Span]:
    """Start, end and content of every closed box that holds no other."""
    open_braces: list[int | None] = []
    found: list[Span] = []
    starts: list[int] = []
    for token in BOX_TOKEN.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and starts.pop() == start and not (found and found[-1][0] > start):
                found.append((start, token.end(), text[text.index("{", start) + 1 : token.start()]))
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(token.start())
            starts.append(token.start())
    return found
