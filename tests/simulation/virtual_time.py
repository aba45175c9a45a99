"""Virtual time, and programs that block, run one at a time.

The product's loops block deep in their stacks, so each simulated process has a thread. The order is deterministic:
exactly one thread runs, until its process waits (for a message, for its work to take time). A waiting process runs the
queue of timed events itself until one of them wakes a process; if it wakes itself, no thread is switched. A killed
process gets `Killed` at the place where it waits, and unwinds there.

Left out on purpose: preemption between two waits. Nothing the product does there can be seen by another process.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

MAX_EVENTS = 200_000
"""A run of a few hundred is normal; beyond this somebody spins without time going on."""


class Killed(BaseException):
    """This process is dead: nothing it still does counts."""


class Stuck(Exception):
    """The simulated run does not come to an end."""


class Process:
    """One thread and its place in the queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.signal = threading.Lock()
        self.signal.acquire()
        self.killed = False
        self.waiting = False
        self.waits = 0
        self.ended = False
        self.error: BaseException | None = None


class VirtualTime:
    """The clock, the events to come, and which process runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.runnable: deque[Process] = deque()
        self.director = Process("director")
        self.current = self.director
        self.failure: BaseException | None = None
        self.num_events = 0
        self.threads: list[threading.Thread] = []

    def clock(self) -> float:
        """For the product's `now`."""
        return self.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later; equal times go in the order of their asking."""
        heapq.heappush(self.events, (self.now + delay_s, next(self.numbers), action))

    def start(self, name: str, body: Callable[[], None], ended: Callable[[Process], None]) -> Process:
        """A new process; `ended` is called when its body has returned, raised or been killed."""
        process = Process(name)
        thread = threading.Thread(target=self.run_body, args=(process, body, ended), daemon=True)
        self.threads.append(thread)
        thread.start()
        self.runnable.append(process)
        return process

    def run_body(self, process: Process, body: Callable[[], None], ended: Callable[[Process], None]) -> None:
        """What the thread does."""
        process.signal.acquire()
        try:
            if not process.killed:
                body()
        except Killed:
            pass
        except BaseException as error:
            process.error = error
        process.ended = True
        self.guarded(lambda: ended(process))
        self.hand_on()

    def wait(self, timeout_s: float) -> None:
        """The current process waits: until it is woken, or for this long."""
        process = self.current
        if process.killed:
            raise Killed
        process.waiting = True
        process.waits += 1
        number = process.waits
        self.after(timeout_s, lambda: self.wake(process, number))
        if self.hand_on() is not process:
            process.signal.acquire()
        if process.killed:
            raise Killed

    def wake(self, process: Process, number: int | None = None) -> None:
        """End a wait: the one of this number, or whichever there is."""
        if process.waiting and number in (None, process.waits):
            process.waiting = False
            self.runnable.append(process)

    def kill(self, process: Process) -> None:
        """From outside of it. It unwinds before anything else happens."""
        if process.ended or process.killed:
            return
        process.killed = True
        if process.waiting:
            process.waiting = False
            self.runnable.appendleft(process)

    def die(self) -> None:
        """The current process is killed here and now."""
        self.current.killed = True
        raise Killed

    def fail(self, error: BaseException) -> None:
        """The first failure ends the run: the director runs next."""
        self.failure = self.failure or error
        self.wake(self.director)

    def guarded(self, action: Callable[[], None]) -> None:
        """Events run on the stack that waits; what they raise belongs to the director."""
        try:
            action()
        except Exception as error:
            self.fail(error)

    def hand_on(self) -> Process:
        """Let time go on until somebody can run, and let it."""
        while not self.runnable:
            self.num_events += 1
            if self.num_events > MAX_EVENTS or not self.events:
                self.fail(Stuck(f"{self.num_events} events, {len(self.events)} to come, at {self.now:.3f} s"))
                continue
            self.now, _, action = heapq.heappop(self.events)
            self.guarded(action)
        chosen = self.runnable.popleft()
        if chosen is not self.current:
            self.current = chosen
            chosen.signal.release()
        return chosen

    def direct(self, limit_s: float) -> None:
        """Run everything until somebody wakes the director, or for this long; raises the first failure."""
        self.wait(limit_s)
        if self.failure:
            raise self.failure

    def close(self, processes: list[Process]) -> None:
        """Unwind all processes that have not ended."""
        self.events.clear()
        self.num_events = 0
        for process in processes:
            self.kill(process)
            while not process.ended:
                self.after(0.0, lambda: self.wake(self.director))
                self.wait(0.0)
        for thread in self.threads:
            thread.join()
