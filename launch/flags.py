"""Flags that people know from other training scripts: mapped to the key that means the same, else answered.

A mapped flag is `--set` under another name: `--group-size 8` is `--set rollout.group=8`. In the order of the command
line, the later one wins. Underscores are read as hyphens, since TRL has them (`--num_generations`). `--max-steps`
counts updates in TRL: a step has one, unless `batch.updates` or `loss.passes` asks for more. `--beta` is TRL's as long
as its `use_bias_correction_kl` is true, the default of 1.16; if it was false, set `loss.kl_gradient=k3` as well.
"""

import argparse
from collections.abc import Mapping, Sequence

from shared.errors import UserError

# The names of OTHER_NAMES (shared/config/load.py), which imports a library: this is read before any is looked for.
VALUES = {
    "--group-size": ("rollout.group={}",),
    "--num-generations": ("rollout.group={}",),
    "--learning-rate": ("optimizer.lr={}",),
    "--lr": ("optimizer.lr={}",),
    "--beta": ("loss.kl_beta={}",),
    "--lora-rank": ("lora.rank={}",),
    "--lora-alpha": ("lora.alpha={}",),
    "--max-steps": ("run.steps={}",),
    "--max-response-length": ("rollout.max_new_tokens={}",),
    "--max-completion-length": ("rollout.max_new_tokens={}",),
    "--temperature": ("rollout.temperature={}",),
    "--wandb-project": ("tracking.kind=wandb", "tracking.project={}"),
}
"""Flag with a value -> the keys that it sets."""
SWITCHES = {
    "--wandb": "tracking.kind=wandb",
    "--no-wandb": "tracking.kind=none",
    "--use-triton": "compute.kernels=triton",
    "--no-triton": "compute.kernels=torch",
    "--no-entropy-mask": "loss.entropy_fraction=1.0",
}
BATCH = (
    "a step has rollout.prompts groups of rollout.group completions, and in sft rollout.prompts examples; use --set"
    " rollout.prompts=N. Micro-batches are cut to fit the memory"
)
ANSWERS = {
    "--epochs": "a run is a number of steps, each of rollout.prompts new prompts; use --steps N",
    "--num-train-epochs": "a run is a number of steps, each of rollout.prompts new prompts; use --steps N",
    "--batch-size": BATCH,
    "--per-device-train-batch-size": BATCH,
    "--gradient-accumulation-steps": "micro-batches are cut to fit the memory, whatever the size of a step; use --set"
    " rollout.prompts=N for larger steps, and --set batch.updates=N for several updates in a step",
    "--use-vllm": "use --set actor.engine=vllm, or vllm_server for a server that you start",
    "--use-entropy-mask": "say which share of the tokens is trained on: --set loss.entropy_fraction=0.2",
    "--max-prompt-length": "a longer prompt is dropped here, not cut; use --set tasks.max_prompt_tokens=N",
    "--dataset-name": "use --set tasks.source=NAME, for example gsm8k or a .jsonl file",
    "--model-id": "use --set model.path=FOLDER, or a hub id",
    "--model": "use --set model.path=FOLDER, or a hub id",
    "--output-dir": "use --out DIR",
    "--resume-checkpoint": "use the command `resume DIR`, which takes the newest checkpoint",
    "--resume": "use the command `resume DIR`, which takes the newest checkpoint",
    "--config": "give the file itself, my.toml or my.yaml, right after the command",
    "--lora-weights": "use the command `generate DIR` with the run's directory",
    "--num-gpus": "--ranks N is a learner on N cards; compute.learner_card and compute.actor_card choose cards",
    "--nproc-per-node": "--ranks N is a learner on N cards; compute.learner_card and compute.actor_card choose cards",
}
"""Flag -> what to do instead; none of ours means exactly the same."""


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
    for word in argv:
        flag = word.partition("=")[0]
        if answer := ANSWERS.get(flag.replace("_", "-")):
            raise UserError(f"{flag} is not a flag of Tandem: {answer}.")
