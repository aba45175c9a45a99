"""Makes `shared/embedded/model/` from nothing.

    python -m benchmarks.embedded.make_model [--out DIR] [--steps N] [--seed N] [--held-out N]

    tokenizer -> random Qwen2 weights -> `steps` AdamW steps on fresh corpus texts -> files -> accuracy report

A step takes one micro-batch of each level (rows of one level are about equally long, so little is padding) and
minimises the weighted mean

    loss = sum_t w_t (-log p(token_t | tokens_<t)) / sum_t w_t,    w = 1 on the solution and its end, 0.1 on the prompt

The policy will have its decoder linears in NF4, which costs a model this small some accuracy. So the last steps run
forward with the NF4 values of the weights and pass the gradient straight through to the weights themselves.

The same seed and steps give the same bytes on the same CPU: threads and BLAS mode are pinned. Left out on purpose:
mixed precision, data files, resuming; a step takes about 0.3 s on two idle cores.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.embedded.accuracy import Grade, chat_prompt, decoder_linears, grade, nf4_values, to_nf4_values
from benchmarks.embedded.chat_tokenizer import MAX_LENGTH, PAD_ID, TURN_END, TURN_END_ID, VOCAB_SIZE, train_tokenizer
from benchmarks.embedded.corpus import Example, draw_example
from learner.tasks.word_problems import LEVELS, problems
from shared.embedded import EMBEDDED_DIR
from shared.process.determinism import cpu_environment, pin_torch

_NUM_THREADS = 2
_ROWS_PER_LEVEL = 24
_PEAK_LR = 3e-3
_WARMUP_SHARE = 0.04
_QUANTISED_SHARE = 0.3
_PROMPT_WEIGHT = 0.1
_MAX_GRAD_NORM = 1.0
_LOG_EVERY = 100
_NUM_HELD_OUT = 600


class Nf4StraightThrough(nn.Module):
    """Forward: the weight's NF4 values. Backward: the identity."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (nf4_values(weight.detach()) - weight.detach())


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.embedded.make_model", description="Make the embedded model.")
    parser.add_argument("--out", type=Path, default=EMBEDDED_DIR, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2400, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, texts and tokenizer (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=_NUM_HELD_OUT, help="problems to report on, 0 for no report")
    args = parser.parse_args()
    _pin_environment()
    make_model(args.out, num_steps=args.steps, seed=args.seed)
    if args.held_out:
        report(args.out, num_problems=args.held_out)


def _pin_environment() -> None:
    """Start over where the variables that decide the last bit of a sum are not in place before torch."""
    pinned = cpu_environment(_NUM_THREADS, "portable")
    if not pinned.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.embedded.make_model", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **pinned})


def make_model(out: Path, *, num_steps: int, seed: int) -> None:
    pin_torch(_NUM_THREADS)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)
    model = Qwen2ForCausalLM(_architecture())
    pretrain(model, tokenizer, num_steps=num_steps, seed=seed)
    save(model, tokenizer, out)


def _architecture() -> Qwen2Config:
    """About 0.85 M parameters; heads of 32, the smallest that vLLM's kernels take."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, *, num_steps: int, seed: int) -> None:
    """Warm up, decay to zero on a cosine, and finish on the NF4 values."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    num_warmup = max(1, round(num_steps * _WARMUP_SHARE))
    first_quantised = round(num_steps * (1 - _QUANTISED_SHARE))
    began = time.perf_counter()
    for step in range(num_steps):
        if step == first_quantised:
            _quantise_forward(model)
        _set_lr(optimizer, step, num_warmup, num_steps)
        loss = _train_step(model, tokenizer, optimizer, rng)
        if step % _LOG_EVERY == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss:.4f} after {time.perf_counter() - began:.0f} s", flush=True)
    for linear in decoder_linears(model):
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


def _quantise_forward(model: Qwen2ForCausalLM) -> None:
    for linear in decoder_linears(model):
        parametrize.register_parametrization(linear, "weight", Nf4StraightThrough(), unsafe=True)


def _set_lr(optimizer: torch.optim.Optimizer, step: int, num_warmup: int, num_steps: int) -> None:
    warmup = min(1.0, (step + 1) / num_warmup)
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / num_steps)).item())
    for group in optimizer.param_groups:
        group["lr"] = _PEAK_LR * warmup * cosine


def _train_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, optimizer: torch.optim.Optimizer, rng: random.Random
) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    with parametrize.cached():
        for level in LEVELS:
            examples = [draw_example(rng, level) for _ in range(_ROWS_PER_LEVEL)]
            part = _weighted_loss(model, *_to_batch(tokenizer, examples)) / len(LEVELS)
            part.backward(retain_graph=level != LEVELS[-1])
            loss += part.item()
    nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    return loss


def _to_batch(tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """`[N, T]` token ids, right-padded, and `[N, T]` loss weights, 0 on padding."""
    prompts = tokenizer([chat_prompt(tokenizer, example.question) for example in examples])["input_ids"]
    solutions = tokenizer([example.solution + TURN_END for example in examples])["input_ids"]
    num_tokens = max(len(prompt) + len(solution) for prompt, solution in zip(prompts, solutions, strict=True))
    ids_NT = torch.full((len(examples), num_tokens), PAD_ID)
    weights_NT = torch.zeros(len(examples), num_tokens)
    for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
        end = len(prompt) + len(solution)
        ids_NT[row, :end] = torch.tensor(prompt + solution)
        weights_NT[row, : len(prompt)] = _PROMPT_WEIGHT
        weights_NT[row, len(prompt) : end] = 1.0
    return ids_NT, weights_NT


def _weighted_loss(model: Qwen2ForCausalLM, ids_NT: Tensor, weights_NT: Tensor) -> Tensor:
    """Next-token cross-entropy; causal attention keeps the right-hand padding out of it, so no mask is needed."""
    logits_NTV = model(input_ids=ids_NT[:, :-1], use_cache=False).logits
    losses_NT = nn.functional.cross_entropy(logits_NTV.transpose(1, 2), ids_NT[:, 1:], reduction="none")
    return (losses_NT * weights_NT[:, 1:]).sum() / weights_NT[:, 1:].sum()


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Each file appears in `out` whole, so that a reader of the old model never meets half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for path in sorted(Path(staging).iterdir()):
            path.chmod(0o644)  # safetensors writes for the owner alone
            os.replace(path, out / path.name)


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
