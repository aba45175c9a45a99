"""What a card would launch for a step over tensors without values (shared/base/meta.py)."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNFILLED = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift", "detach")
NO_LAUNCH = tuple(f"aten::{name}" for name in UNFILLED)
OF_VALUES = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave")
WAITS = {f"aten::{name}" for name in OF_VALUES}
"""The host needs a value from the device, or the shape of the result follows from values."""
SORTS = {f"aten::{name}" for name in ("index_put_", "index_put", "_index_put_impl_", "sort", "argsort", "topk")}
"""In deterministic mode a card sorts all places before it writes to them; or it sorts anyway."""


class Launches(TorchDispatchMode):
    """Counts what a card would launch: everything but views and tensors that are not filled. Use it under `no_grad`: in
    inference mode, operations arrive here before they are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.devices = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, counted."""
        self.devices |= {one.device.type for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        name, returns = func._schema.name, func._schema.returns
        is_view = bool(returns) and all(one.alias_info and not one.alias_info.is_write for one in returns)
        if not is_view and not name.startswith(NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class CardKernels(TorchFunctionMode):
    """Operations that are one kernel on a card and several elsewhere."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """RMSNorm counts as one."""
        if func is not F.rms_norm and func is not torch.rms_norm:
            return func(*args, **(kwargs or {}))
        before = Counter(self.launches.counts)
        found = func(*args, **(kwargs or {}))
        self.launches.counts = before + Counter({"aten::_fused_rms_norm": 1})
        return found
