"""The decode cache attends like attention over each row's own whole sequence, also after rows have ended and been
packed."""

import pytest
import torch

from actor.engines.kv_cache import COPIED_BYTES, KVCache
from actor.engines.prompts import PromptPass
from shared.model.layers.products import product_fp32

WIDTH, ROOM, KV_HEADS, SHARED, SIZE = 7, 9, 2, 3, 8
PADDING = torch.tensor([0, 3, 6])
PROMPT_OF_ROW = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])


class Twin:
    """The same rows, each with its own whole keys and values in float64."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.prompts = {
            p: (keys[p, :, PADDING[p] :].double(), values[p, :, PADDING[p] :].double()) for p in range(len(PADDING))
        }
        self.seen = [self.prompts[p] for p in PROMPT_OF_ROW.tolist()]
        self.rows = list(range(len(PROMPT_OF_ROW)))

    def begin(self, place: int, prompt: int) -> None:
        self.seen[self.rows[place]] = self.prompts[prompt]

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


def passed(padding: torch.Tensor, keys: list[tuple[torch.Tensor, torch.Tensor]]) -> PromptPass:
    """Prompts that were run: keys and values of each layer."""
    prompts = PromptPass(padding, WIDTH)
    for layer, (key, value) in enumerate(keys):
        assert prompts.update(key, value, layer) == (key, value), "prompts attend to themselves"
    return prompts


class Rows:
    """A cache, its twins, and how many tokens each row has."""

    def __init__(self, copied_bytes: int, layers: int = 2) -> None:
        self.cache = KVCache(len(PROMPT_OF_ROW), ROOM, WIDTH, PADDING.device, copied_bytes)
        made = [tuple(torch.randn(2, len(PADDING), KV_HEADS, WIDTH, SIZE)) for _ in range(layers)]
        self.cache.add_prompts(passed(PADDING, [(key, value) for key, value in made]))
        self.twins = [Twin(key, value) for key, value in made]
        self.prompt_of_row, self.tokens = PROMPT_OF_ROW, torch.zeros(len(PROMPT_OF_ROW), dtype=torch.int64)
        self.cache.assign(PROMPT_OF_ROW)

    def step(self, window: int | None = None, cap: float | None = None) -> None:
        """One token of every row through every layer, compared."""
        self.tokens = self.tokens + 1
        self.cache.rows.step(self.tokens)
        for layer, twin in enumerate(self.twins):
            query = torch.randn(len(twin.rows), KV_HEADS * SHARED, 1, SIZE)
            keys, values = torch.randn(2, len(twin.rows), KV_HEADS, 1, SIZE)
            cached, _ = self.cache.update(keys, values, layer)
            expected = twin.attend(query, keys.double(), values.double(), window, cap).float()
            torch.testing.assert_close(cached.attend(query, SIZE**-0.5, window, cap), expected)

    def end(self, *places: int) -> None:
        """These rows leave, and the last rows take their places."""
        rows = [row for row in range(len(self.tokens)) if row not in places]
        holes = [place for place in places if place < len(rows)]
        for hole in holes:
            rows.insert(hole, rows.pop())
        order = torch.tensor(rows, dtype=torch.int64)
        moved = torch.tensor([place for place, row in enumerate(rows) if place != row], dtype=torch.int64)
        self.cache.move_rows(order[moved], moved)
        self.prompt_of_row, self.tokens = self.prompt_of_row[order], self.tokens[order]
        for twin in self.twins:
            twin.rows = [twin.rows[row] for row in rows]
        if rows:
            self.cache.assign(self.prompt_of_row)

    def take_over(self, place: int, prompt: int) -> None:
        """Another completion, of this prompt, begins in a row."""
        self.prompt_of_row, self.tokens = self.prompt_of_row.clone(), self.tokens.clone()
        self.prompt_of_row[place], self.tokens[place] = prompt, 0
        for twin in self.twins:
            twin.begin(place, prompt)
        self.cache.assign(self.prompt_of_row)


@pytest.fixture(params=[0, COPIED_BYTES], ids=["shared", "copied"])
def copied_bytes(request: pytest.FixtureRequest) -> int:
    """Prompts are read where they are, or copied to their rows."""
    return request.param


def test_every_row_attends_to_its_prompt_and_to_itself(copied_bytes: int) -> None:
    rows = Rows(copied_bytes)
    for _ in range(3):
        rows.step()
    assert rows.cache.get_seq_length() == WIDTH + 3


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_leaves_the_prompt_behind_column_by_column(window: int, cap: float | None, copied_bytes: int) -> None:
    rows = Rows(copied_bytes)
    for _ in range(3):
        rows.step(window, cap)
    rows.end(0, 1, 4, 5)
    rows.take_over(2, 1)
    for _ in range(5):
        rows.step(window, cap)


@pytest.mark.parametrize("window", [None, 2, 6])
def test_a_row_that_is_taken_over_sees_nothing_of_the_one_before_and_columns_are_used_again(
    window: int | None, copied_bytes: int
) -> None:
    """Twenty steps in nine columns; no completion is longer than those."""
    rows = Rows(copied_bytes)
    for step in range(20):
        for place in range(len(PROMPT_OF_ROW)):
            if (step + place) % (5 + place % 4) == 0 or rows.tokens[place] == ROOM:
                rows.take_over(place, (step + place) % len(PADDING))
        rows.step(window)
    assert len(set(rows.tokens.tolist())) > 3


def test_a_token_that_does_not_count_is_seen_by_none(copied_bytes: int) -> None:
    """The step in which a row's new prompt is run: its row is computed with a token that must leave no trace."""
    rows = Rows(copied_bytes, layers=1)
    rows.step()
    rows.take_over(3, 1)
    tokens = rows.tokens + 1
    tokens[3] = 0
    rows.cache.rows.step(tokens)
    keys, values = torch.randn(2, 9, KV_HEADS, 1, SIZE)
    keys[3] = values[3] = 1e4
    cached, _ = rows.cache.update(keys, values, 0)
    query = torch.randn(9, KV_HEADS * SHARED, 1, SIZE)
    expected = rows.twins[0].attend(query, keys.double(), values.double(), None, None).float()
    others = torch.arange(9) != 3
    torch.testing.assert_close(cached.attend(query, SIZE**-0.5)[others], expected[others])
    rows.tokens = tokens
    rows.twins[0].begin(3, 1)
    rows.step()


def test_scores_are_scaled_in_fp32_and_not_the_bf16_query(copied_bytes: int) -> None:
    """Scores of some tens of nats: a query that is rounded once more would move them by a tenth."""
    generator = torch.Generator().manual_seed(0)
    keys, values, mine, more = (
        torch.randn(rows, KV_HEADS, width, SIZE, generator=generator).bfloat16()
        for rows, width in ((1, WIDTH), (1, WIDTH), (9, 1), (9, 1))
    )
    query = 60 * torch.randn(9, KV_HEADS * SHARED, 1, SIZE, generator=generator).bfloat16()
    cache = KVCache(9, ROOM, WIDTH, PADDING.device, copied_bytes)
    cache.add_prompts(passed(torch.tensor([0]), [(keys, values)]))
    cache.assign(torch.zeros(9, dtype=torch.int64))
    cache.rows.step(torch.ones(9, dtype=torch.int64))
    cached, _ = cache.update(mine, more, 0)
    every = [torch.cat([a.expand(9, -1, -1, -1), b], 2).double() for a, b in ((keys, mine), (values, more))]
    k, v = (t.repeat_interleave(SHARED, dim=1) for t in every)
    weights = torch.softmax(query.double() @ k.transpose(2, 3) * SIZE**-0.5, dim=-1)
    found = cached.attend(query, SIZE**-0.5, None, None).double()
    torch.testing.assert_close(found, (weights @ v).transpose(1, 2), rtol=0.01, atol=0.01)


def test_rows_that_end_leave_the_others_as_they_were(copied_bytes: int) -> None:
    rows = Rows(copied_bytes)
    rows.step()
    rows.end(1, 6)
    rows.step()
    rows.end(0, 2, 5)
    for _ in range(3):
        rows.step()


def test_prompts_that_no_row_continues_can_leave_and_others_come(copied_bytes: int) -> None:
    rows = Rows(copied_bytes)
    rows.step()
    rows.end(4, 5)
    assert not (rows.prompt_of_row == 1).any()
    rows.cache.keep_prompts(torch.tensor([0, 2]))
    more = [(torch.randn(1, KV_HEADS, WIDTH, SIZE), torch.randn(1, KV_HEADS, WIDTH, SIZE)) for _ in rows.twins]
    rows.cache.add_prompts(passed(PADDING[1:2], more))
    rows.prompt_of_row = torch.where(rows.prompt_of_row == 2, 1, rows.prompt_of_row)
    for twin, (key, value) in zip(rows.twins, more, strict=True):
        twin.prompts[2] = (key[0, :, PADDING[1] :].double(), value[0, :, PADDING[1] :].double())
    rows.take_over(0, 2)
    assert [len(layer.prompt_keys) for layer in rows.cache.layers] == [3, 3]
    for _ in range(4):
        rows.step()


def test_a_group_of_one_completion_each_takes_a_slot_a_prompt() -> None:
    cache = KVCache(2, ROOM, 2, PADDING.device)
    cache.add_prompts(PromptPass(torch.tensor([0, 1]), 2))
    cache.assign(torch.tensor([0, 1]))
    assert (cache.rows.places, len(cache.rows.of_slot), cache.rows.full) == (1, 2, True)


def test_the_prompt_mask_hides_padding_and_the_future_but_never_a_column_from_itself() -> None:
    mask = PromptPass(PADDING, WIDTH).mask()
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


def test_prompts_are_copied_up_to_a_size_in_a_layer() -> None:
    needed = 2 * 4 * len(PROMPT_OF_ROW) * KV_HEADS * WIDTH * SIZE
    assert [layer.whole is None for layer in Rows(needed).cache.layers] == [False, False]
    assert [layer.whole is None for layer in Rows(needed - 1).cache.layers] == [True, True]
