"""Flags of other scripts: each sets exactly its key, or is answered with a key that exists."""

import re
from pathlib import Path

import pytest

from launch.cli import parse
from launch.flags import SWITCHES, VALUES
from launch.presets.load import load_config
from shared.config.other_names import INSTEAD, OTHER_NAMES
from shared.errors import UserError
from tests.support.config_keys import PINNED

TRL_TABLE = "### Arguments of TRL's `GRPOConfig`"


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


def names_of_trl() -> list[str]:
    """Those in the first column of the table in learner/README.md."""
    text = (Path(__file__).parents[3] / "learner/README.md").read_text(encoding="utf-8").partition(TRL_TABLE)[2]
    rows = re.findall(r"^\| (.*?) \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)", row)]


@pytest.mark.parametrize("name", names_of_trl())
def test_every_name_in_the_table_for_people_from_trl_is_a_flag_or_answered(name: str) -> None:
    if name in OTHER_NAMES:
        assert parse(["run", f"--{name}", "3"]).set == [f"{OTHER_NAMES[name]}=3"]
    else:
        with pytest.raises(UserError, match=rf"--{name} is not a flag of Tandem: \S"):
            parse(["run", f"--{name}", "3"])


def test_that_table_is_read() -> None:
    assert {"num_generations", "scale_rewards", "report_to", "r"} <= set(names_of_trl())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("--epsilon", "`--set loss.clip_low=X`"),
        ("--loss_type", "`--set loss.kind=grpo`"),
        ("--lr_scheduler_type", "`--set optimizer.schedule=constant`"),
        ("--scale_rewards", "`--set reward.advantage=std`"),
        ("--report_to", "`--set tracking.kind=wandb`"),
        ("--top_p", "`--set rollout.temperature=T`"),
        ("--mask_truncated_completions", "`--set verifier.on_truncated=mask`"),
        ("--target_modules", "lora.targets, a list"),
        ("--logging_steps", "metrics.jsonl"),
        ("--save_total_limit", "`--set checkpoint.keep=N`"),
        ("--warmup_ratio", "`--set optimizer.warmup_steps=N`"),
        ("--optim", "AdamW"),
        ("--bf16", "`--set compute.dtype=bf16`"),
        ("--load_in_4bit", "`--set model.quantization=none`"),
        ("--max_seq_length", "`--set tasks.max_prompt_tokens=N`"),
        ("--resume_from_checkpoint", "`resume DIR`"),
    ],
)
def test_the_answer_says_what_to_set_on_the_command_line(name: str, key: str) -> None:
    with pytest.raises(UserError, match=re.escape(key)):
        parse(["run", name, "1"])


def test_more_names_of_trl_and_unsloth_set_their_key() -> None:
    words = "--save_steps 7 --weight_decay 0.1 --lora_r 4 --warmup_steps 3 --num_iterations 2 --delta 4 --run_name mine"
    config = load_config("embedded", parse(["run", "embedded", *words.split()]).set)
    assert (config.checkpoint.every, config.optimizer.weight_decay, config.lora.rank) == (7, 0.1, 4)
    assert (config.optimizer.warmup_steps, config.loss.passes, config.loss.dual_clip) == (3, 2, 4.0)
    assert config.tracking.name == "mine"


def test_the_later_one_wins() -> None:
    both = ["--set", "rollout.group=4", "--group-size", "6"]
    assert load_config("embedded", parse(["run", *both]).set).rollout.group == 6
    assert load_config("embedded", parse(["run", *both[2:], *both[:2]]).set).rollout.group == 4


def test_every_mapped_flag_sets_a_key_that_exists() -> None:
    keys = [assignment.partition("=")[0] for assignments in VALUES.values() for assignment in assignments]
    keys += [assignment.partition("=")[0] for assignment in SWITCHES.values()]
    assert set(keys) <= PINNED.keys()


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_flag_without_an_exact_key_is_answered(command: str, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    for word in (flag, f"{flag}=3", f"--{name}"):
        with pytest.raises(UserError, match=r"is not a flag of Tandem: \S"):
            parse([command, "embedded", word])


def test_answers_name_keys_that_exist() -> None:
    sections = {key.partition(".")[0] for key in PINNED}
    named = {key for answer in INSTEAD.values() for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", answer)}
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
    with pytest.raises(UserError, match=r"`--set compute\.ranks=N` is a learner on N cards"):
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
