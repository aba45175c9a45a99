"""On-policy distillation on real NF4, against float64: the teacher's log-probs, the gradient, and what it estimates."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.scoring.teacher import RemoteTeacher
from learner.objective.batch import Sample
from learner.objective.loss import TokenBatch, policy_loss
from learner.orders.plan import judge_of
from learner.tasks.tasks import Task, load_tasks, told_prompts
from learner.update.teacher import Teacher, TeacherFacts
from learner.wiring import build_trainer
from protocol.messages import FilledOrder, Group
from shared.config.data import TasksConfig
from shared.config.load import resolve
from shared.config.tree import BatchConfig, Config, LossConfig, OptimizerConfig, RolloutConfig, TeacherConfig
from shared.embedded import EMBEDDED_DIR
from shared.errors import ConfigError, DataError
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from shared.model.prompt import load_prompter
from tests.support.dense_truth import Truth
from tests.support.fakes import CHECK, filled, shake, tiny_group, tiny_policy, toy_orders, toy_policy
from tests.support.steps import collected_of, gradients
from tests.support.teacher_server import TeacherServer, logprobs_of
from tests.support.wire_examples import timings

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURE = 0.8
CAP = 1.2
BUDGETS = (1, 45, 10_000)
TOLERANCE = 1e-5


def config_for(budget: int = 45, **loss: Any) -> Config:
    return Config(
        loss=LossConfig(kind="opd", importance_cap=CAP, **loss),
        teacher=TeacherConfig(prompt="x"),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_new_tokens=16),
        optimizer=OptimizerConfig(max_grad_norm=1e9),
        batch=BatchConfig(token_budget=budget, head_rows=5),
    )


def step_groups() -> list[Group]:
    """One in which all scores are equal: with a teacher it teaches like any other."""
    return [
        tiny_group([1.0, 0.0, 0.0], [3, 12, 7], group_id="a", seed=1),
        tiny_group([1.0, 1.0], [4, 5], group_id="equal", seed=2),
    ]


def word(token: int) -> str:
    """How a token is spelled, where there is no tokenizer."""
    return "".join(chr(ord("a") + int(digit)) for digit in f"{token:03d}")


def told(groups: Sequence[Group]) -> dict[bytes, np.ndarray]:
    """Another prompt for each, longer and of another length."""
    prompts = [np.arange(5 + 3 * place, dtype=np.int32) for place in range(len(groups))]
    return {group.prompt_ids.tobytes(): prompt for group, prompt in zip(groups, prompts, strict=True)}


def order_of(groups: Sequence[Group]) -> FilledOrder:
    return FilledOrder(
        order_id="train/000000/u0000",
        policy_version=3,
        adapter_sha256="a" * 64,
        groups=tuple(groups),
        timings=timings(),
    )


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint, dequantize="each_call")


def facts_of(policy: Policy, groups: Sequence[Group], *, adapter: bool) -> TeacherFacts:
    shake(policy, 8)
    return TeacherFacts(prompts=told(groups), adapter=adapter_bytes(policy.adapter) if adapter else b"")


@pytest.mark.parametrize("own_adapter", [True, False])
def test_the_gradient_is_that_of_the_formula_for_any_cut(checkpoint: Path, policy: Policy, own_adapter: bool) -> None:
    """L = - sum w c r (log pi_T - log pi). The teacher is the dense model with its own adapter, or with the one that
    the run began with, on its own prompt."""
    groups = step_groups()
    facts = facts_of(policy, groups, adapter=own_adapter)
    teacher = Truth(checkpoint, policy, TEMPERATURE) if own_adapter else None
    shake(policy, 1)
    student = Truth(checkpoint, policy, TEMPERATURE)
    teacher = teacher or student
    loss, length = torch.zeros((), dtype=torch.float64), sum(sum(group.lengths) for group in groups)
    for judged in map(judge_of(config_for()), groups):
        for sample in samples_in(judged.group):
            asked = replace(sample, prompt_ids=facts.prompts[sample.prompt_ids.tobytes()])
            logprobs = student.logprobs(sample)
            gain = teacher.logprobs(asked).detach() - logprobs.detach()
            weight = (logprobs.detach() - torch.from_numpy(sample.actor_logprobs).double()).exp().clamp(max=CAP)
            loss = loss - (weight * gain * (logprobs - logprobs.detach()).exp()).sum() / length
    expected = dict(zip(student.leaves, torch.autograd.grad(loss, list(student.leaves.values())), strict=True))
    for budget in BUDGETS:
        shake(policy, 1)
        trainer = build_trainer(policy, config_for(budget), lambda: None, teacher=facts)
        batch = trainer.batches.build(0, collected_of([order_of(groups)], config_for(budget)))
        assert len(batch.samples) == 5 and batch.idle_groups == 0
        stats = trainer.update.apply(0, batch)
        assert stats.loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        found = gradients(policy)
        for name, wanted in expected.items():
            assert wanted.norm() > 0 and (found[name].double() - wanted).norm() <= TOLERANCE * wanted.norm(), name


def test_a_teacher_elsewhere_gives_the_gradient_of_the_same_teacher_here(policy: Policy) -> None:
    at_one = {"rollout": RolloutConfig(temperature=1.0, max_new_tokens=16)}
    plain = structs.replace(config_for(), **at_one)
    config = structs.replace(plain, teacher=TeacherConfig(url="http://127.0.0.1:9/v1"))
    groups = step_groups()
    shake(policy, 8)
    facts = TeacherFacts(prompts={}, adapter=adapter_bytes(policy.adapter))
    server = TeacherServer(logprobs_of(build_trainer(policy, config, lambda: None).batches.forward_pass), word)
    try:
        remote = RemoteTeacher(TeacherConfig(url=server.url), word, len(policy.head))
        taught = list(remote.read(tuple(groups), lambda phase: None))
    finally:
        server.close()
    assert all(group.teacher is not None for group in taught)
    found: list[dict[str, torch.Tensor]] = []
    for given, told_by in ((groups, facts), (taught, None)):
        shake(policy, 1)
        trainer = build_trainer(policy, config if told_by is None else plain, lambda: None, teacher=told_by)
        batch = trainer.batches.build(0, collected_of([order_of(given)], plain))
        assert all(one.sample.teacher_logprobs is not None for one in batch.samples)
        trainer.update.apply(0, batch)
        found.append({name: gradient.double() for name, gradient in gradients(policy).items()})
    here, elsewhere = found
    for name, wanted in here.items():
        assert wanted.norm() > 0 and (elsewhere[name] - wanted).norm() <= TOLERANCE * wanted.norm(), name


def samples_in(group: Group) -> list[Sample]:
    cuts = np.cumsum(group.lengths)[:-1]
    pairs = zip(np.split(group.completion_ids, cuts), np.split(group.logprobs, cuts), strict=True)
    return [
        Sample(
            name=f"{group.group_id}[{index}]",
            prompt_ids=group.prompt_ids,
            completion_ids=ids,
            actor_logprobs=logprobs,
            entropies=None,
            trained=np.ones(len(ids), bool),
            advantage=0.0,
        )
        for index, (ids, logprobs) in enumerate(pairs)
    ]


def test_over_the_sampler_the_gradient_is_that_of_the_reverse_kl() -> None:
    """One token, its whole distribution: sum over o of pi(o) times the gradient of its loss is the gradient of
    KL(pi || pi_T)."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(11, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.log_softmax(torch.randn(11, generator=generator, dtype=torch.float64), dim=0)
    logprobs = torch.log_softmax(logits, dim=0)
    probabilities = logprobs.detach().exp()
    terms = policy_loss(
        TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            actor_logprobs=logprobs.detach(),
            teacher_logprobs=teacher,
            advantages=torch.zeros(11),
            weights=probabilities,
            sample=torch.zeros(11, dtype=torch.int64),
            counts=torch.tensor([11]),
        ),
        LossConfig(kind="opd"),
    )
    kl = (torch.log_softmax(logits, dim=0).exp() * (torch.log_softmax(logits, dim=0) - teacher)).sum()
    (ours,), (wanted,) = torch.autograd.grad(terms.loss, logits), torch.autograd.grad(kl, logits)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    # The loss itself, at ratio one, is that KL too.
    assert float(terms.loss.detach()) == pytest.approx(float(kl.detach()), rel=1e-12)


def test_a_later_pass_is_clipped_by_the_teachers_side() -> None:
    """Where the teacher finds a token more likely, a ratio above the range has no gradient, and the other way round."""
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    old = torch.full((4,), -2.0, dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    terms = policy_loss(
        TokenBatch(
            logprobs=logprobs,
            old_logprobs=old,
            actor_logprobs=old,
            teacher_logprobs=torch.tensor([-1.0, -3.0, -1.0, -3.0], dtype=torch.float64),
            advantages=torch.zeros(4),
            weights=torch.ones(4),
            sample=torch.zeros(4, dtype=torch.int64),
            counts=torch.tensor([4]),
        ),
        LossConfig(kind="opd"),
    )
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    assert found.tolist() == pytest.approx([0.0, math.exp(0.5), -math.exp(-0.5), 0.0])
    assert terms.clipped.tolist() == [True, False, False, True]


def test_the_teacher_stays_what_it_was_and_the_policy_is_given_back(policy: Policy) -> None:
    groups = step_groups()
    samples = [sample for group in groups for sample in samples_in(group)]
    facts = facts_of(policy, groups, adapter=False)
    teacher = Teacher(build_trainer(policy, config_for(), lambda: None).batches.forward_pass, facts)

    def said() -> list[list[float]]:
        found = (sample.teacher_logprobs for sample in teacher.read(samples))
        return [row.tolist() for row in found if row is not None]

    before = said()
    shake(policy, 2)
    now = adapter_bytes(policy.adapter)
    assert said() == before and len(before) == len(samples)
    assert adapter_bytes(policy.adapter) == now


def test_only_the_teacher_is_told(checkpoint: Path) -> None:
    prompter = load_prompter(EMBEDDED_DIR)
    config = TasksConfig(limit=4, few_shot=1, system_prompt="Add.", max_prompt_tokens=512)
    tasks = load_tasks(config, prompter, "gsm8k").train
    prompts = told_prompts(tasks, "It is {answer}. {x y}", config, prompter, "gsm8k")
    for task in tasks:
        student, teacher = (
            prompter.as_the_model_sees(ids.tolist()) for ids in (task.prompt_ids, prompts[task.prompt_ids.tobytes()])
        )
        added = f"\nIt is {task.columns['answer']}. {{x y}}"
        assert f"Add.{added}" in teacher and teacher.replace(added, "") == student
    twice = (*tasks, Task(prompt_ids=tasks[0].prompt_ids, columns=tasks[0].columns | {"answer": "other"}))
    again = told_prompts(twice, "It is {answer}. {x y}", config, prompter, "gsm8k")
    assert all(np.array_equal(again[key], prompt) for key, prompt in prompts.items())
    with pytest.raises(DataError, match=r"names the column \{hint\}, which a task lacks; it has question, answer"):
        told_prompts(tasks, "{hint}", config, prompter, "gsm8k")


def test_a_distillation_needs_a_teacher_and_nothing_else_has_one() -> None:
    with pytest.raises(ConfigError, match=r"teacher\.prompt and teacher\.adapter are empty"):
        resolve({"loss": {"kind": "opd"}})
    with pytest.raises(ConfigError, match=r"\[teacher\] is set but loss\.kind = 'dapo' has no teacher"):
        resolve({"teacher": {"prompt": "x"}})


def test_an_order_for_a_teacher_is_refused_without_what_it_said() -> None:
    ((order,), sampled_from) = toy_orders(), toy_policy(0)
    answer = filled(order, sampled_from)
    assert CHECK.fault(order, sampled_from, answer) == ""
    asked = structs.replace(order, teacher=True)
    assert "came without the log-probs of the teacher" in CHECK.fault(asked, sampled_from, answer)
    said = np.full(len(answer.groups[0].logprobs), -1.0, np.float32)
    groups = tuple(structs.replace(group, teacher=said) for group in answer.groups)
    assert CHECK.fault(asked, sampled_from, structs.replace(answer, groups=groups)) == ""


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        ({"url": "http://there/v1", "prompt": "x"}, "teacher.url is another model"),
        ({"url": "there:8000"}, "expected http://host:port/v1"),
    ],
)
def test_a_teacher_elsewhere_is_one_alone(teacher: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"loss": {"kind": "opd"}, "teacher": teacher})
    url = {"url": "http://there/v1"}
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0\.7, but the server"):
        resolve({"loss": {"kind": "opd"}, "teacher": url, "rollout": {"temperature": 0.7}})
    with pytest.raises(ConfigError, match=r"\[teacher\] is set but"):
        resolve({"teacher": url})
    assert resolve({"loss": {"kind": "opd"}, "teacher": url}).teacher.url == "http://there/v1"
