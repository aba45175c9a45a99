"""Flags that people know from other training scripts: mapped to the key that means the same, else answered.

A mapped flag is `--set` under another name: `--group-size 8` is `--set rollout.group=8`. In the order of the command
line, the later one wins. Underscores are read as hyphens, since TRL has them (`--num_generations`).
"""

import argparse
import re
from collections.abc import Mapping, Sequence

from shared.config.other_names import INSTEAD, OTHER_NAMES
from shared.errors import UserError

VALUES = {f"--{name.replace('_', '-')}": (f"{key}={{}}",) for name, key in OTHER_NAMES.items()} | {
    "--wandb-project": ("tracking.kind=wandb", "tracking.project={}")
}
"""Flag with a value -> the keys that it sets."""
SWITCHES = {
    "--wandb": "tracking.kind=wandb",
    "--no-wandb": "tracking.kind=none",
    "--use-triton": "compute.kernels=triton",
    "--no-triton": "compute.kernels=torch",
    "--no-entropy-mask": "loss.entropy_fraction=1.0",
}
KEY = re.compile(r"`(?=\w+\.\w+=)")
"""Where an answer tells to set a key."""
RESUMED = (
    "resume takes no --set: a run keeps its configuration, except for --steps, --actors, --ranks and --on-fault. For"
    " another key, begin a new run with --set lora.start_from=RUN_DIRECTORY."
)


def add_known_flags(parser: argparse.ArgumentParser) -> None:
    """Each adds to `set`, like --set."""
    group = parser.add_argument_group("flags of other scripts")
    for flag, keys in VALUES.items():
        words = " ".join(f"--set {key.format('X')}" for key in keys)
        for name, text in spellings(flag, words).items():
            group.add_argument(name, dest="set", action="extend", type=Assignments(keys), metavar="X", help=text)
    for flag, assignment in SWITCHES.items():
        for name, text in spellings(flag, f"--set {assignment}").items():
            group.add_argument(name, dest="set", action="append_const", const=assignment, help=text)


def spellings(flag: str, words: str) -> Mapping[str, str]:
    """Each with its help; that with underscores is in no list."""
    return {f"--{flag[2:].replace('-', '_')}": argparse.SUPPRESS, flag: words}


class Assignments:
    """The value of a flag as `key=value` of each key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys

    def __call__(self, value: str) -> list[str]:
        return [key.format(value) for key in self.keys]


def answer_known_flags(argv: Sequence[str]) -> None:
    """UserError for the first flag of `run` or `sft` that others have and we do not, and for --set of `resume`."""
    if argv[:1] == ["resume"] and any(word.partition("=")[0] == "--set" for word in argv):
        raise UserError(RESUMED)
    if argv[:1] not in (["run"], ["sft"]):
        return
    for flag in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if answer := INSTEAD.get(flag[2:].replace("-", "_")):
            raise UserError(f"{flag} is not a flag of Tandem: {KEY.sub('`--set ', answer)}.")
