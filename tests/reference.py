"""Slow truths in float64, written from the papers' definitions and nothing of ours.

Sources: DeepSeekMath 2402.03300 (grpo), Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, MiniMax-M1 2506.13585
(cispo), SAPO 2511.20347, DPPO 2602.04879, dual clip 1912.09729, IcePop 2510.18855 (token_mask), "When speed kills
stability" 2025 (sequence, sequence_mask), DeepSeek-V3.2 2512.02556 (masking of stale samples), RLOO 2402.14740, MaxRL
2602.02710, REINFORCE++ 2501.03262, GDPO 2601.05242, high-entropy tokens 2506.01939, SENT 2512.04359 and KL-Cov
2505.22617 (penalised tokens), QLoRA 2305.14314 (NF4, double quantisation), 8-bit optimizers 2110.02861 (the dynamic
data type), LoRA 2106.09685, decoupled weight decay 1711.05101, k3: Schulman, "Approximating KL divergence", its
unbiased gradient: DeepSeek-V3.2 2512.02556, equation 7.
Loops run over samples i and tokens t as the sums in the papers do. Nothing here is fast or imports the product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from statistics import NormalDist

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion o_i of a step."""

    logprobs: torch.Tensor
    """[T] float64 log pi(o_it), with gradient."""
    old: torch.Tensor
    """[T] log pi_old."""
    actor: torch.Tensor
    """[T] log mu."""
    base: torch.Tensor
    """[T] log pi_base."""
    selected: Sequence[bool]
    """[T] tokens of the entropy mask."""
    advantage: float
    """A_i."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which objective, and its constants."""

    kind: str
    """grpo, dr_grpo, dapo, gspo, cispo, sapo or dppo."""
    bounds: tuple[float, float]
    """1 - epsilon_low and 1 + epsilon_high, between which the ratio is clipped; DPPO's: 1 - delta and 1 + delta."""
    cap: float
    """C of the importance weight; 0 for none."""
    correction: str = "token"
    """`token`, `sequence`: truncated; `token_mask`, `sequence_mask`: 0 outside of [floor, C]."""
    floor: float = 0.0
    """Of a mask."""
    stale: float = 0.0
    """delta of DeepSeek-V3.2's off-policy sequence mask; 0 for none."""
    dual: float = 0.0
    """c of the dual clip; 0 for none."""
    taus: tuple[float, float] = (1.0, 1.05)
    """SAPO's temperatures, of positive advantages and of others."""
    beta: float
    """Weight of the KL term."""
    kl: str
    """`kl` for the estimate whose gradient is unbiased, `k3` for DeepSeekMath's."""
    longest: int
    """T_max, Dr. GRPO's constant."""


def number_of(fraction: float, whole: int) -> int:
    """ceil(fraction x whole) of the decimal number as it is written."""
    exact = Decimal(repr(fraction)) * whole
    return int(exact.to_integral_value(rounding=ROUND_CEILING))


def top_tokens(entropies: Sequence[Sequence[float]], fraction: float) -> list[list[bool]]:
    """H_t >= tau, where tau is the entropy of the ceil(rho S)-th of all S tokens of the step."""
    ranked = sorted((h for row in entropies for h in row), reverse=True)
    threshold = ranked[number_of(fraction, len(ranked)) - 1]
    return [[h >= threshold for h in row] for row in entropies]


def penalised_tokens(
    entropies: Sequence[Sequence[float]],
    logprobs: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    low_entropy: float,
    share: float,
    strengths: tuple[float, float],
) -> list[list[float]]:
    """How strongly each token is penalised: `strengths` are those of the highest and of the lowest covariances."""
    ranked = sorted(h for row in entropies for h in row)
    threshold = ranked[number_of(low_entropy, len(ranked)) - 1]
    low = [(i, t) for i, row in enumerate(entropies) for t, h in enumerate(row) if h <= threshold]
    mean_logprob = math.fsum(logprobs[i][t] for i, t in low) / len(low)
    mean_advantage = math.fsum(advantages[i] for i, _ in low) / len(low)
    covariance = {(i, t): (logprobs[i][t] - mean_logprob) * (advantages[i] - mean_advantage) for i, t in low}
    count = number_of(share, len(low))
    strength = dict.fromkeys(sorted(low, key=lambda token: (covariance[token], token))[:count], strengths[1])
    strength |= dict.fromkeys(sorted(low, key=lambda token: (-covariance[token], token))[:count], strengths[0])
    return [[strength.get((i, t), 0.0) for t in range(len(row))] for i, row in enumerate(entropies)]


def constraint(
    rollouts: Sequence[Rollout], strengths: Sequence[Sequence[float]], objective: Objective, to: str
) -> torch.Tensor:
    """The penalty of a whole step: the pull of each token to its base or its old log-prob (`to`)."""
    total = torch.zeros((), dtype=torch.float64)
    for o, row in zip(rollouts, strengths, strict=True):
        target = {"base": o.base, "old": o.old}[to]
        for t, strength in enumerate(row):
            total = total + token_share(o, rollouts, objective) * strength * k3(o.logprobs[t], target[t])
    return total


def token_share(o: Rollout, rollouts: Sequence[Rollout], objective: Objective) -> float:
    """The factor of one token of this completion in the objective's average."""
    match objective.kind:
        case "grpo" | "gspo" | "sapo":
            return 1 / len(o.logprobs) / len(rollouts)
        case "dapo" | "cispo":
            return 1 / sum(len(other.logprobs) for other in rollouts)
        case "dr_grpo" | "dppo":
            return 1 / objective.longest / len(rollouts)
        case unknown:
            raise ValueError(unknown)


def loss(rollouts: Sequence[Rollout], objective: Objective) -> torch.Tensor:
    """-J of a whole step: all its completions, also those with A_i = 0 because their group was paid alike."""
    total = torch.zeros((), dtype=torch.float64)
    for o in rollouts:
        gains = sequence_gains(o, objective) if objective.kind == "gspo" else token_gains(o, objective)
        inner = torch.zeros((), dtype=torch.float64)
        for gain in gains:
            inner = inner + gain
        if objective.beta:
            for t in range(len(o.logprobs)):
                inner = inner - objective.beta * token_kl(o, t, objective)
        total = total + inner * token_share(o, rollouts, objective)
    return -total


def token_gains(o: Rollout, objective: Objective) -> list[torch.Tensor]:
    """What each selected token adds to its sample's inner sum, ratios by token."""
    gains = []
    for t in range(len(o.logprobs)):
        if o.selected[t]:
            gain = token_gain(o, t, torch.exp(o.logprobs[t] - o.old[t]), objective)
            gains.append(correction(o, float(o.old[t] - o.actor[t]), objective) * gain)
    return gains


def token_gain(o: Rollout, t: int, ratio: torch.Tensor, objective: Objective) -> torch.Tensor:
    bounded = torch.clip(ratio, *objective.bounds)
    if objective.kind == "cispo":
        return bounded.detach() * o.advantage * o.logprobs[t]
    if objective.kind == "sapo":
        tau = objective.taus[0] if o.advantage > 0 else objective.taus[1]
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * o.advantage
    if objective.kind == "dppo":
        mu, pi = math.exp(float(o.actor[t])), math.exp(float(o.logprobs[t].detach()))
        away = pi > mu if o.advantage > 0 else pi < mu
        limit = objective.bounds[1] - 1 if o.advantage > 0 else 1 - objective.bounds[0]
        return ratio * o.advantage * (0.0 if away and abs(mu - pi) > limit else 1.0)
    return pessimistic(ratio, bounded, o.advantage, objective.dual)


def correction(o: Rollout, log_weight: float, objective: Objective) -> float:
    """The factor for what the sampler was, of a token (or a GSPO sample) whose own log pi_old / mu is given."""
    if objective.stale and o.advantage < 0:
        drift = math.fsum((o.actor - o.logprobs.detach()).tolist()) / len(o.logprobs)
        if drift > objective.stale:
            return 0.0
    if objective.correction.startswith("sequence"):
        log_weight = math.fsum((o.old - o.actor).tolist())
    if objective.cap and objective.correction.endswith("mask"):
        weight = math.exp(log_weight)
        return weight if objective.floor <= weight <= objective.cap else 0.0
    return importance(log_weight, objective.cap)


def token_kl(o: Rollout, t: int, objective: Objective) -> torch.Tensor:
    """What one token that mu drew says of KL(pi || base): pi / mu in front, as pi / pi_old min(pi_old / mu, C)."""
    estimate = k3(o.logprobs[t], o.base[t])
    if objective.kl == "k3":
        return estimate
    ratio = torch.exp(o.logprobs[t]) / torch.exp(o.old[t])
    return importance(float(o.old[t] - o.actor[t]), objective.cap) * ratio * estimate


def sequence_gains(o: Rollout, objective: Objective) -> list[torch.Tensor]:
    """The same with one ratio for the sample: s_i = (prod over its selected tokens of r_it) ^ (1 / their number)."""
    chosen = [t for t in range(len(o.logprobs)) if o.selected[t]]
    if not chosen:
        return []
    product = torch.ones((), dtype=torch.float64)
    moved = 1.0
    for t in chosen:
        product = product * torch.exp(o.logprobs[t] - o.old[t])
        moved = moved * math.exp(float(o.old[t] - o.actor[t]))
    ratio = product ** (1 / len(chosen))
    bounded = torch.clip(ratio, *objective.bounds)
    weight = correction(o, math.log(moved) / len(chosen), objective)
    return [weight * pessimistic(ratio, bounded, o.advantage, objective.dual) for _ in chosen]


def pessimistic(ratio: torch.Tensor, bounded: torch.Tensor, advantage: float, dual: float) -> torch.Tensor:
    """min(r A, clip(r) A), and no less than c A where A < 0"""
    smaller = torch.minimum(ratio * advantage, bounded * advantage)
    if dual and advantage < 0:
        return torch.maximum(smaller, torch.full_like(smaller, dual * advantage))
    return smaller


def importance(log_weight: float, cap: float) -> float:
    """min(pi_old / mu, C)"""
    return min(math.exp(log_weight), cap) if cap else 1.0


def k3(logprob: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """pi_base / pi - log(pi_base / pi) - 1"""
    x = torch.exp(base) / torch.exp(logprob)
    return x - torch.log(x) - 1


def clipped_tokens(o: Rollout, objective: Objective) -> list[bool]:
    """Selected tokens whose gradient the clip of a token-wise objective stops."""
    stopped = []
    for t in range(len(o.logprobs)):
        ratio = math.exp(float(o.logprobs[t].detach() - o.old[t]))
        bounded = min(max(ratio, objective.bounds[0]), objective.bounds[1])
        if o.selected[t]:
            stopped.append(bounded * o.advantage < ratio * o.advantage)
    return stopped


def softmax_stats(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, V] full logits, [T] -> log-probs of the targets and entropies, [T] each."""
    scaled = logits.double() / temperature
    p = torch.exp(scaled - scaled.max(dim=1, keepdim=True).values)
    p = p / p.sum(dim=1, keepdim=True)
    logprobs = torch.stack([torch.log(p[t, int(target)]) for t, target in enumerate(targets)])
    return logprobs, -(p * torch.log(p)).sum(dim=1)


def nf4_code() -> np.ndarray:
    """[16] quantiles of N(0, 1), eight positive and seven negative with a zero between, scaled to [-1, 1]."""
    tail = 0.9677083
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(tail, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(tail, 0.5, 8)[:-1]]
    values = np.array(sorted([*above, 0.0, *below]))
    return values / values.max()


def dynamic_code() -> np.ndarray:
    """[256] the signed dynamic data type: seven decades, 2^i means of equal intervals in decade i, and 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2**decade + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *-means]
    return np.array(sorted(values))


def nearest(values: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Index of the code value closest to each value."""
    return np.abs(values[:, None] - code[None, :]).argmin(axis=1)


def nf4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flattened weight -> [n] code indices and [n / 64] absmax."""
    blocks = weight.reshape(-1, 64).astype(np.float64)
    absmax = np.abs(blocks).max(axis=1)
    return nearest((blocks / absmax[:, None]).reshape(-1), nf4_code()), absmax


def double_quantised(absmax: np.ndarray) -> np.ndarray:
    """[b] absmax rounded to 8 bits about its mean in blocks of 256."""
    mean, code = absmax.mean(), dynamic_code()
    centred = absmax - mean
    rounded = np.empty_like(centred)
    for start in range(0, len(centred), 256):
        block = centred[start : start + 256]
        scale = np.abs(block).max()
        rounded[start : start + 256] = code[nearest(block / scale, code)] * scale
    return rounded + mean


def nf4_values(weight: np.ndarray) -> np.ndarray:
    """What a weight becomes by NF4 with double quantisation."""
    codes, absmax = nf4(weight)
    return (nf4_code()[codes].reshape(-1, 64) * double_quantised(absmax)[:, None]).reshape(weight.shape)


def lora(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float
) -> torch.Tensor:
    """h = W x + b + (alpha / R) B A x for each row x."""
    scale = alpha / a.shape[0]
    return torch.stack([weight @ row + bias + scale * (b @ (a @ row)) for row in x])


@dataclass
class AdamW:
    """One tensor under AdamW."""

    theta: np.ndarray
    beta1: float
    beta2: float
    decay: float
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        self.m, self.v, self.t = np.zeros_like(self.theta), np.zeros_like(self.theta), 0

    def step(self, gradient: np.ndarray, rate: float) -> None:
        """theta <- theta - rate (m^ / (sqrt v^ + eps) + decay theta)"""
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        m, v = self.m / (1 - self.beta1**self.t), self.v / (1 - self.beta2**self.t)
        self.theta = self.theta - rate * (m / (np.sqrt(v) + self.epsilon) + self.decay * self.theta)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean x^2 + eps) w  (1910.07467)"""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU before its last product (2002.05202)"""
    return gate / (1 + torch.exp(-gate)) * up


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each pair (x_i, x_{i + D/2}) turned by its angle (2104.09864)"""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_weights(scores: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """softmax over the columns that the mask shows"""
    shares = torch.where(mask, torch.exp(scaling * scores), 0.0)
    return shares / shares.sum(-1, keepdim=True)


def learning_rates(peak: float, warmup: int, steps: int, schedule: str, final: float) -> list[float]:
    """All rates of a run: an even climb that ends at the peak, then down to `final` of it at the last step."""
    climb = [peak * (s + 1) / warmup for s in range(warmup)]
    way = np.linspace(0.0, 1.0, steps - warmup)
    fall = {"constant": 1 + 0 * way, "linear": 1 - way, "cosine": 0.5 + 0.5 * np.cos(math.pi * way)}[schedule]
    low = peak if schedule == "constant" else peak * final
    return climb + [float(low + (peak - low) * f) for f in fall]


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The p with |p^ - p| = z sqrt(p (1 - p) / n): both roots of the quadratic."""
    z, share = NormalDist().inv_cdf(0.5 + confidence / 2), correct / n
    a, b, c = 1 + z * z / n, -(2 * share + z * z / n), share * share
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def beta_variance(a: float, b: float) -> float:
    """E[p (1 - p)] under Beta(a, b): B(a + 1, b + 1) / B(a, b)."""

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return math.exp(log_beta(a + 1, b + 1) - log_beta(a, b))


def semantic_entropy(meanings: Sequence[object]) -> float:
    """- sum_k p_k log p_k over the classes of equal meaning, p_k their share of all completions."""
    total = 0.0
    for meaning in set(meanings):
        share = sum(other == meaning for other in meanings) / len(meanings)
        total -= share * math.log(share)
    return total


def ewc_penalty(weight: float, fisher: np.ndarray, delta: np.ndarray, anchored: np.ndarray) -> float:
    """lambda / 2 sum_i F_i (theta_i - theta*_i)^2"""
    pairs = zip(fisher.flat, delta.flat, anchored.flat, strict=True)
    return weight / 2 * math.fsum(f * (now - then) ** 2 for f, now, then in pairs)


def bernoulli_fisher(inputs: Sequence[Sequence[float]], theta: Sequence[float]) -> np.ndarray:
    """diag of E_x E_{y ~ p(.|x)} [(d log p(y|x) / d theta)^2], p(1|x) = sigma(theta x), by summing over both y."""
    total = np.zeros(len(theta))
    for x in inputs:
        p = 1 / (1 + math.exp(-math.fsum(t * value for t, value in zip(theta, x, strict=True))))
        for y, share in ((1, p), (0, 1 - p)):
            total += share * np.array([((y - p) * value) ** 2 for value in x])
    return total / len(inputs)
