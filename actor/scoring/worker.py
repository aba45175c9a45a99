"""A scoring worker: runs the verifier in a process forked by fork_server.py, until it is killed.

Calls come in and replies go out on two descriptors that no print reaches and no program started here inherits. Standard
input is empty; the pool reads standard output and standard error and keeps the last lines. The home folder and the
folder for temporary files are one scratch folder, where libraries may cache; it is removed with the worker. The working
folder is inside of it, and is emptied before each call.

After each call the worker resets what a function may have changed in its process: alarms, working folder, umask, soft
limits. It does not reset the function's own modules or the environment, nor end the programs that it has started: it
may have meant them for all calls.

Mathematics can take long or crash on one completion, so the math verifier sends each verdict at once. Other verifiers
send those of a whole call together. The worker imports neither torch nor transformers.

Resource limits of the process, which everything that it starts inherits:

    memory      RLIMIT_DATA: the private memory it had when the verifier was loaded, plus verifier.memory_mb.
                RLIMIT_AS: its address space at that time, plus four times as much: shared mappings, thread stacks
    files       RLIMIT_FSIZE: one file has at most verifier.memory_mb; memory file systems count as files
    processor   RLIMIT_CPU: for each call its limit (job_queue.py) on every core, and two seconds
    core dumps  none

RLIMIT_DATA is the main limit, not RLIMIT_AS, because libraries reserve address space that they never use. The limits
apply to each process separately: a worker that forks gets the same again for each child. Left out on purpose: control
groups, which need rights that an ordinary user rarely has.
"""

import contextlib
import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from actor.scoring.job_queue import call_limit_s, is_one_by_one
from actor.scoring.pipe import LENGTH_BYTES, Failed, Ready, Reply, ScoreCall, Scored, frame
from actor.verifiers.reward_function import CallFailed
from actor.verifiers.verifier import Scoring
from shared.config.data import VerifierConfig, VerifierKind
from shared.config.named_rewards import runs_functions
from shared.errors import RewardError

MIB = 1 << 20
ADDRESS_SPACE_FACTOR = 4
SPARE_CPU_S = 2


def forbid_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(memory_mb: int) -> None:
    """Allow this much more than is in use now; 0 sets no limit."""
    if not memory_mb:
        return
    more = memory_mb * MIB
    lower(resource.RLIMIT_DATA, mapped_bytes("VmData") + more)
    lower(resource.RLIMIT_AS, mapped_bytes("VmSize") + ADDRESS_SPACE_FACTOR * more)
    lower(resource.RLIMIT_FSIZE, more)


def limit_cpu(limit_s: float) -> None:
    """For the call that starts now. The hard limit stays, so that the next call gets its own limit."""
    allowed = math.ceil(time.process_time() + limit_s * (os.cpu_count() or 1)) + SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def lower(which: int, limit: int) -> None:
    """Set soft and hard limit, but never raise the hard one."""
    _, hard = resource.getrlimit(which)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def mapped_bytes(name: str) -> int:
    """One of this process's memory figures, by its name in /proc/self/status."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


CALLS, REPLIES = 3, 4
FOR_THE_USER_ONLY = 0o077
WORKING_FOLDER = "work"
SOFT_LIMITS = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


def preload(kind: VerifierKind) -> None:
    """Import what is slow to import, once, in the fork server."""
    if kind == "math":
        from actor.verifiers.math_equality import warm_up

        warm_up()


def work(verifier: VerifierConfig, folder: Path) -> None:
    """Load the verifier, report the result, then score calls until the pool closes the pipe."""
    calls, replies = os.fdopen(CALLS, "rb"), os.fdopen(REPLIES, "wb")
    forbid_core_dumps()
    os.umask(FOR_THE_USER_ONLY)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
    try:
        # Before the change of folder: relative paths of the user start at the actor's working folder.
        scoring = Scoring(verifier)
    except RewardError as error:
        send(replies, Ready(fault=str(error)))
        return
    folder = enter_working_folder(folder)
    limit_memory(verifier.memory_mb)
    soft_limits = {which: resource.getrlimit(which)[0] for which in SOFT_LIMITS}
    send(replies, Ready(fault=None))
    while (call := next_call(calls)) is not None:
        if runs_functions(verifier):
            empty(folder)
        for reply in score(verifier, scoring, call):
            if runs_functions(verifier):
                restore_process(folder, soft_limits)
            send(replies, reply)
            if isinstance(reply, Failed) and reply.exits:
                return
    scoring.calls.close()


def score(verifier: VerifierConfig, scoring: Scoring, call: ScoreCall) -> Iterator[Reply]:
    """One reply for the whole call, or one per job; `is_one_by_one` says which."""
    parts = [[job] for job in call.jobs] if is_one_by_one(verifier) else [call.jobs]
    try:
        for jobs in parts:
            limit_cpu(call_limit_s(verifier, len(jobs)))
            yield Scored(number=call.number, verdicts=scoring.score(jobs))
    except CallFailed as failure:
        yield Failed(number=call.number, note=str(failure), exits=failure.out_of_memory)


def enter_working_folder(scratch: Path) -> Path:
    folder = scratch / WORKING_FOLDER
    folder.mkdir()
    os.chdir(folder)
    return folder


def empty(folder: Path) -> None:
    """Empty the working folder, without following links. What still runs there may keep some of it."""
    for entry in () if folder.is_symlink() else os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry)


def restore_process(folder: Path, soft_limits: dict[int, int]) -> None:
    """Undo what a call may have changed in the process, before the next call."""
    signal.alarm(0)
    os.umask(FOR_THE_USER_ONLY)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for which, soft in soft_limits.items():
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def next_call(calls: BinaryIO) -> ScoreCall | None:
    """None when the pool has closed the pipe."""
    length = calls.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(calls.read(int.from_bytes(length, "big")), type=ScoreCall)


def send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(frame(reply))
    replies.flush()
