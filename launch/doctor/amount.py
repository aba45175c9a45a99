"""Bytes for people."""


def size(num_bytes: float) -> str:
    """`3.2 GiB`, `64 MiB`."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"
