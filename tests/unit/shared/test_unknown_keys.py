"""shared/config/load.py: keys that there are none of, and what the sentence says was meant."""

import pytest

from shared.config.load import apply_override, resolve
from shared.config.other_names import INSTEAD, OTHER_NAMES
from shared.errors import ConfigError
from tests.support.config_keys import PINNED


def refusal(key: str, value: object = 1) -> str:
    """The sentence that refuses `section.key`, or a key outside of all sections."""
    section, _, name = key.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        resolve({section: {name: value}} if section else {name: value})
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("run.step", "run.steps"),
        ("lora.rnak", "lora.rank"),
        ("rollout.prompt", "rollout.prompts"),
        ("optimiser", "optimizer"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, near: str) -> None:
    assert refusal(key) == f"Unknown key '{key}'; did you mean '{near}'?"


@pytest.mark.parametrize(
    ("key", "places"),
    [
        ("rollout.max_prompt_tokens", "'tasks.max_prompt_tokens'"),
        ("optimizer.rank", "'lora.rank'"),
        ("loss.temperature", "'rollout.temperature'"),
        ("batch.prompts", "'rollout.prompts'"),
        ("rollout.seed", "'run.seed' or 'tasks.seed'"),
        ("loss.lr", "'optimizer.lr'"),
        ("lr", "'optimizer.lr'"),
        ("reward.function", "'environment.function' or 'verifier.function'"),
        ("model.dtype", "'compute.dtype'"),
        ("optimizer.learning_rate", "'optimizer.lr'"),
        ("rollout.num_generations", "'rollout.group'"),
        ("max_steps", "'run.steps'"),
        ("loss.beta", "'loss.kl_beta' or 'constraint.beta'"),
        ("grpo.beta", "'loss.kl_beta' or 'constraint.beta'"),
        ("optim.lr", "'optimizer.lr'"),
        ("checkpoint.save_steps", "'checkpoint.every'"),
        ("lora.r", "'lora.rank'"),
    ],
)
def test_a_key_of_another_section_or_tool_is_refused_with_its_place(key: str, places: str) -> None:
    assert refusal(key) == f"Unknown key '{key}'; did you mean {places}?"


def test_the_keys_that_other_tools_call_otherwise_are_ours() -> None:
    assert set(OTHER_NAMES.values()) <= PINNED.keys()
    assert not OTHER_NAMES.keys() & INSTEAD.keys()


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("run.epochs", "a run is a number of steps, each of rollout.prompts new prompts; use `run.steps=N`."),
        ("reward.weights", 'a reward has its weight where it is named, as in "rewards.py:accuracy" = 2.0 in ['),
        ("trainer.report_to", "use `tracking.kind=wandb`, trackio or tensorboard."),
        ("lora.target_modules", "use lora.targets, a list such as"),
        ("num_train_epochs", "a run is a number of steps"),
    ],
)
def test_a_key_of_another_tool_is_answered_as_its_flag(key: str, answer: str) -> None:
    assert refusal(key).startswith(f"Unknown key '{key}': {answer}")


@pytest.mark.parametrize(
    ("override", "end"),
    [
        ("num_generations=4", "; did you mean 'rollout.group'?"),
        ("epochs=4", ": a run is a number of steps, each of rollout.prompts new prompts; use `run.steps=N`."),
        ("zzzz=4", ", for example optimizer.lr=3e-4."),
    ],
)
def test_an_override_without_its_section_is_told_its_key(override: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({}, override)
    assert str(caught.value) == f"--set got '{override}', expected section.key=value{end}"


def test_a_key_like_no_other_is_refused_with_those_of_its_section() -> None:
    assert refusal("run.zzzz") == "Unknown key 'run.zzzz'; expected one of steps, seed."
    assert refusal("zzzz.yyyy").startswith("Unknown key 'zzzz'; expected one of run, model, lora, ")


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_what_would_truncate_or_bend_the_distribution_is_refused_with_the_reason(key: str) -> None:
    sentence = refusal(f"rollout.{key}", 0.9)
    assert sentence.startswith(f"Unknown key 'rollout.{key}': it changes the distribution") and "learner" in sentence


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lora.dropout", 0.05, ("lora.dropout = 0.05", "different masks", "weight_decay")),
        ("loss.kind", "dpo", ("loss.kind = dpo", "samples nothing", "launch sft", "lora.start_from")),
        ("lora.targets", "all-linear", ("lora.targets = all-linear", "leave the key out")),
        ("lora.full_rank", True, ("frozen in 4 bits", "lora.rank")),
        ("model.full_finetuning", True, ("frozen in 4 bits", "lora.rank")),
    ],
)
def test_what_this_project_does_not_do_is_refused_with_the_reason(
    key: str, value: object, words: tuple[str, ...]
) -> None:
    assert all(word in refusal(key, value) for word in words)
