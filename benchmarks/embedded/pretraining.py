"""Pretrains a model of 0.85 M parameters on texts that a corpus draws.

A step takes one micro-batch of each kind of text (rows of one kind are about equally long, so little is padding) and
minimises the mean over the kinds of

    loss = sum_t w_t (-log p(token_t | tokens_<t)) / sum_t w_t

with the weights that the corpus gives. The policy will have its decoder linears in NF4, which costs a model this small
some accuracy. So the last steps run forward with the NF4 values of the weights and pass the gradient straight through
to the weights themselves.

The same seed and steps give the same bytes on the same CPU: threads and BLAS mode are pinned. Left out on purpose:
mixed precision, data files, resuming; a step takes about 0.3 s on two idle cores.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.embedded.accuracy import decoder_linears, nf4_values
from benchmarks.embedded.chat_tokenizer import MAX_LENGTH, PAD_ID, TURN_END_ID, VOCAB_SIZE
from shared.process.determinism import cpu_environment, pin_torch

NUM_THREADS = 2
_PEAK_LR = 3e-3
_WARMUP_SHARE = 0.04
_QUANTISED_SHARE = 0.3
_MAX_GRAD_NORM = 1.0
_LOG_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row of a micro-batch."""

    ids: list[int]
    weights: list[float]
    """Of each token in the loss."""


Draw = Callable[[random.Random], Sequence[Sequence[Text]]]
"""The micro-batches of a step, one for each kind of text."""


class Nf4StraightThrough(nn.Module):
    """Forward: the weight's NF4 values. Backward: the identity."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (nf4_values(weight.detach()) - weight.detach())


def pin_environment(module: str) -> None:
    """Start over where the variables that decide the last bit of a sum are not in place before torch."""
    pinned = cpu_environment(NUM_THREADS, "portable")
    if not pinned.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **pinned})


def make(out: Path, tokenizer: Qwen2Tokenizer, draw: Draw, *, num_steps: int, seed: int) -> None:
    """Weights from nothing, and the files of the model."""
    pin_torch(NUM_THREADS)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(_architecture())
    pretrain(model, draw, num_steps=num_steps, seed=seed)
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


def pretrain(model: Qwen2ForCausalLM, draw: Draw, *, num_steps: int, seed: int) -> None:
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
        loss = _train_step(model, optimizer, draw(rng))
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
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Sequence[Text]]
) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    with parametrize.cached():
        for index, texts in enumerate(micro_batches):
            part = _weighted_loss(model, *_to_batch(texts)) / len(micro_batches)
            part.backward(retain_graph=index < len(micro_batches) - 1)
            loss += part.item()
    nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    return loss


def _to_batch(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """`[N, T]` token ids, right-padded, and `[N, T]` loss weights, 0 on padding."""
    num_tokens = max(len(text.ids) for text in texts)
    ids_NT = torch.full((len(texts), num_tokens), PAD_ID)
    weights_NT = torch.zeros(len(texts), num_tokens)
    for row, text in enumerate(texts):
        ids_NT[row, : len(text.ids)] = torch.tensor(text.ids)
        weights_NT[row, : len(text.ids)] = torch.tensor(text.weights)
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
