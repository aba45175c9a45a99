"""Builds a running actor from a config. Imports torch, so it is imported after arguments and config are checked."""

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from actor.engines.engine import Engine, Identity
from actor.engines.forms import codes_for, compiled_for, eight_bit_head_for
from actor.engines.hf_engine import HFEngine
from actor.engines.server.adapter_files import AdapterFiles
from actor.engines.server.completions import Completions
from actor.engines.server.server_engine import Line, ServerEngine
from actor.engines.server.vllm_server import Needs, VLLMServer
from actor.engines.token_step.coded import Codes
from actor.engines.vllm_options import MOST_SEQUENCES, RANKS, check_engine, longest
from actor.environments.agents import Agents
from actor.environments.episodes import Episodes, Player
from actor.environments.pool import EnvironmentPool
from actor.installer import EXACT, Allowed, CanaryMismatch, Installer
from actor.link import Link
from actor.loop import serve
from actor.passed_on import PassedOn
from actor.rollout import Installs, Rollout
from actor.scoring.pool import ScorePool
from actor.scoring.teacher import RemoteTeacher, no_teacher
from actor.scoring.votes import casting
from actor.verifiers.verdict import Context
from protocol.messages import Bye
from protocol.transport import ActorPort
from shared.base.cache import CachedBase, cached_base, dense_base
from shared.base.lending import Borrower
from shared.base.load import check_once, load_policy, pick_device, pick_dtype
from shared.base.loading import fitting, lighter
from shared.base.residency import borrow, residency_of
from shared.config.load import rules_digest
from shared.config.model import cache_root
from shared.config.named_rewards import rewards_in_words
from shared.config.processes import ComputeConfig
from shared.config.training import TeacherConfig
from shared.config.tree import Config
from shared.errors import DamageError, UserError
from shared.model.adapter_file import LoraLayout, adapter_config, read_layout
from shared.model.conversation import Conversation
from shared.model.kernels.choice import policy_with_kernels
from shared.model.layers.nf4 import WEIGHTS
from shared.model.prompt import Prompter, load_prompter
from shared.process.busy_cores.watch import watch_cores
from shared.process.card import driver_of
from shared.process.determinism import pin_torch, record
from shared.process.lease import ComputeLease, NoLease, lease_for
from shared.process.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    from actor.engines.vllm_options import GiveBack, VLLMOptions

BF16_TOLERANCE = 0.25
"""vLLM's kernels sum in another order than the learner's: in bf16 this much in the log-prob of an unlikely token."""

ENGINES = Path(__file__).parent / "engines"
OWN_CODE = (ENGINES, ENGINES / "token_step", ENGINES / "token_step" / "compiled")
"""Folders whose source computes a completion."""

log = logging.getLogger("actor")


def build_engine(
    config: Config, borrower: Borrower | None = None, *, beside_learner: bool | None = None
) -> tuple[Engine, Prompter]:
    """The rollout engine and the tokenizer it decodes with. borrower: of the learner's base. beside_learner: whether it
    is on its machine. None where that is not known: containers and Ray may put both on one."""
    pin_torch(config.compute.actor_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder, config.environment)
    if config.actor.is_elsewhere:
        return build_servers(config, base, prompter), prompter
    device = pick_device(config.compute.device, config.compute.actor_card)
    dtype = pick_dtype(config.compute.dtype, device)
    if config.actor.engine == "vllm":
        return build_vllm(config, base, prompter, device, dtype, beside_learner=beside_learner), prompter
    place = borrower.place if borrower else None
    policy = load_policy(base, config.model, config.lora, device, dtype, place)
    policy.adapter.cast_to(dtype)
    policy = policy_with_kernels(policy, config.compute, cache_root(config.model))
    residency = residency_of(config.compute, policy, "actor", borrower)
    compiled = compiled_for(config, policy)
    codes = codes_for(config, base, policy, compiled)
    eight_bit = eight_bit_head_for(config, base, policy, compiled)
    engine = HFEngine(policy, prompter, config.actor, residency, codes, eight_bit, compiled)
    if isinstance(codes, Codes):
        # Orders of many rows read the dense base.
        check_once(
            policy, base, "decode loop", lambda: HFEngine(policy, prompter, config.actor, residency).check(), OWN_CODE
        )
    check_once(policy, base, engine.loop, engine.check, OWN_CODE)
    watch_cores(config.compute.actor_threads, device)
    return engine, prompter


def build_vllm(
    config: Config,
    base: CachedBase,
    prompter: Prompter,
    device: torch.device,
    dtype: torch.dtype,
    *,
    beside_learner: bool | None,
) -> Engine:
    """vLLM over the learner's base. The digest is that of the NF4 base even if vLLM serves the dense base."""
    # Imported here, because vLLM is an optional extra.
    from actor.engines.vllm_engine import VLLMEngine
    from actor.engines.vllm_internals import VLLM
    from actor.engines.vllm_options import vllm_options

    check_engine(config.actor)
    if device.type == "cuda":
        # Some of vLLM's kernels have no deterministic version and would raise.
        torch.use_deterministic_algorithms(False)
    folder = served_folder(config, base, dtype)
    options = vllm_options(
        config,
        folder,
        "cuda" if device.type == "cuda" else "cpu",
        "bfloat16" if dtype == torch.bfloat16 else "float32",
    )
    layout = read_layout(base.folder, config.lora)
    part = given_back(config, base, layout, options, beside_learner=beside_learner)
    return VLLMEngine(VLLM(options), options, prompter, config.lora, layout, base.digest, config.actor.install, part)


def served_folder(config: Config, base: CachedBase, dtype: torch.dtype) -> Path:
    """The model that vLLM loads: the values of the codes, or the codes."""
    dense = config.model.quantization == "nf4" and config.actor.weights != "nf4"
    return dense_base(base, dtype).folder if dense else base.folder


def build_servers(config: Config, base: CachedBase, prompter: Prompter) -> ServerEngine:
    """vLLM behind URLs, each checked now; nothing is loaded here. Canary and mismatch allow what they allow vLLM."""
    server, dtype = config.server, learners_dtype(config.compute)
    layout = read_layout(base.folder, config.lora)
    folder = served_folder(config, base, dtype)
    needs = Needs(
        serves=str(folder),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        tokens=longest(config),
        rank=next(rank for rank in RANKS if rank >= config.lora.rank),
        temperature=config.rollout.temperature,
        end_ids=prompter.end_ids,
        spelling=lambda token: prompter.as_the_model_sees([token]),
        vocabulary=len(prompter.tokenizer),
    )
    files = AdapterFiles(Path(server.folder), server.seen_as, adapter_config(config.lora, str(folder)))
    files.open()
    width = config.actor.max_sequences or min(config.rollout.prompts * config.rollout.group, MOST_SEQUENCES)
    allowed = vllm_difference(config, dtype)
    lines: list[Line] = []
    for url in server.urls:
        api = Completions(f"The vLLM server at {url}", url, server.key_variable, server.limit_s)
        one = VLLMServer(api, needs, files, layout.zeros)
        remedy = f"It must serve {folder} as {needs.dtype}; if it does, start it again and use `resume`."
        lines.append(Line(one, Installer(one, allowed, f"the vLLM server at {url}", remedy), width))
    identity = Identity(
        engine="vllm_server",
        base_digest=base.digest,
        tokenizer_digest=prompter.digest,
        lora_digest=layout.digest,
    )
    engine = ServerEngine(lines, identity, server.patience_s, needs.tokens)
    log.info("a server for this run is started with: %s", needs.command)
    try:
        engine.check(min(server.patience_s, config.link.silence_s / 2))
    except UserError:
        engine.close()
        raise
    return engine


def learners_dtype(compute: ComputeConfig) -> torch.dtype:
    """In a process that uses no card itself."""
    on_card = compute.device == "cuda" or (compute.device == "auto" and torch.cuda.is_available())
    return pick_dtype(compute.dtype, torch.device("cuda" if on_card else "cpu"))


def card_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def served_bytes(options: "VLLMOptions") -> int:
    """Of the base while vLLM serves it: codes stay as they are in the file, all else gets vLLM's number type."""
    from actor.engines.vllm_options import BYTES

    file = options.folder / WEIGHTS
    if options.nf4:
        return file.stat().st_size
    with safe_open(file, framework="pt") as reader:
        shapes = [reader.get_slice(name).get_shape() for name in reader.keys()]  # noqa: SIM118
    return BYTES[options.dtype] * sum(map(math.prod, shapes))


def given_back(
    config: Config,
    base: CachedBase,
    layout: "LoraLayout",
    options: "VLLMOptions",
    find_card: Callable[[], int] = card_bytes,
    *,
    beside_learner: bool | None,
) -> "GiveBack":
    """What vLLM frees between two orders: as configured, or as planned for this card. find_card: its memory."""
    from actor.engines.vllm_options import BYTES, MARGIN_BYTES, EngineMemory, learner_bytes, plan_give_back

    if options.device == "cpu":
        return "nothing"
    if config.actor.give_back != "auto":
        return config.actor.give_back
    parameters = sum(rows * columns for rows, columns in layout.shapes.values())
    model = json.loads((base.folder / "config.json").read_text())
    learner = learner_bytes(model, (base.folder / WEIGHTS).stat().st_size, parameters, config.batch.token_budget)
    weights = served_bytes(options) + BYTES[options.dtype] * parameters
    engine = EngineMemory(weights=weights, kv=options.kv_bytes)
    card, actors = find_card(), config.compute.actors if beside_learner else 1
    apart, most = config.compute.learner_card != config.compute.actor_card, card - MARGIN_BYTES
    if apart or beside_learner is False or (beside_learner is None and learner > most):
        # It is on another card, so an actor makes room for the others of its own card.
        return plan_give_back(card, min(engine.awake, most), engine, actors - 1)
    return plan_give_back(card, learner, engine, actors)


def allowed_difference(config: Config, device: torch.device) -> Allowed:
    """Of the canary: as configured, or what engine and compute type allow."""
    if config.guard.canary_tolerance:
        return Allowed(largest=config.guard.canary_tolerance)
    dtype = pick_dtype(config.compute.dtype, device)
    return Allowed(measured=dtype == torch.bfloat16) if config.actor.engine == "hf" else vllm_difference(config, dtype)


def vllm_difference(config: Config, dtype: torch.dtype) -> Allowed:
    if config.guard.canary_tolerance:
        return Allowed(largest=config.guard.canary_tolerance)
    # The plugin computes NF4 in bf16 on every device.
    return Allowed(largest=BF16_TOLERANCE) if dtype == torch.bfloat16 or config.actor.weights == "nf4" else EXACT


def context_of(config: Config) -> Context:
    """What reward functions may ask about the run. Every prompt goes through a chat template (load_prompter)."""
    return Context(chat=True, system_prompt=config.tasks.system_prompt, max_steps=config.run.steps)


def build_episodes(config: Config, prompter: Prompter) -> Player | None:
    """None where a completion is one turn."""
    environment, scores = config.environment, config.verifier.kind == "environment"
    if not environment.is_used:
        return None
    if environment.is_agent:
        return Agents(EnvironmentPool(environment), prompter, environment, scores=scores)
    conversation = Conversation(prompter, environment.max_turns)
    return Episodes(EnvironmentPool(environment), conversation, environment, scores=scores)


def remote_teacher(config: TeacherConfig, prompter: Prompter) -> RemoteTeacher | None:
    """None where nobody elsewhere is asked."""
    if not config.url:
        return None
    return RemoteTeacher(config, lambda token: prompter.as_the_model_sees([token]), len(prompter.tokenizer))


def installer_of(engine: Engine) -> Installs | None:
    """None for an engine that the actor's own installer verifies."""
    return engine.wanted if isinstance(engine, ServerEngine) else None


def close_engine(engine: Engine) -> None:
    """Servers go on without what this process left there."""
    if isinstance(engine, ServerEngine):
        engine.close()


def place_of(config: Config, lease_file: Path | None, trace: Trace, planned: int) -> tuple[torch.device, ComputeLease]:
    """Where this process computes, and what it holds meanwhile: nothing if servers compute for it."""
    if config.actor.is_elsewhere:
        return torch.device("cpu"), NoLease()
    device = pick_device(config.compute.device, config.compute.actor_card)
    overlaps = config.pipeline.max_lag > 0
    return device, lease_for(config.compute, device, lease_file, trace, planned, overlaps=overlaps)


def serve_or_send_bye(link: Link, rollout: Rollout) -> None:
    """Serve. An actor whose policy is wrong tells the learner why it stops."""
    try:
        serve(link, rollout)
    except (CanaryMismatch, DamageError) as fault:
        link.send(Bye(reason=str(fault)))
        raise


def serve_orders(
    config: Config,
    port: ActorPort,
    endpoint: str,
    actor_id: str,
    lease_file: Path | None,
    trace: Trace = NO_TRACE,
    planned: int = 0,
    passes: PassedOn | None = None,
    *,
    beside_learner: bool | None = None,
) -> None:
    """Build the engine and the scorers, join the run, fill orders until the learner sends Drain. lease_file: None for
    cores of its own. planned: bytes of the card, as of a lease. passes: where adapters are passed on.
    beside_learner: as in build_engine; its base may be used then."""
    fits = partial(fitting, "actor", planned, lighter(config.compute, config.model, config.lora))
    with fits():
        device, lease = place_of(config, lease_file, trace, planned)
        lends = beside_learner and config.actor.engine == "hf"
        lender = lease_file.parent if lends and lease_file else None
        borrower = borrow(config.compute, device, lender, config.link.silence_s) if lender else None
    # Under the lease: an engine allocates memory while it is built, and vLLM measures how much is free.
    with lease.hold("actor"), fits(driver_of(device)), trace.phase("load"):
        engine, prompter = build_engine(config, borrower, beside_learner=beside_learner)
        engine.sleep()
    log.info("%s engine computes with %s", engine.identity.engine, json.dumps(record()))
    for line in rewards_in_words(config.verifier):
        log.info(line)
    scorer, episodes = ScorePool(config.verifier), build_episodes(config, prompter)
    teacher = remote_teacher(config.teacher, prompter)
    try:
        allowed = allowed_difference(config, device)
        votes, ask = casting(config.verifier.kind, scorer), teacher.read if teacher else no_teacher
        rollout = Rollout(
            engine,
            scorer,
            lease,
            prompter.text,
            allowed,
            trace,
            context_of(config),
            episodes,
            votes,
            ask,
            installer_of(engine),
        )
        rules = rules_digest(config.verifier, config.rollout, config.environment)
        link = Link(port, endpoint, actor_id, engine.identity, config.link.credits, rules, passed_on=passes)
        welcome = link.join(config.link.silence_s)
        log.info("joined run %s", welcome.run_id)
        serve_or_send_bye(link, rollout)
    finally:
        scorer.close()
        if episodes:
            episodes.close()
        if teacher:
            teacher.close()
        close_engine(engine)
        port.close()
