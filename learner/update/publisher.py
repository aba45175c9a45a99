"""The adapter after each step, as the message that actors sample from.

    file     fp32, as a checkpoint has it: what the learner goes on from; its sha256 identifies the version
    message  what actors get: the same bytes, or half as many with every value rounded to bf16 (`link.adapter_dtype`)

Always the whole adapter: it is self-contained against the frozen base, so a late joiner needs one message and nothing
has to be replayed. Versions that open orders may still name are kept, and saved with a checkpoint. With each goes the
canary (shared/model/canary.py): what an actor must find once it has installed that version. A policy in bf16 computes
with rounded values itself. If the policy is in fp32 and its adapter is sent in bf16, actors sample from slightly other
values: the canary is computed with those, and the importance weight corrects the difference. Left out: differences
between versions, which no actor could use that has missed one.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from protocol.messages import Policy as PolicyMessage
from shared.config.processes import SentDtype
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes, adapter_parts, digest, install_adapter
from shared.model.canary import NO_CANARY, Canary, canary_of
from shared.model.layers.lora import Adapter
from shared.model.policy import Policy
from shared.process.trace import NO_TRACE, Trace
from shared.run.files import FileParts


@dataclass(frozen=True, kw_only=True)
class Version:
    """The adapter after a number of steps."""

    message: PolicyMessage
    """For the actors. If it is sent in fp32, it has the bytes of the file, once in memory."""
    file: bytes | None
    """What a checkpoint writes: fp32. None if it can be made from the adapter, which has this version until the next
    update."""
    made_sha256: str = ""
    """If `file` is None: the sha256 of the adapter's file, computed when this version was published."""

    @cached_property
    def sha256(self) -> str:
        """Of the file. Where there is one, it is computed when it is asked for first, after the message was sent."""
        return self.made_sha256 if self.file is None else digest(self.file)


class Publisher:
    """Turns the adapter's values into numbered messages."""

    def __init__(
        self,
        adapter: Adapter,
        canary: Callable[[], Canary] = lambda: NO_CANARY,
        trace: Trace = NO_TRACE,
        dtype: SentDtype = "fp32",
        *,
        keeps_older: bool = True,
    ) -> None:
        """canary: what actors must find of the policy as it is now. dtype: of what they get. keeps_older: whether
        orders may name versions before the newest, whose files are then kept. Without a lag they do not."""
        self.adapter = adapter
        self.canary = canary
        self.trace = trace
        self.sends_bf16 = dtype == "bf16"
        self.keeps_older = keeps_older
        self.versions: dict[int, Version] = {}

    def snapshot(self, version: int) -> PolicyMessage:
        """The adapter as it is now, under this version."""
        with self.trace.phase("publish"):
            self.versions[version] = self.new_version(version, adapter_parts(self.adapter), keep=self.keeps_older)
        return self.versions[version].message

    def restore(self, files: Mapping[int, bytes]) -> None:
        """The versions of a checkpoint, each with its own canary; the adapter has the newest one afterwards."""
        self.versions = {}
        for version in sorted(files):
            install_adapter(self.adapter, files[version])
            self.versions[version] = self.new_version(version, (files[version],), keep=True)

    def new_version(self, version: int, parts: FileParts, *, keep: bool) -> Version:
        """A record of the adapter as it is now, under this number. parts: its file. keep: the file too."""
        if not self.sends_bf16:
            file = b"".join(parts)
            return Version(message=policy_message(version, file, self.canary()), file=file)
        message = policy_message(version, adapter_bytes(self.adapter, torch.bfloat16), self.canary())
        if keep:
            return Version(message=message, file=b"".join(parts))
        return Version(message=message, file=None, made_sha256=digest(*parts))

    def file(self, version: int) -> FileParts:
        """What a checkpoint writes of this version, perhaps in the adapter's memory."""
        kept = self.versions[version]
        if kept.file is not None:
            return (kept.file,)
        parts = adapter_parts(self.adapter)
        if digest(*parts) != kept.sha256:
            raise DamageError(
                f"The adapter of version {version} has changed in memory since it was published. `resume` goes on from"
                " the last checkpoint; if this happens again, this machine's memory is damaged."
            )
        return parts

    def forget_before(self, version: int) -> None:
        """Drop what nothing names any more; the newest always stays."""
        newest = max(self.versions)
        self.versions = {v: kept for v, kept in self.versions.items() if v >= version or v == newest}


def canary_of_sent(policy: Policy, ids: np.ndarray, dtype: SentDtype) -> Canary:
    """Of the policy as its actors have it, who get the adapter in this type."""
    with policy.adapter.rounded() if loses_bits(policy, dtype) else nullcontext():
        return canary_of(policy, ids)


def loses_bits(policy: Policy, dtype: SentDtype) -> bool:
    """Whether actors who get the adapter in this type compute with other values than the learner."""
    return policy.dtype == torch.float32 and dtype == "bf16"


def policy_message(version: int, data: bytes, canary: Canary = NO_CANARY) -> PolicyMessage:
    """Bytes of an adapter file as a message."""
    return PolicyMessage(
        version=version,
        adapter=np.frombuffer(data, dtype=np.uint8),
        sha256=digest(data),
        canary_ids=canary.ids,
        canary_logprobs=canary.logprobs,
    )
