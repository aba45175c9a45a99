"""Escapes text that a peer or a model chose.

    for_log        one line of limited length; characters that cannot be printed become escapes (`\\n`, `\\x1b`)
    for_terminal   line breaks and tabs stay; other control characters become escapes
    for_wire       halves of a surrogate pair, which UTF-8 cannot carry, become question marks

Without this a line break could forge a line of the log, and an escape code could clear the screen or write to the
clipboard. Left out on purpose: characters that look like other characters.
"""

from protocol.limits import MAX_SHOWN_CHARS

LAYOUT = "\n\t"


def for_log(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """One line of at most this many printable characters."""
    line = "".join(char if char.isprintable() else escaped(char) for char in text[: max_chars + 1])
    return line if len(line) <= max_chars else line[: max_chars - 3] + "..."


def for_terminal(text: str) -> str:
    """The whole text, with its control characters escaped except line breaks and tabs."""
    return "".join(escaped(char) if is_control(char) and char not in LAYOUT else char for char in text)


def for_wire(text: str) -> str:
    """Python has such halves for bytes of a file name that are not UTF-8, and where JSON has half of an emoji."""
    return text.encode(errors="replace").decode()


def is_control(char: str) -> bool:
    """C0, DEL and C1, which a terminal interprets."""
    return char < " " or "\x7f" <= char <= "\x9f"


def escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
