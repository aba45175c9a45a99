"""rollouts.jsonl: groups of each step in full, with what the learner and the actor knew of each token."""

import errno
import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.objective.batch import StepBatch
from learner.reports.rollout_log import RolloutLog
from learner.update.figures import StepResult
from protocol.messages import FilledOrder, Finish, Outcome
from shared.config.data import RewardConfig, VerifierConfig
from shared.config.processes import LogConfig
from shared.config.tree import BatchConfig, Config, LossConfig
from shared.model.policy import Policy
from shared.run.files import LineLog
from shared.run.rollouts import RolloutGroup, line_bytes, task_key, unpack_group
from tests.support.disk_faults import failing
from tests.support.fakes import spelled, spelled_words, tiny_group, tiny_policy
from tests.support.steps import collected_of, forward_pass_of, step_batch, teaching_samples, update_of, update_stats
from tests.support.wire_examples import timings

CONFIG = Config(
    loss=LossConfig(entropy_fraction=0.5),
    reward=RewardConfig(truncated=-0.25),
    verifier=VerifierConfig(on_timeout="drop"),
    log=LogConfig(rollouts_per_step=2),
)
TEACHING = tiny_group(
    [1.0, 0.0, 0.0],
    [2, 4, 3],
    group_id="train/000004/0000",
    outcomes=[Outcome.CORRECT, Outcome.WRONG, Outcome.TIMEOUT],
    finishes=[Finish.STOP, Finish.LENGTH, Finish.STOP],
)
SAME = tiny_group([1.0, 1.0], [1, 2], group_id="train/000004/0001", entropies=False)
THIRD = tiny_group([1.0, 0.0], [1, 2], group_id="train/000004/0002")


def filled_orders() -> list[FilledOrder]:
    return [
        FilledOrder(
            order_id=f"train/000004/u{index}",
            policy_version=4,
            adapter_sha256="a" * 64,
            groups=groups,
            timings=timings(),
        )
        for index, groups in enumerate([(TEACHING,), (SAME, THIRD)])
    ]


QUIET = StepResult()


def batch() -> StepBatch:
    return step_batch(teaching_samples([TEACHING, SAME, THIRD], CONFIG), 1, CONFIG)


def rows(path: Path) -> list[RolloutGroup]:
    found = [unpack_group(line) for line in path.read_bytes().splitlines()]
    assert None not in found
    return [group for group in found if group]


def logged(path: Path, config: Config = CONFIG, result: StepResult = QUIET) -> list[RolloutGroup]:
    log = RolloutLog(LineLog(path), config.log, spelled_words())
    log.log(4, collected_of(filled_orders(), config), batch(), result)
    return rows(path)


def test_the_first_groups_of_a_step_are_written_in_full(tmp_path: Path) -> None:
    first, second = logged(tmp_path / "rollouts.jsonl")
    assert (first.step, first.group_id, second.group_id) == (5, "train/000004/0000", "train/000004/0001")
    assert (first.prompt, first.answer, second.answer) == (spelled(TEACHING.prompt_ids.tolist()), "42", "42")
    assert (first.task, first.version, first.stale) == (task_key(TEACHING.prompt_ids, {"answer": "42"}), 4, 0)
    cuts = np.split(TEACHING.completion_ids, [2, 6])
    assert TEACHING.entropies is not None
    parts = np.split(TEACHING.entropies, [2, 6]), np.split(TEACHING.logprobs, [2, 6])
    for sample, ids, entropies, logprobs in zip(first.samples, cuts, *parts, strict=True):
        assert sample.ids == ids.tolist() and sample.text == spelled(ids.tolist())
        assert "".join(sample.pieces).split() == spelled(ids.tolist()).split()
        assert sample.entropy == pytest.approx(entropies, abs=5e-5)
        assert sample.logprob == pytest.approx(logprobs, abs=5e-5)
    assert first.lengths == (2, 4, 3)
    assert first.outcomes == tuple(sample.outcome for sample in first.samples) == ("correct", "wrong", "timeout")
    assert [sample.finish for sample in first.samples] == ["stop", "length", "stop"]
    assert first.rewards == tuple(sample.reward for sample in first.samples) == (1.0, -0.25, 0.0)
    assert first.samples[1].rewards == {"score": 0.0, "truncated": 1.0} or first.samples[1].rewards == {}
    assert [sample.kept for sample in first.samples] == [True, True, False]


def test_mask_and_advantage_are_those_of_the_batch(tmp_path: Path) -> None:
    first, second = logged(tmp_path / "rollouts.jsonl")
    made = {sample.sample.name: sample for sample in batch().samples}
    right, wrong = made["train/000004/0000[0]"], made["train/000004/0000[1]"]
    masks = [one.selected.astype(int).tolist() for one in (right, wrong)]
    assert [sample.mask for sample in first.samples] == [*masks, None]
    assert 0 < sum(map(sum, masks)) < sum(map(len, masks))
    assert first.advantages[:2] == pytest.approx((right.sample.advantage, wrong.sample.advantage), abs=1e-6)
    assert first.advantages[2] is None
    assert [(sample.mask, sample.entropy, sample.advantage) for sample in second.samples] == [(None, None, None)] * 2
    assert (first.fate, second.fate) == ("trained", "idle")
    shown = first.samples[1]
    assert shown.advantage is not None and shown.push() == [shown.advantage * mark for mark in shown.mask or ()]


def test_the_gap_is_what_the_learner_had_more(tmp_path: Path) -> None:
    """Only for the tokens whose log-prob the update needed."""
    used = batch().samples[1]
    learner = used.sample.actor_logprobs[used.used] + np.float32(0.25)
    stats = update_stats(logprobs={used.sample.name: learner})
    first, _ = logged(tmp_path / "rollouts.jsonl", result=StepResult(stats=stats))
    sample = first.samples[1]
    assert first.samples[0].gap is None and first.samples[0].ratio() == [None, None]
    assert [gap is not None for gap in sample.gap or ()] == used.used.tolist()
    assert [gap for gap in sample.mismatch() if gap is not None] == pytest.approx([0.25] * int(used.used.sum()))
    assert [one for one in sample.ratio() if one is not None] == pytest.approx([np.exp(0.25)] * int(used.used.sum()))
    assert [one for one in sample.learner() if one is not None] == pytest.approx(learner, abs=1e-4)


def test_answers_that_no_actor_wrote_have_the_learners_log_prob_and_no_ratio(tmp_path: Path) -> None:
    used = batch().samples[1]
    learner = -np.arange(1, used.used.sum() + 1, dtype=np.float32)
    stats = update_stats(logprobs={used.sample.name: learner})
    log = RolloutLog(LineLog(tmp_path / "rollouts.jsonl"), CONFIG.log, spelled_words(), sampled=False)
    log.log(4, collected_of(filled_orders(), CONFIG), batch(), StepResult(stats=stats))
    samples = rows(tmp_path / "rollouts.jsonl")[0].samples
    for sample in samples:
        assert sample.logprob == sample.ratio() == sample.mismatch() == [None] * len(sample.ids)
        assert sample.gap is None
    assert samples[0].written is None and set(samples[0].learner()) == {None}, "it was not in the update"
    assert [one is not None for one in samples[1].learner()] == used.used.tolist()
    assert [one for one in samples[1].likelihood() if one is not None] == learner.tolist()


@pytest.mark.parametrize("updates", [1, 2])
def test_an_update_tells_the_log_probs_it_began_with(updates: int, checkpoint: Path) -> None:
    config = Config(loss=LossConfig(entropy_fraction=0.5), batch=BatchConfig(updates=updates, token_budget=20))
    policy: Policy = tiny_policy(checkpoint)
    made = step_batch(teaching_samples([TEACHING, THIRD], config), 0, config)
    expected = forward_pass_of(policy, config).per_sample(made.samples, config.rollout.temperature)
    found = update_of(policy, config).apply(0, made).logprobs
    assert found.keys() == expected.keys()
    for name, logprobs in found.items():
        assert logprobs == pytest.approx(expected[name].numpy(), abs=1e-5)


def test_groups_of_a_refused_update_and_of_an_older_policy_say_so(tmp_path: Path) -> None:
    assert {one.fate for one in logged(tmp_path / "a.jsonl", result=StepResult(quarantined=3))} == {"quarantined"}
    old = [msgspec.structs.replace(order, policy_version=2) for order in filled_orders()]
    log = RolloutLog(LineLog(tmp_path / "b.jsonl"), CONFIG.log, spelled_words())
    log.log(4, collected_of(old, CONFIG), batch(), StepResult())
    assert [(one.version, one.stale) for one in rows(tmp_path / "b.jsonl")] == [(2, 2)] * 2


@pytest.mark.parametrize(("limit", "written"), [(0, 0), (1, 1), (3, 3), (9, 3)])
def test_as_many_as_the_config_says(limit: int, written: int, tmp_path: Path) -> None:
    config = Config(loss=CONFIG.loss, verifier=CONFIG.verifier, log=LogConfig(rollouts_per_step=limit))
    assert len(logged(tmp_path / "rollouts.jsonl", config)) == written


def test_the_file_has_a_mean_size_of_a_step_at_most_and_groups_of_late_steps(tmp_path: Path) -> None:
    path, kb = tmp_path / "rollouts.jsonl", 1
    log = RolloutLog(LineLog(path), LogConfig(rollouts_kb=kb), spelled_words())
    for step in range(40):
        log.log(step, collected_of(filled_orders(), CONFIG), batch(), StepResult())
        assert path.stat().st_size <= (step + 1) * kb * 1000
    steps = [row.step for row in rows(path)]
    assert path.stat().st_size > 38 * kb * 1000 and len(steps) < 40 * 3
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 2


def test_a_line_says_how_long_it_is(tmp_path: Path) -> None:
    logged(tmp_path / "rollouts.jsonl")
    lines = (tmp_path / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    assert [line_bytes(line[:20]) for line in lines] == [len(line) for line in lines]


def test_tasks_with_the_same_prompt_keep_their_own_answers(tmp_path: Path) -> None:
    collected = collected_of(filled_orders(), CONFIG)
    golds = [replace(task, columns={"answer": str(place)}) for place, task in enumerate(collected.tasks)]
    log = RolloutLog(LineLog(tmp_path / "rollouts.jsonl"), LogConfig(), spelled_words())
    log.log(4, replace(collected, tasks=tuple(golds)), batch(), QUIET)
    found = rows(tmp_path / "rollouts.jsonl")
    assert [group.answer for group in found] == ["0", "1", "2"] and len({group.task for group in found}) == 3


def test_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(LineLog(path), CONFIG.log, spelled_words())
    for step in range(4):
        log.log(step, collected_of(filled_orders(), CONFIG), batch(), StepResult())
    log.resume_at(3)
    assert [row.step for row in rows(path)] == [1, 1, 2, 2]
    log.log(2, collected_of(filled_orders(), CONFIG), batch(), StepResult())
    assert [row.step for row in rows(path)] == [1, 1, 2, 2, 3, 3]
    before = path.stat().st_ino
    log.resume_at(4)
    assert path.stat().st_ino == before, "with nothing to drop it is not written again"
    with path.open("ab") as file:
        file.write(b"\0" * 9 + b"\n")
    log = RolloutLog(LineLog(path), CONFIG.log, spelled_words())
    log.resume_at(4)
    assert [row.step for row in rows(path)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_a_run_that_ended_on_a_full_disk_drops_its_last_steps_without_room_for_a_copy(
    tmp_path: Path, refusal: int
) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(LineLog(path), CONFIG.log, spelled_words())
    for step in range(4):
        log.log(step, collected_of(filled_orders(), CONFIG), batch(), StepResult())
    whole = path.read_bytes()
    with failing("write", refusal):
        log.resume_at(3)
    assert [row.step for row in rows(path)] == [1, 1, 2, 2] and list(tmp_path.iterdir()) == [path]
    for step in (2, 3):
        log.log(step, collected_of(filled_orders(), CONFIG), batch(), StepResult())
    assert path.read_bytes() == whole
    with pytest.raises(OSError, match="No such device"), failing("write", errno.ENODEV):
        log.resume_at(3)
