r"""Which part of a completion counts, and what it gives as its final answer.

What counts ends before the first end-of-turn token and begins after the last `</think>`; an open `<think>` never ended,
so nothing after it counts. The final answer of a mathematical text is looked for in this order of trust:

    1  the line of the last `####`, unless it is a heading of a text that goes on
    2  the last \boxed{...}
    3  what follows the last `A:`, `Answer:` or `the answer is`
    4  the last formula ($...$, \(...\), \[...\]) or number

The last of its kind counts, so a text may correct itself. What is listed beside it (`\boxed{41} or \boxed{42}`,
`is 42. Actually 7`) is part of it: the answer is then a list, which equals no single gold answer. Every pattern runs in
linear time.
"""

import re

from shared.boxes import Span, boxes

END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end|end_of_text|eom_id)\|>|</s>|<end_of_turn>|<eos>"
    "|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
ANSWER = re.compile(
    r"^[ \t]*\**A\**[ \t]*:|\banswer\**[ \t]*:|\banswer[ \t]+is\b[ \t]*:?", re.IGNORECASE | re.MULTILINE
)
FORMULA = re.compile(
    r"(?<!\\)\$\$([^$]{1,2000})\$\$"
    r"|(?<![\\\w])\$(?!\s)([^$\n]{1,500})(?<![\s\\])\$(?!\d)"
    r"|\\\(([^\n]{1,500}?)\\\)"
    r"|\\\[(.{1,2000}?)\\\]",
    re.DOTALL,
)
PLAIN_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)])[-\u2212])?\\?[$\u20ac\u00a3]?(?<![0-9A-Za-z.])"
    r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?(?:[ \t]*\\?%)?"
)
SENTENCE_END = re.compile(r"[.!?](?=[\s*]|$)")
HEADING = re.compile(r"\**[A-Za-z]|\**[0-9]+[.):][ \t]+\**[A-Za-z]")
BETWEEN_LISTED = re.compile(r"[\s,;$*.]*(?:\b(?:and|or)\b)?[\s,;$*]*", re.IGNORECASE)


def counted(text: str) -> str:
    """The part of a completion in which a final answer counts."""
    end = END_OF_TURN.search(text)
    spoken = text[: end.start()] if end else text
    return spoken.rpartition("</think>")[2].partition("<think>")[0]


def final_answers(text: str) -> list[str]:
    """What the text gives as its final answer, as it is written: one, several if it lists several, or none."""
    answers = after_hashes(text) or boxed_answers(text) or after_marker(text) or last_listed(text, items(text))
    return list(dict.fromkeys(answers))


def boxed_answers(text: str) -> list[str]:
    """What the last box holds, and those listed beside it."""
    return list(dict.fromkeys(last_listed(text, boxes(text))))


def after_hashes(text: str) -> list[str]:
    """The line of the last `####`."""
    _, marker, tail = text.rpartition("####")
    line, _, rest = tail.partition("\n")
    is_heading = rest.strip() and HEADING.match(line.strip())
    return statement(line.strip()) if marker and not is_heading else []


def after_marker(text: str) -> list[str]:
    """What the last `Answer:` is followed by, on its line or else on the next one that is not blank."""
    markers = list(ANSWER.finditer(text))
    lines = text[markers[-1].end() :].splitlines() if markers else []
    return statement(next((line.strip() for line in lines if line.strip(" \t*:$")), ""))


def statement(line: str) -> list[str]:
    """The first sentence, or the formulas in it; and every formula and number that the line goes on to name."""
    line = line.strip("* \t")
    end = SENTENCE_END.search(line)
    first, rest = (line[: end.start()], line[end.end() :]) if end else (line, "")
    if not first:
        return []
    named = [content for _, _, content in items(first)] if FORMULA.search(first) else [first]
    return named + [content for _, _, content in items(rest)]


def items(text: str) -> list[Span]:
    """Every formula, and every number outside of formulas, in order."""
    found: list[Span] = []
    end = 0
    for formula in FORMULA.finditer(text):
        found += numbers(text, end, formula.start())
        content = next(group for group in formula.groups() if group is not None)
        found.append((formula.start(), formula.end(), content))
        end = formula.end()
    return found + numbers(text, end, len(text))


def numbers(text: str, start: int, end: int) -> list[Span]:
    """Plain numbers between two places."""
    return [(match.start(), match.end(), match[0]) for match in PLAIN_NUMBER.finditer(text, start, end)]


def last_listed(text: str, spans: list[Span]) -> list[str]:
    """The last of these, and those before it that nothing but commas and `or` separates from it."""
    listed: list[str] = []
    next_start = None
    for start, end, content in reversed(spans):
        if next_start is not None and not BETWEEN_LISTED.fullmatch(text, end, next_start):
            break
        listed.append(content)
        next_start = start
    return listed[::-1]
