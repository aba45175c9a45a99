"""The adapter after each step, as the message that actors sample from.

Always the whole adapter: it is self-contained against the frozen base, so a late joiner needs one message and nothing
has to be replayed. Versions that open orders may still name are kept, and saved with a checkpoint.
"""

import numpy as np

from protocol.messages import Policy as PolicyMessage
from shared.adapter_file import adapter_bytes, digest
from shared.lora import Adapter


class Publisher:
    """Turns the adapter's values into numbered messages."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.versions: dict[int, PolicyMessage] = {}

    def snapshot(self, version: int) -> PolicyMessage:
        """The adapter as it is now, under this version."""
        self.versions[version] = policy_message(version, adapter_bytes(self.adapter))
        return self.versions[version]

    def forget_before(self, version: int) -> None:
        """Drop what nothing names any more; the newest always stays."""
        newest = max(self.versions)
        self.versions = {v: policy for v, policy in self.versions.items() if v >= version or v == newest}


def policy_message(version: int, data: bytes) -> PolicyMessage:
    """Bytes of an adapter file as a message."""
    return PolicyMessage(version=version, adapter=np.frombuffer(data, dtype=np.uint8), sha256=digest(data))
