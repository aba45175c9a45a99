"""The adapter after each step, as the message that actors sample from.

Always the whole adapter: it is self-contained against the frozen base, so a late joiner needs one message and nothing
has to be replayed. Versions that open orders may still name are kept, and saved with a checkpoint. With each goes the
canary (shared/model/canary.py): what an actor must find once it has installed that version.
"""

from collections.abc import Callable, Mapping

import numpy as np

from protocol.messages import Policy as PolicyMessage
from shared.model.adapter_file import adapter_bytes, digest, install_adapter
from shared.model.canary import NO_CANARY, Canary
from shared.model.lora import Adapter
from shared.process.trace import NO_TRACE, Trace


class Publisher:
    """Turns the adapter's values into numbered messages."""

    def __init__(
        self, adapter: Adapter, canary: Callable[[], Canary] = lambda: NO_CANARY, trace: Trace = NO_TRACE
    ) -> None:
        """canary: what the policy as it is now makes of the run's canary."""
        self.adapter = adapter
        self.canary = canary
        self.trace = trace
        self.versions: dict[int, PolicyMessage] = {}

    def snapshot(self, version: int) -> PolicyMessage:
        """The adapter as it is now, under this version."""
        with self.trace.phase("publish"):
            self.versions[version] = policy_message(version, adapter_bytes(self.adapter), self.canary())
        return self.versions[version]

    def restore(self, files: Mapping[int, bytes]) -> None:
        """The versions of a checkpoint, each with its own canary; the adapter has the newest one afterwards."""
        self.versions = {}
        for version in sorted(files):
            install_adapter(self.adapter, files[version])
            self.versions[version] = policy_message(version, files[version], self.canary())

    def forget_before(self, version: int) -> None:
        """Drop what nothing names any more; the newest always stays."""
        newest = max(self.versions)
        self.versions = {v: policy for v, policy in self.versions.items() if v >= version or v == newest}


def policy_message(version: int, data: bytes, canary: Canary = NO_CANARY) -> PolicyMessage:
    """Bytes of an adapter file as a message."""
    return PolicyMessage(
        version=version,
        adapter=np.frombuffer(data, dtype=np.uint8),
        sha256=digest(data),
        canary_ids=canary.ids,
        canary_logprobs=canary.logprobs,
    )
