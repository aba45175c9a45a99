"""Sections that load one side of a run into their own process and take it apart.

    actor_phases      memory of the actor: loaded, prompts, decoding
    learner_phases    memory and time of an update at the same size
    token_step        time of one token step, eager and as a graph, for few and for many rows
    mismatch          the actor's log-probs against the learner's, and the learner's against itself

    wall per token step = (time of an order of n tokens - time of an order of m tokens) / (n - m)

The time for prompts cancels in the difference. Each order is decoded once before it is timed, so graphs are there.
PyTorch's profiler counts how long the card was busy and how many kernels it ran. It takes host time, so it has orders
of its own.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from actor.engines.engine import Completion, Engine
from actor.wiring import build_engine
from benchmarks.gpu.measured import Note, Peaks, Place, timed
from benchmarks.gpu.shapes import R1, config_of, keys_of, order_of, sampling
from benchmarks.update_bound import drawn_batch
from learner.objective.batch import Sample, TrainSample
from learner.update.mismatch import gap_of
from learner.update.update import roundings
from learner.wiring import build_trainer, load_trained_policy
from protocol.messages import GroupOrder
from shared.config.tree import Config
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from shared.process.determinism import record

ROUNDS = 2
GRAPHS = {"eager": "never", "graph": "auto"}
"""`actor.graphs`."""
FEW, MANY = 1, 8
"""Prompts of an order: 8 rows and 64."""


def actor_phases(place: Place, note: Note) -> None:
    size = R1.at(place)
    peaks = Peaks(place.device)
    load_s, (engine, prompter) = timed(lambda: build_engine(config_of(keys_of(place, size))), place.device)
    peaks("loaded")
    note(size=vars(size), load_s=round(load_s, 2), computes_with=record(), peaks_mib=peaks.phases)
    for prompts in (FEW, place.size(MANY, 2)):
        groups, heard = order_of(prompter, size, prompts), Heard(peaks, f"{prompts} prompts")
        work = partial(engine.generate, groups, sampling(place.size(64, 4)), heard)
        seconds, _ = timed(work, place.device)
        peaks(f"{prompts} prompts, decoding")
        note(**{f"order_of_{prompts}_s": round(seconds, 3)}, peaks_mib=peaks.phases)
    engine.sleep()
    peaks("asleep")
    note(peaks_mib=peaks.phases)


class Heard:
    """Progress of an order: the first token ends the phase in which the prompts are computed."""

    def __init__(self, peaks: Peaks, name: str) -> None:
        self.peaks, self.name, self.tokens = peaks, name, 0

    def __call__(self, ended: object) -> None:
        if self.tokens == 0:
            self.peaks(f"{self.name}, first token")
        self.tokens += 1


def learner_phases(place: Place, note: Note) -> None:
    size = R1.at(place)
    peaks, config = Peaks(place.device), config_of(keys_of(place, size))
    load_s, policy = timed(lambda: load_trained_policy(config, place.device.type), place.device)
    peaks("loaded")
    update = build_trainer(policy, config, lambda: None).update
    args = argparse.Namespace(prompt=size.prompt, lengths=[size.tokens] * size.group)
    batch = drawn_batch(config, len(policy.head), args)
    seconds: list[float] = []
    for number in range(place.size(ROUNDS, 1)):
        seconds.append(round(timed(lambda: update.apply(0, batch), place.device)[0], 3))
        peaks("first update" if number == 0 else "update")
        note(size=vars(size), load_s=round(load_s, 2), update_s=seconds, peaks_mib=peaks.phases)


def token_step(place: Place, note: Note) -> None:
    size = R1.at(place)
    note(size=vars(size))
    for name, graphs in GRAPHS.items():
        engine, prompter = build_engine(config_of(keys_of(place, size, actor__graphs=graphs)))
        for prompts in (FEW, place.size(MANY, 2)):
            groups = order_of(prompter, size, prompts)
            note(**{f"{name}_{prompts * size.group}_rows": step_figures(place, engine, groups)})
        engine.sleep()


def step_figures(place: Place, engine: Engine, groups: tuple[GroupOrder, ...]) -> dict[str, Any]:
    """Of one token step, in milliseconds."""
    lengths, profiled = (place.size(8, 2), place.size(40, 4)), (place.size(4, 2), place.size(12, 4))

    def after_another(tokens: int, measure: Callable[[Callable[[], object]], Any]) -> Any:
        def order() -> object:
            return engine.generate(groups, sampling(tokens), lambda ended: None)

        order()
        return measure(order)

    rounds = [
        [after_another(tokens, lambda order: timed(order, place.device)[0]) for tokens in lengths]
        for _ in range(place.size(ROUNDS, 1))
    ]
    figures: dict[str, Any] = {
        "wall_ms": [round((long - short) / (lengths[1] - lengths[0]) * 1000, 3) for short, long in rounds]
    }
    if place.device.type == "cuda":
        # Fewer steps, because PyTorch's profiler takes a millisecond for each kernel.
        few, many = (after_another(tokens, card_work) for tokens in profiled)
        steps = profiled[1] - profiled[0]
        figures |= {f"{name}_a_step": round((many[name] - few[name]) / steps, 3) for name in few}
    return figures


def card_work(work: Callable[[], object]) -> dict[str, float]:
    """How long the card was busy, and how many kernels and copies it was given."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    busy = sum(event.time_range.elapsed_us() for event in events) / 1000
    copies = sum(event.name.startswith("Mem") for event in events)
    return {"card_busy_ms": busy, "kernels": len(events) - copies, "copies": copies}


def mismatch(place: Place, note: Note) -> None:
    """Both sides with the same drawn adapter, in one process: nothing but the computation differs."""
    size = R1.at(place)
    config = config_of(keys_of(place, size))
    engine, prompter = build_engine(config)
    policy = load_trained_policy(config, place.device.type)
    with policy.adapter.drawn():
        engine.install(1, adapter_bytes(policy.adapter))
        groups, tokens = order_of(prompter, size, place.size(4, 1)), place.size(192, 4)
        completions = engine.generate(groups, sampling(tokens), lambda ended: None)
        samples = samples_of(groups, completions)
        note(size=vars(size), **gaps(policy, config, samples))


def samples_of(groups: tuple[GroupOrder, ...], completions: list[list[Completion]]) -> list[TrainSample]:
    """Every token used."""
    return [
        TrainSample(
            sample=Sample(
                name=f"{group.group_id}[{index}]",
                prompt_ids=group.prompt_ids,
                completion_ids=one.ids,
                trained=np.ones(len(one.ids), bool),
                actor_logprobs=one.logprobs,
                entropies=one.entropies,
                advantage=1.0,
            ),
            selected=np.ones(len(one.ids), bool),
            weight=1.0,
            penalties=np.zeros(len(one.ids), np.float32),
            in_kl=False,
        )
        for group, found in zip(groups, completions, strict=True)
        for index, one in enumerate(found)
    ]


def gaps(policy: Policy, config: Config, samples: list[TrainSample]) -> dict[str, Any]:
    forward_pass = build_trainer(policy, config, lambda: None).update.forward_pass
    actor = np.concatenate([sample.sample.actor_logprobs for sample in samples])
    found = np.abs(forward_pass.recomputed(samples, 1.0) - actor)
    entropies = np.concatenate([sample.sample.entropies for sample in samples if sample.sample.entropies is not None])
    uncertain = found[entropies >= np.quantile(entropies, 0.8)]
    own = next(iter(roundings(forward_pass, samples)))
    return {
        "tokens": len(found),
        "mean_entropy": round(float(entropies.mean()), 3),
        "actor_against_learner": vars(gap_of(found)),
        "top_fifth_by_entropy": vars(gap_of(uncertain)),
        "learner_against_itself": vars(own),
    }
