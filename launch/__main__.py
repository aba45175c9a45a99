"""`python -m launch COMMAND`: the front door. Parses, then imports only what the command needs. Nothing of ours, and no
library, is imported before `main` can answer Ctrl-C.

This is the edge where errors become words: 0 done, 1 a crash of a process or of our own, 2 something the user can mend
(one sentence on stderr, no traceback), 130 interrupted, 141 nobody reads what is printed. `doctor` ends with 1 if it
found an error.
"""

import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: list[str]) -> int:
    """The exit code."""
    try:
        return answer(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def answer(argv: list[str]) -> int:
    """Parse and do it; errors in words."""
    from launch.cli import parse
    from launch.supervisor.topology import ProcessFailed
    from protocol.errors import SecurityError
    from shared.errors import UserError

    try:
        return dispatch(parse(argv))
    except (UserError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ProcessFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if not nobody_reads():
            raise
        # Python would fail once more as it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def nobody_reads() -> bool:
    """Whether it was our output that broke (`| head` has seen enough), and not a pipe to a process of ours."""
    output = select.poll()
    output.register(sys.stdout, select.POLLERR)
    return bool(output.poll(0))


def dispatch(args: "argparse.Namespace") -> int:
    """One branch a command."""
    match args.command:
        case "run":
            return run(args)
        case "resume":
            from launch.commands.resume import run_command

            return run_command(
                directory=args.directory,
                steps=args.steps,
                on_fault=args.on_fault,
                resample_step=args.resample_step,
                verbose=args.verbose,
            )
        case "replay":
            return replay(args)
        case "eval":
            return evaluate(args)
        case "doctor":
            from launch.doctor.command import run_doctor

            return run_doctor(source=args.source, overrides=args.set, out=args.out, as_json=args.json)
        case "compare":
            from launch.commands.compare import run_command

            return run_command(first=args.A, second=args.B, label=args.label, flips=args.flips)
        case "export":
            return export(args)
        case "key":
            from launch.commands.key import run_command

            return run_command(directory=args.directory, name=args.name)
        case "curriculum":
            from launch.commands.curriculum import run_command

            return run_command(source=args.source, overrides=args.set)
        case "data":
            from launch.commands.data import run_command

            return run_command(source=args.source, overrides=args.set, examples=args.examples)
        case "verify":
            from launch.commands.verify import run_command

            return run_command(
                kind=args.kind, strict=args.strict, source=args.source, out=args.out, workers=args.workers
            )
        case _:
            return generate(args)


def evaluate(args: "argparse.Namespace") -> int:
    """`eval`."""
    from launch.commands.evaluate import run_command

    return run_command(
        directory=args.directory,
        checkpoint=args.checkpoint,
        base=args.base,
        problems=args.problems,
        samples=args.samples,
        long_cap=args.long_cap,
        test=args.test,
    )


def replay(args: "argparse.Namespace") -> int:
    """`replay` of a whole run, or of one batch."""
    if args.batch:
        from launch.commands.replay import run_batch

        return run_batch(file=args.batch)
    from launch.commands.replay import run_command

    return run_command(directory=args.directory)


def run(args: "argparse.Namespace") -> int:
    """`run`, with --steps and --seed as the overrides they stand for."""
    from launch.commands.run import run_command

    sugar = {"run.steps": args.steps, "run.seed": args.seed}
    return run_command(
        source=args.source,
        overrides=[*args.set, *(f"{key}={text}" for key, text in sugar.items() if text is not None)],
        out=args.out,
        dry_run=args.dry_run,
        prepare=args.prepare,
        verbose=args.verbose,
    )


def export(args: "argparse.Namespace") -> int:
    """`export`."""
    from launch.export.command import run_export

    return run_export(
        directory=args.directory,
        form=args.form,
        out=args.out,
        checkpoint=args.checkpoint,
        dtype=args.dtype,
        repo=args.push,
    )


def generate(args: "argparse.Namespace") -> int:
    """`generate`, once or as a conversation."""
    policy = {"directory": args.directory, "base": args.base, "checkpoint": args.checkpoint}
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    if args.chat:
        from launch.commands.chat import run_command as run_chat

        return run_chat(**policy, **sampling, out=args.out)
    from launch.commands.generate import run_command

    return run_command(**policy, **sampling, prompt=args.prompt, source=args.source, out=args.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
