"""From groups to micro-batches: who is in, with which advantage, mask and weight, and that any cut holds them all."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.batch import (
    TrainSample,
    first_ordered,
    outcome_counts,
)
from learner.objective.judged import Admission
from learner.update.microbatch import cut, micro_batch
from protocol.messages import Finish, Outcome
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.tree import Config, LossConfig, RolloutConfig
from tests import reference, reference_advantages
from tests.support.fakes import tiny_group, tiny_policy
from tests.support.steps import batch_of, idle_samples, judge_of, step_batch, teaches, teaching_samples

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def samples_with(lengths: list[int], group_id: str = "g", seed: int = 0) -> list[TrainSample]:
    group = tiny_group([1.0, *[0.0] * (len(lengths) - 1)], lengths, group_id=group_id, seed=seed)
    return list(step_batch(teaching_samples([group], Config()), 0, Config()).samples)


def tokens_fed(samples: list[TrainSample], padding: bool) -> int:
    """What the backbone sees of a micro-batch; the last token of a completion never is."""
    sequences = micro_batch(samples, torch.device("cpu")).sequences
    assert sequences.completions is not None
    places = sequences.places
    assert places is not None and places.place_count == sequences.prompts.numel() + sequences.completions.numel()
    return places.place_count if padding or places.kept is None else len(places.kept)


@given(groups=st.lists(LENGTHS, min_size=1, max_size=4), budget=st.integers(1, 300), padding=st.booleans())
def test_a_cut_holds_every_sample_once_within_the_budget(groups: list[list[int]], budget: int, padding: bool) -> None:
    samples = [s for index, lengths in enumerate(groups) for s in samples_with(lengths, f"g{index}")]
    cuts = cut(samples, budget, padding=padding)
    assert sorted(s.sample.name for part in cuts for s in part) == sorted(s.sample.name for s in samples)
    assert all(len(part) == 1 or tokens_fed(part, padding) <= budget for part in cuts)


def test_groups_stay_together_the_longest_first() -> None:
    samples = [s for index, lengths in enumerate([[3, 9], [8, 8], [2, 30]]) for s in samples_with(lengths, f"g{index}")]
    samples = samples[::2] + samples[1::2]
    (part,) = cut(samples, 10_000, padding=True)
    groups = [s.sample.group for s in part]
    assert groups[0] == "g2" and [groups[i] for i in (0, 2, 4)] == [groups[i] for i in (1, 3, 5)]
    assert len(set(groups)) == 3


def test_the_budget_is_used_to_the_last_token() -> None:
    samples = samples_with([5, 5, 5, 5])
    prompt = len(samples[0].sample.prompt_ids)
    assert [len(part) for part in cut(samples, prompt + 20, padding=True)] == [4]
    assert [len(part) for part in cut(samples, prompt + 19, padding=True)] == [3, 1]
    assert [len(part) for part in cut(samples, 1, padding=True)] == [1, 1, 1, 1]


def test_padding_counts_where_it_is_computed() -> None:
    samples = samples_with([2, 30])
    prompt = len(samples[0].sample.prompt_ids)
    assert [len(part) for part in cut(samples, prompt + 1 + 29, padding=False)] == [2]
    assert [len(part) for part in cut(samples, prompt + 29, padding=False)] == [1, 1]
    assert [len(part) for part in cut(samples, prompt + 2 * 29, padding=True)] == [1, 1]


@given(groups=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=12), min_size=1, max_size=4))
def test_each_used_token_is_predicted_by_what_comes_before_it(groups: list[list[int]]) -> None:
    samples = [s for index, lengths in enumerate(groups) for s in samples_with(lengths, f"g{index}", seed=index)]
    found = micro_batch(samples, torch.device("cpu"))
    sequences, places = found.sequences, found.sequences.places
    assert sequences.completions is not None and places is not None
    first, length = sequences.prompts.numel(), sequences.completions.shape[1]
    assert torch.equal(torch.cat(places.owners), sequences.owner)
    for sample, rows in zip(samples, found.rows.split([int(s.used.sum()) for s in samples]), strict=True):
        prompt, completion = sample.sample.prompt_ids.tolist(), sample.sample.completion_ids.tolist()
        for number, row in zip(np.flatnonzero(sample.used), rows.tolist(), strict=True):
            if row < first:
                owner, column = divmod(row, sequences.prompts.shape[1])
                before = sequences.prompts[owner, : column + 1]
            else:
                index, column = divmod(row - first, length)
                owner = sequences.owner[index]
                of_prompt = sequences.prompts[owner, : sequences.lengths[owner]]
                before = torch.cat([of_prompt, sequences.completions[index, : column + 1]])
            assert before.tolist() == prompt + completion[:number]
    longest = [bucket.shape[1] for bucket in places.completions]
    assert longest == sorted(longest, reverse=True)


def test_tokens_after_the_last_used_one_are_not_fed() -> None:
    sample, _ = samples_with([9, 9])
    used = np.zeros(9, bool)
    used[[0, 4]] = True
    some = replace(sample, selected=used, penalties=np.zeros(9, np.float32), in_kl=False)
    found = micro_batch([some], torch.device("cpu"))
    assert found.sequences.completions is not None and found.sequences.completions.shape == (1, 4)
    assert found.targets.tolist() == sample.sample.completion_ids[[0, 4]].tolist()
    nothing = micro_batch([replace(some, selected=np.eye(9, dtype=bool)[0])], torch.device("cpu")).sequences
    prompt = list(range(len(sample.sample.prompt_ids)))
    assert nothing.places is not None and nothing.places.kept is not None
    assert nothing.places.kept.tolist() == prompt, "the prompt predicts the first token"


def test_samples_are_the_groups_rows_with_their_advantages() -> None:
    group = tiny_group([1.0, 0.0, 1.0], [2, 4, 3], group_id="train/000003/001")
    first, second, third = teaching_samples([group], Config())
    assert [s.name for s in (first, second, third)] == [f"train/000003/001[{i}]" for i in range(3)]
    np.testing.assert_array_equal(second.completion_ids, group.completion_ids[2:6])
    np.testing.assert_array_equal(third.actor_logprobs, group.logprobs[6:])
    assert group.entropies is not None and first.entropies is not None
    np.testing.assert_array_equal(first.entropies, group.entropies[:2])
    got = [first.advantage, second.advantage, third.advantage]
    assert got == pytest.approx(reference_advantages.group_advantages([1, 0, 1], "std"))


@pytest.mark.parametrize("advantage", ["mean", "std"])
def test_a_truncated_sample_is_penalised_or_left_out_of_the_mean(advantage: Any) -> None:
    outcomes = [Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED]
    finishes = [Finish.STOP, Finish.STOP, Finish.LENGTH]
    group = tiny_group([1.0, 0.0, 0.0], [2, 2, 2], outcomes=outcomes, finishes=finishes)
    shaped = RewardConfig(truncated=-0.5, advantage=advantage)

    trained = Config(reward=shaped)
    assert judge_of(trained)(group).rewards.tolist() == [1.0, 0.0, -0.5]
    expected = reference_advantages.group_advantages([1.0, 0.0, -0.5], advantage)
    assert [s.advantage for s in teaching_samples([group], trained)] == pytest.approx(expected)

    dropped = Config(reward=shaped, verifier=VerifierConfig(on_truncated="drop"))
    kept = teaching_samples([group], dropped)
    assert [s.name[-3:] for s in kept] == ["[0]", "[1]"]
    assert [s.advantage for s in kept] == pytest.approx(reference_advantages.group_advantages([1.0, 0.0], advantage))


MASKING = Config(verifier=VerifierConfig(on_truncated="mask"), loss=LossConfig(kl_beta=0.1))


def test_a_masked_sample_is_in_the_mean_and_in_no_loss() -> None:
    """DAPO: two right, two wrong and four cut off are eight completions, of which four are trained on."""
    scores = [1.0] * 2 + [0.0] * 6
    outcomes = [Outcome.CORRECT] * 2 + [Outcome.WRONG] * 2 + [Outcome.TRUNCATED] * 4
    group = tiny_group(scores, [3] * 8, outcomes=outcomes)
    samples = teaching_samples([group], MASKING)
    assert [s.advantage for s in samples] == pytest.approx(reference_advantages.group_advantages(scores, "std")[:4])
    assert [round(s.advantage, 2) for s in samples] == [1.73, 1.73, -0.58, -0.58]
    batch = step_batch(samples, 0, MASKING)
    assert (batch.response_tokens, batch.samples[0].weight) == (12, pytest.approx(1 / 12))


def test_a_masked_sample_may_make_its_group_teach_but_not_alone() -> None:
    finished, cut_off = [Outcome.CORRECT, Outcome.TRUNCATED], [Outcome.TRUNCATED, Outcome.TRUNCATED]
    group = tiny_group([1.0, 0.0], [2, 3], group_id="a", outcomes=finished)
    assert [s.name for s in teaching_samples([group], MASKING)] == ["a[0]"]
    alike = tiny_group([0.0, 0.0], [2, 3], group_id="b", outcomes=cut_off)
    assert not teaches(alike, MASKING) and idle_samples([alike], MASKING) == []
    shaped = Config(
        verifier=VerifierConfig(on_truncated="mask"), reward=RewardConfig(shaped_groups="train", length=-1.0)
    )
    assert not teaches(alike, shaped), "rewards differ, but there is nothing to train on"


def test_groups_of_equal_scores_are_idle_despite_their_shaped_rewards() -> None:
    finishes = [Finish.STOP, Finish.LENGTH]
    equal = tiny_group([0.0, 0.0], [2, 3], group_id="equal", finishes=finishes)
    alive = tiny_group([0.0, 1.0], [2, 3], group_id="alive")
    timed_out = [Outcome.TIMEOUT, Outcome.CORRECT]
    alone = tiny_group([0.0, 1.0], [2, 3], group_id="alone", outcomes=timed_out)
    config = Config(reward=RewardConfig(truncated=-1.0))
    assert [teaches(group, config) for group in (equal, alive, alone)] == [False, True, False]
    names = [s.name for s in teaching_samples([equal, alive, alone], config)]
    assert names == ["alive[0]", "alive[1]"]


def test_an_outcome_that_says_stop_stops_and_names_the_sample() -> None:
    outcomes = [Outcome.CORRECT, Outcome.ERROR]
    group = tiny_group([1.0, 0.0], [2, 2], group_id="train/000007/002", outcomes=outcomes)
    with pytest.raises(match=r"sample 1 of group train/000007/002 is 'error' and verifier\.on_error"):
        Admission.of(Config().verifier, Config().reward)(group)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [1 / 10, 1 / 20, 1 / 5]),
        ("gspo", [1 / 10, 1 / 20, 1 / 5]),
        ("dapo", [1 / 15] * 3),
        ("cispo", [1 / 15] * 3),
        ("dr_grpo", [1 / 100] * 3),
    ],
)
def test_weights_count_masked_tokens_and_idle_samples(kind: str, expected: list[float]) -> None:
    fraction = 1.0 if kind == "gspo" else 0.2
    loss = LossConfig(kind=kind, entropy_fraction=fraction)  # pyright: ignore[reportArgumentType]
    config = Config(loss=loss, rollout=RolloutConfig(max_new_tokens=20))
    idle = idle_samples([tiny_group([1.0, 1.0], [3, 5], group_id="equal")], config)
    batch = step_batch(teaching_samples([tiny_group([1.0, 0.0, 0.0], [2, 4, 1])], config), 1, config, idle)
    assert [s.weight for s in batch.samples] == pytest.approx(expected)
    assert sum(int(s.selected.sum()) for s in batch.samples) == math.ceil(fraction * 7)
    assert (batch.response_tokens, batch.idle, batch.sampled) == (7, (), 2)


def test_idle_samples_are_kept_completions_without_an_advantage() -> None:
    """Shaped rewards may differ where scores do not; the group teaches nothing all the same."""
    outcomes, finishes = [Outcome.WRONG, Outcome.TIMEOUT, Outcome.WRONG], [Finish.STOP, Finish.STOP, Finish.LENGTH]
    equal = tiny_group([0.0] * 3, [2, 3, 4], group_id="equal", outcomes=outcomes, finishes=finishes)
    alive = tiny_group([0.0, 1.0], [2, 3], group_id="alive")
    nothing = tiny_group([0.0] * 2, [1, 1], group_id="none", outcomes=[Outcome.TIMEOUT] * 2)
    config = Config(reward=RewardConfig(truncated=-1.0), loss=LossConfig(kl_beta=0.1))
    idle = idle_samples([equal, alive, nothing], config)
    assert [(s.name, s.advantage) for s in idle] == [("equal[0]", 0.0), ("equal[2]", 0.0)]
    batch = step_batch(teaching_samples([equal, alive, nothing], config), 2, config, idle)
    assert [s.sample.name for s in batch.used] == ["alive[0]", "alive[1]", "equal[0]", "equal[2]"]
    assert not any(s.selected.any() or s.penalties.any() for s in batch.idle) and all(s.used.all() for s in batch.used)
    assert all(s.weight == pytest.approx(1 / 11) for s in batch.used)


def test_of_the_groups_that_teach_nothing_the_last_are_not_replaced() -> None:
    flags = [False, True, False, True, False]
    groups = [tiny_group([1.0, 0.0 if t else 1.0], [1, 1], group_id=str(i)) for i, t in enumerate(flags)]
    for rounds, names in ((0, ["0", "2", "4"]), (1, ["4"])):
        config = Config(rollout=RolloutConfig(replacement_rounds=rounds))
        assert [s.group for s in idle_samples(groups, config)][::2] == names


def test_replaced_groups_count_in_the_log_only(checkpoint: Path) -> None:
    """Three were ordered, and in two rounds the three that did not teach were replaced."""
    flags = [False, True, False, True, False, True]
    groups = [tiny_group([1.0, 0.0 if t else 1.0], [1, 1], group_id=str(i)) for i, t in enumerate(flags)]
    batch = batch_of(groups, tiny_policy(checkpoint), Config(rollout=RolloutConfig(replacement_rounds=2)))
    assert (batch.idle_groups, batch.replaced, batch.sampled) == (3, 3, 3)


@given(flags=st.lists(st.booleans(), min_size=400, max_size=400), first=st.integers(1, 40), rounds=st.integers(0, 4))
def test_the_first_order_is_found_again_from_what_came_of_it(flags: list[bool], first: int, rounds: int) -> None:
    """As the plan orders: each round as many as still do not teach."""
    total = first
    for _ in range(rounds):
        total += first - sum(flags[:total])
    assert first_ordered(flags[:total], rounds) == first


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_the_mask_runs_over_the_samples_of_the_whole_step(fraction: float) -> None:
    config = Config(loss=LossConfig(entropy_fraction=fraction))
    groups = [tiny_group([1.0, 0.0], [3, 5], group_id=f"g{i}", seed=i) for i in range(4)]
    samples = teaching_samples(groups, config)
    batch = step_batch(samples, 2, config)
    entropies = [s.entropies.tolist() for s in samples if s.entropies is not None]
    assert [s.selected.tolist() for s in batch.samples] == reference.top_tokens(entropies, fraction)
    assert (batch.idle_groups, batch.response_tokens) == (2, 32)


def test_a_full_mask_needs_no_entropies_and_a_step_may_teach_nothing() -> None:
    blind = teaching_samples([tiny_group([1.0, 0.0], [2, 3], entropies=False)], Config())
    assert all(s.selected.all() for s in step_batch(blind, 0, Config()).samples)
    for fraction in (0.2, 1.0):
        empty = step_batch([], 5, Config(loss=LossConfig(entropy_fraction=fraction)))
        assert (empty.samples, empty.idle_groups, empty.response_tokens) == ((), 5, 0)


def test_a_mask_without_entropies_is_refused() -> None:
    blind = teaching_samples([tiny_group([1.0, 0.0], [2, 3], entropies=False)], Config())
    seeing = teaching_samples([tiny_group([1.0, 0.0], [2, 3])], Config())
    with pytest.raises(ValueError, match="shorter"):
        step_batch([*blind, *seeing], 0, Config(loss=LossConfig(entropy_fraction=0.2)))


def test_outcomes_are_counted_with_zeros() -> None:
    outcomes = [Outcome.CORRECT, Outcome.TIMEOUT, Outcome.CORRECT]
    counts = outcome_counts([tiny_group([1.0, 0.0, 1.0], [1, 1, 1], outcomes=outcomes)])
    assert (counts[Outcome.CORRECT], counts[Outcome.TIMEOUT], counts[Outcome.WRONG]) == (2, 1, 0)
    assert set(counts) == set(Outcome)
