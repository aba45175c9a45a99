"""The evaluator of a run with `eval.beside`: `python -m launch.evaluator --run DIR`.

The supervisor starts it with the run, starts it again if it dies, and asks it to end with SIGTERM when the learner has
ended; `--ended` says the same to one that is started after that. Then it makes what is missing if the run is done; if
the run was stopped, it ends at once, and goes on with the next `resume`.

No module of Tandem, and no library, is imported before SIGTERM is handled.
"""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Event


def evaluate(directory: Path, asked_to_end: Event) -> None:
    from launch.commands.open_run import open_run

    run, config = open_run(directory, compute_as="actor")
    from launch.evaluator.follow import follow_supervised, following

    follow_supervised(run, config.link.silence_s, partial(following, run, config), asked_to_end.is_set)


def main(arguments: list[str]) -> int:
    asked_to_end = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    parser = argparse.ArgumentParser(prog="python -m launch.evaluator", allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--ended", action="store_true", help="the learner has ended")
    parsed = parser.parse_args(arguments)
    if parsed.ended:
        asked_to_end.set()
    from shared.process.entry_point import run_process

    return run_process("evaluator", lambda: evaluate(parsed.run, asked_to_end))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
