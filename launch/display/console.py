"""The console that commands print to: as wide as the terminal, or 120 columns where the output is a file or a pipe."""

from rich.console import Console

PLAIN_WIDTH = 120


class PipeConsole(Console):
    """Raises BrokenPipeError when the reader is gone (`| head`). rich would end the process, and with it the run."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    console = PipeConsole(highlight=False)
    return console if console.is_terminal else PipeConsole(highlight=False, width=PLAIN_WIDTH)
