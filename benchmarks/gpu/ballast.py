"""Takes so much memory of a card that it behaves like a small one.

    python -m benchmarks.gpu.ballast --leave-gib 8 --deadline-s 600

What is left free is for everything else: the contexts, weights and caches of all other processes, as on a card of that
size. The driver still reports the whole card as its size, so whoever plans must ask what is free. Memory is taken by a
plain `torch.empty`. It prints one line of JSON when it has the memory, and ends by itself: at the deadline, or when the
process that started it dies (`with ballast(...)` also ends it). With `--device cpu` it takes nothing and does the rest.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.process.parent_death import PARENT_PID, die_with_parent

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def ballast(leave_gib: float, deadline_s: int, device: str) -> Iterator[dict[str, float]]:
    """Inside the block, `leave_gib` are free; gives what it took. To be used in the main thread."""
    command = [sys.executable, "-m", "benchmarks.gpu.ballast", "--device", device]
    command += ["--leave-gib", str(leave_gib), "--deadline-s", str(deadline_s)]
    environment = os.environ | {PARENT_PID: str(os.getpid())}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the ballast ended with {process.wait()} before it had any memory")
        yield json.loads(line)
    finally:
        process.kill()
        process.communicate()


def to_take(free: int, leave: int) -> int:
    """Bytes; refuses a card that has less."""
    if free < leave:
        raise SystemExit(f"only {free / GIB:.2f} GiB are free on this card, and {leave / GIB:g} GiB were to be left")
    return free - leave


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--leave-gib", type=float, required=True)
    parser.add_argument("--deadline-s", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    # Ends the process, whatever it is doing.
    signal.alarm(args.deadline_s)
    if args.device == "cuda":
        hold(round(args.leave_gib * GIB))
    else:
        tell(0, 0)
        signal.pause()


def hold(leave: int) -> None:
    import torch

    # The first tensor makes the context, which takes memory too.
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(to_take(free, leave), dtype=torch.uint8, device="cuda")
    tell(taken.nbytes, torch.cuda.mem_get_info()[0])
    signal.pause()


def tell(taken: int, free: int) -> None:
    print(json.dumps({"taken_gib": round(taken / GIB, 3), "free_gib": round(free / GIB, 3)}), flush=True)


if __name__ == "__main__":
    main()
