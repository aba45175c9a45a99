"""From a config to a running actor. Heavy imports live here, after arguments and config have been checked."""

import json
import logging
from pathlib import Path

import torch

from actor.engine_hf import HFEngine
from actor.installer import TOLERANCE, CanaryMismatch
from actor.link import Link
from actor.loop import serve
from actor.rollout import Rollout
from actor.score_pool import ScorePool
from protocol.messages import Bye
from protocol.transport import ActorPort
from shared.base_cache import cached_base
from shared.config import Config
from shared.determinism import pin_torch, record
from shared.errors import DamageError
from shared.policy import Policy, load_policy, pick_device
from shared.prompt import Prompter, load_prompter
from shared.turns import turns

BF16_TOLERANCE = 0.25
"""bf16 keeps 8 bits: two kernels that sum in another order may differ by this in an improbable token's log-prob."""

log = logging.getLogger("actor")


def build_engine(config: Config) -> tuple[HFEngine, Prompter]:
    """The rollout engine and the tokenizer it decodes with."""
    pin_torch(config.compute.actor_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder)
    policy = load_policy(base, config.model, config.lora, pick_device(config.compute.device))
    return HFEngine(policy, prompter), prompter


def canary_tolerance(config: Config, policy: Policy) -> float:
    """As configured, or what the compute type allows."""
    rounding = TOLERANCE if policy.dtype == torch.float32 else BF16_TOLERANCE
    return config.guard.canary_tolerance or rounding


def serve_or_say_why(link: Link, rollout: Rollout) -> None:
    """Serve; an actor whose policy cannot be trusted tells the learner before it ends."""
    try:
        serve(link, rollout)
    except (CanaryMismatch, DamageError) as fault:
        link.say(Bye(reason=str(fault)))
        raise


def serve_orders(config: Config, port: ActorPort, endpoint: str, actor_id: str, lease: Path) -> None:
    """Load, join, serve, leave."""
    engine, prompter = build_engine(config)
    log.info("computes with %s", json.dumps(record()))
    scorer = ScorePool(config.verifier)
    try:
        turn = turns(config.compute, engine.policy.device.type, lease)
        rollout = Rollout(engine, scorer, turn, prompter.text, canary_tolerance(config, engine.policy))
        link = Link(port, endpoint, actor_id, engine.identity, config.link.credits)
        welcome = link.join(config.link.silence_s)
        log.info("joined run %s", welcome.run_id)
        serve_or_say_why(link, rollout)
    finally:
        scorer.close()
        port.close()
