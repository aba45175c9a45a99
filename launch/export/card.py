"""README.md of an export: a model card of what the run itself knows, and of nothing else.

Every number comes from the run's config, its evaluations or the comparison that was just made. What nobody measured is
said to be unknown; the licence is left to whoever publishes, since it depends on the base and the data.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from launch.export.agreement import Agreement
from launch.export.folders import Form, is_folder
from shared.config.tree import Config
from shared.run.evaluation import Evaluation
from shared.run.run_dir import RunInfo


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that a card is made from."""

    form: Form
    """What is in the folder."""
    dtype: str
    """Of the weights."""
    config: Config
    """Of the run."""
    info: RunInfo
    """What it ran on."""
    step: int
    """Updates behind the policy."""
    adapter_sha256: str
    """Of the exported adapter."""
    base_digest: str
    """Of the quantised base."""
    evaluations: tuple[Evaluation, ...]
    """Of the base and of this very adapter, if they were made."""
    agreement: Agreement
    """Measured on the written files."""


def model_card(facts: Facts) -> str:
    """The document."""
    parts = [front_matter(facts), *description(facts), *usage(facts), *training(facts), *results(facts), *origin(facts)]
    return "\n".join(parts) + "\n"


def front_matter(facts: Facts) -> str:
    """For the hub's search; only what is certain."""
    lines = ["---", "library_name: " + ("peft" if facts.form == "peft" else "transformers")]
    if not is_folder(facts.config):
        lines += [f"base_model: {facts.config.model.path}"]
    lines += ["tags:", "- grpo", "- reinforcement-learning", *(["- lora"] if facts.form == "peft" else []), "---", ""]
    return "\n".join(lines)


def description(facts: Facts) -> Iterator[str]:
    """What this is."""
    what = {
        "peft": "A LoRA adapter in PEFT's format",
        "merged": f"A whole model ({facts.dtype}), adapter merged in",
        "gguf-ready": f"A whole model ({facts.dtype}), adapter merged in, ready for llama.cpp's converter",
    }[facts.form]
    yield f"# {short_name(facts.config)}, trained by reinforcement learning\n"
    yield f"{what}, after {facts.step} updates with Tandem. After writing, {facts.agreement.sentence()}.\n"


def short_name(config: Config) -> str:
    """Without the folders above it: they are nobody's business."""
    return config.model.path.rstrip("/").rpartition("/")[2]


def usage(facts: Facts) -> Iterator[str]:
    """The base the adapter belongs to, or how to convert."""
    base = facts.config.model.path if not is_folder(facts.config) else short_name(facts.config)
    nf4 = facts.config.model.quantization == "nf4"
    if facts.form == "peft" and nf4:
        yield f"The adapter was trained beside `{base}` in NF4 (block 64, double quantisation), which is:\n"
        yield "```python"
        yield "from peft import AutoPeftModelForCausalLM"
        yield "from transformers import BitsAndBytesConfig"
        yield ""
        yield ('nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)')
        yield 'model = AutoPeftModelForCausalLM.from_pretrained("THIS FOLDER", quantization_config=nf4)'
        yield "```\n"
        yield "Beside the unquantised base it runs too, with other numbers than those below.\n"
    elif facts.form == "peft":
        yield f"The adapter was trained beside `{base}` as it is, unquantised.\n"
    elif nf4:
        yield f"The weights are `{base}` after NF4 quantisation, dequantised, plus the adapter: what was trained.\n"
    if facts.form == "gguf-ready":
        yield "```\npython convert_hf_to_gguf.py THIS_FOLDER --outfile model.gguf --outtype bf16\n```\n"


def training(facts: Facts) -> Iterator[str]:
    """How it came to be."""
    config = facts.config
    yield "## Training\n"
    yield "| | |\n|---|---|"
    rows = {
        "objective": f"{config.loss.kind}, entropy fraction {config.loss.entropy_fraction:g}",
        "tasks": f"{config.tasks.source} ({config.tasks.split})",
        "verifier": config.verifier.kind,
        "a step": f"{config.rollout.prompts} prompts x {config.rollout.group} answers"
        f" of at most {config.rollout.max_new_tokens} tokens, temperature {config.rollout.temperature:g}",
        "updates": f"{facts.step} of {config.run.steps}, seed {config.run.seed}",
        "LoRA": f"rank {config.lora.rank}, alpha {config.lora.alpha:g}, on {', '.join(config.lora.targets)}",
        "optimizer": f"AdamW, lr {config.optimizer.lr:g} ({config.optimizer.schedule})",
        "system prompt": config.tasks.system_prompt or "none",
    }
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def results(facts: Facts) -> Iterator[str]:
    """Held-out accuracy of base and of this adapter, where they were measured."""
    yield "\n## Held-out accuracy\n"
    if not facts.evaluations:
        yield "Not measured for this adapter. `python -m launch eval` does it.\n"
        return
    yield "| policy | decoding | accuracy | 95 % interval | n | cap | seed |\n|---|---|---:|---:|---:|---:|---:|"
    for found in facts.evaluations:
        who = "base" if found.version == 0 else f"after {found.version} updates"
        for name, way in found.ways().items():
            interval = f"[{way.low:.1%}, {way.high:.1%}]"
            yield f"| {who} | {name} | {way.accuracy:.1%} | {interval} | {found.n} | {way.cap} | {found.seed} |"
    yield "\nOn the run's own held-out tasks, by its own verifier; nothing else was measured.\n"


def origin(facts: Facts) -> Iterator[str]:
    """What proves it."""
    packages = ", ".join(f"{name} {version}" for name, version in facts.info.packages.items())
    yield "## Origin\n"
    yield f"- adapter sha256 `{facts.adapter_sha256}`"
    yield f"- base, as quantised, sha256 `{facts.base_digest}`"
    yield f"- run `{facts.info.run_id}`, begun {facts.info.created}, {packages}"
