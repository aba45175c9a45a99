"""`python -m launch COMMAND`: parses the command line, then imports only what that command needs.

Errors become words here. Exit codes: 0 done, 1 a process or this program crashed, 2 something that the user can fix
(one sentence on stderr, no traceback), 130 interrupted, 141 the reader of the output is gone. `doctor` ends with 1 if
it found an error, `replay` if the adapters differ, `plan` with 2 if the run does not fit.

No module of Tandem, and no library, is imported before `main` can handle Ctrl-C.
"""

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

LIBRARIES = ("msgspec", "torch")
"""The first that a command imports, and the largest; they are looked for, not imported."""
BUNDLE_MEGABYTES = 100
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: list[str], *, program: str = "python -m launch", system: str = sys.platform) -> int:
    """Returns the exit code. program: what the user called. system: of this machine."""
    try:
        open_missing_streams()
        escape_unencodable()
        return run_safely(argv, program, system)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def open_missing_streams() -> None:
    """A caller may have closed some (`>&-`). The next files that are opened would take their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))


def escape_unencodable() -> None:
    """Names of files and texts of models may have characters that the encoding of a terminal lacks."""
    for output in (sys.stdout, sys.stderr):
        # A caller may have put another kind of stream there.
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")


def tandem() -> int:
    """The command `tandem`, which `pip install .` makes; the same as `python -m launch`."""
    # A folder `shared` in the user's folder must not replace ours in the processes of a run.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    return main(sys.argv[1:], program="tandem")


def run_safely(argv: list[str], program: str, system: str) -> int:
    """Run the command; expected errors become one sentence and an exit code."""
    from launch.cli import parse
    from protocol.errors import SecurityError
    from protocol.plain_text import for_terminal
    from shared.errors import UserError
    from shared.process.parent_death import die_with_parent
    from shared.process.supported_system import refuse_other_systems

    # The page of `ui` passes its process id to commands that must end with it.
    die_with_parent()
    try:
        args = parse(argv, program)
        refuse_other_systems(system)
        refuse_without_libraries()
        return report_crash(args)
    except (UserError, SecurityError) as error:
        print(for_terminal(f"error: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not output_is_closed():
            raise
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def refuse_without_libraries() -> None:
    """UserError if this is a Python into which nothing was installed, as it is in a fresh clone."""
    from importlib.util import find_spec

    from shared.errors import UserError

    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{sys.executable} lacks {' and '.join(missing)}; in a clone use .venv/bin/python, which ./launch/run.sh"
            " makes, or install Tandem with `pip install .` into a Python of 3.11 or newer."
        )


def report_crash(args: "argparse.Namespace") -> int:
    """Run the command; if a process of the run has crashed, say so."""
    # Only now: elsewhere than on Linux some of these modules cannot be imported.
    from launch.supervisor.topology import ProcessFailed
    from protocol.plain_text import for_terminal

    try:
        return dispatch(args)
    except ProcessFailed as error:
        # It quotes a log.
        print(for_terminal(f"error: {error}"), file=sys.stderr)
        return 1


def output_is_closed() -> bool:
    """Whether the broken pipe is stdout (`| head` has read enough) and not a pipe to one of our processes."""
    output = select.poll()
    output.register(sys.stdout, select.POLLERR)
    return bool(output.poll(0))


def dispatch(args: "argparse.Namespace") -> int:
    match args.command:
        case "run" | "sft":
            return run(args)
        case "resume":
            from launch.commands.resume import resume_run

            return resume_run(
                directory=args.directory,
                steps=args.steps,
                actors=args.actors,
                ranks=args.ranks,
                on_fault=args.on_fault,
                resample_step=args.resample_step,
                on=args.on,
                verbose=args.verbose,
                trace=args.trace,
            )
        case "replay":
            return replay(args)
        case "eval":
            return evaluate(args)
        case "plan":
            from launch.card.command import run_plan

            return run_plan(source=args.source, overrides=args.set, gpu_gb=args.gpu_gb, as_json=args.json)
        case "doctor":
            from launch.doctor.command import run_doctor

            return run_doctor(source=args.source, overrides=args.set, out=args.out, as_json=args.json)
        case "why":
            from launch.why.command import why

            return why(directory=args.directory, as_json=args.json)
        case "ui" | "show" | "watch" | "report":
            return look(args)
        case "export":
            return export(args)
        case "generate":
            return generate(args)
        case _:
            return dispatch_other(args)


def dispatch_other(args: "argparse.Namespace") -> int:
    """Comparisons, keys, data, and the shell."""
    match args.command:
        case "compare":
            from launch.commands.compare import compare_runs

            return compare_runs(first=args.A, second=args.B, label=args.label, flips=args.flips)
        case "key":
            from launch.commands.key import make_key

            return make_key(directory=args.directory, name=args.name)
        case "invite":
            from launch.commands.key import invite

            return invite(directory=args.directory, name=args.name, hours=args.hours)
        case "keys":
            from launch.commands.key import keys

            return keys(directory=args.directory, revoked=args.revoke)
        case "curriculum":
            from launch.commands.curriculum import measure_curriculum

            return measure_curriculum(source=args.source, overrides=args.set)
        case "data":
            from launch.commands.data import show_data

            return show_data(source=args.source, overrides=args.set, examples=args.examples)
        case "verify":
            from launch.commands.verify import verify_file

            return verify_file(
                kind=args.kind,
                strict=args.strict,
                source=args.source,
                out=args.out,
                workers=args.workers,
                overrides=args.set,
            )
        case _:
            from launch.completion import print_script

            return print_script(args.shell)


def run(args: "argparse.Namespace") -> int:
    from launch.commands.run import start_run

    short = {"run.steps": args.steps, "run.seed": args.seed}
    return start_run(
        source=args.source,
        # --steps and --seed come last, so that they win over --set.
        overrides=[*args.set, *(f"{key}={text}" for key, text in short.items() if text is not None)],
        out=args.out,
        dry_run=args.dry_run,
        prepare=args.prepare,
        on=args.on,
        verbose=args.verbose,
        json_only=args.json,
        trace=args.trace,
        warm=args.command == "sft",
    )


def look(args: "argparse.Namespace") -> int:
    """At what was sampled."""
    if args.command == "ui":
        from launch.ui.command import show_window

        return show_window(folder=args.folder, port=args.port, browser=args.browser, control=args.control)
    if args.command == "watch":
        from launch.display.terminal.command import watch

        return watch(directory=args.directory)
    if args.command == "report" and args.bundle:
        from launch.ui.bundle import bundle

        return bundle(directories=args.directories, folder=args.bundle, megabytes=args.megabytes or BUNDLE_MEGABYTES)
    if args.command == "report":
        refuse_option("--megabytes", args.megabytes, "it is only for a bundle; add --bundle DIR, or omit it")
        from launch.display.page.command import report

        return report(directories=args.directories, out=args.out)
    from launch.display.show import show

    return show(directory=args.directory, step=args.step, group=args.group, sample=args.sample, as_json=args.json)


def refuse_option(name: str, value: object, why: str) -> None:
    """ConfigError if an option was given that would do nothing."""
    from shared.errors import ConfigError

    if value is not None:
        raise ConfigError(f"{name} got {value}, but {why}.")


def replay(args: "argparse.Namespace") -> int:
    from launch.commands.replay import replay_batch, replay_run

    return replay_batch(file=args.batch) if args.batch else replay_run(directory=args.directory)


def evaluate(args: "argparse.Namespace") -> int:
    options = {"problems": args.problems, "samples": args.samples, "long_cap": args.long_cap, "test": args.test}
    if args.follow:
        from launch.evaluator.command import follow_run

        return follow_run(directory=args.directory, options=options)
    from launch.commands.evaluate import evaluate_run

    return evaluate_run(directory=args.directory, checkpoint=args.checkpoint, base=args.base, **options)


def export(args: "argparse.Namespace") -> int:
    from launch.export.command import run_export

    if args.form == "peft":
        refuse_option("--dtype", args.dtype, "only merged weights have one; add --as merged, or omit it")
    return run_export(
        directory=args.directory,
        form=args.form,
        out=args.out,
        checkpoint=args.checkpoint,
        dtype=args.dtype or "bf16",
        repo=args.push,
    )


def generate(args: "argparse.Namespace") -> int:
    policy = {"directory": args.directory, "base": args.base, "checkpoint": args.checkpoint, "system": args.system}
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    if args.chat:
        from launch.commands.chat import chat

        return chat(**policy, **sampling, out=args.out)
    from launch.commands.generate import generate_completions

    return generate_completions(**policy, **sampling, prompt=args.prompt, source=args.source, out=args.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
