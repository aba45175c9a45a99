"""The command line: commands, options and their help. Imports nothing that needs torch, so `--help` is immediate."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from launch.flags import Assignments, add_known_flags, answer_known_flags
from shared.errors import UserError

VERSION = "0.1.0"
"""As in pyproject.toml, which is not there once Tandem is installed."""
MODULE = "python -m launch"
EXAMPLES = """examples:
  python -m launch run                                    the embedded model: no card, no download
  python -m launch run my.toml --out runs/first --set optimizer.lr=3e-4
  python -m launch run embedded --dry-run                 show the plan, start nothing
  python -m launch sft my.toml --out runs/warm            learn written answers first (solutions or chats)
  python -m launch run my.toml --set lora.start_from=runs/warm
  python -m launch data my.toml                           what that run would be trained on
  python -m launch plan gsm8k_8gb --gpu-gb 8              what it takes of a card, phase by phase
  python -m launch doctor my.toml                         does this machine fit that run
  python -m launch resume runs/first --steps 80            continue, up to step 80
  python -m launch why runs/first                         what it is doing, and what would help
  python -m launch ui                                     see all runs in runs/ in a browser, with their answers
  python -m launch show runs/first --step 12 --group 3    what was sampled, token by token with --sample 0
  python -m launch report runs/first                      the run as one HTML page to keep or to send
  python -m launch compare runs/first runs/second         which is better, by how much, on which tasks
  python -m launch export runs/first --as merged --out my-model
  python -m launch run embedded --actors 2 --set rollout.groups_per_order=4
  python -m launch key runs/first gpu-box                 a key for an actor on another machine
  python -m launch invite runs/first                      one command that joins from another machine
  python -m launch keys runs/first                        who may join; --revoke NAME ends it
  python -m launch generate runs/first --prompt "Tom has 3 apples and buys 4 more. How many does he have now?"
  python -m launch generate runs/first --chat
"""
OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")
"""Where a process finds its open files. A rename over such a name would replace it for the whole machine."""
CHECKPOINT = "best: highest held-out accuracy during the run, which needs eval.every (default: latest)"


class Parser(argparse.ArgumentParser):
    """Reports a wrong option like any other user error: one sentence, exit code 2, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].lower()}{message[1:]}; see `{self.prog} --help`.")


def parse(argv: list[str], program: str = MODULE) -> argparse.Namespace:
    """program: how the user called it; help and errors name it."""
    parser = make_parser(program)
    answer_known_flags(argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}; see `{program} {args.command} --help`.")
    return args


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Tandem: reinforcement learning for language models with two processes on one small card.",
        epilog=EXAMPLES.replace(MODULE, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run(commands.add_parser("run", help="train a new run", allow_abbrev=False))
    add_run(commands.add_parser("sft", help="warm start: learn written answers", allow_abbrev=False))
    add_resume(commands.add_parser("resume", help="continue a run", allow_abbrev=False))
    add_replay(commands.add_parser("replay", help="train on a run's journal again and compare", allow_abbrev=False))
    add_eval(commands.add_parser("eval", help="held-out accuracy of a run", allow_abbrev=False))
    add_key(commands.add_parser("key", help="make a key for one more actor", allow_abbrev=False))
    add_invite(commands.add_parser("invite", help="print a command that joins from elsewhere", allow_abbrev=False))
    add_keys(commands.add_parser("keys", help="list the keys of actors, or revoke one", allow_abbrev=False))
    add_config(commands.add_parser("curriculum", help="measure semantic entropies", allow_abbrev=False))
    add_data(commands.add_parser("data", help="show what a run would be trained on", allow_abbrev=False))
    add_verify(commands.add_parser("verify", help="score a file of completions", allow_abbrev=False))
    add_why(commands.add_parser("why", help="what a run is doing, and what would help", allow_abbrev=False))
    add_show(commands.add_parser("show", help="the groups, answers and tokens of a step", allow_abbrev=False))
    add_directory(commands.add_parser("watch", help="the answers of a run in a terminal", allow_abbrev=False))
    add_report(commands.add_parser("report", help="write runs as one HTML page", allow_abbrev=False))
    add_compare(commands.add_parser("compare", help="which of two runs is better, and where", allow_abbrev=False))
    add_export(commands.add_parser("export", help="write the trained model for other programs", allow_abbrev=False))
    add_generate(
        commands.add_parser("generate", help="complete a prompt or a file of prompts, or chat", allow_abbrev=False)
    )
    add_ui(commands.add_parser("ui", help="see runs in a browser on this machine", allow_abbrev=False))
    add_plan(commands.add_parser("plan", help="memory of a run on a card, before it starts", allow_abbrev=False))
    add_doctor(commands.add_parser("doctor", help="check this machine and a configuration", allow_abbrev=False))
    add_completion(commands.add_parser("completion", help="completion in a shell", allow_abbrev=False))
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: runs/<preset>-<time>)")
    parser.add_argument("--steps", metavar="N", help="same as --set run.steps=N")
    parser.add_argument("--seed", metavar="N", help="same as --set run.seed=N")
    for name, what in {"actors": "actors on this machine", "ranks": "processes of the learner"}.items():
        given = Assignments((f"compute.{name}={{}}",))
        what = f"{what}: same as --set compute.{name}=N"
        parser.add_argument(f"--{name}", dest="set", action="extend", type=given, metavar="N", help=what)
    parser.add_argument("--dry-run", action="store_true", help="print the plan; start and write nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print predicted memory and time as JSON")
    parser.add_argument("--prepare", action="store_true", help="make the run directory and its keys, and stop")
    add_known_flags(parser)
    add_start(parser)


def add_resume(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("--steps", type=positive_int, metavar="N", help="train up to step N")
    parser.add_argument("--actors", type=positive_int, metavar="N", help="from now on with N actors on this machine")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="from now on with N processes of the learner")
    parser.add_argument(
        "--on-fault", choices=("stop", "skip"), help="when an update is refused: stop the run, or skip the batch"
    )
    parser.add_argument(
        "--resample-step", type=positive_int, metavar="N", help="first void the recorded groups of step N and later"
    )
    add_start(parser)


def add_replay(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="run directory")
    what.add_argument("--batch", type=Path, metavar="FILE", help="repeat one batch of a run's quarantine/")


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "writes eval/<label>.json, such as base or step-000040; with other tasks, draws or caps than the run's own"
        " evaluations, or than the one that is there, the label ends in -n<tasks>x<draws>; `compare --label` takes any"
        " label"
    )
    add_directory(parser)
    which = parser.add_mutually_exclusive_group()
    add_checkpoint(which)
    which.add_argument(
        "--base", action="store_true", help="evaluate what the run began with: the base, or lora.start_from"
    )
    which.add_argument(
        "--follow", action="store_true", help="evaluate each new checkpoint while the run trains, until it ends"
    )
    parser.add_argument("--test", action="store_true", help="use the test set (tasks.test), which training never reads")
    parser.add_argument("--problems", type=positive_int, metavar="N", help="held-out problems (default: eval.problems)")
    parser.add_argument(
        "--samples", type=positive_int, metavar="K", help="draws for each problem (default: eval.samples)"
    )
    parser.add_argument(
        "--long-cap", type=positive_int, metavar="N", help="evaluate again with this cap (default: eval.long_cap)"
    )


def add_why(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("--json", action="store_true", help="print all verdicts as JSON")


def add_show(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("--step", type=positive_int, metavar="N", help="which step (default: the newest)")
    parser.add_argument("--group", type=non_negative_int, metavar="G", help="one of its groups, from 0")
    parser.add_argument("--sample", type=non_negative_int, metavar="S", help="one of its answers, from 0")
    parser.add_argument("--json", action="store_true", help="print records as JSON")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directory")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=out_file, metavar="FILE", help="default: report.html in the first run's directory")
    where.add_argument(
        "--bundle", type=Path, metavar="DIR", help="write all answers of a run as a page into a new folder"
    )
    most = "of a bundle at most; steps that do not fit are left out (default: 100)"
    parser.add_argument("--megabytes", type=positive_int, metavar="N", help=most)


def add_key(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("name", metavar="NAME", help="name of the actor")


def add_invite(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the actor (default: guest0, guest1, ...)")
    parser.add_argument(
        "--hours", type=positive_int, default=24, metavar="N", help="how long it can be used (default: 24)"
    )


def add_keys(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("--revoke", metavar="NAME", help="end the access of this actor, even while the run trains")


def add_compare(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name, type=Path, help="run directory, or one of its eval/*.json")
    parser.add_argument("--label", default="final", metavar="NAME", help="evaluation of a run (default: final)")
    parser.add_argument(
        "--flips", type=non_negative_int, default=5, metavar="N", help="tasks to show for each side (default: 5)"
    )


def add_export(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument(
        "--as",
        dest="form",
        choices=("peft", "merged", "gguf-ready"),
        default="peft",
        help="default: peft, the adapter alone",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    add_checkpoint(parser)
    parser.add_argument("--dtype", metavar="bf16|fp32", help="number type of merged weights (default: bf16)")
    parser.add_argument("--push", metavar="REPO", help="upload to this hub repository, replacing its model (HF_TOKEN)")


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR", help="run directory (default: the embedded base)"
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompts.add_argument("--in", dest="source", type=Path, metavar="FILE", help="prompts, one a line")
    prompts.add_argument("--chat", action="store_true", help="chat with base and trained policy, side by side")
    parser.add_argument("--out", type=out_file, metavar="FILE", help="write JSON lines to this file")
    which = parser.add_mutually_exclusive_group()
    add_checkpoint(which)
    parser.set_defaults(checkpoint=None)
    which.add_argument("--base", action="store_true", help="use the base, without the adapter")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, metavar="N", help="cap on one completion (default: as in training)"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--greedy",
        dest="temperature",
        action="store_const",
        const=0.0,
        default=0.0,
        help="take the most likely token (default)",
    )
    choice.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="sample at this temperature")
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="of the sampling (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: as in training)")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit code: 0 if the run fits, 2 if it does not, or for bad arguments"
    add_config(parser)
    parser.add_argument(
        "--gpu-gb", type=gigabytes, metavar="N", help="memory of the card in GiB (default: free on this machine's card)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def add_ui(parser: argparse.ArgumentParser) -> None:
    where = "folder with runs, or one run (default: runs)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="RUNS-FOLDER", help=where)
    parser.add_argument("--port", type=port, metavar="N", help="port on 127.0.0.1 (default: 8420, or any free one)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address, open nothing")
    more = "let the page evaluate, chat, and start, stop and resume runs"
    parser.add_argument("--control", action="store_true", help=more)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "exit code: 0 if there is no error (warnings are not errors), 1 if there is one, 2 for bad arguments"
    )
    parser.add_argument(
        "source", nargs="?", metavar="PRESET|FILE", help="configuration (default: that of DIR, else embedded)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory, new or existing (default: as for `run`)"
    )
    add_set(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.epilog = 'for bash, add `eval "$(tandem completion bash)"` to ~/.bashrc; launch/README.md has the others'
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell whose script to print")


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="section.key=value; may be repeated"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--examples", type=non_negative_int, default=2, metavar="N", help="prompts to print (default: 2)"
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", default="embedded", metavar="PRESET|FILE", help="configuration (default: embedded)"
    )
    add_set(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    add_set(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kind", choices=("gsm8k", "exact", "math"), default="gsm8k", help="default: gsm8k")
    own = Assignments(("verifier.kind=callable", "verifier.function={}"))
    which.add_argument("--function", dest="set", action="extend", type=own, metavar="FILE:NAME", help="your function")
    parser.add_argument(
        "--in", dest="source", type=Path, required=True, metavar="FILE", help="JSON lines with id, completion, answer"
    )
    parser.add_argument(
        "--out", type=out_file, required=True, metavar="FILE", help="JSON lines with id, outcome, score, final_answer"
    )
    parser.add_argument(
        "--strict", action="store_true", help="accept one form only: ####, a box (math), the bare number (exact)"
    )
    parser.add_argument("--workers", type=positive_int, default=2, metavar="N", help="scoring processes (default: 2)")


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--checkpoint", default="latest", metavar="STEP|best|latest", help=CHECKPOINT)


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory")


def add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on", choices=("here", "ray"), default="here", help="ray: where the cluster has room (default: this machine)"
    )
    parser.add_argument(
        "--trace", action="store_true", help="write trace.json: when each process computed (https://ui.perfetto.dev)"
    )
    parser.add_argument("--verbose", action="store_true", help="show all log lines of the processes")


def out_file(text: str) -> Path:
    """Where a file can be written, so that nothing is computed for a place that cannot take it. Of a symlink its end:
    the file gets its name by a rename, which would replace the link itself."""
    file = os.path.realpath(text)
    if not text or os.path.isdir(text) or not os.path.isdir(os.path.dirname(file)):
        raise argparse.ArgumentTypeError(f"got '{text}', expected a file in an existing folder")
    is_other = os.path.exists(text) and not os.path.isfile(text)
    if text.startswith(OPEN_FILES) or is_other or os.path.islink(file):
        raise argparse.ArgumentTypeError(
            f"got '{text}', expected a regular file; name one, or omit --out where it is optional"
        )
    return Path(file) if os.path.islink(text) else Path(text)


def positive_int(text: str) -> int:
    return checked(text, int(text) if text.isdecimal() else 0, least=1)


def non_negative_int(text: str) -> int:
    return checked(text, int(text) if text.isdecimal() else -1, least=0)


def checked(text: str, number: int, least: int) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a whole number of at least {least}")
    return number


def port(text: str) -> int:
    number = int(text) if text.isdecimal() and len(text) < 6 else -1
    if not 0 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a port from 0 (any free one) to 65535")
    return number


def gigabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 10_000.0:
        raise argparse.ArgumentTypeError(f"got '{text}', expected GiB above 0, for example 8")
    return number


def temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 100.0:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number from 0 to 100")
    return number
