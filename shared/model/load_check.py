"""Whether a policy computes what its model's own class computes; a model of which it does not is refused at load.

    max |log pi(x_t | x_<t) - log pi_class(x_t | x_<t)| <= tolerance

`pi_class` is transformers' `forward` with its own plain attention, masks and head, over the modules and weights that
the policy holds, so nothing is in memory twice. Compared are both paths of this package, whole sequences and shared
prompts (shared/model/sequences.py); the actor compares its decode loop (actor/engines/hf_engine.py). Both processes
would share
a
mistake, so neither the canary nor the mismatch gate could see one.
Two rows of a few random tokens are enough (five CPU-seconds at half a billion parameters): sliding windows are made
narrower than that while they run, on both sides. What this leaves unchecked: rotary tables that change beyond a length
(`dynamic`, `longrope`), everything else that only length brings about, the fused attention kernels over long
sequences, and the weights themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shared.model.architecture import UNFIT, first_line, unsupported
from shared.model.sequences import Sequences

if TYPE_CHECKING:
    from shared.model.policy import Policy

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Nats. bf16 keeps 8 bits, and two orders of the same sums may differ by a tenth in an improbable token's log-prob."""
WINDOW = 4
PROMPTS, ANSWER, OWNER = (2, 5), 3, (1, 0)
"""Tokens of each prompt, of each answer, and which prompt each answers."""


@contextmanager
def checking(policy: "Policy", path: str) -> Iterator[None]:
    """Windows are narrow; what the model's code cannot do becomes a sentence."""
    windowed = [part for part in (policy.lm.config, *policy.lm.modules()) if is_wide(part)]
    before = [part.sliding_window for part in windowed]
    try:
        for part in windowed:
            part.sliding_window = WINDOW
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        reason = f"its code cannot run over {path} ({type(error).__name__}: {first_line(error)})"
        raise unsupported(policy.config.model_type, reason) from error
    finally:
        for part, window in zip(windowed, before, strict=True):
            part.sliding_window = window


def is_wide(part: Any) -> bool:
    """It has a window, and one that is to be narrowed."""
    window = getattr(part, "sliding_window", None)
    return type(window) is int and window > WINDOW


def class_logprobs(policy: "Policy", ids: torch.Tensor) -> torch.Tensor:
    """[B, T] whole rows -> [B, T - 1] fp32 log-probs of all tokens but the first, by the model's own class."""
    config = policy.lm.config
    ours = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        logits = policy.lm(input_ids=ids, use_cache=False).logits
    finally:
        config._attn_implementation = ours
    return torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)


def refuse_difference(policy: "Policy", found: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    """The two sides' log-probs of the same tokens."""
    worst = float((found - expected).abs().max())
    if not worst <= TOLERANCE[policy.dtype]:
        reason = (
            f"over {path} log-probs differ from those of transformers' own {type(policy.lm).__name__} by up to"
            f" {worst:.2g} nats, allowed are {TOLERANCE[policy.dtype]:g}"
        )
        raise unsupported(policy.config.model_type, reason)


def check_paths(policy: "Policy") -> None:
    """Whole sequences, then the same with shared prompts."""
    prompts, answers = sample_ids(len(policy.head), policy.device)
    lengths, owner = (torch.tensor(values, device=policy.device) for values in (PROMPTS, OWNER))
    rows = whole_rows([torch.cat([prompts[o], answer]) for o, answer in zip(OWNER, answers, strict=True)])
    with checking(policy, "whole sequences"):
        expected = class_logprobs(policy, rows)
        none = Sequences(prompts=rows, lengths=lengths[owner] + ANSWER, completions=None, owner=owner[:0])
        hidden = policy.hidden(none).unflatten(0, rows.shape)[:, :-1]
        found = logprobs_of(policy, hidden.flatten(0, 1), rows[:, 1:].flatten()).view(expected.shape)
        refuse_difference(policy, found, expected, "whole sequences")
    with checking(policy, "shared prompts"):
        shared = Sequences(prompts=whole_rows(prompts), lengths=lengths, completions=torch.stack(answers), owner=owner)
        width = max(PROMPTS)
        before, after = policy.hidden(shared).split([len(PROMPTS) * width, len(OWNER) * ANSWER])
        last = before.unflatten(0, (-1, width))[owner, lengths[owner] - 1]
        hidden = torch.cat([last[:, None], after.unflatten(0, (-1, ANSWER))[:, :-1]], dim=1)
        found = logprobs_of(policy, hidden.flatten(0, 1), torch.cat(answers)).view(len(OWNER), ANSWER)
        of_answers = [expected[row, PROMPTS[o] - 1 :][:ANSWER] for row, o in enumerate(OWNER)]
        refuse_difference(policy, found, torch.stack(of_answers), "shared prompts")


def logprobs_of(policy: "Policy", hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n, H], [n] -> [n]"""
    return policy.stats(hidden, targets, temperature=1.0, rows=len(targets)).logprobs


def sample_ids(vocab: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random prompts and answers, the same for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    lengths = (*PROMPTS, *(ANSWER for _ in OWNER))
    drawn = [torch.randint(0, vocab, (length,), generator=generator).to(device) for length in lengths]
    return drawn[: len(PROMPTS)], drawn[len(PROMPTS) :]


def whole_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """[B, T] right-padded."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
