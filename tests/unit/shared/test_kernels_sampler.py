"""The sampler's kernel, in Triton's interpreter or on a card: the inverse of the distribution function, in float64."""

import numpy as np
import pytest
import torch

from shared.model import sampler
from tests import reference

pytest.importorskip("triton", reason="the extra `kernels` is not installed here")

from shared.model.kernels.sampler import draw

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = sampler.BLOCK
SIZES = [1, 97, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


def logits_of(size: int, rows: int = 6, spread: float = 4.0) -> torch.Tensor:
    drawn = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    return (spread * drawn + 30).to(DEVICE)


def uniforms_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """First j with sum_{i <= j} p_i > u, term by term in float64."""
    found = []
    for row, u in zip(logits.double().cpu().numpy(), uniforms.cpu().numpy(), strict=True):
        weights = np.exp(row - row.max())
        found.append(int(np.searchsorted(np.cumsum(weights), u * weights.sum(), side="right")))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_token_log_prob_and_entropy_are_those_of_the_distribution(size: int) -> None:
    logits, uniforms = logits_of(size), uniforms_of(6)
    drawn = draw(logits, uniforms)
    assert drawn.ids.tolist() == tokens(logits, uniforms)
    logprobs, entropies = reference.softmax_stats(logits.cpu(), drawn.ids.cpu(), 1.0)
    torch.testing.assert_close(drawn.logprobs.double().cpu(), logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.entropies.double().cpu(), entropies, rtol=0, atol=1e-5)


def test_a_vocabulary_of_150_000_and_the_torch_version() -> None:
    logits, uniforms = logits_of(151_936, rows=1), uniforms_of(1)
    before = logits.clone()
    drawn, other = draw(logits, uniforms), sampler.draw(logits.clone(), uniforms)
    assert drawn.ids.tolist() == other.ids.tolist() == tokens(logits, uniforms)
    logprobs, entropies = reference.softmax_stats(logits.cpu(), drawn.ids.cpu(), 1.0)
    torch.testing.assert_close(drawn.logprobs.double().cpu(), logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.entropies.double().cpu(), entropies, rtol=0, atol=1e-5)
    assert torch.equal(logits, before), "the torch version overwrites them, this one does not"


@pytest.mark.parametrize("size", SIZES)
def test_without_uniforms_the_first_of_the_most_likely_tokens_is_taken(size: int) -> None:
    logits = logits_of(size)
    best = logits.amax(dim=1)
    first = torch.arange(6) * (size // 7)
    logits[torch.arange(6), first] = best
    logits[torch.arange(6), first + (size - 1 - first) // 2] = best
    drawn = draw(logits, None)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert drawn.ids.tolist() == expected
    logprobs, _ = reference.softmax_stats(logits.cpu(), drawn.ids.cpu(), 1.0)
    torch.testing.assert_close(drawn.logprobs.double().cpu(), logprobs, rtol=0, atol=1e-5)


def test_every_token_has_its_own_part_of_the_line() -> None:
    """Uniforms on both sides of each boundary, across the ends of blocks."""
    logits = torch.full((1, 2 * BLOCK + 3), -np.inf, device=DEVICE)
    alive = [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 1]
    logits[0, alive] = torch.tensor([0.125, 0.25, 0.125, 0.25, 0.25], device=DEVICE).log()
    line = [(0.0, 0), (0.1249, 0), (0.1251, 1), (0.3749, 1), (0.3751, 2), (0.4999, 2), (0.5001, 3), (0.7499, 3)]
    line += [(0.7501, 4), (1 - 2**-53, 4)]
    uniforms = torch.tensor([u for u, _ in line], dtype=torch.float64, device=DEVICE)
    with np.errstate(invalid="ignore"):
        drawn = draw(logits.expand(len(line), -1).contiguous(), uniforms)
    assert drawn.ids.tolist() == [alive[place] for _, place in line]
    entropy = -sum(p * np.log(p) for p in (0.125, 0.25, 0.125, 0.25, 0.25))
    torch.testing.assert_close(drawn.entropies.cpu(), torch.full((len(line),), entropy, dtype=torch.float32))


def test_the_tail_of_a_large_vocabulary_is_drawn() -> None:
    """In fp32 a running sum near one would not move for hundreds of tokens of 1e-10."""
    size, wanted = 20_001, [3, 5_011, 12_000, 19_998]
    logits = torch.full((len(wanted), size), float(np.log(1e-10)), device=DEVICE)
    logits[:, 0] = 0.0
    weights = np.exp(logits[0].double().cpu().numpy())
    cumulative = np.cumsum(weights)
    middles = torch.tensor([(cumulative[token] - 0.5e-10) / cumulative[-1] for token in wanted], dtype=torch.float64)
    assert draw(logits, middles.to(DEVICE)).ids.tolist() == wanted


def test_a_draw_depends_on_its_own_row_alone_to_the_bit() -> None:
    logits, uniforms = logits_of(3 * BLOCK + 17), uniforms_of(6)
    together = draw(logits, uniforms)
    for row in range(6):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1])
        assert alone.ids.tolist() == together.ids[row : row + 1].tolist()
        assert torch.equal(alone.logprobs, together.logprobs[row : row + 1])
        assert torch.equal(alone.entropies, together.entropies[row : row + 1])


def test_rows_of_a_wider_matrix_and_fp32_uniforms_will_do() -> None:
    whole = logits_of(400)
    logits, uniforms = whole[:, :300], uniforms_of(6).float()
    assert draw(logits, uniforms).ids.tolist() == tokens(logits, uniforms.double())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_no_numbers_lead_to_no_place_outside_the_vocabulary(greedy: bool) -> None:
    logits = torch.full((2, 3 * BLOCK), np.nan, device=DEVICE)
    drawn = draw(logits, None if greedy else uniforms_of(2))
    assert all(0 <= token < 3 * BLOCK for token in drawn.ids.tolist())
