"""The sections of an update: [loss], [constraint], [optimizer], [batch], [growth] and [guard]; and which of their keys
exclude each other."""

import math
from typing import Annotated, Literal

from msgspec import Meta

from shared.config.data import Advantage, RewardConfig, VerifierConfig
from shared.config.types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from shared.errors import ConfigError

OnFault = Literal["stop", "skip"]

PAPER_CLIPS = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "dppo": (0.15, 0.15),
    "sft": (1.0, math.inf),
    "opd": (0.2, 0.2),
}
"""clip_low and clip_high of each kind. DeepSeekMath gives none for GRPO, so these are PPO's. CISPO has no lower bound
(MiniMax-M1), and the upper bound of 5 is ScaleRL's (2510.13786). DPPO's are differences of probabilities. SAPO has no
clip."""
CLIPS_THE_RATIO = ("grpo", "dr_grpo", "dapo", "gspo")
UNBOUNDED = (0.0, math.inf)


class LossConfig(Section, frozen=True, kw_only=True):
    """The objective. The formulas are in learner/objective/loss.py."""

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "opd", "sft"] = "dapo"
    """Algorithm: it decides the objective and its divisor, and where their keys are not given a published clip range
    and the advantage. `gspo` needs entropy_fraction = 1. `opd` follows [teacher], and rewards are only logged. `sft` is
    what `python -m launch sft` sets: the likelihood of answers that somebody wrote. `run` takes the others."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below 1 - clip_low. If not given: 0.2 (PPO's) for `grpo`, `dr_grpo` and `dapo`,
    3e-4 for `gspo`, 1 (no lower bound) for `cispo`. For `dppo`, how far the probability of a token may fall: 0.15. Not
    for `sapo`."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above 1 + clip_high. If not given: 0.2 for `grpo` and `dr_grpo`, 0.28 for `dapo`
    (clip-higher), 4e-4 for `gspo`, 4 (ScaleRL's) for `cispo`. For `dppo`, how far the probability of a token may rise:
    0.15. Not for `sapo`."""
    dual_clip: NonNegativeFloat = 0.0
    """For kinds that clip the ratio: where the advantage is negative, the ratio counts at most this much (dual clip;
    its paper has 3). More than 1 + clip_high; 0 turns it off."""
    tau_positive: PositiveFloat = 1.0
    """`sapo`: temperature of the gate where the advantage is positive. The higher it is, the sooner a ratio beside 1
    loses its gradient."""
    tau_negative: PositiveFloat = 1.05
    """`sapo`: temperature of the gate where the advantage is not positive."""
    importance: Literal["token", "token_mask", "sequence", "sequence_mask"] = "token"
    """What is done with the importance weight pi_learner / pi_actor. `token`: each token's is cut off at the cap.
    `token_mask`: tokens whose weight is outside [importance_floor, importance_cap] are left out (IcePop has 0.5 and 5).
    `sequence`, `sequence_mask`: the same with one weight for a completion, the product of its tokens'. They need
    entropy_fraction = 1."""
    importance_cap: NonNegativeFloat | None = None
    """Largest importance weight. If not given: 2, for `dppo` 20, for masks 5 by token and 3 by sequence. 0 turns the
    weight off."""
    importance_floor: NonNegativeFloat = 0.0
    """Smallest importance weight, for the two masks. At most 1, and below the cap. 0 sets no limit."""
    stale_limit: NonNegativeFloat | None = None
    """A completion with a negative advantage is left out once the mean of log pi_actor - log pi_learner over its tokens
    is larger than this (off-policy sequence masking). Needs entropy_fraction = 1. 0 turns it off. If not given: 0.1
    with `pipeline.max_lag` of 2 or more, if entropy_fraction is 1 and rewards decide; 0 for `dppo` and otherwise."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL to the reference (`curriculum.kl_to`, by default the policy without its adapter), over all
    tokens of the step. 0 skips the reference pass. Above 0 every token goes through lm_head, masked or not."""
    kl_gradient: Literal["kl", "k3"] = "kl"
    """`kl`: the gradient of KL(policy || base). `k3`: the gradient of the k3 estimate, as DeepSeekMath published it;
    its mean is the gradient of KL(base || policy)."""
    entropy_fraction: Fraction = 1.0
    """rho: only this share of the response tokens of a step's groups that teach, those with the highest entropy,
    carries gradient. Above 0; 1 turns the mask off."""
    passes: Positive = 1
    """Gradient passes over the batch of a step. Clipping has an effect from the second update on, in the second pass or
    with `batch.updates`."""
    max_mismatch: NonNegativeFloat = 0.0
    """Training stops if the 99th percentile of |actor - learner log-prob| is larger than this, on samples of the
    current version. 0 takes limits of mean and percentile by the compute type, raised to a multiple of the learner's
    own rounding: the difference that the same tokens make in two different batches."""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(lowest, highest) ratio; for `dppo`, one plus the difference of probabilities. From the keys where they are
        given, else the paper's."""
        if self.kind == "sapo":
            return UNBOUNDED
        low, high = PAPER_CLIPS[self.kind]
        low = low if self.clip_low is None else self.clip_low
        high = high if self.clip_high is None else self.clip_high
        return 1 - low, 1 + high

    @property
    def cap(self) -> float:
        """Of the importance weight, 0 where it is off."""
        if self.importance_cap is not None:
            return self.importance_cap
        if self.kind == "dppo":
            return 20.0
        return {"token": 2.0, "sequence": 2.0, "token_mask": 5.0, "sequence_mask": 3.0}[self.importance]

    @property
    def needs_whole_completions(self) -> str:
        """The key that is about all tokens of a completion; empty if none is."""
        if self.kind == "gspo":
            return "loss.kind = 'gspo'"
        if self.cap and self.importance.startswith("sequence"):
            return f"loss.importance = '{self.importance}'"
        return f"loss.stale_limit = {self.stale_limit:g}" if self.stale_limit else ""


class TeacherConfig(Section, frozen=True, kw_only=True):
    """The teacher that loss.kind = "opd" follows. It reads what the policy has sampled and says how likely each token
    was. With `prompt` or `adapter` it is the same base as another policy, so that no second model is loaded; with `url`
    it is any model with the same tokenizer behind a server."""

    prompt: str = ""
    """Text that only the teacher sees, in its system message after tasks.system_prompt. {name} stands for a column of
    the task, for example "A correct solution is: {solution}"."""
    adapter: str = ""
    """Its adapter: a folder, a hub id or a run, as in lora.start_from, and copied into the run. If empty, what the run
    began with: the base, or lora.start_from."""
    url: str = ""
    """An OpenAI-compatible server whose completions support echo and logprobs, such as vLLM's: `http://host:8000/v1`.
    The actors ask it, and what it says is recorded. Not with `prompt` or `adapter`; needs rollout.temperature = 1."""
    model: str = ""
    """Name of the model there. Empty: the request names none, and the server takes its own."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable of the actors with the server's key; it need not be set."""
    limit_s: PositiveFloat = 120.0
    """Longest wait for one reply, in seconds."""
    patience_s: PositiveFloat = 600.0
    """A server that does not reply is asked again for this many seconds; then the run ends, and `resume` continues
    it."""

    def __post_init__(self) -> None:
        self.expand_home("adapter")


class ConstraintConfig(Section, frozen=True, kw_only=True):
    """A KL penalty on selected tokens. The formulas and sources are in learner/objective/constraint.py."""

    beta: NonNegativeFloat = 0.0
    """Weight of the penalty. 0 turns it off."""
    low_entropy: Fraction = 0.8
    """Only this share of a step's response tokens, those with the lowest entropy, may be penalised (SENT). Above 0;
    with 1 any token may be (KL-Cov)."""
    share: Annotated[float, Meta(gt=0.0, le=0.5)] = 2e-4
    """Of those tokens, this share with the highest covariance of log-prob and advantage is penalised, and the same
    share with the lowest; at least one token each. Above 0, at most 0.5. With 0.5 and high = low all of them are
    penalised equally."""
    high: NonNegativeFloat = 2.0
    """Weight of a penalised token with high covariance."""
    low: NonNegativeFloat = 0.5
    """Weight of a penalised token with low covariance. 0 leaves these tokens free."""
    reference: Literal["base", "old"] = "base"
    """The distribution that the tokens are kept close to. `base`: the policy without its adapter, which costs one pass
    over the completions concerned. `old`: the policy before the first gradient pass, which has an effect from the
    second pass on."""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW on the fp32 adapter."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up to the peak. 0 starts at the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: `constant`, or a `linear` or `cosine` fall to `final_lr_fraction` of the peak at the
    last step."""
    final_lr_fraction: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Where `linear` and `cosine` end, as a share of the peak. From 0 to 1."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Decay of AdamW's mean of gradients. At least 0, below 1."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """Decay of AdamW's mean of squared gradients. At least 0, below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. 0 turns it off."""
    max_grad_norm: PositiveFloat = 1.0
    """A gradient with a larger global norm is scaled down to it."""


class BatchConfig(Section, frozen=True, kw_only=True):
    """How a step is cut: into minibatches with an update each, and these into parts that fit into memory. Results of
    different parts differ by rounding only. A step for which the memory of a card runs out is repeated in smaller
    parts, and so are those after it for a while."""

    updates: Positive = 1
    """Optimizer updates in a pass, each on its share of the step's groups. If fewer groups count, there are fewer
    updates."""
    token_budget: Positive = 8192
    """Largest number of tokens in one micro-batch. For models other than Llama, Qwen2 and Qwen3, padding counts. A
    longer sequence is a micro-batch by itself."""
    head_rows: Positive = 1024
    """Number of tokens that go through the head at once, a tile of the vocabulary after the other."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Keep one activation per layer and recompute the others in the backward pass: less memory, more time. `auto` does
    so if the run would not fit into memory otherwise; the choice is made when a run starts, and kept. Where nothing is
    planned (vLLM on a CPU, Ray, a model that has to be fetched, a learner that was started by hand) `auto` means
    `never`."""

    @property
    def recomputes(self) -> bool:
        return self.recompute == "always"


class GrowthConfig(Section, frozen=True, kw_only=True):
    """More groups per step as the noise of the gradient grows. The formulas are in learner/orders/plan.py."""

    max_prompts: NonNegative = 0
    """Largest number of groups per step; `rollout.prompts` is the first. 0 turns growth off."""
    factor: PositiveFloat = 1.0
    """Number of groups to aim for, as a multiple of the gradient noise scale."""
    memory: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Weight of earlier steps in the smoothed noise. At least 0, below 1."""
    rate: Annotated[float, Meta(gt=1.0, le=100.0)] = 1.25
    """Largest growth from one step to the next, as a factor, rounded up to whole groups. Above 1, at most 100."""


class GuardConfig(Section, frozen=True, kw_only=True):
    """Checks that stop wrong numbers before anything is built on them."""

    on_fault: OnFault = "stop"
    """What to do after an update was refused and its batch was saved to quarantine/: `stop` the run, or `skip` the
    update and go on."""
    skips_in_a_row: Positive = 3
    """With `skip`: the run stops after more refused updates in a row than this."""
    grad_norm_limit: NonNegativeFloat = 0.0
    """An update whose gradient norm, before clipping, is larger than this is refused. 0 sets no limit. A norm that is
    not finite is always refused."""
    spike_factor: NonNegativeFloat = 1000.0
    """The same limit as a multiple of the median norm of earlier steps. 0 sets no limit."""
    spike_window: Positive = 32
    """Number of earlier norms that the median is taken of. The limit applies once there are eight."""
    canary_tokens: Annotated[int, Meta(ge=0, le=4096)] = 16
    """Number of log-probs that an actor compares with the learner's after each install of an adapter, before it
    samples. 0 turns this off; at most 4096."""
    canary_tolerance: NonNegativeFloat = 0.0
    """Largest difference that one of these log-probs may have. 0 takes 1e-3, and 0.25 where vLLM computes in bf16. If
    our own engine computes in bf16, larger differences pass where their mean is within a multiple of its own
    rounding."""


def check_objective(loss: LossConfig, constraint: ConstraintConfig, reward: RewardConfig) -> None:
    """Refuse a kind of loss with keys that would make it another algorithm than the paper's, or that it ignores."""
    if loss.kind == "dr_grpo" and reward.advantage == "std":
        raise ConfigError(
            "loss.kind = 'dr_grpo' leaves the standard deviation out, but reward.advantage is 'std'; remove that key,"
            " or set loss.kind to 'grpo'."
        )
    if loss.needs_whole_completions and loss.entropy_fraction < 1.0:
        raise ConfigError(
            f"{loss.needs_whole_completions} is about all tokens of a completion, but loss.entropy_fraction ="
            f" {loss.entropy_fraction:g} masks some of them; set it to 1, or leave the other out."
        )
    if loss.kind == "sapo" and (loss.clip_low is not None or loss.clip_high is not None):
        raise ConfigError(
            "loss.kind = 'sapo' has a gate and no clip, but loss.clip_low or loss.clip_high is given; use"
            " loss.tau_positive and loss.tau_negative."
        )
    if loss.kind == "dppo" and not loss.cap:
        raise ConfigError(
            "loss.kind = 'dppo' needs the ratio to the actor's policy, which loss.importance_cap = 0 turns off; remove"
            " that key."
        )
    if loss.importance_floor and not loss.importance.endswith("mask"):
        raise ConfigError(
            f"loss.importance_floor = {loss.importance_floor:g} is for masks, but loss.importance is"
            f" '{loss.importance}'; set it to 'token_mask' or 'sequence_mask', or remove the floor."
        )
    if loss.importance_floor > 1.0 or 0.0 < loss.cap <= loss.importance_floor:
        raise ConfigError(
            f"loss.importance_floor = {loss.importance_floor:g} would leave out tokens whose weight is 1, or all of"
            f" them (loss.importance_cap is {loss.cap:g}); set a floor of at most 1 that is below the cap."
        )
    if loss.kind == "opd" and (loss.stale_limit or reward.advantage or constraint.beta):
        raise ConfigError(
            "loss.kind = 'opd' follows a teacher and no reward, so loss.stale_limit, reward.advantage and"
            " constraint.beta mean nothing; remove them."
        )
    if loss.dual_clip:
        check_dual_clip(loss)


def check_dual_clip(loss: LossConfig) -> None:
    if loss.kind not in CLIPS_THE_RATIO:
        raise ConfigError(
            f"loss.dual_clip is a second clip of the ratio, and loss.kind = '{loss.kind}' has no first one; set it to"
            " 0, or choose another loss.kind."
        )
    if loss.dual_clip <= loss.ratio_bounds[1]:
        raise ConfigError(
            f"loss.dual_clip = {loss.dual_clip:g} must be above 1 + clip_high = {loss.ratio_bounds[1]:g}; 3 is its"
            " paper's."
        )


def check_advantage(advantage: Advantage, reward: RewardConfig, verifier: VerifierConfig) -> None:
    """Refuse one that is not defined for these rewards."""
    shaped = reward.length != 0.0 or reward.truncated != 0.0
    named = sum(weight != 0.0 for weight in verifier.rewards.values())
    if advantage == "maxrl" and (shaped or (named and not verifier.adds_up_rewards)):
        raise ConfigError(
            "reward.advantage = 'maxrl' divides by the mean score, which stands for the chance to be right, but"
            " verifier.rewards, reward.length or reward.truncated add to it; remove them or set their weights to 0, or"
            " choose another advantage."
        )
    if advantage == "gdpo" and not shaped and named < (2 if verifier.adds_up_rewards else 1):
        raise ConfigError(
            "reward.advantage = 'gdpo' combines several rewards, and there is only the verifier's score; add"
            " verifier.rewards, reward.length or reward.truncated, or set it to 'batch'."
        )


def check_teacher(loss: LossConfig, teacher: TeacherConfig, temperature: float) -> None:
    here = bool(teacher.prompt or teacher.adapter)
    if loss.kind == "opd" and not (here or teacher.url):
        raise ConfigError(
            "loss.kind = 'opd' follows a teacher, but teacher.prompt and teacher.adapter are empty, so it would be the"
            " policy that the run begins with; set one of them, or teacher.url."
        )
    if loss.kind != "opd" and (here or teacher.url):
        raise ConfigError(
            f"[teacher] is set but loss.kind = '{loss.kind}' has no teacher; set loss.kind to 'opd', or remove it."
        )
    if not teacher.url:
        return
    if here:
        raise ConfigError("teacher.url is another model; remove it, or teacher.prompt and teacher.adapter.")
    if not teacher.url.startswith(("http://", "https://")):
        raise ConfigError(f"teacher.url = '{teacher.url}' is not allowed: expected http://host:port/v1.")
    if temperature != 1.0:
        raise ConfigError(f"rollout.temperature = {temperature:g}, but the server at teacher.url has 1; set it to 1.")
