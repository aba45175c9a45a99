"""Text that a peer or a model chose is escaped for a log and for a terminal."""

import pytest

from protocol.plain_text import for_log, for_terminal


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hf", "hf"),
        ("Gr\xfc\xdfe, \u4f60\u597d", "Gr\xfc\xdfe, \u4f60\u597d"),
        ("a\nerror: b", "a\\nerror: b"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J\x7f\0", "\\x9b2J\\x7f\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028", "\\u2028"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 197 + "..."),
        ("\n" * 10**6, "\\n" * 98 + "\\..."),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert for_log(text) == line
    assert for_log(text).isprintable() and len(for_log(text)) <= 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        (
            "Gr\xfc\xdfe, \u4f60\u597d \U0001f469\u200d\U0001f680",
            "Gr\xfc\xdfe, \u4f60\u597d \U0001f469\u200d\U0001f680",
        ),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("safe\roverwritten\b\x7f", "safe\\roverwritten\\x08\\x7f"),
    ],
)
def test_for_terminal(text: str, shown: str) -> None:
    assert for_terminal(text) == shown
