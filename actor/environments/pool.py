"""The processes of the environments of an order: one for each completion, so that a fault harms no other.

    seat      the place of one process at a time; it is kept for later orders, and replaced after a fault
    ask       a call for each of some seats; at most `environment.at_once` compute at the same time
    load      only as many at a time as compute at once or have a core, each with its own time limit
    fault     a process that is late, gone, or sends nonsense: Lost(outcome, note). Its episode is over. So is that of
              one that cannot be loaded, unless it is the first of the run: then the file is at fault

A process that is late is killed with all that it has started; its time begins when it gets its call. If the fork server
is killed, all episodes are lost that had begun: their state was in its processes.
"""

import itertools
import logging
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from actor.environments.contract import key_and_value
from actor.environments.worker import Act, Answer, AnyReply, Broken, Call, Reset
from actor.scoring.fork_server_process import ForkServerProcess
from actor.scoring.pipe import Ready
from actor.scoring.pool import START_LIMIT_S, TICK_S
from actor.scoring.worker_process import WorkerProcess
from protocol.outcome import Outcome
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError
from shared.process.children import how_it_ended
from shared.process.processor import cores_here

log = logging.getLogger("actor")


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that cannot go on."""

    outcome: Outcome
    """Timeout, error, or abstain if its task is too long."""
    note: str
    """Why, in one sentence."""


class Seat:
    """The place of one process."""

    def __init__(self, new: Callable[[], WorkerProcess], name: str, start_limit_s: float) -> None:
        """name: of the environment, for errors."""
        self.new, self.name, self.start_limit_s = new, name, start_limit_s
        self.call: Call | None = None
        self.loss_to_tell = False
        """Whether the episode's process is gone, which its next call must be told."""
        self.load_fault: Lost | None = None
        """Why its process could not be loaded. The next episode tries again."""
        self.code: int | None = None
        """Of a process that has ended."""
        self.start()

    def start(self) -> None:
        self.worker, self.is_ready, self.is_loading = self.new(), False, True
        self.code = None
        self.deadline = time.monotonic() + self.start_limit_s

    @property
    def waits(self) -> bool:
        """Whether its process has yet to start."""
        return not (self.is_ready or self.is_loading or self.load_fault)

    def give(self, call: Call, limit_s: float) -> None:
        if self.waits:
            self.start()
        self.call = call
        # One that still loads has its own limit until then.
        self.deadline = self.deadline if self.is_loading else time.monotonic() + limit_s
        self.worker.send(call)

    def stop(self) -> None:
        """`start_more` starts another process, unless there is a load fault."""
        self.worker.kill()
        self.call, self.is_ready, self.is_loading = None, False, False

    def stop_and_note_loss(self) -> None:
        """Its process is gone; the next call of its episode is told."""
        self.loss_to_tell = True
        self.stop()

    def look_at_loading(self) -> None:
        """Whether it is loaded, or cannot be."""
        found = self.look(self.start_limit_s)
        if isinstance(found, Lost):
            log.warning("an environment could not be loaded, so its episode is lost: %s", found.note)
            self.stop()
            self.load_fault = found

    def look(self, limit_s: float) -> Answer | Lost | None:
        """What has come since; None while nothing has."""
        self.worker.output.drain()
        self.worker.flush()
        try:
            reply = self.worker.receive(AnyReply)
        except (ValueError, RecursionError):
            return Lost(outcome=Outcome.ERROR, note=self.said("sent something that is no answer"))
        if isinstance(reply, Ready):
            if reply.fault:
                return Lost(outcome=Outcome.ERROR, note=reply.fault)
            self.is_ready, self.is_loading = True, False
            self.deadline = time.monotonic() + limit_s
        elif reply is not None:
            return reply
        if self.code is not None:
            late = self.code == -signal.SIGXCPU
            what = "used up its processor time" if late else how_it_ended(self.code)
            return Lost(outcome=Outcome.TIMEOUT if late else Outcome.ERROR, note=self.said(what))
        limit = self.start_limit_s if self.is_loading else limit_s
        if time.monotonic() > self.deadline and (self.call or not self.is_ready):
            return Lost(outcome=Outcome.TIMEOUT, note=self.said(f"was stopped after {limit:g} s"))
        return None

    def said(self, what: str) -> str:
        last = self.worker.output.last_line()
        when = "" if self.is_ready else f"{self.name}, while it loaded: "
        return f"{when}The environment {what}." + (f" It last printed: {last}" if last else "")


class EnvironmentPool:
    """Started environments."""

    def __init__(self, config: EnvironmentConfig, start_limit_s: float = START_LIMIT_S) -> None:
        self.config, self.start_limit_s = config, start_limit_s
        self.loading_at_once = max(config.at_once, cores_here())
        self.numbers = itertools.count()
        self.seats: list[Seat] = []
        self.fork_server = self.new_fork_server()
        try:
            # One at once, so that a file that cannot be used is known before anything is sampled.
            self.make_ready(1, lambda: None)
            if fault := self.seats[0].load_fault:
                raise RewardError(fault.note)
        except BaseException:
            self.close()
            raise

    def new_fork_server(self) -> ForkServerProcess:
        return ForkServerProcess("actor.environments.worker", self.config, self.config.variables)

    def new_worker(self) -> WorkerProcess:
        return WorkerProcess(self.fork_server, next(self.numbers))

    def make_ready(self, count: int, on_progress: Callable[[], None]) -> None:
        """At least so many, loaded, or with the fault that kept them from it."""
        self.start_more(count)
        while loading := [seat for seat in self.seats if seat.is_loading]:
            self.wait(loading)
            for seat in loading:
                seat.look_at_loading()
            if self.fork_server.is_gone:
                what = "the process that starts the environments ended while they loaded"
                raise RewardError(f"{key_and_value(self.config)}: {what}; the actor's log may say why.")
            self.start_more(count)
            on_progress()

    def start_more(self, count: int) -> None:
        """Those that wait, and new ones up to this count, as far as there is room."""
        room = self.loading_at_once - sum(seat.is_loading for seat in self.seats)
        waiting = [seat for seat in self.seats if seat.waits][: max(room, 0)]
        for seat in waiting:
            seat.start()
        for _ in range(min(room - len(waiting), count - len(self.seats))):
            self.seats.append(Seat(self.new_worker, key_and_value(self.config), self.start_limit_s))

    def ask(self, calls: Mapping[int, Call], on_progress: Callable[[], None]) -> dict[int, Answer | Lost]:
        """Number of the seat -> its answer, in the order of the calls."""
        self.stop_ended()
        self.forget_load_faults(calls)
        self.make_ready(max(calls, default=-1) + 1, on_progress)
        left, busy = deque(calls.items()), dict[int, Seat]()
        found: dict[int, Answer | Lost] = {}
        while left or busy:
            while left and len(busy) < self.config.at_once:
                number, call = left.popleft()
                if lost := self.loss_of(number, call):
                    found[number] = lost
                    continue
                busy[number] = self.seats[number]
                busy[number].give(call, self.config.step_limit_s)
            if busy:
                self.wait(list(busy.values()))
            for number, answer in self.answers(busy).items():
                found[number] = answer
                seat = busy.pop(number)
                seat.call = None
                if isinstance(answer, Lost):
                    seat.stop()
            self.start_more(len(self.seats))
            if self.fork_server.is_gone:
                self.start_again()
                lost = Lost(outcome=Outcome.ERROR, note="The environments lost their fork server.")
                return {number: found.get(number, lost) for number in calls}
            on_progress()
        return {number: found[number] for number in calls}

    def forget_load_faults(self, calls: Mapping[int, Call]) -> None:
        """Where an episode begins now, its process may be loaded again."""
        for number, call in calls.items():
            if number < len(self.seats) and isinstance(call, Reset | Act):
                self.seats[number].load_fault = None

    def loss_of(self, number: int, call: Call) -> Lost | None:
        """Why the process is gone that this episode began in, or is to begin in; None if it is there."""
        seat = self.seats[number]
        is_lost, seat.loss_to_tell = seat.loss_to_tell, False
        if is_lost and not isinstance(call, Reset | Act):
            return Lost(outcome=Outcome.ERROR, note="The environment ended between two turns.")
        return seat.load_fault

    def end(self, number: int) -> None:
        """The episode of this seat, wherever it is."""
        self.seats[number].stop()
        self.start_more(len(self.seats))

    def answers(self, busy: Mapping[int, Seat]) -> dict[int, Answer | Lost]:
        looked = {number: seat.look(self.config.step_limit_s) for number, seat in busy.items()}
        return {number: answer for number, answer in looked.items() if answer is not None}

    def wait(self, seats: list[Seat]) -> None:
        """Until one of them has something to say, or a tick has passed."""
        poll = select.poll()
        poll.register(self.fork_server, select.POLLIN)
        for seat in seats:
            if not seat.worker.output.hung_up:
                poll.register(seat.worker.output.descriptor, select.POLLIN)
            if not seat.worker.hung_up:
                poll.register(seat.worker.replies, select.POLLIN)
            if seat.worker.unsent:
                poll.register(seat.worker.calls, select.POLLOUT)
        poll.poll(TICK_S * 1000)
        self.note_exits()

    def stop_ended(self) -> None:
        """Those that have ended since the last calls; all, if the fork server has ended."""
        self.note_exits()
        self.stop_hung_up()
        if self.fork_server.is_gone:
            self.start_again()

    def stop_hung_up(self) -> None:
        """Those that have just ended, before the fork server reports it."""
        idle = {seat.worker.replies: seat for seat in self.seats if seat.is_ready and seat.call is None}
        poll = select.poll()
        for descriptor in idle:
            poll.register(descriptor, 0)  # only whether the other end is closed
        for descriptor, _ in poll.poll(0):
            idle[descriptor].stop_and_note_loss()

    def note_exits(self) -> None:
        """Those that have ended in a call keep their code, those between two calls are stopped."""
        by_number = {seat.worker.number: seat for seat in self.seats}
        for exited in self.fork_server.exits():
            if exited.number in by_number:
                by_number[exited.number].code = exited.code
        for seat in self.seats:
            if seat.code is not None and seat.call is None and seat.is_ready:
                seat.stop_and_note_loss()

    def start_again(self) -> None:
        """Under a new fork server."""
        self.fork_server.close()
        self.fork_server = self.new_fork_server()
        for seat in self.seats:
            seat.stop_and_note_loss()

    def close(self) -> None:
        # First the fork server, which ends all of them at once; a command for each could fill its socket.
        self.fork_server.close()
        for seat in self.seats:
            seat.worker.kill()


def fault_of(answer: Answer | Lost) -> Lost | None:
    """Why the episode cannot go on after this answer; None if it can."""
    match answer:
        case Lost():
            return answer
        case Broken(note=note):
            return Lost(outcome=Outcome.ERROR, note=note)
        case _:
            return None
