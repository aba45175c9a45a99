"""The console that commands print to. That its reader has gone (`| head`) is for the caller to judge, not for rich."""

from rich.console import Console

PLAIN_WIDTH = 100


class OurConsole(Console):
    """A console that raises BrokenPipeError."""

    def on_broken_pipe(self) -> None:
        """rich would end the process here, and a run with it."""
        raise BrokenPipeError


def make_console(plain_width: int | None = PLAIN_WIDTH) -> Console:
    """As wide as the terminal; a fixed width where there is none."""
    console = OurConsole(highlight=False)
    return console if console.is_terminal else OurConsole(highlight=False, width=plain_width)
