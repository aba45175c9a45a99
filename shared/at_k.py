"""What k answers to a task are worth, estimated without bias from n >= k that were drawn.

    pass@k = P(at least one of k is right)      = 1 - C(n - c, k) / C(n, k)           c of the n right
    maj@k  = P(the most frequent answer of k is right), a tie of m answers counting 1/m for each

Both are the mean over all C(n, k) subsets of the n answers, so k = n is what was drawn and a smaller k has less noise
than k fresh draws. maj@k counts subsets by their votes: for each number of votes v for the right answer, the ways in
which no other answer gets more, and how many get as many. Exact, in whole numbers. An answer that cannot be read has
no vote; where nobody votes, nobody is right.
Left out on purpose: plug-in estimates such as 1 - (1 - c/n)^k, which are biased upwards or downwards for small n.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import comb


def pass_at_k(n: int, right: int, k: int) -> float:
    """Share of the subsets of k in which one is right."""
    return 1 - comb(n - right, k) / comb(n, k)


def maj_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """right: votes for the right answer. wrong: votes of each other answer. silent: answers without a vote."""
    return _maj_at_k(right, tuple(sorted(wrong)), silent, k)


@cache
def _maj_at_k(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """Many tasks have the same counts."""
    won = Fraction(0)
    for votes in range(1, min(right, k) + 1):
        for ties, ways in rivals(wrong, silent, votes, k - votes).items():
            won += Fraction(comb(right, votes) * ways, 1 + ties)
    return float(won / comb(right + sum(wrong) + silent, k))


def rivals(wrong: Sequence[int], silent: int, votes: int, others: int) -> Mapping[int, int]:
    """Ways to choose `others` answers of which no rival gets more than `votes`, by how many get exactly that."""
    ways = {(cast, 0): comb(silent, cast) for cast in range(min(silent, others) + 1)}
    for size in wrong:
        grown: dict[tuple[int, int], int] = defaultdict(int)
        for (cast, ties), count in ways.items():
            for got in range(min(size, votes, others - cast) + 1):
                grown[cast + got, ties + (got == votes)] += count * comb(size, got)
        ways = grown
    return {ties: count for (cast, ties), count in ways.items() if cast == others}


def sizes(n: int) -> list[int]:
    """1, 2, 4 ... and n itself."""
    powers = [2**power for power in range(n.bit_length()) if 2**power < n]
    return [*powers, n]
