"""An evaluation as a table, for the terminal and as Markdown. n, seed and caps always stand beside the figures."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from shared.run.evaluation import Decoded, Evaluation, Share

HEAD = ("", "accuracy", "95 %", "n", "draws", "cap", "format", "truncated", "length")
Row = tuple[str, ...]
LEGEND = (
    "Accuracy is the probability that one answer is right, with Wilson's 95 % interval over the n tasks. pass@k: one of"
    " k draws is right; maj@k: the most frequent of k is, ties counting in part; both are estimated without bias from"
    " all draws. Format: answers in which the verifier found a final answer. Length: mean tokens, and the longest."
)


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """To the terminal."""
    console.print(title(evaluation), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in HEAD:
        table.add_column(name, no_wrap=True, justify="left" if not name else "right")
    for row in rows(evaluation):
        table.add_row(*row)
    console.print(table)


def markdown(evaluation: Evaluation) -> str:
    """The same as a document."""
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *rows(evaluation)]
    table = "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)
    return f"# {title(evaluation)}\n\n{table}\n\n{LEGEND}\n"


def title(evaluation: Evaluation) -> str:
    """`step-000040: n = 256 tasks of embedded, seed 0, verifier gsm8k, adapter 1a2b3c4d5e6f`"""
    return (
        f"{evaluation.label}: n = {evaluation.n} tasks of {evaluation.source}, seed {evaluation.seed},"
        f" verifier {evaluation.verifier}, adapter {evaluation.adapter_sha256[:12]}"
    )


def rows(evaluation: Evaluation) -> Iterator[Row]:
    """One a way to decode, and below each what it is made of."""
    for name, way in evaluation.ways().items():
        yield decoded_row(name, way)
        yield from parts(beyond_one(way.pass_at), "pass@", way)
        yield from parts(beyond_one(way.maj_at), "maj@", way)
        yield from parts(way.by_level, "level ", way)
        yield from parts(way.by_subject, "", way)


def decoded_row(name: str, way: Decoded) -> Row:
    """All figures."""
    warmth = f" at {way.temperature:g}" if way.temperature else ""
    return (
        f"{name}{warmth}",
        *share_cells(way),
        str(way.draws),
        str(way.cap),
        f"{way.format_rate:.1%}",
        f"{way.truncation_rate:.1%}",
        f"{way.length_mean:.0f} ({way.length_max})",
    )


def parts(shares: Mapping[str, Share] | Mapping[int, Share], prefix: str, way: Decoded) -> Iterator[Row]:
    """Indented; only the share."""
    for key, share in shares.items():
        yield (f"  {prefix}{key}", *share_cells(share), str(way.draws), str(way.cap), "", "", "")


def beyond_one(shares: Mapping[int, Share]) -> Mapping[int, Share]:
    """One of one is the accuracy above."""
    return {k: share for k, share in shares.items() if k > 1}


def share_cells(share: Share) -> tuple[str, str, str]:
    """Mean, interval, n."""
    return f"{share.accuracy:.1%}", f"[{share.low:.1%}, {share.high:.1%}]", str(share.n)
