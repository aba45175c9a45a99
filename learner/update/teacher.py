"""Whom a distillation follows (loss.kind = "opd"): the same base, with another prompt, another adapter, or both.

    student   prompt                           -> completion, sampled by the policy
    teacher   prompt with teacher.prompt in it -> log pi_T of the same tokens, one pass without gradient

The teacher never changes: its adapter is teacher.adapter, or what the run began with. So its log-probs are a function
of checkpoint and journal like everything else of a step, and nothing of it is recorded: a resumed or replayed run
computes them again. They are taken at the temperature of the samples, as the policy's are.

A teacher's prompt is found by the student's tokens. Where a question is in the data twice, with two solutions, the
first one counts for both. A teacher that is another model is asked by the actors (actor/scoring/teacher.py): its
memory is elsewhere, and what it says is recorded.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from learner.objective.batch import Sample, at_sampled
from learner.update.forward_pass import ForwardPass, whole
from shared.model.adapter_file import read_adapter


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """What makes it another policy."""

    prompts: Mapping[bytes, np.ndarray]
    """Bytes of a prompt as the student has it -> [Tp] int32 as the teacher has it; empty if they are the same."""
    adapter: bytes
    """Its adapter file; empty for what the run began with."""

    @property
    def longest_prompt(self) -> int:
        return max((len(prompt) for prompt in self.prompts.values()), default=0)


class Teacher:
    """Reads what the policy has sampled. Build it while the policy is what the run began with."""

    def __init__(self, forward_pass: ForwardPass, facts: TeacherFacts) -> None:
        self.forward_pass = forward_pass
        self.prompts = facts.prompts
        adapter = forward_pass.policy.adapter
        self.adapter = adapter
        if facts.adapter:
            shapes = {name: value.shape for name, value in adapter.parameters().items()}
            self.values = {name: value.float() for name, value in read_adapter(facts.adapter, shapes).items()}
        else:
            self.values = adapter.values() if adapter.moved else {}

    def read(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same samples with its log-probs."""
        if not samples:
            return []
        shown = [whole(replace(sample, prompt_ids=self.prompt_of(sample))) for sample in samples]
        with self.as_policy():
            found = self.forward_pass.per_sample(shown, self.forward_pass.temperature)
        return [
            replace(sample, teacher_logprobs=at_sampled(sample, found[sample.name].cpu().numpy())) for sample in samples
        ]

    def prompt_of(self, sample: Sample) -> np.ndarray:
        return self.prompts[sample.prompt_ids.tobytes()] if self.prompts else sample.prompt_ids

    def as_policy(self) -> AbstractContextManager[None]:
        """Inside, the policy computes as the teacher."""
        return self.adapter.holding(self.values) if self.values else self.adapter.switched_off()
