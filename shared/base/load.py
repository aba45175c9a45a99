"""Load a policy from the cached base, and refuse one that does not compute what its model's own class computes.

    max |log pi(x_t | x_<t) - log pi_class(x_t | x_<t)| <= tolerance

Loading: the model is built without weights and then filled from the base, so a large model is never held twice. On a
CPU the dequantised weights are views of a mapped file, of which all processes share one copy. Base, activations and
their products have the compute type, fp32 or bf16; adapter, gradients, optimizer, log-softmax and loss are always fp32.

Checking: `pi_class` is transformers' `forward` with its own plain attention, masks and head, over the modules and
weights that the policy has, so nothing is in memory twice. Both paths of this package are compared: whole sequences
and shared prompts (shared/model/layers/sequences.py). The actor compares its decode loop too
(actor/engines/hf_engine.py).
Both processes would make the same mistake, so neither the canary nor the mismatch gate could find one.

Two rows of a few random tokens are enough. During the check, on both sides, the adapter is random, because B = 0 would
hide what is wrong about it, and sliding windows are narrower than the rows. At half a billion parameters a check takes
two to three seconds, so a base that has passed is marked beside its cached folder, and later loads skip the check. The
mark covers everything that a result depends on: the base's digest, the versions of the libraries, the source code, the
device, the kind of product and the adapter's layers. A base that fails gets no mark.

Not checked: rotary tables that change beyond a length (`dynamic`, `longrope`) and all else that only length brings
about, the fused attention kernels over long sequences, and the weights themselves.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from shared.base.architecture import (
    UNFIT,
    decoder_linears,
    empty_model,
    logit_form,
    read_architecture,
    unsupported,
)
from shared.base.cache import CachedBase, dense_base
from shared.config.model import CACHE_DIR_KEY, LoraConfig, ModelConfig
from shared.errors import ModelError, in_words
from shared.model.layers.linears import check_targets
from shared.model.layers.lora import PAIR, Adapter, DenseMatmul, DequantizingMatmul, FrozenLinear, LoraLinear
from shared.model.layers.nf4 import WEIGHTS, from_tensors
from shared.model.layers.sequences import Places, Sequences
from shared.model.layers.trained_layers import trained_layers
from shared.model.policy import Policy
from shared.run.files import write_whole
from shared.tensor_file import map_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Nats. bf16 keeps 8 bits, and two orders of summation may change the log-prob of an improbable token by a tenth."""
WINDOW = 4
PROMPTS, COMPLETION, OWNER = (2, 5), 3, (1, 0)
"""Tokens of each prompt, tokens of a completion, and the prompt that each completion belongs to."""
MODEL_CODE = Path(__file__).parents[1] / "model"
OWN_CODE = (Path(__file__).parent, *(MODEL_CODE / name for name in (".", "layers", "kernels", "compiled")))
"""Folders whose code computes a forward pass."""
LIBRARIES = ("torch", "transformers", "bitsandbytes", "safetensors")
"""Packages whose code takes part in a forward pass."""

log = logging.getLogger("policy")


def pick_device(device: str, card: int = 0) -> torch.device:
    """card: its number. It becomes the current one of this process, on which kernels of other libraries start."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("compute.device is 'cuda' but PyTorch sees no card; use compute.device=cpu or fix the driver.")
    if card >= torch.cuda.device_count():
        raise ModelError(
            f"Card {card} was asked for, but PyTorch sees {torch.cuda.device_count()} cards, from number 0 on; set"
            " compute.learner_card and compute.actor_card."
        )
    torch.cuda.set_device(card)
    return torch.device("cuda", card)


def pick_dtype(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


Place = Callable[[Mapping[str, torch.Tensor], torch.dtype], dict[str, torch.Tensor]]
"""From the tensors of a file, mapped on the host, to those that are loaded."""


def load_policy(
    base: CachedBase,
    model: ModelConfig,
    lora: LoraConfig,
    device: torch.device,
    dtype: torch.dtype,
    place: Place | None = None,
) -> Policy:
    """Fill an empty model from the cached base and put the adapter in. place: where several processes use one base."""
    config = read_architecture(base.folder)
    lm = empty_model(config)
    once = model.dequantize == "once" or (model.dequantize == "auto" and device.type == "cpu")
    log.info(linears_sentence(lm, tensor_names(base)))
    file = (dense_base(base, dtype) if once else base).folder / WEIGHTS
    tensors = map_file(file).tensors if once or place else load_file(file)
    if place:
        tensors = place(tensors, dtype)
    policy = filled_policy(lm, tensors, lora, device, dtype, base.digest)
    check_once(policy, base, "training", lambda: check_paths(policy))
    return policy


def filled_policy(
    lm: Any, tensors: dict[str, torch.Tensor], lora: LoraConfig, device: torch.device, dtype: torch.dtype, digest: str
) -> Policy:
    """From an empty model and its tensors by name, as the cached base has them."""
    adapter = Adapter(replace_linears(lm, tensors, lora, device, dtype))
    fill_rest(lm, tensors, device, dtype)
    adapter_to(adapter, device)
    backbone = getattr(lm, lm.base_model_prefix)
    return Policy(
        backbone=backbone,
        head=lm.get_output_embeddings().weight.detach(),
        adapter=adapter,
        device=device,
        dtype=dtype,
        base_digest=digest,
        config=lm.config,
        lm=lm,
        form=logit_form(lm),
        layers=trained_layers(backbone),
    )


def tensor_names(base: CachedBase) -> set[str]:
    with safe_open(base.folder / WEIGHTS, framework="pt") as reader:
        return set(reader.keys())


def linears_sentence(lm: Any, names: Iterable[str]) -> str:
    """How many linears of the model are NF4, and which are not. The head does not count."""
    codes = {name.partition(".weight.")[0] for name in names if ".weight.quant_state" in name}
    head = lm.get_output_embeddings()
    linears = {name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    dense = Counter(name.rpartition(".")[2] for name in linears - codes)
    named = ", ".join(f"{count} {name}" for name, count in sorted(dense.items()))
    return f"{len(linears & codes)} linears are NF4 and {dense.total()} are left dense{f': {named}' if named else ''}"


def replace_linears(
    lm: Any, tensors: dict[str, torch.Tensor], lora: LoraConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, LoraLinear]:
    """Replace every decoder linear by a frozen one, with an adapter if lora.targets names it."""
    layers: dict[str, LoraLinear] = {}
    linears = decoder_linears(lm)
    for name, linear in linears.items():
        if f"{name}.weight" not in tensors:
            raise missing(lm, f"{name}.weight")
        frozen = frozen_linear(name, tensors, device, dtype)
        parent, _, child = name.rpartition(".")
        if child in lora.targets:
            shape = (linear.out_features, linear.in_features)
            frozen = layers[name] = LoraLinear(frozen, shape, lora.rank_of(name), lora.scale_of(name))
        setattr(lm.get_submodule(parent), child, frozen)
    check_targets(lora.targets, linears)
    return layers


def frozen_linear(
    name: str, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> FrozenLinear:
    weight_name, bias = f"{name}.weight", tensors.get(f"{name}.bias")
    if tensors[weight_name].dtype == torch.uint8:
        matmul = DequantizingMatmul(from_tensors(weight_name, tensors, device))
    else:
        matmul = DenseMatmul(tensors[weight_name].to(device, dtype))
    return FrozenLinear(matmul, None if bias is None else bias.to(device, dtype))


def fill_rest(lm: Any, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Fill embeddings, norms and head (which may be tied) from the model's files, and move buffers to the device."""
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    rest = [name for name, value in lm.named_parameters() if value.is_meta and not name.endswith(PAIR)]
    for name in rest:
        if name not in tensors:
            raise missing(lm, name)
        parent, _, child = name.rpartition(".")
        value = nn.Parameter(tensors[name].to(device, dtype), requires_grad=False)
        setattr(lm.get_submodule(parent), child, value)
    if tied:
        head.weight = embedding.weight
    stored = lm.state_dict().keys()
    for prefix, module in lm.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            name = f"{prefix}.{key}"
            value = tensors[name].to(buffer.dtype) if name in stored and name in tensors else buffer
            module.register_buffer(key, value.to(device), persistent=False)


def missing(lm: Any, name: str) -> ModelError:
    reason = f"transformers' class needs a tensor '{name}', but the model's files have none of that name"
    return unsupported(lm.config.model_type, reason)


def adapter_to(adapter: Adapter, device: torch.device) -> None:
    for layer in adapter.layers.values():
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.data.to(device), layer.lora_B.data.to(device)


def check_once(
    policy: Policy, base: CachedBase, path: str, check: Callable[[], None], code: Sequence[Path] = ()
) -> None:
    """Run a check unless this base has passed it before. `path` names what is checked; `code` are folders whose source
    takes part in it, beside this one."""
    facts = check_facts(policy, path, (*OWN_CODE, *code))
    key = hashlib.sha256(facts).hexdigest()[:16]
    # Outside the base's own folder, whose files are exactly those that were written with it.
    mark = base.folder.with_name(f"{base.folder.name}.passed-{key}.json")
    if mark.is_file():
        return
    check()
    # A mark that a power cut takes costs one more check.
    write_whole(mark, facts, durable=False, place=CACHE_DIR_KEY)


def check_facts(policy: Policy, path: str, folders: Iterable[Path]) -> bytes:
    """Everything that the result of a check depends on, as JSON."""
    sources = hashlib.sha256()
    for file in (file for folder in folders for file in sorted([*folder.glob("*.py"), *folder.glob("*.[ch]")])):
        sources.update(file.name.encode() + b"\0" + file.read_bytes())
    linears = (module for module in policy.backbone.modules() if isinstance(module, FrozenLinear))
    facts = {
        "path": path,
        "base": policy.base_digest,
        "versions": {name: version(name) for name in LIBRARIES},
        "code": sources.hexdigest(),
        "device": policy.device.type,
        "dtype": str(policy.dtype),
        "products": sorted({type(linear.matmul).__name__ for linear in linears}),
        "kernels": policy.kernels.names(),
        "adapter": sorted(policy.adapter.layers),
    }
    return json.dumps(facts, indent=2).encode()


@contextmanager
def checking(policy: Policy, path: str) -> Iterator[None]:
    """Inside the block the adapter is random and windows are narrow; an error of the model's code becomes a
    ModelError."""
    windowed = [part for part in (policy.lm.config, *policy.lm.modules()) if is_wide(part)]
    before = [part.sliding_window for part in windowed]
    try:
        for part in windowed:
            part.sliding_window = WINDOW
        with torch.no_grad(), policy.adapter.drawn():
            yield
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        reason = f"its code cannot run over {path} ({in_words(error)})"
        raise unsupported(policy.config.model_type, reason) from error
    finally:
        for part, window in zip(windowed, before, strict=True):
            part.sliding_window = window


def is_wide(part: Any) -> bool:
    window = getattr(part, "sliding_window", None)
    return type(window) is int and window > WINDOW


def class_logprobs(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """[B, T] whole rows -> [B, T - 1] fp32 log-probs of all tokens but the first, by the model's own class."""
    config = policy.lm.config
    ours = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        logits = policy.lm(input_ids=ids, use_cache=False).logits
    finally:
        config._attn_implementation = ours
    return torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)


def refuse_difference(policy: Policy, found: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    """ModelError if the log-probs of the two sides differ by more than the tolerance."""
    worst = float((found - expected).abs().max())
    if not worst <= TOLERANCE[policy.dtype]:
        reason = (
            f"over {path} log-probs differ from those of transformers' own {type(policy.lm).__name__} by up to"
            f" {worst:.2g} nats; at most {TOLERANCE[policy.dtype]:g} are allowed"
        )
        raise unsupported(policy.config.model_type, reason)


def check_paths(policy: Policy) -> None:
    prompts, completions = sample_ids(len(policy.head), policy.device)
    lengths, owner = (torch.tensor(values, device=policy.device) for values in (PROMPTS, OWNER))
    rows = whole_rows([torch.cat([prompts[o], completion]) for o, completion in zip(OWNER, completions, strict=True)])
    with checking(policy, "whole sequences"):
        expected = class_logprobs(policy, rows)
        none = Sequences(prompts=rows, lengths=lengths[owner] + COMPLETION, completions=None, owner=owner[:0])
        hidden = policy.hidden(none).unflatten(0, rows.shape)[:, :-1]
        found = logprobs_of(policy, hidden.flatten(0, 1), rows[:, 1:].flatten()).view(expected.shape)
        refuse_difference(policy, found, expected, "whole sequences")
    with checking(policy, "shared prompts"):
        width, on_device = max(PROMPTS), partial(torch.tensor, device=policy.device)
        shared = Sequences(
            prompts=whole_rows(prompts),
            lengths=lengths,
            completions=torch.stack(completions),
            owner=owner,
            places=Places.of(PROMPTS, [COMPLETION] * len(OWNER), OWNER, on_device),
        )
        before, after = policy.hidden(shared).split([len(PROMPTS) * width, len(OWNER) * COMPLETION])
        last = before.unflatten(0, (-1, width))[owner, lengths[owner] - 1]
        hidden = torch.cat([last[:, None], after.unflatten(0, (-1, COMPLETION))[:, :-1]], dim=1)
        found = logprobs_of(policy, hidden.flatten(0, 1), torch.cat(completions)).view(len(OWNER), COMPLETION)
        of_completions = [expected[row, PROMPTS[o] - 1 :][:COMPLETION] for row, o in enumerate(OWNER)]
        refuse_difference(policy, found, torch.stack(of_completions), "shared prompts")


def logprobs_of(policy: Policy, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n, H], [n] -> [n]"""
    return policy.stats(hidden, targets, temperature=1.0, rows=len(targets)).logprobs


def sample_ids(vocab: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random prompts and completions, the same for every model with this vocabulary size."""
    generator = torch.Generator().manual_seed(0)
    lengths = (*PROMPTS, *(COMPLETION for _ in OWNER))
    drawn = [torch.randint(0, vocab, (length,), generator=generator).to(device) for length in lengths]
    return drawn[: len(PROMPTS)], drawn[len(PROMPTS) :]


def whole_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """[B, T] right-padded."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
