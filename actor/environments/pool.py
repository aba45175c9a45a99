"""The processes of the environments of an order: one for each completion, so that a fault harms no other.

    seat      the place of one process at a time; it is kept for later orders, and replaced after a fault
    ask       a call for each of some seats; at most `environment.at_once` compute at the same time
    fault     a process that is late, gone, or sends nonsense: Lost(outcome, note). Its episode is over

A process that is late is killed with all that it has started; its time begins when it gets its call. If the fork server
is killed, all episodes are lost that had begun: their state was in its processes.
"""

import itertools
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


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that cannot go on."""

    outcome: Outcome
    """Timeout or error."""
    note: str
    """Why, in one sentence."""


class Seat:
    """The place of one process."""

    def __init__(self, new: Callable[[], WorkerProcess]) -> None:
        self.new = new
        self.call: Call | None = None
        self.loss_to_tell = False
        """Whether the episode's process is gone, which its next call must be told."""
        self.code: int | None = None
        """Of a process that has ended."""
        self.start()

    def start(self) -> None:
        self.worker, self.is_ready = self.new(), False
        self.code = None
        self.deadline = time.monotonic() + START_LIMIT_S

    def give(self, call: Call, limit_s: float) -> None:
        self.call, self.deadline = call, time.monotonic() + limit_s
        self.worker.send(call)

    def replace(self) -> None:
        self.worker.kill()
        self.call = None
        self.start()

    def replace_and_note_loss(self) -> None:
        """Its process is gone; the next call of its episode is told."""
        self.loss_to_tell = True
        self.replace()

    def look(self, limit_s: float) -> Answer | Lost | None:
        """What has come since; None while nothing has."""
        self.worker.output.drain()
        self.worker.flush()
        try:
            reply = self.worker.receive(AnyReply)
        except (ValueError, RecursionError):
            return Lost(outcome=Outcome.ERROR, note="The environment sent something that is no answer.")
        if isinstance(reply, Ready):
            if reply.fault:
                raise RewardError(reply.fault)
            self.is_ready = True
        elif reply is not None:
            return reply
        if self.code is not None:
            late = self.code == -signal.SIGXCPU
            what = "used up its processor time" if late else how_it_ended(self.code)
            return Lost(outcome=Outcome.TIMEOUT if late else Outcome.ERROR, note=self.said(what))
        if time.monotonic() > self.deadline and (self.call or not self.is_ready):
            return Lost(outcome=Outcome.TIMEOUT, note=self.said(f"was stopped after {limit_s:g} s"))
        return None

    def said(self, what: str) -> str:
        last = self.worker.output.last_line()
        return f"The environment {what}." + (f" It last printed: {last}" if last else "")


class EnvironmentPool:
    """Started environments."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.numbers = itertools.count()
        self.seats: list[Seat] = []
        self.fork_server = self.new_fork_server()
        try:
            # One at once, so that a file that cannot be used is known before anything is sampled.
            self.make_ready(1, lambda: None)
        except BaseException:
            self.close()
            raise

    def new_fork_server(self) -> ForkServerProcess:
        return ForkServerProcess("actor.environments.worker", self.config, self.config.variables)

    def new_worker(self) -> WorkerProcess:
        return WorkerProcess(self.fork_server, next(self.numbers))

    def make_ready(self, count: int, on_progress: Callable[[], None]) -> None:
        """At least so many, loaded."""
        self.seats += [Seat(self.new_worker) for _ in range(count - len(self.seats))]
        while waiting := [seat for seat in self.seats if not seat.is_ready]:
            self.wait(waiting)
            for seat in waiting:
                found = seat.look(START_LIMIT_S)
                if isinstance(found, Lost):
                    raise RewardError(f"{key_and_value(self.config)}, while loaded: {found.note}")
            if self.fork_server.is_gone:
                what = "the process that starts the environments ended while they loaded"
                raise RewardError(f"{key_and_value(self.config)}: {what}; the actor's log may say why.")
            on_progress()

    def ask(self, calls: Mapping[int, Call], on_progress: Callable[[], None]) -> dict[int, Answer | Lost]:
        """Number of the seat -> its answer, in the order of the calls."""
        self.replace_ended()
        self.make_ready(max(calls, default=-1) + 1, on_progress)
        left, busy = deque(calls.items()), dict[int, Seat]()
        found: dict[int, Answer | Lost] = {}
        while left or busy:
            while left and len(busy) < self.config.at_once:
                number, call = left.popleft()
                if self.was_lost(number, call):
                    found[number] = Lost(outcome=Outcome.ERROR, note="The environment ended between two turns.")
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
                    seat.replace()
            if self.fork_server.is_gone:
                self.start_again()
                lost = Lost(outcome=Outcome.ERROR, note="The environments lost their fork server.")
                return {number: found.get(number, lost) for number in calls}
            on_progress()
        return {number: found[number] for number in calls}

    def was_lost(self, number: int, call: Call) -> bool:
        """Whether the process that this episode began in is gone."""
        is_lost, self.seats[number].loss_to_tell = self.seats[number].loss_to_tell, False
        return is_lost and not isinstance(call, Reset | Act)

    def end(self, number: int) -> None:
        """The episode of this seat, wherever it is."""
        self.seats[number].replace()

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

    def replace_ended(self) -> None:
        """Those that have ended since the last calls; all, if the fork server has ended."""
        self.note_exits()
        self.replace_hung_up()
        if self.fork_server.is_gone:
            self.start_again()

    def replace_hung_up(self) -> None:
        """Those that have just ended, before the fork server reports it."""
        idle = {seat.worker.replies: seat for seat in self.seats if seat.is_ready and seat.call is None}
        poll = select.poll()
        for descriptor in idle:
            poll.register(descriptor, 0)  # only whether the other end is closed
        for descriptor, _ in poll.poll(0):
            idle[descriptor].replace_and_note_loss()

    def note_exits(self) -> None:
        """Those that have ended in a call keep their code, those between two calls are replaced."""
        by_number = {seat.worker.number: seat for seat in self.seats}
        for exited in self.fork_server.exits():
            if exited.number in by_number:
                by_number[exited.number].code = exited.code
        for seat in self.seats:
            if seat.code is not None and seat.call is None and seat.is_ready:
                seat.replace_and_note_loss()

    def start_again(self) -> None:
        """Under a new fork server."""
        self.fork_server.close()
        self.fork_server = self.new_fork_server()
        for seat in self.seats:
            seat.replace_and_note_loss()

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
