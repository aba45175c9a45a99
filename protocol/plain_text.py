"""Text that somebody else chose, made fit for a log and for a terminal.

    for_log       for a log: what cannot be printed is written as an escape (`\\n`, `\\x1b`), and it is cut
    for_terminal   for an answer that is read: lines and tabs stay, every other control character becomes an escape

A line break could forge a line of the log; an escape code could clear the screen, or write to the clipboard.
Left out on purpose: what looks like something else (homographs, blanks of other widths).
"""

from protocol.limits import MAX_SHOWN_CHARS

LAYOUT = "\n\t"


def for_log(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """At most so many characters, all of them printable."""
    line = "".join(char if char.isprintable() else escaped(char) for char in text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def for_terminal(text: str) -> str:
    """All of it; the control characters of C0 and C1 as escapes, but for line breaks and tabs."""
    return "".join(escaped(char) if is_control(char) and char not in LAYOUT else char for char in text)


def is_control(char: str) -> bool:
    """C0, DEL and C1: what a terminal obeys."""
    return char < " " or "\x7f" <= char <= "\x9f"


def escaped(char: str) -> str:
    """As Python writes it."""
    return char.encode("unicode_escape").decode("ascii")
