"""The tracker of a run, in a process of its own: `python -m launch.tracking --run DIR`.

It reads what the learner has written, so training pays nothing for it, and neither a slow network nor an error of a
tracker reaches the run. It has a lower priority than the others. The supervisor starts it again if it dies
and asks it to end with SIGTERM when the run has ended; then it sends the rest. What it could not send in time is sent
by the next `resume`.

No module of Tandem, and no library, is imported before SIGTERM is handled.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from threading import Event

NICE = 10
"""Learner and actor come first; on a machine that is never idle it still moves."""


def track(directory: Path, stop: Event) -> None:
    import msgspec

    from launch.tracking.follow import MetricsSender, corrected_by_tracker, note_tracked, tracked_run
    from launch.tracking.trackers import check_tracker, make_tracker
    from shared.config.load import config_from_json
    from shared.run.run_dir import RunDir

    run = RunDir.open(directory)
    text = run.config.read_bytes()
    config = config_from_json(text).tracking
    check_tracker(config)
    tracked = tracked_run(run, config, os.environ)
    note_tracked(run, tracked)
    tracker = make_tracker(tracked, run, msgspec.json.decode(text))
    sender = MetricsSender(run, tracker, corrected_by_tracker(tracked, tracker.last_step()))
    sender.send_until(stop.is_set)
    sender.send_unshown_evaluations()
    tracker.close()
    note_tracked(run, sender.tracked())


def main(arguments: list[str]) -> int:
    stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    parser = argparse.ArgumentParser(prog="python -m launch.tracking", allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory")
    parser.add_argument("--ended", action="store_true", help="the run has ended: send the rest")
    parsed = parser.parse_args(arguments)
    directory = parsed.run
    if parsed.ended:
        stop.set()
    os.nice(NICE)
    from shared.process.entry_point import run_process

    return run_process("tracker", lambda: track(directory, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
