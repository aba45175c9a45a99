"""From TOML, YAML, JSON and `--set` to a Config, or to one sentence: which key is wrong, and what is expected."""

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from protocol.limits import MAX_BODY_BYTES, MAX_INBOUND_BYTES, MAX_ITEMS
from shared.config.data import CurriculumConfig, VerifierConfig
from shared.config.environment import EnvironmentConfig, check_agent, check_functions, check_semantic_entropy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.named_rewards import check_verifier
from shared.config.other_names import INSTEAD, OTHER_NAMES
from shared.config.processes import (
    ActorConfig,
    ComputeConfig,
    EvalConfig,
    LinkConfig,
    check_parallel,
    check_servers,
)
from shared.config.training import check_advantage, check_objective, check_teacher
from shared.config.tree import Config, RolloutConfig
from shared.config.types import Section
from shared.config.yaml_file import yaml_tree
from shared.errors import ConfigError

Tree = dict[str, Any]
hints_of = cache(get_type_hints)  # Python evaluates annotations again in each call.

ONE_BASE = (
    "the base stays frozen in 4 bits and both processes share it; a rank of 256 on all targets comes close to full"
    " training (set lora.rank)."
)
REFUSED = {
    "lora.dropout": (
        "actor and learner would compute with different masks, so the log-probs of the same tokens would differ and"
        " their ratio would be noise; remove the key, and use optimizer.weight_decay or loss.kl_beta against"
        " overfitting."
    ),
    "lora.full_rank": ONE_BASE,
    "model.full_finetuning": ONE_BASE,
    "loss.kind = dpo": (
        "it learns from fixed pairs and samples nothing, so an actor would have nothing to do; warm up with `python -m"
        " launch sft`, then train with a reward, or use TRL's DPOTrainer and start from its adapter (lora.start_from)."
    ),
    "lora.targets = all-linear": (
        "all linear layers of a block have an adapter already; leave the key out, or list some of them, as in"
        ' ["q_proj", "v_proj"].'
    ),
}
"""Keys and values that other tools have, and why there are none here."""
MISSPELT, ALIKE = 0.85, 0.6
"""How close a name is to one that it is meant to be, and to one that it may be; 1 is equal."""
YAML_SUFFIXES = (".yaml", ".yml")
TCP = re.compile(r"tcp://[^\s/]+:([0-9]{1,5})")
TOKEN_BYTES = 13
"""Id, log-prob, entropy and mark of a token in a message, and in the journal that keeps it."""
TEACHER_BYTES = 4
"""What a teacher behind a URL adds."""
SAMPLE_BYTES = 128
"""Length, finish, outcome, score and a few rewards of a completion, with room to spare."""
ARRAYS_BYTES = 512
"""Id, names and alignment of a group, with room to spare."""


def read_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """A TOML or YAML file, with `section.key=value` overrides on top."""
    tree = read_yaml(path) if path.suffix.lower() in YAML_SUFFIXES else read_toml(path)
    for override in overrides:
        apply_override(tree, override)
    return resolve(tree)


def read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # wrong TOML, wrong UTF-8, or brackets without end
        raise ConfigError(f"{path} is not valid TOML: {error}; fix that line.") from error


def read_yaml(path: Path) -> Tree:
    try:
        return yaml_tree(read_text(path))
    except (ValueError, RecursionError) as error:  # wrong YAML, wrong UTF-8, or brackets without end
        raise ConfigError(f"{path} is not valid YAML: {error}; fix that line.") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); expected a file of settings that you may read."
        ) from error


def apply_override(tree: Tree, override: str) -> None:
    """Set one `section.key=value`. The value is read as TOML, or taken as text if it is not TOML."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) != 2:
        example = said_of(path.strip(), "") or ", for example optimizer.lr=3e-4."
        raise ConfigError(f"--set got '{override}', expected section.key=value{example}")
    try:
        override.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--set {path} got {text!r}, expected UTF-8; write it in UTF-8, or set it in a file."
        ) from error
    section = tree.setdefault(parts[0], {})
    if isinstance(section, dict):  # otherwise the file is wrong, and `resolve` refuses it
        section[parts[1]] = toml_value(text.strip())


def toml_value(text: str) -> Any:
    """`3e-4` -> float, `true` -> bool, `[1, 2]` -> list, anything else -> the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def resolve(tree: Mapping[str, Any]) -> Config:
    """Check every key, then every type and range."""
    refuse_unknown_keys(tree, Config, path="")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), tree)) from error
    check_together(config)
    return config


def refuse_unknown_keys(tree: Mapping[str, Any], section: type[Section], path: str) -> None:
    """Also refuses values where a section belongs, and numbers that are not finite."""
    hints = hints_of(section)
    for key, value in tree.items():
        if reason := REFUSED.get(f"{path}{key}") or REFUSED.get(f"{path}{key} = {value}"):
            raise ConfigError(f"{path}{key} = {value} is refused: {reason}")
        if key not in hints:
            raise ConfigError(unknown_key(key, value, hints, path))
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, Section):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"'{path}{key}' got {value!r}, expected a section: write [{key}] and its keys below it."
                )
            refuse_unknown_keys(value, kind, f"{path}{key}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}{key} = {value} is not allowed: expected a finite number.")


def unknown_key(key: str, value: Any, known: Iterable[str], path: str) -> str:
    """The sentence about it; if it is a section of another tool, about the first of its keys that is known. known: the
    keys at `path`."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=ALIKE)
    if near and difflib.SequenceMatcher(None, key, near[0]).ratio() >= MISSPELT:
        return f"Unknown key '{path}{key}'; did you mean '{path}{near[0]}'?"
    is_section = isinstance(value, Mapping) and not path
    for name, place in [(name, f"{key}.") for name in value] if is_section else [(key, path)]:
        if said := said_of(name, place):
            return f"Unknown key '{place}{name}'{said}"
    meant = f"did you mean '{path}{near[0]}'?" if near else f"expected one of {', '.join(known)}."
    return f"Unknown key '{path}{key}'; {meant}"


def said_of(key: str, path: str) -> str:
    """The end of a sentence about a name that other tools, or other sections, have; empty if none has it."""
    if answer := INSTEAD.get(f"{path}{key}") or INSTEAD.get(key):
        return f": {answer}."
    found = elsewhere(key)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def elsewhere(key: str) -> list[str]:
    """What other tools call so, and keys of this name in all sections."""
    sections = hints_of(Config).items()
    found = [f"{name}.{key}" for name, section in sections if key in section.__struct_fields__]
    return list(dict.fromkeys([*filter(None, [OTHER_NAMES.get(key)]), *found]))


def explain(message: str, tree: Mapping[str, Any]) -> str:
    """msgspec's sentence, with the path of the key and the value that was given."""
    what, _, where = message.partition(" - at `$.")
    keys = re.sub(r"\[.*?\]", "", where.rstrip("`")).split(".")
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else value
    return f"{'.'.join(keys)} = {json.dumps(value, default=str)} is not allowed: {what[0].lower()}{what[1:]}."


def check_together(config: Config) -> None:
    """Refuse keys that contradict each other."""
    check_verifier(config.verifier)
    if config.verifier.kind == "environment" and not config.environment.function:
        raise ConfigError(
            "verifier.kind is 'environment' but environment.function is empty; set it to path/to/file.py:Name, a class"
            " with `get_reward`."
        )
    if config.is_warm_start and config.environment.is_used:
        raise ConfigError("A warm start has written answers and no environment; give it a file without [environment].")
    check_functions(config.environment)
    if config.environment.is_agent:
        check_agent(config.environment, config.tasks, config.curriculum, config.teacher)
    if config.curriculum.kind == "sent":
        check_semantic_entropy(config.environment)
    check_objective(config.loss, config.constraint, config.reward)
    check_advantage(config.advantage, config.reward, config.verifier)
    check_teacher(config.loss, config.teacher, config.rollout.temperature)
    if config.rollout.group == 1 and not config.is_warm_start:
        raise ConfigError(
            "rollout.group = 1 is not allowed: expected >= 2, because the completions of a prompt are compared with"
            " each other; only a warm start (`python -m launch sft`) has one."
        )
    once = config.loss.passes == 1 and config.batch.updates == 1
    if config.constraint.beta > 0.0 and config.constraint.reference == "old" and once:
        raise ConfigError(
            "constraint.reference is 'old' but loss.passes is 1: in the first pass the policy is the old one and the"
            " term has no gradient; set loss.passes or batch.updates to 2 or more, or constraint.reference to 'base'."
        )
    if config.growth.max_prompts and config.batch.updates > 1:
        raise ConfigError(
            f"growth.max_prompts = {config.growth.max_prompts} measures the noise of a step's one gradient, but"
            f" with batch.updates = {config.batch.updates} a step has several; reset one of the two."
        )
    if 0 < config.growth.max_prompts < config.rollout.prompts:
        raise ConfigError(
            f"growth.max_prompts = {config.growth.max_prompts} is less than rollout.prompts = {config.rollout.prompts},"
            " the size of the first step; set it higher, or to 0 for steps that do not grow."
        )
    check_engine_options(config.actor, config.compute, config.model)
    check_ranks(config.lora, config.actor)
    check_servers(config.actor.engine, config.server.urls)
    check_parallel(config.compute, config.model, config.actor, config.constraint)
    check_curriculum(config.curriculum, config.loss.kl_beta)
    check_adapter_dtype(config.link, config.compute)
    token_bytes = TOKEN_BYTES + (TEACHER_BYTES if config.teacher.url else 0)
    check_orders(config.rollout, config.most_prompts, config.tasks.max_prompt_tokens, token_bytes)
    check_evaluation(config.eval, config.rollout.max_new_tokens, config.tasks.max_prompt_tokens)
    if config.reward.length and config.reward.length_free >= config.rollout.max_new_tokens:
        raise ConfigError(
            f"reward.length_free = {config.reward.length_free} is not below rollout.max_new_tokens ="
            f" {config.rollout.max_new_tokens}, so reward.length would never count; set it lower, or remove both."
        )
    check_link(config.link)


def check_curriculum(curriculum: CurriculumConfig, kl_beta: float) -> None:
    if curriculum.needs_stages and not curriculum.has_stages:
        raise ConfigError(
            f"curriculum.ewc and curriculum.kl_to = 'stage' need stages, but curriculum.kind = '{curriculum.kind}'"
            " has no stages; set it to 'levels' or 'sent'."
        )
    if curriculum.kl_to != "base" and kl_beta == 0.0:
        raise ConfigError(
            f"curriculum.kl_to = '{curriculum.kl_to}' says what loss.kl_beta keeps the policy close to, but that is 0;"
            " set it to 0.01, say, or remove curriculum.kl_to."
        )


def check_link(link: LinkConfig) -> None:
    if link.endpoint != "ipc" and (not is_tcp(link.endpoint) or link.endpoint.startswith("tcp://*")):
        raise ConfigError(
            f"link.endpoint = '{link.endpoint}' is not allowed: expected 'ipc' or tcp://host:port, as in"
            " tcp://10.0.0.1:5757."
        )
    if link.bind and not is_tcp(link.bind):
        raise ConfigError(
            f"link.bind = '{link.bind}' is not allowed: expected tcp://host:port, as in tcp://0.0.0.0:5757."
        )
    if link.bind and link.endpoint == "ipc":
        raise ConfigError(
            f"link.bind = '{link.bind}' says where the learner listens, but with link.endpoint = 'ipc' actors look for"
            " it in a folder of this machine; set link.endpoint to tcp://host:port as actors reach it, or remove it."
        )
    if link.silence_s <= link.heartbeat_s:
        raise ConfigError(
            f"link.silence_s must be larger than link.heartbeat_s, but they are {link.silence_s:g} and"
            f" {link.heartbeat_s:g}, so every peer would count as dead; set link.silence_s higher."
        )


def is_tcp(address: str) -> bool:
    """Whether it has the form of ZeroMQ's addresses; a host may be a name, a number, [IPv6], an interface, or *."""
    found = TCP.fullmatch(address)
    return found is not None and 0 < int(found[1]) < 65536


def check_adapter_dtype(link: LinkConfig, compute: ComputeConfig) -> None:
    if compute.ranks > 1 and link.adapter_dtype == "bf16":
        raise ConfigError(
            "link.adapter_dtype = 'bf16' rounds the adapters that several ranks compare, so a small difference would"
            " go unseen; remove it, or set compute.ranks to 1."
        )


def check_engine_options(actor: ActorConfig, compute: ComputeConfig, model: ModelConfig) -> None:
    from_nf4 = {"actor.weights is 'nf4'": actor.weights == "nf4", "actor.head is 'int8'": actor.head == "int8"}
    if model.quantization == "none" and (asked := [key for key, given in from_nf4.items() if given]):
        raise ConfigError(f"{asked[0]}, which takes an NF4 base, but model.quantization is 'none'; set one of them.")
    if actor.engine == "vllm" and compute.actor_card:
        raise ConfigError(
            f"compute.actor_card = {compute.actor_card}, but vLLM takes the first card that it sees; set it to 0, and"
            " change the order of the cards with CUDA_VISIBLE_DEVICES."
        )


def check_ranks(lora: LoraConfig, actor: ActorConfig) -> None:
    if unknown := sorted(lora.ranks.keys() - set(lora.targets)):
        raise ConfigError(
            f"lora.ranks names '{unknown[0]}', which is not in lora.targets ({', '.join(lora.targets)}); add it there,"
            " or remove its rank."
        )
    if lora.ranks and actor.engine != "hf":
        raise ConfigError(
            "lora.ranks has several ranks, and vLLM serves an adapter with one; remove it, or set actor.engine to 'hf'."
        )


def check_orders(rollout: RolloutConfig, most_prompts: int, prompt_tokens: int, token_bytes: int) -> None:
    """Refuse an order whose completions, when all reach the cap, do not fit into one message."""
    wanted = min(rollout.groups_per_order or most_prompts, most_prompts)
    most = most_groups(rollout.group, rollout.max_new_tokens, prompt_tokens, token_bytes)
    if wanted > most:
        remedy = (
            f"rollout.groups_per_order to at most {most}" if most else "rollout.group or rollout.max_new_tokens lower"
        )
        raise ConfigError(
            f"An order of {wanted} groups with {rollout.group} completions of up to {rollout.max_new_tokens} tokens may"
            f" be larger than a message, which has at most {MAX_INBOUND_BYTES >> 20} MiB; set {remedy}."
        )


def check_evaluation(evaluation: EvalConfig, training_cap: int, prompt_tokens: int) -> None:
    """The same for the completions of one task; and when a second cap or a process of its own has nothing to do."""
    if evaluation.beside and not (evaluation.problems and evaluation.every):
        raise ConfigError(
            "eval.beside evaluates checkpoints while the run trains, but eval.every or eval.problems is 0; set both, or"
            " remove eval.beside."
        )
    usual = evaluation.max_new_tokens or training_cap
    if evaluation.problems and 0 < evaluation.long_cap <= usual:
        raise ConfigError(
            f"eval.long_cap = {evaluation.long_cap} evaluates again with a larger cap, but the normal one has {usual}"
            " tokens; set it higher, or to 0."
        )
    cap = evaluation.longest_completion(training_cap)
    if cap and not most_groups(evaluation.samples, cap, prompt_tokens):
        raise ConfigError(
            f"eval.samples = {evaluation.samples} completions of up to {cap} tokens may be larger than a message, which"
            f" has at most {MAX_INBOUND_BYTES >> 20} MiB; set eval.samples or the cap lower."
        )


def most_groups(samples: int, cap: int, prompt_tokens: int, token_bytes: int = TOKEN_BYTES) -> int:
    """How many groups of so many completions fit into one message, whatever their lengths are."""
    arrays = samples * cap * token_bytes + 4 * prompt_tokens + ARRAYS_BYTES
    body = samples * SAMPLE_BYTES + ARRAYS_BYTES
    return min(MAX_INBOUND_BYTES // arrays, MAX_BODY_BYTES // body, MAX_ITEMS)


def rules_digest(verifier: VerifierConfig, rollout: RolloutConfig, environment: EnvironmentConfig) -> str:
    """sha256 over the sections that say how completions are sampled and scored. All actors of a run need the same."""
    return hashlib.sha256(msgspec.json.encode((verifier, rollout, environment), order="sorted")).hexdigest()


def config_to_json(config: Config) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def config_from_json(data: bytes) -> Config:
    """The inverse of `config_to_json`. Checks everything again, because a person may have edited the file."""
    try:
        tree = msgspec.json.decode(data, type=Tree)
    except (ValueError, RecursionError) as error:  # wrong JSON, wrong UTF-8, or brackets without end
        raise ConfigError(f"The resolved configuration is damaged: {error}; fix config.json there.") from error
    return resolve(tree)
