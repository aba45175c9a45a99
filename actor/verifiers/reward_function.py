"""Calls a user's reward function, with the signature of TRL's GRPOTrainer.

    fn(prompts=[...], completions=[...], completion_ids=[...], **columns) -> list[float | None]

All arguments are keyword arguments, and each is a list with one entry per completion; reward_arguments.py lists them. A
function without **kwargs gets only the arguments that it names. It may be async: the async functions of a run wait
together, and all calls of a worker run in one event loop, so a connection that one opened stays usable. It may be a
class, which each worker makes once, without arguments, and then calls. One call scores as many completions as possible,
because rewards written for TRL may look at the whole batch, and never a part of a group. Any iterable with an order
will do for a list, such as an array or a tensor.

    number  -> correct if it is at least 0.5, else wrong; the number is the score
    None    -> abstain
    a number for a truncated completion -> truncated; the number is the score. A zero instead would be a prize for
               truncation if the reward is negative elsewhere
    NaN, infinity, a magnitude above the wire's limit, another type -> error for that completion
    an exception, or a list of another length -> the call fails. It is not known which completion caused it, so the
               pool calls the function again for each group, and for each completion of a group that fails, alone. Those
               that fail alone are errors, and the others get their score. A function whose scores depend on the rest of
               the group should therefore not fail

Different from TRL: a model as a reward is a class that loads it. The function runs in a scoring worker with the
worker's rights; it is trusted, not in a sandbox.
"""

import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from actor.verifiers.reward_arguments import RewardLog, accepted, arguments, blamed
from actor.verifiers.verdict import ScoreJob, Verdict, fault, one_line
from protocol.limits import MAX_SCORE
from protocol.outcome import Outcome
from shared.config.data import RewardForm
from shared.errors import RewardError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

RewardFunction = Callable[..., Any]

CORRECT_FROM = 0.5


class CallFailed(Exception):
    """The call gave no list with one value per completion; the message says why in one sentence."""

    def __init__(self, sentence: str, *, out_of_memory: bool = False) -> None:
        super().__init__(one_line(sentence))
        self.out_of_memory = out_of_memory


def load_reward_function(spec: str, key: str) -> RewardFunction:
    """A function as it is, a class as an object of it. key: of the configuration, which holds `spec`."""
    found, name = find_reward_function(spec, key), spec.rpartition(":")[2]
    if not isinstance(found, type):
        return found
    try:
        function = found()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise RewardError(
            f"Making an object of the class {name} in {spec.rpartition(':')[0]} failed with {in_words(error)}; it must"
            " work without arguments."
        ) from error
    if not callable(function):
        raise RewardError(f"Objects of the class {name} cannot be called; give it a method __call__.")
    return function


def find_reward_function(spec: str, key: str) -> RewardFunction:
    """key: of the configuration, which holds `spec`; for errors."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise RewardError(f"{key} is {spec!r}; name a function as path/to/file.py:name.")
    # Unlike Path.expanduser, no error without a home.
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise RewardError(f"{key} names {path}, but there is no such file; a path is relative to {Path.cwd()}.")
    function = getattr(import_file(file), name, None)
    if function is None:
        raise RewardError(f"{key} names {name}, but {path} defines no such name.")
    if not callable(function) or hasattr(function, "forward"):
        raise RewardError(
            f"{name} in {path} is of type {type(function).__name__}; a function is needed, or a class with __call__."
        )
    return function


def import_file(file: Path) -> ModuleType:
    """Runs a Python file as a module, once in a process: functions of one file share what it loads. It can import the
    files beside it, as a script can."""
    name = f"user_reward_function_{zlib.crc32(str(file.resolve()).encode()):08x}"
    known = sys.modules.get(name)
    if known and known.__file__ == str(file.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise RewardError(f"{file} is not a Python file; its name must end in .py.")
    # At the end, so that the user's files cannot hide ours; registered, because dataclasses look their module up.
    sys.path.append(str(file.resolve().parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        traceback.print_exc()
        raise RewardError(f"Importing {file} failed with {in_words(error)}; fix the file.") from error
    return module


class EventLoop:
    """The event loop of a process. It is the same for all calls, so a connection that one opened stays usable."""

    def __init__(self) -> None:
        self.made: AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of the coroutine."""
        if self.made is None:
            # Costs a fifth of a worker's start; most functions are not async.
            from asyncio import new_event_loop

            self.made = new_event_loop()
        return self.made.run_until_complete(coroutine)

    def close(self) -> None:
        if self.made:
            self.made.close()


class RewardCalls:
    """Calls functions and turns what they return into verdicts. Each worker has one."""

    def __init__(self, form: RewardForm = "auto") -> None:
        self.form: RewardForm = form
        self.log = RewardLog()
        self.loop = EventLoop()

    def values(self, functions: Sequence[RewardFunction], jobs: Sequence[ScoreJob]) -> list[list[object]]:
        """What one call of each function returns: one value per job. CallFailed if it is anything else."""
        if not functions:
            return []
        given = arguments(jobs, self.form, self.log)
        try:
            results = [function(**accepted(function, given)) for function in functions]
            returned = [listed(result) for result in self.awaited(results)]
        except CallFailed:
            raise
        except (Exception, SystemExit) as error:
            # The log gets the traceback, the verdict its last line.
            traceback.print_exc()
            memory = isinstance(error, MemoryError)
            sentence = (
                f"The reward function raised {in_words(error)}{blamed(error, given)}{relative_path_advice(error)}."
            )
            raise CallFailed(sentence, out_of_memory=memory) from error
        for values in returned:
            if len(values) != len(jobs):
                raise CallFailed(f"The reward function returned {len(values)} values for {len(jobs)} completions.")
        return returned

    def awaited(self, results: Sequence[Any]) -> list[Any]:
        """Those that are awaitable run in the loop, all at once."""
        waiting = [result for result in results if inspect.isawaitable(result)]
        if not waiting:
            return list(results)
        found = iter(self.loop.run(together(waiting)))
        return [next(found) if inspect.isawaitable(result) else result for result in results]

    def close(self) -> None:
        self.loop.close()


async def as_coroutine(result: Awaitable[Any]) -> Any:
    """Around anything that can be awaited, as an event loop wants it."""
    return await result


async def together(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    """What each of them comes to. The first that raises ends the others, so that none is left in the loop."""
    from asyncio import create_task, gather

    tasks = [create_task(as_coroutine(one)) for one in waiting]
    try:
        return await gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await gather(*tasks, return_exceptions=True)


def listed(values: Any) -> list[object]:
    """An array or a tensor becomes a list of Python's numbers. Texts, mappings and sets are not lists of numbers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise CallFailed(f"The reward function returned a {type(values).__name__}; a list of numbers is needed.")
    return list(values)


def verdict(value: object, truncated: bool) -> Verdict:
    if value is None:
        return fault(Outcome.ABSTAIN, "The reward function returned None.")
    if not isinstance(value, Real):
        value = one_number(value)
    if not isinstance(value, Real):
        note = f"The reward function returned a value of type {type(value).__name__}; a number or None is needed."
        return fault(Outcome.ERROR, note)
    score = as_float(value)
    # Written so that NaN fails too.
    if not abs(score) <= MAX_SCORE:
        note = f"The reward function returned {score}; a number of magnitude up to {MAX_SCORE:g} or None is needed."
        return fault(Outcome.ERROR, note)
    finding = Outcome.CORRECT if score >= CORRECT_FROM else Outcome.WRONG
    return Verdict(outcome=Outcome.TRUNCATED if truncated else finding, score=score, final_answer=None, note="")


def one_number(value: Any) -> object:
    """The number in an array or tensor that holds one, of any shape, or in a Decimal; anything else as it is."""
    if isinstance(value, Decimal):
        return float(value)
    shape = getattr(value, "shape", None)
    return value.item() if isinstance(shape, tuple) and math.prod(shape) == 1 else value


def as_float(value: Real) -> float:
    """Infinity where an integer is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def relative_path_advice(error: BaseException) -> str:
    """The end of a sentence about a file that was not found by a relative path; empty for other errors, and for a
    program that is not there, whose name is a bare word."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    is_relative = isinstance(name, str) and not Path(name).is_absolute() and re.search(r"[./]", name)
    return "; calls run in an empty folder, so build the paths of files from __file__" if is_relative else ""


def in_words(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return one_line("".join(traceback.format_exception_only(error))).rstrip(".")
