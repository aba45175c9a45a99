r"""The words, signs and units beside a value.

Some make another value of it: `not 42`, `42 million`, `>42`, `42k`, `42/x`. final_answer.py and number_answer.py look
at them before they take a number out of a text. Every pattern runs in linear time, and looks no further than BESIDE
characters.

Behind a digit or a closing bracket any other word may be a unit (`5 apples`, `5 \text{ cm}^2`, `30^\circ`). Behind a
letter only the units listed here are, because `x\text{ even}` has none. A unit has one spelling: `hrs` and `hours` are
`h`, `square inches` are `in^2`.
"""

import re

# Words that make another value of the number or formula behind them, or before them.
CHANGED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|anything but|other than|(?:less|more|fewer|greater|larger|smaller) than"
    r"|at (?:least|most)|up to|about|around|approximately|roughly|nearly|almost|minus|negative|under|above|below|twice"
    r"|double|half of|root of|cannot)"
    r"|n't)(?:\s++(?:be|equal|equals|to|the))*+[\s*$(\\]*+$",
    re.IGNORECASE,
)
SCALE = r"hundreds?|thousands?|millions?|billions?|trillions?|dozens?|mod|modulo|factorial|squared|cubed|halves|thirds"
CHANGED_BEHIND = re.compile(
    r"[\s*$)}\]\\-]{0,20}+(?:text *\{ *)?(?:(?:" + SCALE + r"|plus|minus|times|divided|or (?:more|less|fewer|so)"
    r"|and (?:a |one )?(?:half|third|quarter)|(?:is|was)(?:n't| not| wrong| incorrect| false)|pi|sin|cos|tan|log|ln)\b"
    r"|isn't|wasn't)",
    re.IGNORECASE,
)
# Signs that change a number behind them. What may be behind one: a short unit, closing signs, then a word or nothing.
SIGN_BEFORE = re.compile("[<>~!\u00ac\u2010-\u2014\u2200-\u22ff\uff0d]\\s?$|[0-9][a-z] ?[-+*/] ?$")
SHORT_UNITS = (
    "(?:km|cm|mm|m|ft|in)(?:[\u00b2\u00b3]|\\^[23])"
    "|km|cm|mm|m|kg|mg|g|lbs?|oz|ft|in|ml|l|hrs?|h|mins?|s|mph|am|pm|st|nd|rd|th|cents?|dollars?"
)
NO_SIGN = "\u00ac-\u00af\u00b1-\u2012\u2015-\u2017\u2020-\u209f\u20d0-\U0010ffff"
BEHIND = re.compile(
    rf"(?:{SHORT_UNITS})?(?![A-Za-z0-9])-?(?![0-9+/^<>~|&@#_'{NO_SIGN}])(?:[\s*$)}}\]\"]|\\[,;: ])*+"
    rf"(?!-(?![ -]*[A-Za-z]{{2}})|[+/^<>~|&{NO_SIGN}]|(?<=[*])[A-Za-z0-9(]|[A-Zb-z](?![A-Za-z.]))"
)
BESIDE = 60
NO_UNIT = re.compile(
    rf"\b(?:{SCALE}|plus|minus|times|divided|or|and|not|is|was|wrong|pi|sin|cos|tan|cot|sec|csc|log|ln|exp"
    r"|if|for|where|when|right|even|odd|percent|[ap]\.?m)\b",
    re.IGNORECASE,
)
SYNONYMS = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "g": "gram",
    "kg": "kilogram kilo",
    "pound": "lb gbp",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "dollar": "usd buck",
    "euro": "eur",
    "cent": "",
    "degree": "deg",
    "radian": "rad",
    "unit": "",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "mph": "",
}
UNITS = {word: unit for unit, words in SYNONYMS.items() for word in [unit, *words.split()]}
# These fit every unit.
ANY_UNIT = {"unit", "unit^2", "unit^3"}
POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
BRACKETED = re.compile(r"\\text|\\frac|(?<![\^])\{|\}")
PIECE = re.compile(r"[a-z]+|\^\{?-?[0-9]|/|[^\x00-\x7f]+")
IN_TEXT = (
    r"(?:\s*(?:\\text\{[^{}]*\}|\\frac(?:\{\\text\{[^{}]*\}(?:\^\{?[23]\}?)?\}){2})"
    r"(?:\s*\^\s*\{?-?[0-9]\}?)?\s*(?:/|\\cdot(?![A-Za-z]))?)+"
)
TEXT_UNIT = re.compile(rf"(?<=[0-9}})])({IN_TEXT})$")
TEXT_UNIT_BEHIND_A_LETTER = re.compile(rf"(?<=[A-Za-z])({IN_TEXT})$")
PROSE_UNIT = re.compile(
    r"(?<=[0-9}])\s+([A-Za-z]{2,}(?:[ /-][A-Za-z]+){0,2}\.?(?:\^\{?[23]\}?)?)$"
    r"|(?<=[0-9]) *((?:cm|mm|km|m|ft|in)\^\{?[23]\}?)$"
    r"|(?<=[0-9])((?:km|cm|mm|kg|ml|mph|ft|lbs?)|[a-z]{4,})$"
)
CURRENCY = re.compile(r"^(-?)\s*\\?(?:([$\u20ac\u00a3])|\\text\{ *(USD|EUR|GBP) *\}|(USD|EUR|GBP))\s*(?=-?[0-9.])")
CURRENCY_BEHIND = re.compile(r"(?<=[0-9])\s*\\?([$\u20ac\u00a3])$")
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}


def take_unit(value: str) -> tuple[str, str]:
    """The value without the unit or the currency beside its number, and that unit."""
    for pattern in (TEXT_UNIT, PROSE_UNIT, TEXT_UNIT_BEHIND_A_LETTER):
        match = pattern.search(value)
        if match and not NO_UNIT.search(match[0]):
            unit = one_spelling("".join(group or "" for group in match.groups()))
            if pattern is not TEXT_UNIT_BEHIND_A_LETTER or unit.rstrip("^23") in SYNONYMS:
                return value[: match.start()].rstrip(), unit
    if match := CURRENCY_BEHIND.search(value):
        return value[: match.start()], CURRENCIES[match[1]]
    if match := CURRENCY.match(value):
        name = match[2] or match[3] or match[4]
        return str(match[1]) + value[match.end() :], CURRENCIES.get(name) or UNITS[name.lower()]
    return value, ""


def one_spelling(unit: str) -> str:
    """In lower case, singular, each word by its short name."""
    found: list[str] = []
    power = ""
    for piece in PIECE.findall(BRACKETED.sub(" ", unit.replace("}}{", "}/{")).lower()):
        word: str = piece if piece in UNITS or len(piece) < 3 else piece.removesuffix("s")
        if word in POWERS:
            power = POWERS[word]
            continue
        found.append("/" if word == "per" else UNITS.get(word, word) + power)
        power = ""
    return " ".join(found).replace(" ^", "^").replace("^{", "^")


def same_unit(gold: str, given: str) -> bool:
    """Whether both may stand behind one value: a unit may be missing on either side, but not differ."""
    if not gold or not given or gold == given or ANY_UNIT & {gold, given}:
        return True
    return {gold, given} in ({"mph", "mi / h"}, {"degree", "degree c"}, {"degree", "degree f"})
