r"""The words, signs and units beside a value.

Some make another value of it: `not 42`, `42 million`, `>42`, `42k`, `42/x`. final_answer.py and number_answer.py look
at them before they take a number out of a text. Every pattern runs in linear time, and looks no further than BESIDE
characters.

Words of other languages count if they are in Latin letters; behind a value, one with letters beyond ASCII must have
more than three letters. Of other scripts there is no list here of words such as `not` and `million`. A number that
stands before such letters in a text is refused, but a box or `####` with the plain number works in every language.

Behind a digit or a closing bracket any other word may be a unit (`5 apples`, `5 \text{ cm}^2`, `30^\circ`), but letters
outside of \text{} may also be a product (`2 xy`). Behind a letter only the units listed here are, because
`x\text{ even}` has none. A rate may be written with a slash (`18/hour`), but 18/x is a quotient. A unit has one
spelling: `hrs` and `hours` are `h`, `square inches` are `in^2`.

Ticks and pictures at the end of a line say nothing about the value before them. Crosses, arrows, thumbs that point down
and pictures of numbers or signs do: a value beside one is refused, as beside any other sign.
"""

import re

# Without dotless i and long s, which are i and s where case is ignored.
ACCENTED = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u012f\u0132-\u017e\u0180-\u01bf\u01c4-\u024f\u1e00-\u1eff"
# A short accented word may mean `not`, `and` or `more`, so it is no unit.
SHORT_WORD = f"(?=[a-z]{{0,2}}[{ACCENTED}])[a-z{ACCENTED}]{{1,3}}"
# Not, or, thousand, million and dozen in other languages.
NOT_OR = "nicht|pas|n\u00e3o|oder|ou"
MILLIONS = "mil(?:le)?|tausend|millionen|millones|milh\u00f5es|milioni|milliard(?:s|en)?|d\u00fazias?"
# Words that make another value of the number or formula behind them, or before them.
CHANGED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|anything but|other than|(?:less|more|fewer|greater|larger|smaller) than"
    r"|at (?:least|most)|up to|about|around|approximately|roughly|nearly|almost|minus|negative|under|above|below|twice"
    rf"|double|half of|root of|cannot|{NOT_OR})"
    r"|n't)(?:\s++(?:be|equal|equals|to|the))*+[\s*$(\\]*+$",
    re.IGNORECASE,
)
MAGNITUDES = f"tens|hundreds?|thousands?|millions?|billions?|trillions?|lakhs?|crores?|mn|bn|trn|{MILLIONS}"
SCALE = f"{MAGNITUDES}|dozens?|mod|modulo|factorial|squared|cubed|halves|thirds"
CHANGED_BEHIND = re.compile(
    r"[\s*$)}\]\\-]{0,20}+(?:text *\{ *)?(?:(?:" + SCALE + r"|plus|minus|times|divided|or (?:more|less|fewer|so)"
    r"|and (?:a |one )?(?:half|third|quarter)|(?:is|was)(?:n't| not| wrong| incorrect| false)|pi|sin|cos|tan|log|ln"
    rf"|{NOT_OR}|{SHORT_WORD})\b|isn't|wasn't)",
    re.IGNORECASE,
)
# 3!=6 and n!=6 are equations, but x!=6 and n != 6 say that it is another number.
NOT_EQUAL = r"(?<![0-9)}])(?<!\b[A-Wa-w])!="
EQUAL = r"(?:(?<![<>!])|(?<=[0-9)}]!)|(?<=\b[A-Wa-w]!))="
# Signs that change a number behind them. What may be behind one: a short unit, a rate, closing signs, then a word or
# nothing.
SIGN_BEFORE = re.compile(
    rf"(?:[<>~!\u00ac\u00b1\u2010-\u2014\u2200-\u22ff\uff0d]|[<>]=|{NOT_EQUAL}|\+/-?)\s?\+?\s?$"
    r"|[0-9][a-z] ?[-+*/] ?$"
)
# Fewer words change what is in a box, because the box itself says which part of a sentence is the answer: `about
# \boxed{3}`, `\boxed{3} times`, `\boxed{3} or more`, `\boxed{3} dozen` (questions ask for dozens) and `\boxed{4} \pmod
# 7` are what is in the box. Of what is before it, only its line counts. A dash behind a word or a colon, or between
# blanks with no formula before it, is no minus. Nor is one that begins a line, unless the line before is `$$` or ends
# in `[` or `=`.
DENIED_BEFORE = (
    r"(?:\b(?:not|never|neither|nor|except|anything but|other than|minus|negative|twice|double|half of|root of|cannot"
    r"|nicht|pas|n\u00e3o)|n't)(?:\s++(?:be|equal|equals|to|the))*+|\\neq?(?![A-Za-z])|\\not *=|\u2260|" + NOT_EQUAL
)
MINUS_BEFORE = (
    r"(?<![:-])(?<![A-Za-z]{2})(?:(?<!\n)|(?<=(?m:^)\$\$\n)|(?<=[\[=]\n))[-\u2212\u2013\uff0d](?:\\?[(\[$]|\{)?"
    r"|(?:=|(?:^|[=+*/$(])\s{0,3}[0-9.]{1,20}) ?[-\u2212] |(?:\\[pm][mp](?![A-Za-z])|\u00b1) *"
)
FACTOR_BEFORE = r"(?:[0-9]/?|\\sqrt(?:\[[^\[\]]*\])?|\\[dtc]?frac(?:\{[^{}]*\})?)[({]?"
BOX_CHANGED_BEFORE = re.compile(
    rf"(?:(?:{DENIED_BEFORE})[ \t*$({{}}\\]*+|{MINUS_BEFORE}|{FACTOR_BEFORE})\Z", re.IGNORECASE
)
NUMBER_GOES_ON = (
    r"[$)]?(?:(?:\.(?!0++(?![0-9]))|:(?!00))?[0-9]|,[0-9]{3}(?![0-9])|\{,\}[0-9]|[\u00b2\u00b3\u00bc-\u00be])"
)
SCALE_OR_POWER_BEHIND = (
    r"[$)]?(?:(?-i:[kM])(?![A-Za-z])| ?/ ?[0-9(]| ?\^ ?\{? ?-?(?:[0-9]|(?-i:[a-np-z])(?![A-Za-z]))"
    r"|\\(?:sqrt|[dtc]?frac|pi)(?![A-Za-z])| ?(?:\\times|\\cdot|\u00d7|\*) ?10 ?\^)"
)
BOX_CHANGED_BEHIND = re.compile(
    rf"{NUMBER_GOES_ON}|{SCALE_OR_POWER_BEHIND}|(?:[ \t*$)}}\]~-]|\\[,;: )\]]){{0,20}}+(?:\\text *\{{ *)?"
    rf"(?:{MAGNITUDES}|squared|cubed|factorial|(?:plus|minus|times|divided by) [$(\\]*[0-9]+"
    r"|and (?:a |one )?(?:half|third|quarter))\b",
    re.IGNORECASE,
)
SHORT_UNITS = (
    "(?:km|cm|mm|m|ft|in)(?:[\u00b2\u00b3]|\\^[23])"
    "|km|cm|mm|m|kg|mg|g|lbs?|oz|ft|in|ml|l|hrs?|h|mins?|s|mph|am|pm|st|nd|rd|th|cents?|dollars?"
)
# What a rate may be per: a listed word, since letters may be a product.
PER = (
    "(?:hour|hr|day|week|month|year|minute|min|second|mile|km|kg|ounce|pound|lb|gallon|liter"
    "|person|piece|item|box|bag|cup)s?(?![A-Za-z(])"
)
RATE = rf" ?/ ?(?:{PER}|\\(?:text|mathrm|mbox) ?\{{ *(?:[hs]|{PER}) *\}})"
NO_SIGN = "\u00ac-\u00af\u00b1-\u2012\u2015-\u2017\u2020-\u209f\u20d0-\U0010ffff"
BEHIND = re.compile(
    rf"(?:(?:{SHORT_UNITS})(?:/[hs](?![A-Za-z]))?)?(?:{RATE})?(?![A-Za-z0-9])"
    rf"-?(?![0-9+/^<>~|&@#_'{NO_SIGN}])(?:[\s*$)}}\]\"]|\\[,;: ])*+"
    rf"(?!-(?![ -]*[A-Za-z]{{2}})|[+/^<>~|&]|(?![{ACCENTED}])[{NO_SIGN}]|(?<=[*])[A-Za-z0-9({ACCENTED}]"
    rf"|[A-Zb-z](?![A-Za-z.{ACCENTED}]))"
)
# Ticks, stars and pictographs, and what joins or colors them. The gaps are pictographs that deny or mean a number.
PICTURE = (
    "[\u200d\u2611\u2705\u2713\u2714\u2728\u2b50\ufe0f\U0001f300-\U0001f44d\U0001f44f-\U0001f4ae\U0001f4b0-\U0001f4ff"
    "\U0001f505-\U0001f518\U0001f525-\U0001f533\U0001f5f8\U0001f5f9\U0001f600-\U0001f644\U0001f646-\U0001f64f"
    "\U0001f680-\U0001f6aa\U0001f90c-\U0001f913\U0001f915-\U0001f927\U0001f929-\U0001f936\U0001f938-\U0001f9ff"
    "\U0001fa70-\U0001faff]"
)
ENDING_PICTURES = re.compile(rf"{PICTURE}{{1,20}}+(?=(?:{PICTURE}|[ \t\r*.!]){{0,20}}+$)", re.MULTILINE)
BESIDE = 60
NO_UNIT = re.compile(
    rf"\b(?:{SCALE}|plus|minus|times|divided|or|and|not|is|was|wrong|pi|sin|cos|tan|cot|sec|csc|log|ln|exp"
    rf"|if|for|where|when|right|even|odd|percent|remainder|maybe|perhaps|below zero"
    rf"|(?:than|choose) (?-i:[b-z])|(?-i:k|M)|[ap]\.?m|{NOT_OR}|{SHORT_WORD})\b",
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
    "kph": "kmh kmph",
    "rpm": "",
    "mg": "milligram",
    "kw": "kilowatt",
    "kwh": "",
    "ft^2": "sqft",
}
UNITS = {word: unit for unit, words in SYNONYMS.items() for word in [unit, *words.split()]}
# These fit every unit.
ANY_UNIT = {"unit", "unit^2", "unit^3"}
POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
JOINING = {"of", "to", "a", "an"}
# Letters that are factors rather than a word: without vowels, or from the ends of the alphabet.
FACTORS = re.compile("[b-df-hj-np-tv-z]+|[a-fw-z]+")
BRACKETED = re.compile(r"\\text|\\frac|(?<![\^])\{|\}")
PIECE = re.compile(r"[a-z]+|\^\{?-?[0-9]|/|[^\x00-\x7f]+")
IN_TEXT = (
    r"(?:\s*(?:\\text\{(?!\s*\}\s*\^)[^{}]*\}|\\frac(?:\{\\text\{[^{}]*\}(?:\^\{?[23]\}?)?\}){2})"
    r"(?:\s*\^\s*\{?-?[0-9]\}?)?\s*(?:/|\\cdot(?![A-Za-z]))?)+"
)
TEXT_UNIT = re.compile(rf"(?<=[0-9}})])({IN_TEXT})$")
TEXT_UNIT_BEHIND_A_LETTER = re.compile(rf"(?<=[A-Za-z])({IN_TEXT})$")
INSIDE_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# What \text{} may hold to be a unit: words, rates, powers, currencies. Other digits and signs make another value of the
# number before them, as in `5\text{ to 6}` and `5\text{.5}`. A comma or an exclamation mark must follow a word.
UNIT_IN_TEXT = re.compile(
    r"(?:[^\W\d_]|(?!\d)[\u0300-\u036f\u0900-\u0eff]|[\s()]|(?<=[^\s\d(])[.'/]|/(?=\s*(?:[hms]\b|[A-Za-z]{2}))"
    r"|(?:(?<=[^\W\d_]),|(?<=[^\W\d_]{2})!)(?=\s*(?:[^\W\d_]|\Z))"
    r"|-(?=[A-Za-z]{2})|(?<=m)[23](?![0-9])|(?<=[^\s\d(])\$?\^[23]\$?|\^\\circ|\\?[$\u00a2-\u00a5\u20a0-\u20bf])*"
)
RATE_UNIT = re.compile(rf"(?<=[0-9}})])({RATE})$")
LETTER = f"[A-Za-z{ACCENTED}]"
PROSE_UNIT = re.compile(
    rf"(?<=[0-9}}])\s+({LETTER}{{2,}}(?:[ /-]{LETTER}+){{0,2}}\.?(?:\^\{{?[23]\}}?)?)$"
    r"|(?<=[0-9]) *((?:cm|mm|km|m|ft|in)\^\{?[23]\}?)$"
    r"|(?<=[0-9])((?:km|cm|mm|kg|ml|mph|ft|lbs?)|[a-z]{4,})$"
)
END_OF_PROSE = re.compile(r"\.?(?:\^\{?[23]\}?)?$")
CURRENCY = re.compile(r"^(-?)\s*\\?(?:([$\u20ac\u00a3])|\\text\{ *(USD|EUR|GBP) *\}|(USD|EUR|GBP))\s*(?=-?[0-9.])")
CURRENCY_BEHIND = re.compile(r"(?<=[0-9])\s*\\?([$\u20ac\u00a3])$")
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}


def without_pictures(text: str) -> str:
    """Blanks in place of the ticks and pictures that end a line, so that all else keeps its place."""
    return text if text.isascii() else ENDING_PICTURES.sub(lambda found: " " * len(found[0]), text)


def take_unit(value: str) -> tuple[str, str]:
    """The value without the unit or the currency beside its number, and that unit."""
    for pattern in (TEXT_UNIT, RATE_UNIT, PROSE_UNIT, TEXT_UNIT_BEHIND_A_LETTER):
        match = pattern.search(value)
        written = "".join(group or "" for group in match.groups()) if match else ""
        if match and not NO_UNIT.search(match[0]) and is_unit(pattern, written):
            shorter, unit = value[: match.start()].rstrip(), one_spelling(written)
            if pattern is not RATE_UNIT:
                return shorter, unit
            amount, currency = take_currency(shorter)
            return amount, f"{currency} {unit}".strip()
    return take_currency(value)


def take_currency(value: str) -> tuple[str, str]:
    """The value without the currency beside its number, and that currency."""
    if match := CURRENCY_BEHIND.search(value):
        return value[: match.start()], CURRENCIES[match[1]]
    if match := CURRENCY.match(value):
        name = match[2] or match[3] or match[4]
        return str(match[1]) + value[match.end() :], CURRENCIES.get(name) or UNITS[name.lower()]
    return value, ""


def is_unit(pattern: re.Pattern[str], written: str) -> bool:
    """Whether what this pattern found is a unit: behind a letter a listed one, in prose words and no product."""
    if not all(map(UNIT_IN_TEXT.fullmatch, INSIDE_TEXT.findall(written))):
        return False
    if pattern is TEXT_UNIT_BEHIND_A_LETTER:
        return one_spelling(written).rstrip("^23") in SYNONYMS
    if pattern is not PROSE_UNIT:
        return True
    *others, last = re.split("[ /-]", END_OF_PROSE.sub("", written).lower())
    return is_word(last) and all(is_word(other) or other in JOINING for other in others)


def is_word(letters: str) -> bool:
    """False if the letters look like a product, as `xy` does."""
    if letters in UNITS or letters in POWERS:
        return True
    return len(letters) > 2 and (letters.removesuffix("s") in UNITS or not FACTORS.fullmatch(letters))


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
