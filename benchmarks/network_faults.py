"""Does a run over a bad network lose or repeat a group? Real processes, each actor in a network namespace of its own.

    python -m benchmarks.network_faults [--steps 200] [--hosts 3] [--seed 0]      (as root) results/network_faults.json

The learner listens on TCP in the main namespace. Every packet between it and an actor is delayed and some are lost, in
both directions (slow_link.py). At random instants, drawn from the seed, an actor is killed, or its host is cut off:
packets vanish and nobody is told. It is back a while later, under its old name or a new one. One actor is always left
alone.

Afterwards: the journal, read back, has every group once; one row of metrics a step; the adapter is that of a run that
nobody disturbed (max_lag = 0); the reward rises. Namespaces, links and processes are removed at the end, also after a
failure. Needs root, the command ip and /dev/net/tun.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.machine import write_result
from benchmarks.slow_link import TUN, Line, SlowLink
from learner.durable.journal import Journal
from learner.durable.recorder import orders_in, read
from protocol.access.key_list import seen_at
from protocol.access.keys import create_actor_key
from shared.run.run_dir import RunDir
from tests.support.runs import ROOT, free_port, launch, num_rows, rows, sets, summary

SETTINGS: dict[str, Any] = {
    "rollout.prompts": 8,
    "rollout.group": 8,
    "rollout.max_new_tokens": 48,
    "rollout.groups_per_order": 1,
    "lora.rank": 8,
    "checkpoint.every": 50,
    "eval.problems": 0,
    "compute.dtype": "fp32",
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
    "link.heartbeat_s": 0.5,
    "link.silence_s": 20.0,
    "link.late_s": 3.0,
}
COMMAND_S, START_S, SLOWEST_STEP_S, LEAVE_S = 20.0, 120.0, 5.0, 60.0
LOOK_EVERY_S = 0.1
FIRST = LAST = 20
"""Steps whose mean rewards are compared."""


class Unusable(Exception):
    """This machine has no network namespaces for us; with the reason."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What the network and the actors go through."""

    line: Line = field(default_factory=Line)
    """Between the learner and each host."""
    gap_s: tuple[float, float] = (3.0, 8.0)
    """Between two events."""
    cut_s: tuple[float, float] = (1.0, 30.0)
    """How long a host is cut off: shorter and longer than `link.silence_s`."""
    down_s: tuple[float, float] = (0.5, 5.0)
    """How long a host is without an actor."""


def command(*words: str) -> str:
    """Output of a command that must succeed."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except OSError as error:
        raise Unusable(f"`{words[0]}` cannot be run ({error.strerror}); install iproute2.") from error
    if done.returncode:
        raise Unusable(f"`{' '.join(words)}` failed: {done.stderr.strip()}.")
    return done.stdout


class Host:
    """A network namespace, its link to the main one, and at most one actor in it."""

    def __init__(self, number: int, trouble: Trouble, run: RunDir, folder: Path) -> None:
        self.number = number
        self.trouble = trouble
        self.run = run
        self.folder = folder / f"host{number}"
        self.namespace = f"tandem-{os.getpid()}-{number}"
        self.outer, self.inner = f"t{os.getpid()}o{number}", f"t{os.getpid()}i{number}"
        self.network = f"10.{200 + os.getpid() % 50}.{number}"
        self.num_starts = 0
        self.name = ""
        self.link: SlowLink | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = self.again_at = 0.0
        self.cut_until: float | None = None

    def make(self) -> None:
        self.folder.mkdir()
        command("ip", "netns", "add", self.namespace)
        try:
            self.link = SlowLink(self.outer, self.inner, self.trouble.line, self.number)
        except OSError as error:
            raise Unusable(f"{TUN} cannot be used ({error.strerror}).") from error
        inside = ("ip", "netns", "exec", self.namespace)
        command("ip", "link", "set", self.inner, "netns", self.namespace)
        command("ip", "address", "add", f"{self.network}.1", "peer", f"{self.network}.2", "dev", self.outer)
        command(*inside, "ip", "address", "add", f"{self.network}.2", "peer", f"{self.network}.1", "dev", self.inner)
        for at, device in (((), self.outer), (inside, self.inner), (inside, "lo")):
            command(*at, "ip", "link", "set", device, "up")

    def cut(self, *, is_cut: bool) -> None:
        assert self.link is not None
        self.link.is_cut = is_cut

    def start(self, port: int, *, new_name: bool) -> None:
        """An actor with copies of config and key, as on another machine."""
        self.num_starts += 1
        if new_name or not self.name:
            self.name = f"host{self.number}-{self.num_starts}"
            key = create_actor_key(self.run.keys, self.name)
            shutil.copy(key, self.folder)
            shutil.copy(self.run.config, self.folder)
        self.started_at = time.time()
        words = [sys.executable, "-m", "actor", "--connect", f"tcp://{self.network}.1:{port}"]
        words += ["--key", str(self.folder / f"{self.name}.json"), "--config", str(self.folder / "config.json")]
        with (self.folder / "log.txt").open("ab") as log:
            inside = ["ip", "netns", "exec", self.namespace]
            self.process = subprocess.Popen(
                [*inside, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def is_well(self) -> bool:
        """Whether its actor has been heard of and is not cut off."""
        heard = seen_at(self.run.keys, self.name) if self.name else None
        running = self.process is not None and self.process.poll() is None
        return running and self.cut_until is None and heard is not None and heard >= self.started_at

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        """All that `make` and `start` made, however far they came."""
        with suppress(Unusable):
            for pid in command("ip", "netns", "pids", self.namespace).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        self.kill()
        if self.link:
            self.link.close()
        with suppress(Unusable):
            command("ip", "netns", "delete", self.namespace)


@contextmanager
def hosts(count: int, trouble: Trouble, run: RunDir, folder: Path) -> Iterator[list[Host]]:
    made = [Host(number, trouble, run, folder) for number in range(count)]
    try:
        for host in made:
            host.make()
        yield made
    finally:
        for host in made:
            host.remove()


def why_unusable() -> str:
    """One sentence if there are no network namespaces for us; empty if there are."""
    if os.geteuid():
        return "Network namespaces need root; run this as root."
    with tempfile.TemporaryDirectory() as place:
        try:
            with hosts(1, Trouble(), RunDir(Path(place)), Path(place)):
                return ""
        except Unusable as reason:
            return f"This machine has no network namespaces with delay and loss for us. {reason}"


class Disturbance:
    """What happens to the actors while the run trains."""

    def __init__(self, made: Sequence[Host], trouble: Trouble, port: int, seed: int) -> None:
        self.hosts = made
        self.trouble = trouble
        self.port = port
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.next_at = 0.0

    def look(self) -> None:
        """Heal what is over, start who is due, and disturb one if it is time."""
        now = time.monotonic()
        for host in self.hosts:
            if host.cut_until is not None and host.cut_until <= now:
                self.heal(host)
            if host.process and host.process.poll() is not None:
                # It found the learner silent for too long, or was refused while its former connection was open.
                self.counts["actors that left by themselves"] += 1
                self.down(host)
            if host.process is None and host.again_at <= now:
                new_name = self.rng.random() < 0.5
                self.counts["joined under a new name" if new_name or not host.name else "joined again"] += 1
                host.start(self.port, new_name=new_name)
        well = [host for host in self.hosts if host.is_well()]
        if len(well) >= 2 and self.next_at <= now:
            self.next_at = now + self.rng.uniform(*self.trouble.gap_s)
            self.rng.choice((self.kill, self.cut))(self.rng.choice(well))

    def kill(self, host: Host) -> None:
        self.counts["actors killed"] += 1
        self.down(host)

    def down(self, host: Host) -> None:
        host.kill()
        host.again_at = time.monotonic() + self.rng.uniform(*self.trouble.down_s)

    def cut(self, host: Host) -> None:
        self.counts["hosts cut off"] += 1
        host.cut(is_cut=True)
        host.cut_until = time.monotonic() + self.rng.uniform(*self.trouble.cut_s)

    def heal(self, host: Host) -> None:
        host.cut(is_cut=False)
        host.cut_until = None


def disturbed(folder: Path, settings: dict[str, Any], count: int, trouble: Trouble, seed: int) -> dict[str, Any]:
    """A run over a bad network, to its end."""
    out, port = folder / "disturbed", free_port()
    over_tcp = settings | {"link.endpoint": f"tcp://127.0.0.1:{port}", "link.bind": f"tcp://0.0.0.0:{port}"}
    done = launch("run", "embedded", "--prepare", "--out", out, *sets(over_tcp))
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    run, began = RunDir.open(out), time.monotonic()
    deadline = began + START_S + SLOWEST_STEP_S * settings["run.steps"]
    with hosts(count, trouble, run, folder) as made, (folder / "learner.txt").open("wb") as log:
        disturbance = Disturbance(made, trouble, port, seed)
        words = [sys.executable, "-m", "learner", "--run", str(out)]
        learner = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while learner.poll() is None and num_rows(out) < settings["run.steps"]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"The run {out} has not ended; {folder} has the logs.")
                disturbance.look()
                time.sleep(LOOK_EVERY_S)
            for host in made:
                disturbance.heal(host)
            learner.wait(LEAVE_S)
        finally:
            learner.kill()
            learner.wait()
        packets = sum((host.link.packets for host in made if host.link), Counter[str]())
    return {
        "exit": learner.returncode,
        "wall_s": round(time.monotonic() - began, 1),
        "events": dict(sorted(disturbance.counts.items())),
        "packets": dict(sorted(packets.items())),
    }


def journaled(out: Path) -> dict[str, Any]:
    """What the journal has, read back."""
    records = list(Journal.read(out / "journal").records())
    filled = [read(packed) for record in records for packed in orders_in(record).values()]
    groups = Counter(group.group_id for order in filled for group in order.groups)
    return {
        "records": len(records),
        "orders": len(filled),
        "groups": len(groups),
        "groups_twice": sum(number > 1 for number in groups.values()),
    }


def judged(folder: Path, settings: dict[str, Any], found: dict[str, Any], calm: str) -> dict[str, Any]:
    """calm: adapter of the run that nobody disturbed."""
    out, steps = folder / "disturbed", settings["run.steps"]
    journal = journaled(out)
    logged = rows(out)
    rewards = [row["reward/mean"] for row in logged]
    first, last = statistics.mean(rewards[:FIRST]), statistics.mean(rewards[-LAST:])
    wanted = steps * settings["rollout.prompts"]
    passed = {
        "ended": found["exit"] == 0 and [row["step"] for row in logged] == list(range(1, steps + 1)),
        "no group lost": journal["groups"] == journal["orders"] == wanted,
        "no group twice": journal["groups_twice"] == 0,
        "same adapter as undisturbed": found["exit"] == 0 and summary(out)["adapter_sha256"] == calm,
        "reward rises": last > first,
    }
    return {
        **found,
        "groups_wanted": wanted,
        "journal": journal,
        "reward_first": round(first, 4),
        "reward_last": round(last, 4),
        "adapter_sha256": calm,
        "passed": passed,
    }


def measured(folder: Path, settings: dict[str, Any], count: int, trouble: Trouble, seed: int) -> dict[str, Any]:
    calm = launch("run", "embedded", "--out", folder / "calm", *sets(settings), wait_s=600.0)
    if calm.returncode:
        raise RuntimeError(calm.stdout + calm.stderr)
    found = disturbed(folder, settings, count, trouble, seed)
    return judged(folder, settings, found, summary(folder / "calm")["adapter_sha256"])


def ask_to_end(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends this like any error, so that all is removed."""
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if reason := why_unusable():
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, ask_to_end)
    folder, trouble = Path(tempfile.mkdtemp(prefix="network-")), Trouble()
    settings = SETTINGS | {"run.steps": args.steps}
    figures = measured(folder, settings, args.hosts, trouble, args.seed)
    asked = {"steps": args.steps, "hosts": args.hosts, "seed": args.seed, "settings": SETTINGS}
    print(json.dumps(figures, indent=2))
    print(write_result("network_faults", asked | {"trouble": asdict(trouble)} | figures))
    if not all(figures["passed"].values()):
        print(f"Logs and runs are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
