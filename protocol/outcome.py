"""What the verifier found about one completion. A file of its own: scoring workers import it, and nothing heavy."""

from enum import StrEnum


class Outcome(StrEnum):
    """What the verifier found; a fault of the verifier is never a silent zero."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ERROR = "error"
    ABSTAIN = "abstain"
