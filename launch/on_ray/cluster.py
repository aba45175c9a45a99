"""Runs a run on a Ray cluster: the launcher's supervisor, with processes that Ray places.

    program ends, is killed   as on one machine (launch/supervisor/supervise.py): an actor is started again
    Ray worker or node lost   counts as killed; Ray finds another place for what is started again
    learner killed or lost    all is started again, as `resume` would: a learner on another node has another address.
                              At most 5 times without a step in between
    node cannot be reached    the launcher asks again until Ray says that it is lost
    launcher ends             Ray ends all that it has placed for it
    head node lost            the run ends; `resume` continues it

There is one rule for restarts, the supervisor's, so Ray restarts nothing by itself. Each process is the child of a Ray
actor (host.py). Through Ray pass its command line, signals and an exit code. Only public names of Ray are used. Its
dashboard is not needed. Its usage statistics are off in this process; whoever starts the cluster decides about them
there.
"""

import importlib.util
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from launch.on_ray.host import Host
from launch.on_ray.placement import Place, asked_for, refuse_without_room
from launch.supervisor.endings import PREFIX, USER_ERROR
from launch.supervisor.restarts import Restarts, SupervisorLimits
from launch.supervisor.starter import Started, Starter
from launch.supervisor.supervise import Screen, Supervise, Supervisor
from launch.supervisor.topology import LearnerKilled, Process, Topology
from shared.errors import ConfigError, UserError
from shared.run.files import open_log

HOW_TO_START = (
    "start one with `RAY_USAGE_STATS_ENABLED=0 ray start --head`, or set RAY_ADDRESS to the address of one that runs"
)
LOST = -signal.SIGKILL
"""Exit code of a process whose host was lost: it was killed with it."""
NO_CARDS = {"CUDA_VISIBLE_DEVICES": ""}
"""For a process that asked for none. Ray by itself would let it see all."""
LOOK_S = 0.5
"""How long a host looks at its process before it replies."""
CLEANUP_S = 15.0
"""Longest wait for a host that is asked to kill its process."""


@contextmanager
def cluster_with_room(places: Sequence[Place], folder: Path) -> Iterator[Supervise]:
    """What runs a run on the cluster, while connected to it. folder: in which the processes run. ConfigError without
    Ray, a cluster, or room in it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--on ray needs Ray, which is not installed; install it with `pip install -e '.[ray]'`.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f"--on ray cannot join a Ray cluster ({said}); {HOW_TO_START}.") from error
    try:
        refuse_without_room(places, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        print(f"Ray chooses the machines; {asked_for(places)}")
        yield partial(supervise_again, make_starter=partial(RayStarter, places, folder))
    finally:
        ray.shutdown()


def supervise_again(
    plan: Topology, screen: Screen, limits: SupervisorLimits, make_starter: Callable[[], Starter]
) -> None:
    """As Supervisor.run, and a learner that was killed goes on. make_starter: for each start of the whole run."""
    restarts = Restarts(limits)
    name = plan.learner.name
    while True:
        supervisor = Supervisor(plan, screen, make_starter(), limits)
        try:
            return supervisor.run()
        except LearnerKilled:
            restarts.count_steps(screen.tick())
            # The user may have asked to stop after the learner was lost.
            if supervisor.interrupts.count or not restarts.plan(name, LOST, time.monotonic()):
                raise
            count = restarts.deaths[name]
            supervisor.note(f"{name} was killed or lost; restarting everything ({count} of {limits.restarts})")
            time.sleep(max(restarts.due.pop(name) - time.monotonic(), 0.0))


class RayStarter:
    """Starts each process where Ray has room for it."""

    def __init__(self, places: Sequence[Place], folder: Path) -> None:
        """folder: in which they run."""
        self.places = {place.name: place for place in places}
        self.folder = folder
        self.address: Any = None
        """Of the learner: a reference, whose value is there once Ray has placed it. Ray lets the actors wait for it."""

    def start(self, process: Process, log: IO[bytes]) -> Started:
        """log: of this machine; the node opens its own."""
        place = self.places[process.name]
        host = make_host(place)
        option = "--connect"
        if process.name == "learner":
            option, self.address = "--listen", host.address.remote()
        environment = process.environment | ({} if place.gpus else NO_CARDS)
        started = host.start.remote(replace(process, environment=environment), option, self.address, self.folder)
        return HostedProcess(process.log, host, started)

    def close(self) -> None:
        pass


def make_host(place: Place) -> Any:
    """Ray starts it once there is room."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.remote(Host).options(num_cpus=place.cpus, num_gpus=place.gpus, max_restarts=0).remote()


class HostedProcess:
    """A process on a node, as the launcher sees it: what its host has replied so far."""

    pid = None
    """A number of another machine would mean another process here."""

    def __init__(self, log: Path, host: Any, started: Any) -> None:
        """log: of the process. host: Ray's handle. started: the reply to its start."""
        self.log = log
        self.host = host
        self.asked = started
        self.runs = False
        self.code: int | None = None

    def exit_code(self) -> int | None:
        import ray  # pyright: ignore[reportMissingImports]

        if self.code is None and ray.wait([self.asked], timeout=0)[0]:
            self.code = self.reply()
            if self.code is None:
                self.asked = self.host.exit_code.remote(LOOK_S)
            else:
                # Its place becomes free.
                ray.kill(self.host)
        return self.code

    def reply(self) -> int | None:
        """What the host said: an exit code, or None if the process runs."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray import exceptions  # pyright: ignore[reportMissingImports]

        try:
            code = ray.get(self.asked)
        except exceptions.ActorUnavailableError as error:
            # A start may have been lost on the way. Later on the node may come back, or Ray gives it up.
            return None if self.runs else self.lost(error)
        except exceptions.RayActorError as error:
            return self.lost(error)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.RayActorError):
                return self.lost(error.cause)  # the learner's, before it had an address
            self.say(PREFIX + sentence(error.cause))
            return USER_ERROR
        self.runs = True
        return code

    def lost(self, error: Exception) -> int:
        self.say(f"its Ray worker was lost: {' '.join(str(error).split())}")
        return LOST

    def say(self, text: str) -> None:
        """In the log of the process."""
        with suppress(OSError), open_log(self.log, "ab") as log:
            log.write(f"{text}\n".encode())

    def send_signal(self, number: int) -> None:
        self.host.send_signal.remote(number)

    def kill_group(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        if self.code is None:
            if self.runs:
                ray.wait([self.host.kill_group.remote()], timeout=CLEANUP_S)
            self.code = LOST
            ray.kill(self.host)


def sentence(error: Exception) -> str:
    """Why a process could not be started on a node."""
    if isinstance(error, UserError):
        return str(error)
    last = str(error).strip().rpartition("\n")[2].rstrip(".")
    return (
        f"A node of the Ray cluster could not start a process of the run ({last}); the Python that runs Ray on each"
        " node needs Tandem and its dependencies."
    )
