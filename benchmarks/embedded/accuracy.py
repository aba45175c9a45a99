"""How often the embedded model is right, in fp32 or with the weights it has after NF4.

The policy keeps its decoder linears in NF4 (blocks of 64, double quantisation) and leaves embedding and head alone;
`to_nf4_values` writes those values into a model, so that what is measured is what will be trained on.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from benchmarks.embedded.chat_tokenizer import PAD_ID
from learner.tasks.word_problems import Problem
from shared.model.layers.nf4 import quantize

_MAX_NEW_TOKENS = 56
_BATCH_SIZE = 128
_ANSWER = re.compile(r"^#### (\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Grade:
    """One completion of one problem."""

    problem: Problem
    """What was asked."""
    completion: str
    """What the model wrote, without the end-of-turn token."""
    num_prompt_tokens: int
    """Length of the prompt with the chat template around it."""
    num_tokens: int
    """Length of the completion, its end-of-turn token included."""
    correct: bool
    """Whether it ends in the right answer."""


def nf4_values(weight: Tensor) -> Tensor:
    return quantize(weight).dequantize(weight.dtype)


@torch.no_grad()
def to_nf4_values(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    for linear in decoder_linears(model):
        linear.weight.copy_(nf4_values(linear.weight))
    return model


def decoder_linears(model: Qwen2ForCausalLM) -> list[nn.Linear]:
    """Every linear inside the decoder layers; the tied head is outside of them."""
    return [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]


def grade(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    sample: bool,
    seed: int = 0,
) -> list[Grade]:
    """One completion a problem: greedy, or sampled from the unmodified distribution (T=1)."""
    torch.manual_seed(seed)
    grades: list[Grade] = []
    for start in range(0, len(problems), _BATCH_SIZE):
        grades += _grade_batch(model, tokenizer, problems[start : start + _BATCH_SIZE], sample=sample)
    return grades


def _grade_batch(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], *, sample: bool
) -> list[Grade]:
    texts = [chat_prompt(tokenizer, problem.question) for problem in problems]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    generator: Any = model  # its class does not satisfy the protocol that types `generate`
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    sequences = generator.generate(**prompts, **choice, max_new_tokens=_MAX_NEW_TOKENS)
    completions = sequences[:, prompts["input_ids"].shape[1] :]
    lengths = (completions != PAD_ID).sum(1)
    return [
        Grade(
            problem=problem,
            completion=text,
            num_prompt_tokens=int(prompt_length),
            num_tokens=int(length),
            correct=stated_answer(text) == problem.answer,
        )
        for problem, text, prompt_length, length in zip(
            problems,
            tokenizer.batch_decode(completions, skip_special_tokens=True),
            prompts["attention_mask"].sum(1),
            lengths,
            strict=True,
        )
    ]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def stated_answer(completion: str) -> int | None:
    """The n of the last `#### n` line."""
    stated = _ANSWER.findall(completion)
    return int(stated[-1]) if stated else None
