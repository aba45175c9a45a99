"""The decode cache attends like attention over each row's own whole sequence, also after rows have ended and been
packed."""

import pytest
import torch

from actor.engines.kv_cache import KVCache
from shared.model.products import product_fp32

WIDTH, ROOM, KV_HEADS, SHARED, SIZE = 7, 9, 2, 3, 8
PADDING = torch.tensor([0, 3, 6])
PROMPT_OF_ROW = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])


class Twin:
    """The same rows, each with its own whole keys and values in float64."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.seen = [
            (keys[p, :, PADDING[p] :].double(), values[p, :, PADDING[p] :].double()) for p in PROMPT_OF_ROW.tolist()
        ]
        self.rows = list(range(len(PROMPT_OF_ROW)))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, cap: float | None
    ) -> torch.Tensor:
        out: list[torch.Tensor] = []
        for place, row in enumerate(self.rows):
            before = self.seen[row]
            self.seen[row] = (torch.cat([before[0], keys[place]], 1), torch.cat([before[1], values[place]], 1))
            k, v = (t[:, -(window or 99) :].repeat_interleave(SHARED, dim=0) for t in self.seen[row])
            scores = query[place].double() @ k.transpose(1, 2) * SIZE**-0.5
            weights = torch.softmax(cap * torch.tanh(scores / cap) if cap else scores, dim=-1)
            out.append((weights @ v).transpose(0, 1))
        return torch.stack(out)


def prefilled(layers: int = 2) -> tuple[KVCache, list[Twin]]:
    cache = KVCache(PADDING, WIDTH, PROMPT_OF_ROW, ROOM)
    twins: list[Twin] = []
    for layer in range(layers):
        keys, values = torch.randn(2, len(PADDING), KV_HEADS, WIDTH, SIZE)
        returned, _ = cache.update(keys, values, layer)
        assert returned is keys, "prompts attend to themselves"
        twins.append(Twin(keys, values))
    return cache, twins


def step(cache: KVCache, twins: list[Twin], window: int | None = None, cap: float | None = None) -> None:
    """One token of every row through every layer, compared."""
    for layer, twin in enumerate(twins):
        query = torch.randn(len(twin.rows), KV_HEADS * SHARED, 1, SIZE)
        keys, values = torch.randn(2, len(twin.rows), KV_HEADS, 1, SIZE)
        cached, _ = cache.update(keys, values, layer)
        assert not isinstance(cached, torch.Tensor)
        expected = twin.attend(query, keys.double(), values.double(), window, cap).float()
        torch.testing.assert_close(cached.attend(query, SIZE**-0.5, window, cap), expected)


def end(cache: KVCache, twins: list[Twin], *rows: int) -> None:
    """These rows of all there were at the start have ended."""
    going = torch.tensor([row not in rows for row in twins[0].rows])
    for twin in twins:
        twin.rows = [row for row in twin.rows if row not in rows]
    cache.keep(going)


def test_every_row_attends_to_its_prompt_and_to_itself() -> None:
    cache, twins = prefilled()
    for _ in range(3):
        step(cache, twins)
    assert cache.get_seq_length() == WIDTH + 3


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_leaves_the_prompt_behind_column_by_column(window: int, cap: float | None) -> None:
    cache, twins = prefilled()
    for _ in range(3):
        step(cache, twins, window, cap)
    end(cache, twins, 0, 1, 4, 5)
    for _ in range(5):
        step(cache, twins, window, cap)


def test_scores_are_scaled_in_fp32_and_not_the_bf16_query() -> None:
    """Scores of some tens of nats: a query that is rounded once more would move them by a tenth."""
    generator = torch.Generator().manual_seed(0)
    keys, values, mine, more = (
        torch.randn(rows, KV_HEADS, width, SIZE, generator=generator).bfloat16()
        for rows, width in ((1, WIDTH), (1, WIDTH), (9, 1), (9, 1))
    )
    query = 60 * torch.randn(9, KV_HEADS * SHARED, 1, SIZE, generator=generator).bfloat16()
    cache = KVCache(torch.tensor([0]), WIDTH, torch.zeros(9, dtype=torch.int64), ROOM)
    cache.update(keys, values, 0)
    cached, _ = cache.update(mine, more, 0)
    assert not isinstance(cached, torch.Tensor)
    every = [torch.cat([a.expand(9, -1, -1, -1), b], 2).double() for a, b in ((keys, mine), (values, more))]
    k, v = (t.repeat_interleave(SHARED, dim=1) for t in every)
    weights = torch.softmax(query.double() @ k.transpose(2, 3) * SIZE**-0.5, dim=-1)
    found = cached.attend(query, SIZE**-0.5, None, None).double()
    torch.testing.assert_close(found, (weights @ v).transpose(1, 2), rtol=0.01, atol=0.01)


def test_rows_that_end_leave_the_others_as_they_were() -> None:
    cache, twins = prefilled()
    step(cache, twins)
    end(cache, twins, 1, 6)
    step(cache, twins)
    assert cache.slots.count == 3 * 4, "three quarters are in use: nothing is packed yet"


def test_half_empty_slots_are_packed_and_prompts_without_completions_dropped() -> None:
    cache, twins = prefilled()
    step(cache, twins)
    end(cache, twins, 0, 1, 4, 5)
    assert (len(cache.slots.visible), cache.slots.places, cache.slots.count) == (2, 3, 6)
    step(cache, twins)
    end(cache, twins, 2, 3, 7)
    assert (len(cache.slots.visible), cache.slots.places, cache.slots.count) == (1, 2, 2) and cache.slots.full
    for _ in range(4):
        step(cache, twins)
    assert [len(layer.prompt_keys) for layer in cache.layers] == [1, 1]


def test_when_the_last_row_has_ended_nothing_is_left_to_pack() -> None:
    cache, twins = prefilled()
    step(cache, twins)
    end(cache, twins, *range(9))
    assert len(cache.slots.of_row) == 0


def test_a_group_of_one_completion_each_takes_a_slot_a_prompt() -> None:
    cache = KVCache(torch.tensor([0, 1]), 2, torch.tensor([0, 1]), ROOM)
    assert (cache.slots.places, cache.slots.count, cache.slots.full) == (1, 2, True)


def test_the_prompt_mask_hides_padding_and_the_future_but_never_a_column_from_itself() -> None:
    mask = prefilled(0)[0].prompt_mask()
    assert mask.shape == (3, 1, WIDTH, WIDTH)
    for row, padding in enumerate(PADDING.tolist()):
        for seeing in range(WIDTH):
            for seen in range(WIDTH):
                expected = seen == seeing or (padding <= seen <= seeing)
                assert bool(mask[row, 0, seeing, seen]) == expected


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_products_of_bf16_are_summed_and_kept_in_fp32(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(*shape, 4, 64).bfloat16(), torch.randn(*shape, 64, 5).bfloat16()
    product = product_fp32(a, b)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(product, (a @ b).float()), "rounding to bf16 would show"
