"""The adapter after each step, as the message that actors sample from.

    file     fp32, as a checkpoint has it: what the learner goes on from; its sha256 identifies the version
    policy   what actors get: the same bytes, or with `link.adapter_dtype = "bf16"` half as many, every value rounded

Always the whole adapter: it is self-contained against the frozen base, so a late joiner needs one message and nothing
has to be replayed. Versions that open orders may still name are kept, and saved with a checkpoint. With each goes the
canary (shared/model/canary.py): what an actor must find once it has installed that version, so it is computed with the
rounded values. The difference between both adapters is one of sampling, which the importance weight corrects if there
is one. Left out: differences between versions, which no actor could use that has missed one.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

from protocol.messages import Policy as PolicyMessage
from shared.model.adapter_file import adapter_bytes, digest, install_adapter, rounded_file
from shared.model.canary import NO_CANARY, Canary
from shared.model.lora import Adapter
from shared.process.trace import NO_TRACE, Trace


@dataclass(frozen=True, kw_only=True)
class Version:
    """The adapter after a number of steps."""

    file: bytes
    """fp32."""
    sha256: str
    """Of the file."""
    policy: PolicyMessage
    """For the actors."""


class Publisher:
    """Turns the adapter's values into numbered messages."""

    def __init__(
        self,
        adapter: Adapter,
        canary: Callable[[], Canary] = lambda: NO_CANARY,
        trace: Trace = NO_TRACE,
        dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        """canary: what the policy as it is now makes of the run's canary. dtype: of what actors get."""
        self.adapter = adapter
        self.canary = canary
        self.trace = trace
        self.rounds = dtype == "bf16"
        self.versions: dict[int, Version] = {}

    def snapshot(self, version: int) -> PolicyMessage:
        """The adapter as it is now, under this version."""
        with self.trace.phase("publish"):
            self.versions[version] = self.numbered(version, adapter_bytes(self.adapter))
        return self.versions[version].policy

    def restore(self, files: Mapping[int, bytes]) -> None:
        """The versions of a checkpoint, each with its own canary; the adapter has the newest one afterwards."""
        self.versions = {}
        for version in sorted(files):
            install_adapter(self.adapter, files[version])
            self.versions[version] = self.numbered(version, files[version])

    def numbered(self, version: int, file: bytes) -> Version:
        """file: of the adapter as it is now."""
        with self.adapter.rounded() if self.rounds else nullcontext():
            policy = policy_message(version, rounded_file(file) if self.rounds else file, self.canary())
        return Version(file=file, sha256=digest(file) if self.rounds else policy.sha256, policy=policy)

    def forget_before(self, version: int) -> None:
        """Drop what nothing names any more; the newest always stays."""
        newest = max(self.versions)
        self.versions = {v: kept for v, kept in self.versions.items() if v >= version or v == newest}


def policy_message(version: int, data: bytes, canary: Canary = NO_CANARY) -> PolicyMessage:
    """Bytes of an adapter file as a message."""
    return PolicyMessage(
        version=version,
        adapter=np.frombuffer(data, dtype=np.uint8),
        sha256=digest(data),
        canary_ids=canary.ids,
        canary_logprobs=canary.logprobs,
    )
