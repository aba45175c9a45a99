"""The built-in verifiers: pure functions from a text and a gold answer to a verdict.

    gsm8k   the number right after the last `####`. Units may follow on that line; another number may not.
    exact   the last number of the text.
    math    the final answer of the text (final_answer.py), compared as number, list or formula (math_answer.py).

For `gsm8k` and `exact` a number is written 18, -3, 1,234, $18, 18. or 18.0. Numbers are compared as canonical decimal
strings: exact at any length, and no conversion whose cost grows with the square of the digits. The gold answer is plain
(`18`) or in GSM8K format (`... #### 18`); one that cannot be read is an error of the data, not of the model.

Only what is said after thinking and before the end of the turn counts (final_answer.py). A truncated completion is
truncated whatever it says: the answer it would have given is not known. A wrong accept is what a policy learns to
exploit, so what is not plainly the answer is wrong or unparsable. Every pattern below runs in linear time.
"""

import re
from collections.abc import Callable

from actor.final_answer import counted, final_answers
from actor.math_answer import Unreadable, equals_gold
from actor.verdict import ScoreJob, Verdict, fault
from protocol.outcome import Outcome
from shared.config import VerifierKind

MARKER = "####"
MAX_CHARS = 1_000_000

# The sign is one only where no digit or letter stands before it: in `20-5` and `x-5` it is not part of the number.
NUMBER = re.compile(
    r"(?:(?P<sign>(?<![0-9A-Za-z])[-\u2212])[$\u20ac\u00a3]?)?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.(?P<decimals>[0-9]+))?"
)
# What may stand between the marker and the number: blanks, a plus, a currency, bold type, an escaped dollar.
LEAD_IN = re.compile(r"[ \t\u00a0+*\\$\u20ac\u00a3]*")


def score_job(kind: VerifierKind, job: ScoreJob) -> Verdict:
    """The verdict on one completion."""
    if job.truncated:
        return fault(Outcome.TRUNCATED, "")
    if "answer" not in job.columns:
        return fault(Outcome.ERROR, "The task has no column `answer`.")
    text, answer = counted(job.completion[: MAX_CHARS + 1]), job.columns["answer"]
    match kind:
        case "gsm8k":
            return score_gsm8k(text, answer)
        case "math":
            return score_math(text, answer)
        case _:
            return score_exact(text, answer)


def score_gsm8k(text: str, answer: str) -> Verdict:
    """By the number after the last `####`."""
    return judge(text, answer, answer_after_marker)


def score_exact(text: str, answer: str) -> Verdict:
    """By the last number of the text."""
    return judge(text, answer, last_number)


def score_math(text: str, answer: str) -> Verdict:
    """By the final answer as a formula."""
    if not answer.strip():
        return fault(Outcome.ERROR, "The gold answer is empty; mend the data's answer column.")
    if len(text) > MAX_CHARS:
        return fault(Outcome.UNPARSABLE, f"The completion is longer than {MAX_CHARS} characters.")
    given = final_answers(text)
    if not given:
        return fault(Outcome.UNPARSABLE, "")
    try:
        right = equals_gold(given, answer)
    except MemoryError:
        # Not the verifier's fault, and not an error that should stop a run: the completion asked for too much.
        return fault(Outcome.TIMEOUT, "Comparing the final answer took more memory than verifier.memory_mb.")
    except (Unreadable, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # What sympy raises where a formula makes no sense to it.
        return fault(Outcome.UNPARSABLE, str(error))
    outcome = Outcome.CORRECT if right else Outcome.WRONG
    return Verdict(outcome=outcome, score=float(right), extracted=", ".join(given)[:64], note="")


def judge(text: str, answer: str, read: Callable[[str], list[str]]) -> Verdict:
    """Right if what is read from the text is one number and equals the gold one."""
    gold = gold_number(answer)
    if gold is None:
        return fault(Outcome.ERROR, f"The gold answer {answer[-60:]!r} is not a number; mend the data's answer column.")
    if len(text) > MAX_CHARS:
        return fault(Outcome.UNPARSABLE, f"The completion is longer than {MAX_CHARS} characters.")
    numbers = read(text)
    if not numbers:
        return fault(Outcome.UNPARSABLE, "")
    if len(numbers) > 1:
        note = f"The final line holds {len(numbers)} different numbers."
        return Verdict(outcome=Outcome.WRONG, score=0.0, extracted=None, note=note)
    right = numbers[0] == gold
    outcome = Outcome.CORRECT if right else Outcome.WRONG
    return Verdict(outcome=outcome, score=float(right), extracted=numbers[0][:64], note="")


def gold_number(answer: str) -> str | None:
    """The gold answer in canonical form, or None if it does not hold exactly one number."""
    numbers = answer_after_marker(answer if MARKER in answer else MARKER + answer.strip())
    return numbers[0] if len(numbers) == 1 else None


def answer_after_marker(text: str) -> list[str]:
    """The different numbers on the line of the last marker; none unless one stands right behind the marker."""
    _, marker, tail = text.rpartition(MARKER)
    line = tail.split("\n", 1)[0] if marker else ""
    lead_in = LEAD_IN.match(line)
    start = lead_in.end() if lead_in else 0
    if not NUMBER.match(line, start):
        return []
    return list(dict.fromkeys(canonical(match) for match in NUMBER.finditer(line, start)))


def last_number(text: str) -> list[str]:
    """The last number of the text, or none."""
    last = None
    for match in NUMBER.finditer(text):
        last = match
    return [canonical(last)] if last else []


def canonical(match: re.Match[str]) -> str:
    """A number without grouping, padding zeros or a sign on zero: -1,234.50 is -1234.5, 018.0 is 18."""
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    decimals = (match["decimals"] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if match["sign"] and number != "0" else number
