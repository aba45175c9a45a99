"""The folders that `export` writes, in three forms, and their model card.

    peft        adapter_model.safetensors, adapter_config.json, tokenizer, chat template
    merged      a whole model as on the hub: weights, config.json, generation_config.json, tokenizer, chat template
    gguf-ready  merged, and config.json also has the older key names that llama.cpp's converter reads

The model card (README.md) contains only what the run itself knows: its configuration, its evaluations, and the
comparison of export and policy. It says so if something was not measured. Left out: the licence, which depends on the
base and the data; the person who publishes the model has to choose it.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from launch.export.weights import Deltas, merged_weights, write_weights
from learner.durable.find_adapter import ADAPTER_CONFIG
from learner.durable.state import ADAPTER
from learner.tasks.sources import is_file_name, local
from shared.base.cache import DIGESTS, CachedBase
from shared.base.gguf import is_gguf
from shared.config.data import TasksConfig
from shared.config.model import LoraConfig, ModelConfig
from shared.config.training import LossConfig, TeacherConfig
from shared.config.tree import Config
from shared.embedded import EMBEDDED
from shared.model.adapter_file import adapter_config
from shared.model.layers.nf4 import WEIGHTS
from shared.run.evaluation import Evaluation
from shared.run.run_dir import RunInfo

Form = Literal["peft", "merged", "gguf-ready"]
CONFIG = "config.json"
GENERATION = "generation_config.json"
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)( [\w.-]+)?")
"""The id of a data set, and its split."""
TABLE_ESCAPES = str.maketrans({"|": r"\|", "<": r"\<"})
"""A table of Markdown would end a cell at the one, and read the other as HTML."""


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """The policy that is exported."""

    base: CachedBase
    """The base as the run quantised it."""
    model: ModelConfig
    """How the run loaded it."""
    lora: LoraConfig
    """Rank, scale and targets of the adapter."""
    adapter: bytes
    """The adapter file of a checkpoint."""


def write_peft(out: Path, policy: TrainedPolicy, base: str) -> None:
    """An adapter that PEFT, vLLM and transformers load together with the base. base: what it calls the base."""
    (out / ADAPTER).write_bytes(policy.adapter)
    config: dict[str, Any] = json.loads(adapter_config(policy.lora, base))
    if not is_local(policy.model.path):
        config["revision"] = policy.model.revision
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
    copy_other_files(policy.base.folder, out, {CONFIG, GENERATION})


def write_merged(out: Path, policy: TrainedPolicy, form: Form, dtype: torch.dtype) -> None:
    """A model that needs no base."""
    base = policy.base.folder
    deltas = Deltas(policy.adapter, policy.lora.scale_of)
    write_weights(out, merged_weights(base, deltas, dtype))
    model: dict[str, Any] = json.loads((base / CONFIG).read_text())
    model.pop("quantization_config", None)
    model.pop("torch_dtype", None)
    model["dtype"] = str(dtype).removeprefix("torch.")
    if form == "gguf-ready":
        model |= older_keys(model)
    (out / CONFIG).write_text(json.dumps(model, indent=2))
    copy_other_files(base, out, {CONFIG})


def older_keys(model: dict[str, Any]) -> dict[str, Any]:
    """The keys that had the rotary angles before `rope_parameters`. A converter that does not find them stops, or
    takes rope_theta = 10000, and the converted model writes nonsense."""
    rope: dict[str, Any] = model.get("rope_parameters") or {}
    found: dict[str, Any] = {"torch_dtype": model["dtype"]}
    found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in rope.items() if key not in found}
    return found


def copy_other_files(base: Path, out: Path, left_out: set[str]) -> None:
    """Copies the tokenizer, the chat template and the other small files of the model."""
    for file in sorted(base.iterdir()):
        if file.is_file() and file.name not in {WEIGHTS, DIGESTS} | left_out:
            shutil.copy(file, out / file.name)


def is_local(path: str) -> bool:
    """Whether model.path is on this machine; if not, it is a hub id."""
    return path in EMBEDDED or is_gguf(path) or Path(path).is_dir()


def base_name(path: str) -> str:
    """The path or hub id by which other programs find the base."""
    if path in EMBEDDED:
        return str(EMBEDDED[path])
    return str(Path(path).resolve()) if is_local(path) else path


def short_name(path: str) -> str:
    """Without the folders above it, which are private."""
    return path.rstrip("/").rpartition("/")[2]


def public_base(path: str) -> str:
    """The hub id of the base, or the name of one of this machine."""
    return short_name(path) if is_local(path) else path


def public_source(source: str) -> str:
    """`openai/gsm8k test`: a hub id is named in full, a path without the folders above it."""
    found = HUB_ID.fullmatch(source)
    is_public = found and not is_file_name(found[1]) and not local(found[1]).exists()
    return source if is_public else short_name(source)


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the model card says."""

    form: Form
    """Form of the folder."""
    dtype: str
    """Number type of the weights, such as `bfloat16`."""
    config: Config
    """Of the run."""
    system: str | None
    """System message of every training task; None if they have different ones."""
    info: RunInfo
    """When and with which packages it was created."""
    step: int
    """Version of the policy."""
    adapter_sha256: str
    """Of the exported adapter."""
    base_digest: str
    """Of the quantised base."""
    evaluations: tuple[Evaluation, ...]
    """Of the base and of this adapter; empty if there are none."""
    agreement: str
    """How far the export differs from the policy, as a sentence."""


def model_card(facts: CardFacts) -> str:
    parts = [front_matter(facts), *description(facts), *usage(facts), *training(facts), *results(facts), *origin(facts)]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run trained."""

    words: str
    """As the title has it."""
    tags: tuple[str, ...]
    """As the hub has them."""


def method(loss: LossConfig) -> Method:
    if loss.kind == "sft":
        return Method(words="fine-tuned on written answers", tags=("sft",))
    if loss.kind == "opd":
        return Method(words="trained by on-policy distillation", tags=("distillation",))
    kind = loss.kind.replace("_", "-")
    return Method(words="trained by reinforcement learning", tags=(kind, "reinforcement-learning"))


def front_matter(facts: CardFacts) -> str:
    """Metadata for the search on the hub."""
    lines = ["---", "library_name: " + ("peft" if facts.form == "peft" else "transformers")]
    if not is_local(facts.config.model.path):
        lines += [f"base_model: {facts.config.model.path}"]
    tags = method(facts.config.loss).tags + (("lora",) if facts.form == "peft" else ())
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def description(facts: CardFacts) -> Iterator[str]:
    what = {
        "peft": "A LoRA adapter in PEFT's format",
        "merged": f"A whole model ({facts.dtype}), adapter merged in",
        "gguf-ready": f"A whole model ({facts.dtype}), adapter merged in, ready for llama.cpp's converter",
    }[facts.form]
    yield f"# {short_name(facts.config.model.path)}, {method(facts.config.loss).words}\n"
    yield f"{what}, after {facts.step} steps with Tandem. After writing, {facts.agreement}.\n"


def usage(facts: CardFacts) -> Iterator[str]:
    """The base of the adapter, how to load it, and how to convert a GGUF-ready export."""
    base = public_base(facts.config.model.path)
    nf4 = facts.config.model.quantization == "nf4"
    if facts.form == "peft" and is_gguf(base):
        yield f"The adapter was trained on the values of `{base}`{' in NF4' if nf4 else ''}. Programs that do not read"
        yield "such a file need the whole model: `export --as merged`.\n"
    elif facts.form == "peft" and nf4:
        yield f"The adapter was trained on `{base}` in NF4 (block 64, double quantisation). To load both:\n"
        yield "```python"
        yield "from peft import AutoPeftModelForCausalLM"
        yield "from transformers import BitsAndBytesConfig"
        yield ""
        yield ('nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)')
        yield 'model = AutoPeftModelForCausalLM.from_pretrained("THIS FOLDER", quantization_config=nf4)'
        yield "```\n"
        yield "It also runs on the unquantised base, but then the numbers below do not apply.\n"
    elif facts.form == "peft":
        yield f"The adapter was trained on `{base}` without quantisation.\n"
    elif nf4:
        yield f"The weights are those of `{base}`, quantised to NF4 and dequantised, plus the adapter.\n"
    if facts.form == "gguf-ready":
        yield "```\npython convert_hf_to_gguf.py THIS_FOLDER --outfile model.gguf --outtype bf16\n```\n"


def training(facts: CardFacts) -> Iterator[str]:
    config = facts.config
    yield "## Training\n"
    yield "| | |\n|---|---|"
    rows = {
        **(written_rows(facts) if config.is_warm_start else sampled_rows(facts)),
        "steps": f"{facts.step} of {config.run.steps}, seed {config.run.seed}",
        "LoRA": lora_row(config.lora),
        "optimizer": f"AdamW, lr {config.optimizer.lr:g} ({config.optimizer.schedule})",
        "system prompt": "in the data, differs by row" if facts.system is None else facts.system or "none",
    }
    yield from (f"| {name} | {cell(value)} |" for name, value in rows.items())


def sampled_rows(facts: CardFacts) -> dict[str, str]:
    """What a run learned from that sampled its completions."""
    config = facts.config
    rollout, loss = config.rollout, config.loss
    return {
        "objective": f"{loss.kind}, entropy fraction {loss.entropy_fraction:g}",
        **({"teacher": teacher_row(config.teacher)} if loss.kind == "opd" else {}),
        "tasks": tasks_row(config.tasks),
        "verifier": config.verifier.kind,
        "a step": f"{rollout.prompts} prompts x {rollout.group} completions"
        f" of at most {rollout.max_new_tokens} tokens, temperature {rollout.temperature:g}",
    }


def written_rows(facts: CardFacts) -> dict[str, str]:
    """What a warm start learned from."""
    config = facts.config
    tasks = tasks_row(config.tasks)
    return {
        "objective": "likelihood of written answers",
        "answers": public_source(config.sft.source) if config.sft.source else f"the solutions of {tasks}",
        "a step": f"{config.rollout.prompts} answers of at most {config.rollout.max_new_tokens} tokens",
        "held-out tasks": f"{tasks}, verifier {config.verifier.kind}",
    }


def tasks_row(tasks: TasksConfig) -> str:
    return public_source(" ".join(filter(None, (tasks.source, tasks.split))))


def teacher_row(teacher: TeacherConfig) -> str:
    """Neither its address nor its prompt, which may be private."""
    if teacher.url:
        return short_name(teacher.model) or "a model behind a server"
    parts = (
        f"with the adapter {short_name(teacher.adapter)}" if teacher.adapter else "",
        "with a prompt of its own" if teacher.prompt else "",
    )
    return f"the base {' and '.join(filter(None, parts))}"


def cell(text: str) -> str:
    return "<br>".join(text.strip().translate(TABLE_ESCAPES).splitlines())


def lora_row(lora: LoraConfig) -> str:
    """Where it started is named without the folders above it, which are private."""
    ranks = [f"{target} {rank}" for target, rank in lora.ranks.items()]
    scale = f"alpha {lora.alpha:g}{' over the square root of the rank' if lora.rslora else ''}"
    parts = [f"rank {lora.rank}", *ranks, scale, f"on {', '.join(lora.targets)}"]
    return ", ".join([*parts, f"started from {short_name(lora.start_from)}"] if lora.start_from else parts)


def results(facts: CardFacts) -> Iterator[str]:
    yield "\n## Held-out accuracy\n"
    if not facts.evaluations:
        yield "Not measured for this adapter. `python -m launch eval` measures it.\n"
        return
    yield "| policy | decoding | accuracy | 95 % interval | n | cap | seed |\n|---|---|---:|---:|---:|---:|---:|"
    for found in facts.evaluations:
        policy = "base" if found.version == 0 else f"after {found.version} steps"
        for name, way in found.ways().items():
            interval = f"[{way.low:.1%}, {way.high:.1%}]"
            yield f"| {policy} | {name} | {way.accuracy:.1%} | {interval} | {found.n} | {way.cap} | {found.seed} |"
    newest = facts.evaluations[-1]
    tasks = f"the test set ({public_source(newest.source)})" if newest.of_test_set else "the run's held-out tasks"
    yield f"\nMeasured on {tasks} with the run's verifier. Nothing else was measured.\n"


def origin(facts: CardFacts) -> Iterator[str]:
    packages = ", ".join(f"{name} {version}" for name, version in facts.info.packages.items())
    yield "## Origin\n"
    yield f"- adapter sha256 `{facts.adapter_sha256}`"
    yield f"- base, as quantised, sha256 `{facts.base_digest}`"
    yield f"- run `{facts.info.run_id}`, started {facts.info.created}, {packages}"
