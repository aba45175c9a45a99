r"""A small, fast reader of formulas in the form in which people write final answers.

    sum      = term (+|-) term ...
    term     = factor (*|\cdot|\times|/|\div| ) factor ...        factors side by side are a product
    factor   = [-|+] atom [!] [^ exponent]
    atom     = number | letter | \pi, \theta, ... | (sum) | \frac{sum}{sum} | \binom{sum}{sum} | \sqrt[n]{sum}
             | function atom
    letter   = x | x_1 | x_{12}
    function = \sin | \cos | \tan | \ln | \log_base

It reads only what has one meaning. It does not read a product after a slash, a function of more than one atom, letters
that may name a function, mixed numbers, sets, relations or bare braces. Upper and lower case are different letters, and
e and i are the constants. An odd root of a negative number is real, as in \sqrt[3]{-8} = -2, if the formula has no
letters; a power such as (-8)^{1/3} is the principal one. The result is a function from the values of the letters to a
number; formula_value.py has the arithmetic.

Why not use math-verify alone: it takes milliseconds for a formula and simplifies, while this takes a tenth of a
millisecond and computes 60 digits. And where a formula has two readings, this refuses, while math-verify picks one: it
reads `(2)(3)` as 5.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from actor.verifiers.formula_value import Values

MAX_DEPTH = 30
TOKEN = re.compile(r"\\[A-Za-z]+|[0-9]+\.?[0-9]*|\.[0-9]+|[A-Za-z]|[-+*/^_!(){}\[\]]")
BLANK = re.compile(r"[ ]*")
NAMES = (
    "theta alpha beta gamma delta phi omega lambda mu sigma rho tau epsilon eta kappa nu xi psi chi zeta"
    " Delta Omega Phi Psi Gamma Lambda Sigma hbar ell"
)
GREEK = {f"\\{name}" for name in NAMES.split()}
FUNCTIONS = {"\\sin", "\\cos", "\\tan", "\\ln", "\\log"}
TIMES, OVER = {"*", "\\cdot", "\\times"}, {"/", "\\div"}
MAY_NAME_A_FUNCTION = set("fghpq")
AFTER_A_FUNCTION = {"", "+", "-", ")", "}", *FUNCTIONS}
Value = Callable[[Any, dict[str, Any]], Any]
"""The value under the arithmetic of Values or Exact, with numbers for the letters."""


class NotRead(Exception):
    """This reader cannot read the formula; another one may."""


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One formula."""

    letters: frozenset[str]
    """The variables."""
    value: Value
    """From values of the variables to the value of the formula."""


@lru_cache(maxsize=4096)
def read_formula(written: str) -> Formula | None:
    """The formula, or None if this reader cannot read it. A group shares its gold answer, which is read only once."""
    try:
        reader = Reader(tokens=tokens(written))
        value = reader.sum()
        reader.expect("")
    except NotRead:
        return None
    return Formula(letters=frozenset(reader.letters), value=value)


def tokens(written: str) -> list[str]:
    if "E" in written or "I" in written:
        raise NotRead
    found: list[str] = []
    place = 0
    while (place := matched(BLANK, written, place)) < len(written):
        end = matched(TOKEN, written, place)
        token = written[place:end]
        found.append(token)
        place = end
    return found


def matched(pattern: re.Pattern[str], written: str, place: int) -> int:
    """The place where a match that begins here ends."""
    match = pattern.match(written, place)
    if not match:
        raise NotRead
    return match.end()


@dataclass(kw_only=True)
class Reader:
    """Goes through the tokens. Each rule of the grammar is a method that returns a value."""

    tokens: list[str]
    letters: set[str] = field(default_factory=set)
    place: int = 0
    depth: int = 0

    @property
    def next(self) -> str:
        """The token ahead; empty at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        self.place += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise NotRead

    def sum(self) -> Value:
        total = self.term()
        while self.next in ("+", "-"):
            total = combine("add" if self.take() == "+" else "subtract", total, self.term())
        return total

    def term(self) -> Value:
        """Factors, multiplied and divided. None may follow a quotient without a sign: it may be part of it."""
        product = self.factor()
        while self.next not in ("", "+", "-", ")", "}", "]"):
            sign = self.take() if self.next in TIMES | OVER else ""
            if not sign and (self.next[0].isdigit() or self.next[0] == "."):
                raise NotRead
            product = combine("divide" if sign in OVER else "multiply", product, self.factor())
            if sign in OVER and self.next not in ("", "+", "-", ")", "}", *TIMES, *OVER):
                raise NotRead
        return product

    def factor(self) -> Value:
        """An atom with its sign and exponent; -x^2 is -(x^2)."""
        if self.next in ("+", "-"):
            negative = self.take() == "-"
            inner = self.factor()
            return (lambda values, at: values.negate(inner(values, at))) if negative else inner
        base = self.atom()
        if self.next == "!":
            base = self.factorial(base)
        if self.next != "^":
            return base
        self.take()
        exponent = self.braced() if self.next == "{" else self.single()
        if self.next == "^":
            raise NotRead
        return combine("power", base, exponent)

    def factorial(self, inner: Value) -> Value:
        """Of the atom before the sign; `n!!` is another function."""
        self.take()
        if self.next == "!":
            raise NotRead
        return lambda values, at: values.factorial(inner(values, at))

    def single(self) -> Value:
        """An exponent without braces: one digit, letter or named constant."""
        token = self.take()
        if len(token) == 1 and token.isalnum() and not (token.isdigit() and self.next[:1].isdigit()):
            return self.letter(token) if token.isalpha() else number(token)
        raise NotRead

    def atom(self) -> Value:
        token = self.take()
        if token == "(":
            return self.until(")")
        if token == "\\frac":
            return combine("divide", self.braced(), self.braced())
        if token == "\\binom":
            return combine("binomial", self.braced(), self.braced())
        if token == "\\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(token)
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return self.number(token)
        if token in GREEK or token == "\\pi" or (len(token) == 1 and token.isalpha()):
            return self.letter(token)
        raise NotRead

    def number(self, token: str) -> Value:
        """A number before a fraction may be a mixed number, so it is not read."""
        if self.next == "\\frac":
            raise NotRead
        return number(token)

    def letter(self, token: str) -> Value:
        if self.next == "_":
            token = f"{token}_{self.index()}"
        if (token[0] in MAY_NAME_A_FUNCTION and self.next == "(") or (token == "d" and self.next[:1].isalpha()):
            raise NotRead
        if token in ("e", "i", "\\pi"):
            return lambda values, at: values.constants[token]
        self.letters.add(token)
        return lambda values, at: at[token]

    def index(self) -> str:
        """What a letter has below it: one sign, or some in braces."""
        self.take()
        index = self.take()
        if index == "{":
            index = self.take()
            self.expect("}")
        if not index.isalnum() or (len(index) > 1 and not index.isdigit()):
            raise NotRead
        return index

    def root(self) -> Value:
        degree = number("2")
        if self.next == "[":
            self.take()
            degree = self.until("]")
        inner = self.braced()
        # In a formula with letters, a root must stay equal to its power: \sqrt[3]{x} is x^{1/3}.
        return lambda values, at: values.root(inner(values, at), degree(values, at), may_be_negative=not self.letters)

    def function(self, token: str) -> Value:
        r"""A function of one letter, or of what is in parentheses or braces. `\sin 2x` and `\sin x^2` are not read."""
        power = None
        base = self.base() if token == "\\log" else None
        if self.next == "^":
            self.take()
            power = self.single()
        if self.next == "{":
            inner = self.braced()
        elif base and self.next.isdigit():
            inner = number(self.take())
        elif self.next in ("(", "\\frac", "\\pi", *GREEK) or (len(self.next) == 1 and self.next.isalpha()):
            inner = self.atom()
        else:
            raise NotRead
        if self.next not in AFTER_A_FUNCTION:
            raise NotRead

        def applied(values: Values, at: dict[str, Any]) -> Any:
            if base:
                return values.divide(values.apply("\\ln", inner(values, at)), values.apply("\\ln", base(values, at)))
            return values.apply(token, inner(values, at))

        return combine("power", applied, power) if power else applied

    def base(self) -> Value:
        """The base of a logarithm. Without one, some readers mean base ten and others base e."""
        self.expect("_")
        if self.next == "{":
            return self.braced()
        token = self.take()
        if len(token) == 1 and token.isdigit():
            return number(token)
        raise NotRead

    def braced(self) -> Value:
        self.expect("{")
        return self.until("}")

    def until(self, close: str) -> Value:
        """A sum and the bracket that closes it."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotRead
        inner = self.sum()
        self.expect(close)
        self.depth -= 1
        return inner


def number(token: str) -> Value:
    return lambda values, at: values.number(token)


def combine(operation: str, left: Value, right: Value) -> Value:
    return lambda values, at: getattr(values, operation)(left(values, at), right(values, at))
