"""Sections of the configuration that say how an update is made: objective, optimizer, cut, size, limits."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.config.types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

OnFault = Literal["stop", "skip"]


PAPER_CLIPS = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""clip_low and clip_high of each kind. DeepSeekMath names none for GRPO: this is PPO's. CISPO has no lower bound
(MiniMax-M1), and the upper bound of 5 is ScaleRL's (2510.13786)."""


class LossConfig(Section, frozen=True, kw_only=True):
    """The objective; formulas stand in learner/objective/loss.py."""

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "dapo"
    """Algorithm: objective and divisor, and the paper's clip range and advantage where their keys are not given. `gspo`
    goes with entropy_fraction = 1 only."""
    clip_low: NonNegativeFloat | None = None
    """Ratio may fall to 1 - clip_low. Not given: the paper's, `grpo`, `dr_grpo`, `dapo` 0.2, `gspo` 3e-4, `cispo` 1
    (no lower bound)."""
    clip_high: NonNegativeFloat | None = None
    """Ratio may rise to 1 + clip_high. Not given: the paper's, `grpo`, `dr_grpo` 0.2, `dapo` 0.28 (clip-higher), `gspo`
    4e-4, `cispo` 4."""
    importance_cap: NonNegativeFloat = 2.0
    """Truncated importance weight min(pi_learner / pi_actor, cap); 0 turns it off."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL to the policy with the adapter switched off, over all tokens of the step; 0 skips the reference
    pass. Above 0 every token meets lm_head, masked or not."""
    kl_gradient: Literal["kl", "k3"] = "kl"
    """`kl`: the gradient of KL(policy || base). `k3`: of its estimate k3 as DeepSeekMath published it, which is in the
    mean that of KL(base || policy)."""
    entropy_fraction: Fraction = 1.0
    """rho: only the top rho of all response tokens of a step, by entropy, carry gradient."""
    passes: Positive = 1
    """Gradient passes over a step's batch; clipping has an effect from the second on."""
    max_mismatch: PositiveFloat = 0.05
    """Stop if the 99th percentile of |actor - learner log-prob| exceeds this on samples of the current version."""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """What the ratio is clipped to: the keys where they are given, else the paper's."""
        low, high = PAPER_CLIPS[self.kind]
        low = low if self.clip_low is None else self.clip_low
        high = high if self.clip_high is None else self.clip_high
        return 1 - low, 1 + high


class ConstraintConfig(Section, frozen=True, kw_only=True):
    """Tokens that are held back by a KL penalty; formulas and sources stand in learner/objective/constraint.py."""

    beta: NonNegativeFloat = 0.0
    """Weight of the term; 0 turns it off."""
    low_entropy: Fraction = 0.8
    """Only this share of a step's response tokens, those of lowest entropy, may be held (SENT); 1 lets all (KL-Cov)."""
    share: Annotated[float, Meta(gt=0.0, le=0.5)] = 2e-4
    """Of those, the share with the highest covariance of log-prob and advantage is held, and that with the lowest. At
    least one token each; 0.5 with high = low holds all of them alike."""
    high: NonNegativeFloat = 2.0
    """What the highest count."""
    low: NonNegativeFloat = 0.5
    """What the lowest count; 0 leaves them free."""
    reference: Literal["base", "old"] = "base"
    """Whose distribution they are held to: the base's (adapter off; one pass over the answers concerned), or the one
    before the first gradient pass, which has an effect from the second on."""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW on the fp32 adapter."""

    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to `final_lr_fraction` of the peak at the last step."""
    final_lr_fraction: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Where `linear` and `cosine` end."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Adam."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """Adam."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm beyond which the gradient is scaled down."""


class BatchConfig(Section, frozen=True, kw_only=True):
    """How a step is cut to fit memory; changes nothing but rounding."""

    token_budget: Positive = 8192
    """Padded tokens of one micro-batch; a single longer sequence still goes alone."""
    head_rows: Positive = 1024
    """Rows that meet lm_head at once."""
    checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass."""


class GrowthConfig(Section, frozen=True, kw_only=True):
    """Groups a step that grow with the noise of the gradient; formulas stand in learner/orders/plan.py."""

    max_prompts: NonNegative = 0
    """Most groups a step; `rollout.prompts` is where it begins. 0: every step has as many as the first."""
    factor: PositiveFloat = 1.0
    """Groups that are wanted, as a multiple of the gradient noise scale."""
    memory: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Share of the past in the smoothed noise."""
    rate: Annotated[float, Meta(gt=1.0, le=100.0)] = 1.25
    """At most so many times as many groups from one step to the next, rounded up."""


class GuardConfig(Section, frozen=True, kw_only=True):
    """What stops wrong numbers before anything is built on them."""

    on_fault: OnFault = "stop"
    """What to do after an update was refused and its batch set aside in quarantine/: end the run, or go on without."""
    skips_in_a_row: Positive = 3
    """With `skip`: more such steps in a row end the run after all."""
    grad_norm_limit: NonNegativeFloat = 0.0
    """A gradient norm, before clipping, beyond which an update is refused; 0 for no limit. Not finite is always."""
    spike_factor: NonNegativeFloat = 1000.0
    """The same limit as a multiple of the median norm of the steps before; 0 for none."""
    spike_window: Positive = 32
    """How many norms that median is taken of; it counts from the eighth on."""
    canary_tokens: Annotated[int, Meta(ge=0, le=4096)] = 16
    """Log-probs that an actor compares with the learner's after every install of an adapter, before it samples; 0 for
    none."""
    canary_tolerance: NonNegativeFloat = 0.0
    """How far one of them may differ; 0 takes 1e-3 where the policy computes in fp32 and 0.25 where in bf16."""
