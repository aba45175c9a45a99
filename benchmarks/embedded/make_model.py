"""Makes `shared/embedded/model/` from nothing.

    python -m benchmarks.embedded.make_model [--out DIR] [--steps N] [--seed N] [--held-out N]

    tokenizer -> random Qwen2 weights -> `steps` AdamW steps on fresh corpus texts -> files -> accuracy report

In the loss (pretraining.py) the solution and its end weigh 1, the prompt 0.1.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.embedded.accuracy import Grade, chat_prompt, grade, to_nf4_values
from benchmarks.embedded.chat_tokenizer import TURN_END, train_tokenizer
from benchmarks.embedded.corpus import Example, draw_example
from benchmarks.embedded.pretraining import Draw, Text, make, pin_environment
from learner.tasks.word_problems import LEVELS, problems
from shared.embedded import EMBEDDED_DIR

_ROWS_PER_LEVEL = 24
_PROMPT_WEIGHT = 0.1
_NUM_HELD_OUT = 600


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.embedded.make_model", description="Make the embedded model.")
    parser.add_argument("--out", type=Path, default=EMBEDDED_DIR, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2400, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, texts and tokenizer (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=_NUM_HELD_OUT, help="problems to report on, 0 for no report")
    args = parser.parse_args()
    pin_environment("benchmarks.embedded.make_model")
    tokenizer = train_tokenizer(args.seed)
    make(args.out, tokenizer, solutions(tokenizer), num_steps=args.steps, seed=args.seed)
    if args.held_out:
        report(args.out, num_problems=args.held_out)


def solutions(tokenizer: PreTrainedTokenizerBase) -> Draw:
    """Problems with their solutions, a micro-batch of each level."""

    def draw(rng: random.Random) -> Sequence[Sequence[Text]]:
        drawn = [[draw_example(rng, level) for _ in range(_ROWS_PER_LEVEL)] for level in LEVELS]
        return [to_texts(tokenizer, examples) for examples in drawn]

    return draw


def to_texts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[Text]:
    prompts = tokenizer([chat_prompt(tokenizer, example.question) for example in examples])["input_ids"]
    written = tokenizer([example.solution + TURN_END for example in examples])["input_ids"]
    return [
        Text(ids=[*prompt, *solution], weights=[_PROMPT_WEIGHT] * len(prompt) + [1.0] * len(solution))
        for prompt, solution in zip(prompts, written, strict=True)
    ]


def report(folder: Path, *, num_problems: int) -> None:
    """Print held-out accuracy a level, greedy and sampled, in fp32 and with NF4 values."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    held_out = problems("held_out", num_problems, seed=1, levels=LEVELS)
    for name in ("fp32", "nf4"):
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model = to_nf4_values(model) if name == "nf4" else model
        for sample in (False, True):
            grades = grade(model, tokenizer, held_out, sample=sample)
            print(f"{name} {'sampled' if sample else 'greedy'}: {_summary(grades)}", flush=True)


def _summary(grades: list[Grade]) -> str:
    parts = [f"{_accuracy(grades):.3f} of n={len(grades)}"]
    for level in LEVELS:
        of_level = [graded for graded in grades if graded.problem.level == level]
        prompt = sum(graded.num_prompt_tokens for graded in of_level) / len(of_level)
        completion = sum(graded.num_tokens for graded in of_level) / len(of_level)
        parts.append(f"level {level} {_accuracy(of_level):.3f} ({prompt:.0f}+{completion:.0f} tokens)")
    return ", ".join(parts)


def _accuracy(grades: list[Grade]) -> float:
    return sum(graded.correct for graded in grades) / len(grades)


if __name__ == "__main__":
    main()
