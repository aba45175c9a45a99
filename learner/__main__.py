"""Start the learner of a run: `python -m learner --run DIR`. It is the only process with state. With `--trace` it notes
its phases in `logs/trace-learner.json` there.

Starts from the last checkpoint and the journal. SIGTERM: finish the step (or drop it, if there is no actor to fill its
orders), write a checkpoint, exit.
"""

import argparse
import os
import sys
from pathlib import Path

from shared.process.determinism import cpu_environment
from shared.process.entry_point import run_process
from shared.process.processor import start_config
from shared.process.trace import open_trace
from shared.process.watchdog import Watchdog, open_stacks
from shared.run.run_dir import RunDir


def main(directory: Path, *, traced: bool) -> None:
    """Check what can be checked quickly, then load and train."""
    run = RunDir.open(directory)
    with run.locked(), open_stacks(run.stacks("learner")) as stacks:
        config = start_config(run)
        os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
        from learner.session import train_run

        trace = open_trace(directory, "learner", wanted=traced)
        train_run(run, config, Watchdog(config.link.silence_s, stacks), trace)


def start(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description="Trains the policy of a run.")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--trace", action="store_true", help="note when it waits, computes and writes")
    arguments = parser.parse_args(argv)
    return run_process("learner", lambda: main(arguments.run, traced=arguments.trace))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
