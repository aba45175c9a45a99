"""Start the learner of a run: `python -m learner --run DIR`. It is the only process with state. With `--trace` it notes
its phases in `logs/trace-learner.json` there.

With `--rank R --meeting NAME` it is one of several processes of a learner (compute.ranks), which meet under that name.
Rank 0 has the state, and the others follow it (learner/follow.py).

With `--listen ADDRESS` actors connect there, whatever [link] says. That is for clusters, where whoever places a process
decides its address and gives it cores of its own.

Starts from the last checkpoint and the journal. SIGTERM: finish the step (or drop it, if there is no actor to fill its
orders), write a checkpoint, exit. An evaluation is given up, and the next start makes it.
"""

import argparse
import os
import sys
from pathlib import Path

from msgspec.structs import replace

from shared.config.load import config_from_json
from shared.config.processes import LinkConfig
from shared.errors import ConfigError
from shared.process.determinism import cpu_environment
from shared.process.entry_point import run_process
from shared.process.processor import start_config
from shared.process.trace import open_trace
from shared.process.watchdog import Watchdog, open_stacks
from shared.run.run_dir import RunDir


def main(directory: Path, *, traced: bool, rank: int, name: str, address: str) -> None:
    """Check what can be checked quickly, then load and train."""
    run = RunDir.open(directory)
    if rank:
        follow(run, rank, name)
        return
    with run.locked(), open_stacks(run.stacks("learner")) as stacks:
        config = start_config(run)
        if config.compute.ranks > 1 and not name:
            raise ConfigError(
                f"compute.ranks is {config.compute.ranks}, and this starts one of them; use `python -m launch resume"
                f" {directory}`, which starts all."
            )
        os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
        from learner.session import train_run

        trace = open_trace(directory, "learner", wanted=traced)
        config = replace(config, link=listening_at(address, config.link))
        train_run(run, config, Watchdog(config.link.silence_s, stacks), trace, name, own_cores=bool(address))


def listening_at(address: str, link: LinkConfig) -> LinkConfig:
    """address: may be empty."""
    return replace(link, endpoint=address, bind="") if address else link


def follow(run: RunDir, rank: int, name: str) -> None:
    with open_stacks(run.stacks(f"learner{rank}")) as stacks:
        config = config_from_json(run.config.read_bytes())
        os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
        from learner.follow import follow_run

        follow_run(run, config, Watchdog(config.link.silence_s, stacks), rank=rank, name=name)


def start(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description="Trains the policy of a run.")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--trace", action="store_true", help="note when it waits, computes and writes")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which rank of several this is (default: 0)")
    parser.add_argument("--meeting", default="", metavar="NAME", help="where the ranks meet, new for every start")
    parser.add_argument("--listen", default="", metavar="ADDRESS", help="tcp://host:port instead of link.endpoint")
    given = parser.parse_args(argv)
    return run_process(
        "learner",
        lambda: main(given.run, traced=given.trace, rank=given.rank, name=given.meeting, address=given.listen),
    )


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
