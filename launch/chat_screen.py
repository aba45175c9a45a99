"""Answers as they grow: in columns that grow together, or one after the other as plain text.

An answer may hold escape codes, which a terminal must not obey.
"""

import time
from collections.abc import Callable, Generator, Mapping

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protocol.plain_text import for_terminal

Spoken = Mapping[str, Generator[str, None, None]]
"""Who speaks -> the answer so far, again and again."""
Show = Callable[[Spoken], None]

REFRESH_S = 0.05


def one_by_one(spoken: Spoken) -> None:
    """Only what is new is printed. A text may also change behind its end, when a character becomes whole."""
    for name, texts in spoken.items():
        print(f"{name}: " if len(spoken) > 1 else "", end="", flush=True)
        shown = ""
        for text in map(for_terminal, texts):
            if text.startswith(shown):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print()


def columns_of(spoken: Spoken, console: Console | None = None) -> None:
    """All speak in turn, a token each, until the last has ended. console: the terminal, if none is given."""
    so_far = dict.fromkeys(spoken, "")
    going, drawn = dict(spoken), 0.0
    with Live(table_of(so_far), console=console or Console(highlight=False), auto_refresh=False) as live:
        while going:
            for name, texts in list(going.items()):
                text = next(texts, None)
                if text is None:
                    del going[name]
                else:
                    so_far[name] = for_terminal(text)
            if not going or time.monotonic() - drawn > REFRESH_S:
                drawn = time.monotonic()
                live.update(table_of(so_far), refresh=True)


def table_of(so_far: Mapping[str, str]) -> RenderableType:
    """Side by side; brackets in an answer are no markup."""
    table = Table(expand=True)
    for name in so_far:
        table.add_column(name, ratio=1)
    table.add_row(*(Text(text) for text in so_far.values()))
    return table
