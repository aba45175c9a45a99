"""shared/config/load.py: keys that there are none of, and what the sentence says was meant."""

import pytest

from shared.config.load import OTHER_NAMES, resolve
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
        ("loss.beta", "'constraint.beta' or 'loss.kl_beta'"),
    ],
)
def test_a_key_of_another_section_or_tool_is_refused_with_its_place(key: str, places: str) -> None:
    assert refusal(key) == f"Unknown key '{key}'; did you mean {places}?"


def test_the_keys_that_other_tools_call_otherwise_are_ours() -> None:
    assert set(OTHER_NAMES.values()) <= PINNED.keys()


def test_a_key_like_no_other_is_refused_with_those_of_its_section() -> None:
    assert refusal("run.zzzz") == "Unknown key 'run.zzzz'; expected one of steps, seed."
    assert refusal("zzzz.lr").startswith("Unknown key 'zzzz'; expected one of run, model, lora, ")


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_what_would_truncate_or_bend_the_distribution_is_refused_with_the_reason(key: str) -> None:
    sentence = refusal(f"rollout.{key}", 0.9)
    assert sentence.startswith(f"rollout.{key} = 0.9 is refused: it c") and "learner" in sentence


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lora.dropout", 0.05, ("lora.dropout = 0.05", "different masks", "weight_decay")),
        ("loss.kind", "dpo", ("loss.kind = dpo", "samples nothing", "launch sft", "lora.start_from")),
        ("lora.full_rank", True, ("frozen in 4 bits", "lora.rank")),
        ("model.full_finetuning", True, ("frozen in 4 bits", "lora.rank")),
    ],
)
def test_what_this_project_does_not_do_is_refused_with_the_reason(
    key: str, value: object, words: tuple[str, ...]
) -> None:
    assert all(word in refusal(key, value) for word in words)
