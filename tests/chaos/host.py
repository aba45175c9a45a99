"""`python -m tests.chaos.host FOLDER CORE`: runs the trials that come in as lines of JSON, one after another.

Pinned to one core, so that the two processes of a run take turns by the lease, and hosts do not disturb each other.
Each trial runs in a fork: processes that it adopts or that a failed assertion leaves behind end with it.
"""

import os
import shutil
import sys
import traceback
from pathlib import Path

import msgspec

from tests.chaos.forking import load_libraries
from tests.chaos.start import adopt_orphans
from tests.chaos.trial import Result, Trial, run_trial


def main(folder: Path, core: int) -> None:
    """Until stdin ends."""
    os.sched_setaffinity(0, {core})
    load_libraries()
    for line in sys.stdin.buffer:
        trial = msgspec.json.decode(line, type=Trial)
        sys.stdout.buffer.write(in_a_fork(trial, folder / trial.name) + b"\n")
        sys.stdout.buffer.flush()


def in_a_fork(trial: Trial, folder: Path) -> bytes:
    """The result as JSON; the folder of a trial that failed is kept."""
    folder.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        adopt_orphans()
        (folder / "result.json").write_bytes(msgspec.json.encode(attempt(trial, folder)))
        os._exit(0)
    os.waitpid(pid, 0)
    data = (folder / "result.json").read_bytes()
    if not msgspec.json.decode(data, type=Result).error:
        shutil.rmtree(folder)
    return data


def attempt(trial: Trial, folder: Path) -> Result:
    """What went wrong becomes a part of the result: other trials go on."""
    try:
        return run_trial(trial, folder)
    except Exception:
        return Result(name=trial.name, error=traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
