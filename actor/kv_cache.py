"""Keys and values of the tokens so far, in buffers that are allocated once per order.

Duck-typed after transformers' cache: the attention layers call `update`. Rows are samples; finished rows are taken out.
Prompts are left-padded, so one column is one moment for all rows; `visible` says which columns a row may look at.
Left out on purpose: paging. An order's shape is known before it starts.
"""

import torch


class KVCache:
    """Room for `columns` tokens of each row."""

    is_compileable = False

    def __init__(self, padding: torch.Tensor, columns: int) -> None:
        """padding: [P] how many columns at the left of each row are empty."""
        self.columns = columns
        self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.visible = torch.arange(columns, device=padding.device) >= padding[:, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, t, D] new columns of one layer -> all columns so far of that layer."""
        if layer == len(self.keys):
            shape = (keys.shape[0], keys.shape[1], self.columns, keys.shape[3])
            self.keys.append(keys.new_empty(shape))
            self.values.append(values.new_empty(shape))
        if layer == 0:
            self.length += keys.shape[2]
        start = self.length - keys.shape[2]
        self.keys[layer][:, :, start : self.length] = keys
        self.values[layer][:, :, start : self.length] = values
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, under the name transformers asks for."""
        return self.length

    def mask(self, new: int) -> torch.Tensor:
        """[B, 1, new, length + new] what the next `new` columns may look at.

        Every column sees itself: an empty one would otherwise turn into NaN, and 0 * NaN would reach the others.
        """
        end = self.length + new
        columns = torch.arange(end, device=self.visible.device)
        moments = columns[self.length :, None]
        seen = (columns <= moments) & self.visible[:, None, :end]
        return (seen | (columns == moments))[:, None]

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be kept several times (one prompt, G samples)."""
        self.keys = [key.index_select(0, rows) for key in self.keys]
        self.values = [value.index_select(0, rows) for value in self.values]
        self.visible = self.visible.index_select(0, rows)
