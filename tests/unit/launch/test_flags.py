"""Flags of other scripts: each sets exactly its key, or is answered with a key that exists."""

import re

import pytest

from launch.cli import parse
from launch.flags import ANSWERS, SWITCHES, VALUES
from launch.presets.load import load_config
from shared.config.load import OTHER_NAMES
from shared.errors import UserError
from tests.support.config_keys import PINNED


def test_the_flags_of_the_seed_documents_set_what_they_say() -> None:
    words = "--group-size 6 --learning-rate 1e-4 --lora-rank 8 --wandb-project mine --use-triton --no-entropy-mask"
    config = load_config("embedded", parse(["run", "embedded", *words.split()]).set)
    assert (config.rollout.group, config.optimizer.lr, config.lora.rank) == (6, 1e-4, 8)
    assert (config.tracking.kind, config.tracking.project) == ("wandb", "mine")
    assert (config.compute.kernels, config.loss.entropy_fraction) == ("triton", 1.0)


def test_flags_may_be_written_with_underscores_as_in_trl() -> None:
    words = "--num_generations 6 --learning_rate=1e-4 --beta 0.02 --max_completion_length 99 --no_entropy_mask"
    config = load_config("embedded", parse(["run", "embedded", *words.split()]).set)
    assert (config.rollout.group, config.optimizer.lr, config.loss.kl_beta) == (6, 1e-4, 0.02)
    assert (config.rollout.max_new_tokens, config.loss.entropy_fraction) == (99, 1.0)


def test_the_help_names_every_key_that_a_flag_sets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--wandb-project X --set tracking.kind=wandb --set tracking.project=X" in text
    assert "--num_generations" not in text, "once is enough"


def test_every_other_name_of_a_key_is_a_flag() -> None:
    flags = {f"--{name.replace('_', '-')}": (f"{key}={{}}",) for name, key in OTHER_NAMES.items()}
    assert flags == {flag: keys for flag, keys in VALUES.items() if flag != "--wandb-project"}


def test_the_later_one_wins() -> None:
    both = ["--set", "rollout.group=4", "--group-size", "6"]
    assert load_config("embedded", parse(["run", *both]).set).rollout.group == 6
    assert load_config("embedded", parse(["run", *both[2:], *both[:2]]).set).rollout.group == 4


def test_every_mapped_flag_sets_a_key_that_exists() -> None:
    keys = [assignment.partition("=")[0] for assignments in VALUES.values() for assignment in assignments]
    keys += [assignment.partition("=")[0] for assignment in SWITCHES.values()]
    assert set(keys) <= PINNED.keys()


@pytest.mark.parametrize("flag", ANSWERS)
@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_flag_without_an_exact_key_is_answered(command: str, flag: str) -> None:
    for word in (flag, f"{flag}=3", f"--{flag[2:].replace('-', '_')}"):
        with pytest.raises(UserError, match=r"is not a flag of Tandem: \S"):
            parse([command, "embedded", word])


def test_answers_name_keys_that_exist() -> None:
    sections = {key.partition(".")[0] for key in PINNED}
    named = {key for answer in ANSWERS.values() for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", answer)}
    ours = {key for key in named if key.partition(".")[0] in sections}
    assert "rollout.prompts" in ours
    assert ours <= PINNED.keys()


@pytest.mark.parametrize(
    ("flag", "key"), [("--gradient-accumulation-steps", "batch.updates"), ("--use-vllm", "actor.engine=vllm")]
)
def test_an_answer_names_its_key(flag: str, key: str) -> None:
    with pytest.raises(UserError, match=key):
        parse(["run", flag, "2"])


@pytest.mark.parametrize("flag", ["--num-gpus", "--nproc-per-node"])
def test_several_cards_for_the_learner_are_ranks(flag: str) -> None:
    with pytest.raises(UserError, match="--ranks N is a learner on N cards"):
        parse(["run", flag, "2"])


@pytest.mark.parametrize("words", [["--set", "optimizer.lr=1e-5"], ["--set=optimizer.lr=1e-5"]])
def test_resume_says_what_it_can_change(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"except for --steps, .* lora\.start_from=RUN"):
        parse(["resume", "runs/x", *words])
    options = parse(["resume", "runs/x", "--steps", "9", "--actors", "2", "--ranks", "2", "--on-fault", "skip"])
    assert (options.steps, options.actors, options.ranks, options.on_fault) == (9, 2, 2, "skip")


def test_other_commands_are_not_answered() -> None:
    assert parse(["generate", "--prompt", "--model x", "--max-new-tokens", "3"]).max_new_tokens == 3


@pytest.mark.parametrize("command", ["run", "generate"])
def test_an_unknown_flag_is_told_where_the_flags_of_its_command_are(command: str) -> None:
    with pytest.raises(UserError, match=rf"arguments: --odd; see `python -m launch {command} --help`\."):
        parse([command, "--odd", *(["--prompt", "x"] if command == "generate" else [])])
