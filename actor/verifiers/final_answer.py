r"""Finds the part of a completion that counts, and the final answer in it.

The part that counts ends at the first end-of-turn token and begins after the last `</think>`. An open `<think>` was
never closed, so nothing after it counts. The final answer of a mathematical text is the first of these that is there:

    1  the line of the last `####`, unless it is a heading and the text goes on
    2  the last \boxed{...}
    3  what follows the last `A:`, `Answer:`, `the answer is`, `the correct option is` or `<answer>`
    4  the last formula ($...$, \(...\), \[...\]) or number

The last one of its kind counts, so a text may correct itself. Everything listed beside it is part of the answer
(`\boxed{41} or \boxed{42}`, `\boxed{41} or 42`, `is 42. Actually 7`). The answer is then a list, and no list equals a
single gold answer. The same goes for what takes the answer back: `is wrong`, another `Answer:`, or what follows
`Actually`. But behind a boxed formula, a number is no other answer: `\boxed{2\sqrt{3}} or 3.46`. A sign or word that
changes a box is read with it: `-\boxed{42}`, `\boxed{42} million`, `not \boxed{42}`. On the line of `####`, the answer
may be in a box or behind `Answer:`. A formula is taken whole, with or without dollar signs: no number is taken out of
`\sqrt3`. Notes of a calculator, as GSM8K has them (`<<9*2=18>>18`), are left out. By design, the last number of a text
without any of these is its answer, wherever it is (`See page 42`), unless the words or signs beside it deny or change
it (words_beside.py). Every pattern runs in linear time.
"""

import re

from actor.verifiers.answer_text import in_ascii, undoubled
from actor.verifiers.words_beside import (
    BEHIND,
    BESIDE,
    BOX_CHANGED_BEFORE,
    BOX_CHANGED_BEHIND,
    CHANGED_BEFORE,
    CHANGED_BEHIND,
    PICTURE,
    SIGN_BEFORE,
    without_pictures,
)
from shared.gold_answer import MARKER, NUMBER, Span, boxes, canonical, numbers_in, on_marked_line

# A note of GSM8K's calculator; behind a digit or a letter it would join that to the number that follows.
CALCULATED = re.compile(r"(?<![0-9A-Za-z.,<>])<<[-+*/%$(),.0-9 ]{1,150}=([-$,.0-9 ]{1,40})>>")
END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end|end_of_text|eom_id)\|>|</s>|<end_of_turn>|<eos>"
    "|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
ANSWER = re.compile(
    r"^[ \t]*\**A\**[ \t]*:"
    r"|\b(?:answer(?:\**[ \t]*:|[ \t]+is\b[ \t]*:?)|(?:correct|right) (?:option|choice)[ \t]+is\b[ \t]*:?)",
    re.IGNORECASE | re.MULTILINE,
)
FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<display>[^$]{1,2000})\$\$"
    # With a blank inside its dollars, only what holds no words: `$5 and $` is no formula.
    r"|(?<![\\\w])\$(?!\s)(?P<inline>[^$\n]{1,500})(?<![\s\\])\$(?!\d)"
    r"|(?<![\\\w])\$(?P<wide>(?:\\(?:begin|end)\{[a-z]{1,9}\}(?:\{[clr|]{1,9}\})?"
    r"|\\[A-Za-z]++|\\[^A-Za-z]|[A-Za-z](?![A-Za-z])"
    r"|[^$\\A-Za-z]){1,500}+)(?<!\\)\$(?!\d)"
    r"|\\\((?P<round>[^\n]{1,500}?)\\\)"
    r"|\\\[(?P<square>.{1,2000}?)\\\]"
    r"|(?P<tuple>[(\[](?![0-9]{1,3}(?:,[0-9]{3})+\)) ?(?:[-0-9./]{1,20}|[a-z])"
    r"(?: ?, ?(?:[-0-9./]{1,20}|[a-z])){1,20} ?[)\]])"
    # Without any: from the first sign of a formula to its last, with a command or a power in it.
    r"|(?<![\\A-Za-z0-9.])(?P<bare>(?:"
    r"(?:[-+]|[0-9(\[{|]|\\\{|[A-Za-z](?=[\\^_=(]| \\(?:[lg](?:eq?|t)|neq?|in)(?![A-Za-z])))"
    r"(?:[-+*/_=(){}\[\]|<>!,.0-9]"
    r"|\\[{},|]|[A-Za-z](?![A-Za-z])| (?=[-+*/=<>\\0-9])){0,80}+)?"
    r"(?:\\(?!text|quad|qquad)[A-Za-z]{2,}+|\^)"
    r"(?:\\(?!text)[A-Za-z]++(?:\{[a-z]{1,20}\})?|\{[a-z]{4,20}\}|\\[{},;!| \\]"
    r"|[-+*/^_=(){}\[\]|<>!,.&0-9]|[A-Za-z](?![A-Za-z])| (?=[-+*/=<>\\0-9&(A-Z])){0,500}+)",
    re.DOTALL,
)
PLAIN_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)])[-\u2212])?\\?[$\u20ac\u00a3]?(?<![0-9A-Za-z.])"
    r"(?:[0-9]++(?::[0-9]++)++|[0-9]++ [0-9]++(?=/)"
    r"|[0-9]++(?:,[0-9]{3})*+(?:,[0-9]{1,2}(?![0-9,])|\.[0-9]+)?|\.[0-9]++)"
    r"(?:/[0-9]++)?(?:[ \t]*+\\?%)?"
)
# A text that is only this is taken whole: digits in groups, or a sum.
WHOLE_TEXT = re.compile(
    r"\s*+[-+]?[0-9]{1,3}(?: [0-9]{3})++(?: [0-9]+/[0-9]+)?\s*+|\s*+[0-9/.]{1,20} ?\+ ?[0-9/.]{1,20}\s*+"
)
SENTENCE_END = re.compile(r"[.!?](?=[\s*]|$)")
HEADING = re.compile(r"\**[A-Za-z]|\**[0-9]+[.):][ \t]+\**[A-Za-z]")
BETWEEN_LISTED = re.compile(
    # Pictures before what joins two answers: a line that only ends in some is not listed beside the next.
    rf"(?:[\s*]{{0,20}}+{PICTURE}{{1,20}}+[\s*]{{0,20}}+(?=[,;]|(?:and|or|et|ou|und|oder)\b))?"
    r"(?:[\s,;$*.&]|\\(?:quad|qquad)(?![A-Za-z])|\\[,;: ]|\\[()\[\]]|\\text\s*+\{[^{}]*\b(?:and|or)\b[^{}]*\})*+"
    r"(?:\b(?:and|or|et|ou|und|oder)\b)?[\s,;$*]*+"
    r"(?:\\[(\[])?\s*+(?:[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*+=\s*+)?",
    re.IGNORECASE,
)
DENIED = re.compile(
    r"[\s$*)\\\]]*+(?:[.,;!?][\s$*)\\\]]*+(?:that|this|which)\s++(?=(?:is|was)(?:\s++(?:wrong|incorrect|false)"
    r"|(?:n't|\s++not)\s++(?:right|correct|(?:the|my) (?:right |correct |final )?answer))\b))?"
    r"((?:is|was)(?:n't|\s++(?:not|wrong|incorrect|false))\b[^.\n]*+)",
    re.IGNORECASE,
)
OR_NUMBER = re.compile(
    rf"(?:[ \t*$),]|\\[)\]])*+(?:or|ou|oder|\\text *\{{ *or *\}}) *+(?:[$*]|\\[(\[])*+"
    rf"((?>{PLAIN_NUMBER.pattern}))(?<!%)(?=(?:[ \t*$)]|\\[)\]])*+(?:[.,;!?\n]|$))",
    re.IGNORECASE,
)
TAKEN_BACK = re.compile(r"\b(?:actually|correction|wait|sorry|oops|on second thought)\b", re.IGNORECASE)
VALUE_AHEAD = re.compile(r"[\s:*]*+(?:[A-Za-z]\s*=)?[\s$(\\]*+[-+]?[0-9.$\\]")
NAMES_A_VALUE = re.compile(r"(?<!\\)(?<![A-Za-z])[0-9A-Za-z]|\\(?!boxed|fbox)[A-Za-z]")
PLAIN_DIGITS = re.compile("[0-9.,]+")
ANSWER_LEAD_IN = re.compile(
    r"[\s*]*+(?:(?:so|thus|hence|therefore|the|my|our|final|correct)\b[\s,:*]*+)*+", re.IGNORECASE
)
# On the line of `####`, beside a box: words and their signs, but nothing else that may be an answer.
WORDS_BESIDE_A_BOX = re.compile(
    r"(?:[\s*$(){}\[\]\\,.:!^%/-]|(?!(?:and|or|et|ou|und|oder)\b)[^\W\d_]{2,}+|(?![a-z])[^\W\d_]|[a-z] *+=)*+",
    re.IGNORECASE,
)
A_NAME = re.compile(r"[A-Za-z]{1,8}(?:_\{?[0-9A-Za-z]\}?)?(?:\([a-z]\))?")


def counted(text: str) -> str:
    """The part of a completion in which a final answer counts."""
    end = END_OF_TURN.search(text)
    spoken = text[: end.start()] if end else text
    return spoken.rpartition("</think>")[2].partition("<think>")[0]


CHOICE = re.compile(r"\s*+\**+(\(?[A-J]\)?)[.:]?\**+\s*+")
TAGS = re.compile(r"<(/?)answer>")
# `\boxed 5`, and another name of the same box.
BARE_BOX = re.compile(r"\\(?:boxed|fbox) ++(-?[0-9]++(?:[.,/][0-9]++)*+|[A-Za-z])(?![0-9A-Za-z])|\\framebox(?=\{)")


def final_answers(text: str) -> list[str]:
    """The final answer as it is written: one text, several if the completion lists several, or none."""
    text = with_boxes(without_notes(text))
    if "answer>" in text:
        text = TAGS.sub(lambda tag: "\n" if tag[1] else "\nAnswer: ", text)
    return list(dict.fromkeys(after_hashes(text) or boxed_answers(text) or after_marker(text) or last_named(text)))


def without_notes(text: str) -> str:
    """`<<9*2=18>>18` is 18, if the number behind the note is its result."""
    return CALCULATED.sub(lambda note: "" if confirmed(note) else note[0], text) if "<<" in text else text


def confirmed(note: re.Match[str]) -> bool:
    number = NUMBER.match(note.string, note.end())
    return bool(number) and numbers_in([note[1]]) == [canonical(number)]


def formulas_given(text: str) -> list[str]:
    """The final answer of the kind `math`. A root sign is part of a formula; a single letter is a choice."""
    choice = CHOICE.fullmatch(without_pictures(text))
    return [choice[1]] if choice else final_answers(in_ascii(text))


def with_boxes(text: str) -> str:
    r"""Every box as `\boxed{...}`."""
    text = undoubled(text)
    return BARE_BOX.sub(lambda box: f"\\boxed{{{box[1]}}}" if box[1] else "\\boxed", text) if "box" in text else text


def boxed_answers(text: str) -> list[str]:
    """The content of the last box, of those listed beside it, and what the text says about it afterwards."""
    text = with_boxes(text)
    found = boxes(text)
    if not found:
        return []
    end = found[-1][1]
    denied = DENIED.match(text, end)
    other = OR_NUMBER.match(text, end) if PLAIN_DIGITS.fullmatch(found[-1][2].strip(" -\\$")) else None
    read = [(*span[:2], box_in_context(text, span)) for span in found]
    said = [found[-1][2] + " " + denied[1]] if denied else last_listed(text, read) + ([other[1]] if other else [])
    return list(dict.fromkeys(said + later(text[end:])))


def box_in_context(text: str, box: Span) -> str:
    r"""The content of a box, read with the text around it if that changes it: `-\boxed{3}` is -3."""
    start, end, content = box
    before = text[max(0, start - BESIDE) : start]
    if not (BOX_CHANGED_BEFORE.search(before) or BOX_CHANGED_BEHIND.match(text, end)):
        return content
    plain = content if PLAIN_DIGITS.fullmatch(content) else f"({content})"
    return (before + plain + text[end : end + BESIDE]).strip()


def marked_number(text: str) -> list[str]:
    """The line of the last `####`, if it begins with a number, and what takes that back."""
    line = [without_pictures(said) for said in on_marked_line(text)]
    return line + later(text.rpartition(MARKER)[2].partition("\n")[2]) if line else []


def after_hashes(text: str) -> list[str]:
    """The line of the last `####`, and what takes it back."""
    _, marker, tail = text.rpartition(MARKER)
    line, _, rest = tail.partition("\n")
    is_heading = rest.strip() and HEADING.match(line.strip())
    said = answers_on_line(line.strip()) if marker and not is_heading else []
    return said + later(rest) if said else []


def answers_on_line(line: str) -> list[str]:
    """What a line gives as its answer, which may be in a box or follow words such as `Answer:`."""
    found = boxes(line)
    beside = [line[: found[0][0]], line[found[-1][1] :]] if found else []
    if found and all(map(WORDS_BESIDE_A_BOX.fullmatch, beside)) and len(last_listed(line, found)) == len(found):
        return boxed_answers(line)
    lead_in = ANSWER_LEAD_IN.match(line)
    marker = ANSWER.match(line, lead_in.end()) if lead_in else None
    return statement(line[marker.end() :] if marker else line)


def later(rest: str) -> list[str]:
    """What the text gives as its answer after it has already given one."""
    corrected = TAKEN_BACK.search(rest)
    marker = last_marker(rest)
    said = after_marker(rest) if marker is not None and VALUE_AHEAD.match(rest, marker) else []
    return said + ([content for _, _, content in items(rest[corrected.end() :])] if corrected else [])


def last_marker(text: str) -> int | None:
    end = None
    for marker in ANSWER.finditer(text):
        end = marker.end()
    return end


def after_marker(text: str) -> list[str]:
    """What follows the last `Answer:`, on its line or else on the next line that is not blank."""
    end = last_marker(text)
    lines = text[end:].splitlines() if end is not None else []
    return statement(next((line.strip() for line in lines if line.strip(" \t*:$")), ""))


def statement(line: str) -> list[str]:
    """The first sentence, or the formulas in it, and every formula and number in the rest of the line."""
    line = without_pictures(line).strip("* \t")
    end = SENTENCE_END.search(line)
    first, rest = (line[: end.start()], line[end.end() :]) if end else (line, "")
    if not first:
        return []
    spans = items(first)
    plain = FORMULA.search(first) and not any(is_changed(first, start, end) for start, end, _ in spans)
    named = without_names([content for _, _, content in spans]) if plain else [first]
    return named + [content for _, _, content in items(rest)]


def without_names(named: list[str]) -> list[str]:
    """`The largest $n$ is 34` names n, but its answer is 34."""
    return [content for content in named if not A_NAME.fullmatch(content.strip())] or named


def last_named(text: str) -> list[str]:
    """The last formula or number and those listed beside it, with the words beside it if they change it."""
    plain = without_pictures(text)
    if WHOLE_TEXT.fullmatch(plain):
        return [plain.strip()]
    found = items(text)
    if not found:
        return []
    start, end, _ = found[-1]
    if is_changed(plain, start, end) or (text[end - 1].isdigit() and is_touched(plain, start, end)):
        return [plain[max(0, start - BESIDE) : end + BESIDE].strip()]
    # With the pictures: the ticked line of a check is not listed beside what follows.
    return last_listed(text, found)


def is_changed(text: str, start: int, end: int) -> bool:
    """Whether the words beside a value change it."""
    return bool(CHANGED_BEFORE.search(text[max(0, start - BESIDE) : start]) or CHANGED_BEHIND.match(text, end))


def is_touched(text: str, start: int, end: int) -> bool:
    """Whether a sign or a letter beside a number is part of it: 42k, 42/x, >42."""
    return bool(SIGN_BEFORE.search(text[max(0, start - BESIDE) : start]) or not BEHIND.match(text, end))


def items(text: str) -> list[Span]:
    """Every formula, and every number outside of formulas, in order."""
    found: list[Span] = []
    end = 0
    for formula in FORMULA.finditer(text):
        content = next(group for group in formula.groups() if group is not None)
        if formula["bare"] and not NAMES_A_VALUE.search(content):
            continue
        found += numbers(text, end, formula.start())
        found.append((formula.start(), formula.end(), content.rstrip(" .,") if formula["bare"] else content))
        end = formula.end()
    return found + numbers(text, end, len(text))


def numbers(text: str, start: int, end: int) -> list[Span]:
    return [(match.start(), match.end(), match[0]) for match in PLAIN_NUMBER.finditer(text, start, end)]


def last_listed(text: str, spans: list[Span]) -> list[str]:
    """The last of these, and those before it that only commas and `or` separate from it."""
    listed: list[str] = []
    next_start = None
    for start, end, content in reversed(spans):
        if next_start is not None and not BETWEEN_LISTED.fullmatch(text, end, next_start):
            break
        listed.append(content)
        next_start = start
    return listed[::-1]
