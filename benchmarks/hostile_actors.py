"""A real run with one honest actor, and beside it one that has a key and means harm: does anybody notice?

    python -m benchmarks.hostile_actors [--steps 1200] [--only NAME]        writes results/hostile_actors.json

For each kind of harm the same small run, at a limit of 1,024 descriptors, as long as the undisturbed one: the same
adapter at the end, steps at most 1.3 times as long, the learner's memory and the logs flat. The hostile actor speaks
through a socket of its own with the run's own digests, within the allowance that a key has; floods are in
tests/unit/test_flood.py.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import zmq
from msgspec.structs import replace

from benchmarks.fuzz_desk import SPOILS
from benchmarks.gauges import descendants, folder_mb, gauges
from benchmarks.machine import write_result
from launch.commands.run import make_run
from launch.preset import load_config
from learner.wiring import load_model
from protocol.access.keys import create_actor_key, load_actor_key
from protocol.codec import decode, encode
from protocol.messages import AnyMessage, Bye, FilledOrder, Heartbeat, Hello, Order, Policy, Welcome
from protocol.sockets import set_up_actor
from protocol.transport import new_identity
from shared.config.processes import dial_address
from shared.config.tree import Config
from shared.run.run_dir import RunDir
from tests.support.fakes import filled

SETTINGS = (
    "tasks.levels=[1]",
    "rollout.prompts=4",
    "rollout.group=2",
    "rollout.max_new_tokens=8",
    "rollout.groups_per_order=1",
    "checkpoint.every=50",
    "eval.problems=0",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
    "link.heartbeat_s=0.2",
    "link.silence_s=60",
)
DESCRIPTORS = 1024
ALLOWED_SLOWER, ALLOWED_MB, ALLOWED_LOG_MB = 1.3, 64.0, 1.0
PAUSE_S = 0.02
LOUD = "\nerror: all is lost \x1b[2J" + "x" * 60_000


class Hostile:
    """Somebody with a key, and what he was told."""

    def __init__(self, run: RunDir, config: Config, hello: Hello) -> None:
        self.key = load_actor_key(create_actor_key(run.keys, "evil"))
        self.endpoint = dial_address(config.link, run.path)
        self.context = zmq.Context()
        self.hello = replace(hello, actor_id="evil", credits=1024)
        self.random = Random(0)
        self.mark = self.said = self.refused = 0
        self.orders: list[Order] = []
        self.policies: dict[int, Policy] = {}
        self.dial()

    def dial(self) -> None:
        """A new connection."""
        self.socket = self.context.socket(zmq.DEALER)
        set_up_actor(self.socket, self.key, high_water_mark=1000, send_timeout_s=0.1)
        self.socket.linger = 0
        self.socket.routing_id = new_identity(self.key.actor_id)
        self.socket.connect(self.endpoint)

    def say(self, message: AnyMessage) -> None:
        """Whether it can be sent or not."""
        try:
            self.socket.send_multipart(encode(message))
            self.said += 1
        except zmq.Again:
            pass

    def greet(self) -> None:
        """As an honest actor would."""
        self.say(replace(self.hello, mark=self.mark, version=max(self.policies, default=None)))

    def read(self) -> None:
        """All that has come."""
        while self.socket.poll(0):
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Welcome):
                self.mark = message.mark
            elif isinstance(message, Policy):
                self.policies[message.version] = message
            elif isinstance(message, Order):
                self.orders.append(message)
            else:
                self.refused += type(message).__name__ == "Refused"

    def right_answer(self) -> FilledOrder | None:
        """To spoil."""
        known = [order for order in self.orders[-8:] if order.policy_version in self.policies]
        if not known:
            return None
        order = self.random.choice(known)
        return filled(order, self.policies[order.policy_version])


def nonsense(who: Hostile) -> None:
    """Right answers with one thing wrong, and Hello again after each refusal."""
    who.read()
    who.greet()
    if answer := who.right_answer():
        who.say(who.random.choice(SPOILS)(who.random, answer))
    time.sleep(0.5)


def unknown_ids(who: Hostile) -> None:
    """Answers to orders that nobody gave."""
    who.read()
    who.greet()
    if answer := who.right_answer():
        order_id = who.random.choice(("train", "train/x/y", "\x1b[2J", "train/999999/u0000"))
        who.say(replace(answer, order_id=order_id))


def hello_unread(who: Hostile) -> None:
    """Hello after Hello; never reads."""
    who.greet()


def hello_read(who: Hostile) -> None:
    """Hello after Hello with the newest mark, as if all policies had been lost."""
    who.read()
    who.policies.clear()
    who.greet()


def takes(who: Hostile) -> None:
    """Takes orders, shows progress, answers nothing."""
    who.read()
    if not who.mark:
        who.greet()
    who.say(Heartbeat(phase="decoding"))


def reads_slowly(who: Hostile) -> None:
    """A message a second."""
    who.greet()
    if who.socket.poll(0):
        who.socket.recv_multipart()
    time.sleep(1.0)


def is_loud(who: Hostile) -> None:
    """Comes and goes with escape codes and 60 kB of text."""
    who.greet()
    who.say(Bye(reason=LOUD))


def comes_and_goes(who: Hostile) -> None:
    """A new connection each second, the old one without a goodbye."""
    who.greet()
    time.sleep(1.0)
    who.socket.close()
    who.dial()


KINDS: tuple[Callable[[Hostile], None], ...] = (
    nonsense,
    unknown_ids,
    hello_unread,
    hello_read,
    takes,
    reads_slowly,
    is_loud,
    comes_and_goes,
)


class Trial:
    """One run to its end."""

    def __init__(self, folder: Path, config: Config, kind: Callable[[Hostile], None] | None, hello: Hello) -> None:
        self.run = make_run(folder, config)
        self.config = config
        self.kind = kind
        self.over = threading.Event()
        self.hostile = Hostile(self.run, config, hello)
        self.rss: list[float] = []

    def harm(self) -> None:
        """Until the run is over."""
        while self.kind and not self.over.wait(PAUSE_S):
            self.kind(self.hostile)

    def go(self) -> dict[str, Any]:
        """Start it, watch it, and say what came of it."""
        argv = [sys.executable, "-m", "launch", "resume", str(self.run.path)]
        with Path(self.run.path, "launch.txt").open("w") as out:
            popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=limit_descriptors
            )
            thread = threading.Thread(target=self.harm)
            thread.start()
            try:
                seconds = self.watch(popen)
            finally:
                popen.kill()
                popen.wait()
                self.over.set()
                thread.join()
                self.hostile.context.destroy(linger=0)
        return self.figures(popen.returncode, seconds)

    def watch(self, popen: "subprocess.Popen[bytes]") -> float:
        """Seconds from the first row of the metrics to the last."""
        first = last = 0.0
        rows = 0
        while popen.poll() is None:
            time.sleep(0.1)
            found = self.run.metrics.read_bytes().count(b"\n") if self.run.metrics.exists() else 0
            if found > rows:
                rows, last = found, time.monotonic()
                first = first or last
                self.rss.append(max(self.resident(popen.pid), default=0.0))
        return last - first

    def resident(self, pid: int) -> list[float]:
        """Of the learner."""
        try:
            found = [child for child in descendants(pid) if "-m learner" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:  # One has just ended.
            return []
        return [gauges(child.pid).get("rss_mb", 0.0) for child in found]

    def figures(self, code: int, seconds: float) -> dict[str, Any]:
        """For the result file."""
        summary = json.loads(self.run.summary.read_text())
        settled = self.rss[len(self.rss) // 5 :] or [0.0]
        return {
            "exit": code,
            "status": summary["status"],
            "adapter_sha256": summary["adapter_sha256"],
            "seconds": round(seconds, 2),
            "learner_mb": {"first": round(settled[0], 1), "most": round(max(settled), 1)},
            "logs_mb": round(folder_mb(self.run.logs), 3),
            "said": self.hostile.said,
            "refused": self.hostile.refused,
        }


def limit_descriptors() -> None:
    """As most systems do."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def judged(found: dict[str, Any], calm: dict[str, Any]) -> dict[str, Any]:
    """Against the undisturbed run."""
    slower = found["seconds"] / calm["seconds"]
    grown = found["learner_mb"]["most"] - calm["learner_mb"]["most"]
    logged = found["logs_mb"] - calm["logs_mb"]
    good = (
        (found["exit"], found["status"], found["adapter_sha256"]) == (0, "done", calm["adapter_sha256"])
        and slower <= ALLOWED_SLOWER
        and grown <= ALLOWED_MB
        and logged <= ALLOWED_LOG_MB
    )
    return found | {"times_as_long": round(slower, 3), "more_mb": round(grown, 1), "good": good}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    config = load_config("embedded", [*SETTINGS, f"run.steps={args.steps}"])
    hello = load_model(config).expected()
    calm = Trial(folder / "calm", config, None, hello).go()
    print("undisturbed", json.dumps(calm), flush=True)
    results: dict[str, Any] = {}
    for kind in KINDS:
        if args.only in (None, kind.__name__):
            name = kind.__name__
            results[name] = judged(Trial(folder / name, config, kind, hello).go(), calm)
            print(name, json.dumps(results[name]), flush=True)
    good = all(found["good"] for found in results.values())
    figures = {"steps": args.steps, "descriptors": DESCRIPTORS, "undisturbed": calm, "hostile": results, "good": good}
    print(write_result("hostile_actors", figures))
    shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
