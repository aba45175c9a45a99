"""A scoring worker: what a process forked by score_keeper.py does until it is killed.

Requests come in and replies go out on two descriptors that no print reaches and no program started here inherits.
Standard input is empty; standard output and errors are a pipe that the pool drains, keeping the last lines. The working
folder, the home folder and the folder for temporary files are one scratch folder that goes when the worker goes.

After each call the worker takes back what a function may have left set in its process: alarms, working folder, umask,
soft limits. What it did to its own modules and to the environment is its own affair.

Mathematics can take long or crash on one completion, so there each verdict is sent as soon as it is there; other
verifiers answer a whole call at once. It imports neither torch nor transformers.

What a scoring worker may use, as resource limits of its process; whatever it starts inherits them.

    memory      RLIMIT_DATA: the private memory it had when the verifier was loaded, plus verifier.memory_mb.
                RLIMIT_AS: its address space at that time, plus four times as much: shared mappings, thread stacks
    files       RLIMIT_FSIZE: one file holds at most verifier.memory_mb; memory file systems count as files
    processor   RLIMIT_CPU: for each call verifier.limit_s on every core, and two seconds
    core dumps  none

RLIMIT_DATA and not RLIMIT_AS is the limit proper, because libraries reserve address space that they never use. Each
process has these limits for itself: a worker that forks gets as much again for each child. Left out on purpose: control
groups, which need rights that an ordinary user rarely has.
"""

import math
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from actor.scoring.batch import is_one_by_one, runs_functions
from actor.scoring.pipe import LENGTH_BYTES, Failed, Ready, Reply, Scored, ScoreRequest, frame
from actor.verifiers.reward_function import CallFailed
from actor.verifiers.verifier import Scoring
from shared.config.data import VerifierConfig, VerifierKind
from shared.errors import RewardError

MIB = 1 << 20
ADDRESS_SPACE_FACTOR = 4
SPARE_CPU_S = 2


def forbid_core_dumps() -> None:
    """A crash leaves no file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(memory_mb: int) -> None:
    """From here on at most so much more than is in use now; 0 sets no limit."""
    if not memory_mb:
        return
    more = memory_mb * MIB
    lower(resource.RLIMIT_DATA, mapped_bytes("VmData") + more)
    lower(resource.RLIMIT_AS, mapped_bytes("VmSize") + ADDRESS_SPACE_FACTOR * more)
    lower(resource.RLIMIT_FSIZE, more)


def limit_cpu(limit_s: float) -> None:
    """For the call that begins now; the hard limit stays, so that the next call gets its own."""
    allowed = math.ceil(time.process_time() + limit_s * (os.cpu_count() or 1)) + SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def lower(which: int, limit: int) -> None:
    """Soft and hard limit, never above what there is already."""
    _, hard = resource.getrlimit(which)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def mapped_bytes(name: str) -> int:
    """One line of this process's memory figures."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


REQUESTS, REPLIES = 3, 4
FOR_THE_USER_ONLY = 0o077
SOFT_LIMITS = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


def preload(kind: VerifierKind) -> None:
    """Import what is slow to import, once, in the keeper."""
    if kind == "math":
        from actor.verifiers.math_equality import warm_up

        warm_up()


def work(verifier: VerifierConfig, folder: Path) -> None:
    """Load the verifier, say so, then answer requests until there are no more."""
    requests, replies = os.fdopen(REQUESTS, "rb"), os.fdopen(REPLIES, "wb")
    forbid_core_dumps()
    os.umask(FOR_THE_USER_ONLY)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
    try:
        # Still in the actor's working folder: that is where a relative path of the user begins.
        scoring = Scoring(verifier)
    except RewardError as error:
        say(replies, Ready(fault=str(error)))
        return
    os.chdir(folder)
    limit_memory(verifier.memory_mb)
    soft_limits = {which: resource.getrlimit(which)[0] for which in SOFT_LIMITS}
    say(replies, Ready(fault=None))
    while (request := next_request(requests)) is not None:
        for reply in answers(verifier, scoring, request):
            if runs_functions(verifier):
                take_back(folder, soft_limits)
            say(replies, reply)
            if isinstance(reply, Failed) and reply.leaves:
                return


def answers(verifier: VerifierConfig, scoring: Scoring, request: ScoreRequest) -> Iterator[Reply]:
    """One for the whole call, or one a job; `is_one_by_one` says which."""
    calls = [[job] for job in request.jobs] if is_one_by_one(verifier) else [request.jobs]
    try:
        for jobs in calls:
            limit_cpu(verifier.limit_s)
            yield Scored(number=request.number, verdicts=scoring.score(jobs))
    except CallFailed as failure:
        yield Failed(number=request.number, note=str(failure), leaves=failure.out_of_memory)


def take_back(folder: Path, soft_limits: dict[int, int]) -> None:
    """What a call may have left set and the next one must not suffer from."""
    signal.alarm(0)
    os.umask(FOR_THE_USER_ONLY)
    os.chdir(folder)
    for which, soft in soft_limits.items():
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def next_request(requests: BinaryIO) -> ScoreRequest | None:
    """The next request; None when the pool has closed the pipe."""
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(requests.read(int.from_bytes(length, "big")), type=ScoreRequest)


def say(replies: BinaryIO, record: Reply) -> None:
    """Hand one record to the pool."""
    replies.write(frame(record))
    replies.flush()
