"""shared/config/load.py: what only several keys together can get wrong."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.codec import encode
from protocol.limits import MAX_INBOUND_BYTES
from protocol.messages import FilledOrder, Finish, Group, Outcome, Timings
from shared.config.load import apply_override, config_from_json, config_to_json, most_groups, resolve
from shared.errors import ConfigError

DIVIDED = ("compute.parallel=fsdp2", "actor.audit_invited=0")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["verifier.kind=callable"], "verifier.function is empty"),
        (
            ["verifier.function=r.py:f"],
            "is for verifier.kind = 'callable', but that is 'gsm8k', which would score without",
        ),
        (["verifier.rounded_digits=3"], "is for verifier.kind = 'math', but that is 'gsm8k'; set the kind, or remove"),
        *(
            (
                ["verifier.kind=callable", f"verifier.function={name}"],
                f"verifier.function names '{name}', expected path/",
            )
            for name in ("r.py", ":f", "r.py:", "r.py:a.b")
        ),
        (["verifier.rewards={':f' = 1.0}"], "verifier.rewards names ':f', expected path/to/file.py:name"),
        (
            ["verifier.kind=callable", "verifier.rewards={'a.py:f' = 2, 'a.py:g' = 1}", "verifier.correct=b.py:f"],
            "verifier.correct is 'b.py:f', expected one of verifier.rewards: f, g.",
        ),
        (
            [
                "verifier.kind=callable",
                "verifier.function=a.py:f",
                "verifier.correct=f",
                "verifier.rewards={'a.py:g' = 1}",
            ],
            "without a function, but verifier.function = 'a.py:f' decides what is correct; remove verifier.correct.",
        ),
        (
            ["verifier.correct=think_tags", "verifier.rewards={think_tags = 1}"],
            "without a function, but verifier.kind = 'gsm8k' decides what is correct; remove verifier.correct.",
        ),
        (["environment.function=games"], "environment.function names 'games', expected path/to/file.py:name"),
        (["environment.tools=['t.py:add', 'x']"], "environment.tools names 'x', expected path/to/file.py:name"),
        (["verifier.kind=environment"], "environment.function is empty"),
        (["loss.kind=sft", "environment.function=env.py:Env"], "written answers and no environment"),
        (["environment.kind=agent"], "environment.kind is 'agent' but environment.function is empty"),
        (
            ["environment.kind=agent", "environment.function=a.py:solve", "tasks.few_shot=2"],
            "tasks.few_shot is for prompts that we write, but environment.kind is 'agent'",
        ),
        (
            ["environment.kind=agent", "environment.function=a.py:solve", "environment.tools=['t.py:add']"],
            "environment.tools is for prompts that we write",
        ),
        (["curriculum.kind=sent", "environment.tools=['t.py:add']"], "semantic entropy is measured on replies"),
        *(
            (
                [f"link.endpoint={address}"],
                f"link.endpoint = '{address}' is not allowed: expected 'ipc' or tcp://host:port",
            )
            for address in (
                "udp://host:1",
                "tcp://127.0.0.1",
                "tcp://:5757",
                "tcp://*:5757",
                "tcp://h:0",
                "tcp://h:65536",
            )
        ),
        *(
            (
                ["link.endpoint=tcp://h:1", f"link.bind={address}"],
                f"link.bind = '{address}' is not allowed: expected tcp",
            )
            for address in ("0.0.0.0:5757", "tcp://0.0.0.0", "tcp://*:*", "ipc:///x", "tcp://0.0.0.0:5757/")
        ),
        (
            ["link.bind=tcp://0.0.0.0:5757"],
            "but with link.endpoint = 'ipc' actors look for it in a folder of this machine",
        ),
        (["constraint.beta=0.1", "constraint.reference=old"], "constraint.reference is 'old' but loss.passes is 1"),
        (["growth.max_prompts=15"], "growth.max_prompts = 15 is less than rollout.prompts = 16"),
        (["curriculum.ewc=1"], "curriculum.kind = 'shuffled' has no stages"),
        (["curriculum.kl_to=stage", "curriculum.kind=pass_rate"], "curriculum.kind = 'pass_rate' has no stages"),
        (["loss.kind=dr_grpo", "reward.advantage=std"], "loss.kind = 'dr_grpo' leaves the standard deviation out"),
        (["loss.kind=gspo", "loss.entropy_fraction=0.2"], "loss.kind = 'gspo' is about all tokens of a completion"),
        (
            ["loss.importance=sequence_mask", "loss.entropy_fraction=0.5"],
            "loss.importance = 'sequence_mask' is about all",
        ),
        (["loss.stale_limit=0.1", "loss.entropy_fraction=0.5"], "loss.stale_limit = 0.1 is about all tokens"),
        (["loss.kind=sapo", "loss.clip_low=0.1"], "has a gate and no clip"),
        (["loss.kind=dppo", "loss.importance_cap=0"], "needs the ratio to the actor's policy"),
        (["loss.importance_floor=0.5"], "is for masks, but loss.importance is 'token'"),
        (["loss.importance=sequence_mask", "loss.importance_floor=4"], "a floor of at most 1 that is below the cap"),
        (["loss.importance=token_mask", "loss.importance_floor=1.5"], "would leave out tokens whose weight is 1"),
        (
            ["loss.importance=token_mask", "loss.importance_floor=0.5", "loss.importance_cap=0.5"],
            "(loss.importance_cap is 0.5)",
        ),
        (["loss.kind=cispo", "loss.dual_clip=3"], "loss.kind = 'cispo' has no first one"),
        (["loss.dual_clip=1.2"], "must be above 1 + clip_high = 1.28"),
        (["loss.dual_clip=1.28"], "must be above 1 + clip_high = 1.28"),
        (["reward.advantage=maxrl", "reward.length=-0.1"], "divides by the mean score"),
        (["reward.advantage=maxrl", "verifier.rewards={think_tags = 0.5}"], "divides by the mean score"),
        (["loss.kind=opd", "teacher.adapter=x", "loss.stale_limit=0.1"], "follows a teacher and no reward"),
        (["loss.kind=opd", "teacher.adapter=x", "constraint.beta=0.1"], "and constraint.beta mean nothing"),
        (["curriculum.kl_to=start"], "says what loss.kl_beta keeps the policy close to, but that is 0"),
        (["compute.ranks=2", "link.adapter_dtype=bf16"], "rounds the adapters that several ranks compare"),
        (["reward.advantage=gdpo"], "there is only the verifier's score"),
        (["growth.max_prompts=20", "batch.updates=2"], "measures the noise of a step's one gradient"),
        (
            ["rollout.prompts=128", "rollout.group=16", "rollout.max_new_tokens=4096"],
            "An order of 128 groups with 16 completions of up to 4096 tokens may be larger than a message, which has at"
            " most 64 MiB; set rollout.groups_per_order to at most 78.",
        ),
        (
            ["compute.parallel=fsdp2"],
            "(actor.audit = 0, actor.audit_invited = 0.1); set both to 0, or compute.parallel to",
        ),
        ([*DIVIDED, "actor.audit=0.5"], "but the first one alone checks actors (actor.audit = 0.5"),
        (
            [*DIVIDED, "compute.device=cuda"],
            "computes on CPUs only as yet, but compute.device is 'cuda'; set it to 'cpu'",
        ),
        (
            [*DIVIDED, "model.dequantize=each_call"],
            "only NF4 codes are in memory, which cannot be divided so; set that to",
        ),
        ([*DIVIDED, "constraint.beta=0.1"], "but constraint.reference = 'base' makes one more only where tokens are"),
        (["rollout.prompts=5000"], "set rollout.groups_per_order to at most 4096"),
        (["rollout.group=4096", "rollout.max_new_tokens=4096"], "set rollout.group or rollout.max_new_tokens lower"),
        (["eval.samples=1024", "eval.long_cap=8192"], "eval.samples = 1024 completions of up to 8192 tokens may be"),
        (
            ["eval.long_cap=64"],
            "eval.long_cap = 64 evaluates again with a larger cap, but the normal one has 64 tokens",
        ),
        (
            ["eval.max_new_tokens=200", "eval.long_cap=128"],
            "but the normal one has 200 tokens; set it higher, or to 0.",
        ),
        (["reward.length=-0.1", "reward.length_free=64"], "is not below rollout.max_new_tokens = 64, so reward.length"),
        (["eval.beside=true"], "eval.every or eval.problems is 0"),
        (["eval.beside=true", "eval.every=2", "eval.problems=0"], "eval.every or eval.problems is 0"),
        (["link.heartbeat_s=10", "link.silence_s=10"], "link.silence_s must be larger than link.heartbeat_s"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(overrides: list[str], part: str) -> None:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    with pytest.raises(ConfigError) as caught:
        resolve(tree)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["verifier.kind=callable", "verifier.function=~/my rewards/mine.py:score"],
        ["verifier.kind=callable", "verifier.rewards={'mine.py:right' = 1.0}"],
        ["verifier.kind=callable", "verifier.rewards={'a.py:f' = 0, think_tags = 1}", "verifier.correct=f"],
        ["verifier.kind=callable", "verifier.rewards={'a.py:f' = 0, think_tags = 1}", "verifier.correct=a.py:f"],
        ["verifier.kind=callable", "verifier.rewards={'a.py:f' = 0, think_tags = 1}", "verifier.correct=think_tags"],
        ["verifier.kind=math", "verifier.rounded_digits=3"],
        ["environment.function=env.py:Env", "environment.tools=['t.py:add']", "verifier.kind=environment"],
        ["link.endpoint=tcp://10.0.0.1:5757"],
        ["link.endpoint=tcp://[fe80::1%eth0]:5757", "link.bind=tcp://*:5757"],
        ["link.endpoint=tcp://learner:65535", "link.bind=tcp://eth0:1"],
        ["reward.length=-0.1", "reward.length_free=63"],
        ["reward.length_free=64"],
        ["eval.max_new_tokens=32", "eval.long_cap=33"],
        ["eval.problems=0", "eval.long_cap=32"],
        ["curriculum.ewc=1", "curriculum.kind=levels"],
        ["curriculum.kl_to=stage", "loss.kl_beta=0.01", "curriculum.kind=sent"],
        ["link.heartbeat_s=1", "link.silence_s=1.5"],
        ["constraint.beta=0.1", "constraint.reference=old", "loss.passes=2"],
        ["constraint.beta=0.1", "constraint.reference=old", "batch.updates=2"],
        ["constraint.reference=old"],
        ["compute.parallel=zero2", "actor.audit=0.5", "constraint.beta=0.1", "model.dequantize=each_call"],
        ["loss.kind=gspo", "loss.dual_clip=3", "loss.importance=sequence_mask", "loss.stale_limit=0.1"],
        ["loss.importance=token_mask", "loss.importance_floor=0.5", "loss.entropy_fraction=0.5"],
        ["loss.kind=sapo", "reward.advantage=batch", "batch.updates=4"],
        ["reward.advantage=maxrl", "verifier.rewards={think_tags = 0.0}"],
        ["reward.advantage=gdpo", "reward.truncated=-0.5"],
        ["loss.importance=sequence", "loss.importance_cap=0", "loss.entropy_fraction=0.5"],
        ["verifier.on_truncated=mask"],
        ["loss.kind=dr_grpo", "reward.advantage=mean"],
        ["loss.kind=gspo", "loss.clip_low=0.2"],
        ["loss.kind=grpo", "reward.advantage=mean"],
        ["growth.max_prompts=16"],
        ["rollout.prompts=5000", "rollout.groups_per_order=4096"],
        ["rollout.prompts=128", "rollout.group=16", "rollout.max_new_tokens=4096", "rollout.groups_per_order=78"],
        ["eval.samples=1024", "eval.long_cap=8192", "eval.problems=0"],
    ],
)
def test_keys_that_fit_together_pass(overrides: list[str]) -> None:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    resolve(tree)


@pytest.mark.parametrize(
    ("kind", "bounds", "advantage", "cap"),
    [
        ("grpo", (0.8, 1.2), "std", 2.0),
        ("dr_grpo", (0.8, 1.2), "mean", 2.0),
        ("dapo", (0.8, 1.28), "std", 2.0),
        ("gspo", (1 - 3e-4, 1 + 4e-4), "std", 2.0),
        ("cispo", (0.0, 5.0), "std", 2.0),
        ("sapo", (0.0, float("inf")), "std", 2.0),
        ("dppo", (0.85, 1.15), "mean", 20.0),
    ],
)
def test_a_kind_brings_its_papers_clip_range_and_advantage(
    kind: str, bounds: tuple[float, float], advantage: str, cap: float
) -> None:
    config = resolve({"loss": {"kind": kind}})
    assert config.loss.ratio_bounds == pytest.approx(bounds, abs=1e-15)
    assert (config.advantage, config.loss.cap) == (advantage, cap)


def test_masks_have_caps_of_their_own() -> None:
    caps = {kind: resolve({"loss": {"importance": kind}}).loss.cap for kind in ("token_mask", "sequence_mask")}
    assert caps == {"token_mask": 5.0, "sequence_mask": 3.0}
    assert resolve({"loss": {"importance": "token_mask", "importance_cap": 4}}).loss.cap == 4.0


@pytest.mark.parametrize(
    ("lag", "loss", "limit"),
    [
        (0, {}, 0.0),
        (1, {}, 0.0),
        (2, {}, 0.1),
        (4, {"kind": "gspo", "importance": "sequence"}, 0.1),
        (2, {"stale_limit": 0.0}, 0.0),
        (0, {"stale_limit": 0.3}, 0.3),
        (2, {"entropy_fraction": 0.2}, 0.0),
        (2, {"kind": "dppo"}, 0.0),
        (2, {"kind": "opd"}, 0.0),
    ],
)
def test_old_samples_have_a_stale_limit_if_none_is_given(lag: int, loss: dict[str, object], limit: float) -> None:
    teacher = {"adapter": "x"} if loss.get("kind") == "opd" else {}
    config = resolve({"pipeline": {"max_lag": lag}, "loss": loss, "teacher": teacher})
    assert config.objective.stale_limit == limit
    assert replace(config.objective, stale_limit=None) == replace(config.loss, stale_limit=None)
    assert config_from_json(config_to_json(config)).objective == config.objective


def test_a_key_that_is_given_goes_before_the_kinds_own() -> None:
    loss = {"kind": "gspo", "clip_low": 0.5, "clip_high": 0.25}
    config = resolve({"loss": loss, "reward": {"advantage": "mean"}})
    assert config.loss.ratio_bounds == (0.5, 1.25) and config.advantage == "mean"
    assert config_from_json(config_to_json(config)) == config
    assert resolve({"loss": {"kind": "cispo", "clip_high": 1.0}}).loss.ratio_bounds == (0.0, 2.0)


@pytest.mark.parametrize(("samples", "cap"), [(4096, 1), (16, 20_000), (2, 1)])
def test_as_many_groups_as_an_order_may_have_fit_into_a_message(samples: int, cap: int) -> None:
    """However they ended, and with a few rewards."""
    count = most_groups(samples, cap, prompt_tokens=256)
    numbers = np.zeros(samples * cap, np.float32)
    group = Group(
        group_id=f"eval-step-000010-long_sampled/{10**6}/{10**4}",
        prompt_ids=np.zeros(256, np.int32),
        completion_ids=numbers.astype(np.int32),
        trained=np.ones(samples * cap, np.uint8),
        lengths=(cap,) * samples,
        logprobs=numbers,
        entropies=numbers,
        finishes=(Finish.LENGTH,) * samples,
        outcomes=(Outcome.UNPARSABLE,) * samples,
        scores=(0.1,) * samples,
        rewards={f"a_reward_{name}": (0.1,) * samples for name in range(4)},
    )
    filled = FilledOrder(
        order_id="train/000000/u0000",
        policy_version=0,
        adapter_sha256="a" * 64,
        groups=(group,) * count,
        timings=Timings(**dict.fromkeys(Timings.__struct_fields__, 0.1)),
    )
    assert len(encode(filled)[-1]) <= MAX_INBOUND_BYTES
