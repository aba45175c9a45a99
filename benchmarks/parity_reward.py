"""A reward that random weights can differ in: the share of even token ids."""


def parity(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """One number a completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
