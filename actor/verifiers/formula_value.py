"""The arithmetic for formula.py: 60 digits, and an exception wherever those may not be enough.

    a sum that is much smaller than its terms, or that loses one of them; a function near one of its zeros
    a magnitude above 2^4000, an exponent above 1000, a factorial above 400!: these cost time and memory
    a complex value so close to the cut of a root or logarithm that rounding decides the branch
    a pole

The exception says nothing about the formula; the caller must compute it in another way. Exact does the same arithmetic
on fractions, for numbers such as 2^{2010}-1.
"""

import math
from fractions import Fraction
from typing import Any

from mpmath import MPContext

DIGITS = 60
CANCELLED = 1e-20
MAX_MAGNITUDE = 4000
MAX_EXPONENT = 1000
MAX_FACTORIAL = 400
MAX_EXACT_FACTORIAL = 2500
MAX_BITS = 40_000
MAX_NUMBERS = 4096
NOISE = 1e-40
TOLERANCE = 1e-25


class Unsure(Exception):
    """This arithmetic is not sure of the value."""


class Values:
    """Arithmetic with a precision of its own, which no other code can change."""

    def __init__(self) -> None:
        self.context: Any = MPContext()
        self.context.dps = DIGITS
        self.numbers: dict[str, Any] = {}
        self.constants = {"e": +self.context.e, "i": self.context.mpc(0, 1), "\\pi": +self.context.pi}
        self.functions = {
            "\\sin": self.context.sin,
            "\\cos": self.context.cos,
            "\\tan": self.context.tan,
            "\\ln": self.context.ln,
        }

    def number(self, written: str) -> Any:
        """Kept for the next formula: the same few numbers are in most of them."""
        if written not in self.numbers:
            if len(self.numbers) >= MAX_NUMBERS:
                self.numbers.clear()
            self.numbers[written] = self.context.mpf(written.rstrip("."))
        return self.numbers[written]

    def as_fraction(self, value: Any) -> Fraction | None:
        """A real value as a fraction; None for a complex one."""
        return Fraction(self.context.nstr(value, DIGITS)) if self.is_real(value) else None

    def is_real(self, value: Any) -> bool:
        return isinstance(value, self.context.mpf)

    def close(self, left: Any, right: Any, floor: float) -> bool:
        """Whether two values differ only by rounding."""
        return bool(abs(left - right) <= max(TOLERANCE * max(abs(left), abs(right)), floor))

    def negate(self, value: Any) -> Any:
        return -value

    def add(self, left: Any, right: Any) -> Any:
        """The sum, unless its digits cancel or the smaller of the two is lost beside the other."""
        total, size, other = left + right, abs(left), abs(right)
        if min(abs(total), size or other, other or size) < CANCELLED * (size + other):
            raise Unsure
        return total

    def subtract(self, left: Any, right: Any) -> Any:
        return self.add(left, -right)

    def multiply(self, left: Any, right: Any) -> Any:
        return self.bounded(left * right)

    def divide(self, left: Any, right: Any) -> Any:
        if not right:
            raise Unsure
        return self.bounded(left / right)

    def power(self, base: Any, exponent: Any) -> Any:
        if abs(exponent) > MAX_EXPONENT or not base:
            raise Unsure
        self.off_the_cut(base)
        return self.bounded(base**exponent)

    def root(self, value: Any, degree: Any, *, may_be_negative: bool) -> Any:
        """The principal root; or the real one of a negative number, if the degree is odd and that is allowed."""
        exponent = self.divide(self.number("1"), degree)
        is_odd = self.is_real(degree) and self.context.isint(degree) and degree % 2 == 1
        if may_be_negative and is_odd and self.is_real(value) and value < 0:
            return -self.power(-value, exponent)
        return self.power(value, exponent)

    def factorial(self, value: Any) -> Any:
        if not self.is_real(value) or abs(value) > MAX_FACTORIAL or (value < 0 and self.context.isint(value)):
            raise Unsure
        return self.bounded(self.context.gamma(value + 1))

    def binomial(self, above: Any, below: Any) -> Any:
        if not (self.is_real(above) and self.is_real(below)) or max(abs(above), abs(below)) > MAX_FACTORIAL:
            raise Unsure
        return self.bounded(self.context.binomial(above, below))

    def apply(self, name: str, value: Any) -> Any:
        if name == "\\ln":
            if not value:
                raise Unsure
            self.off_the_cut(value)
        elif isinstance(value, self.context.mpc) and abs(value.imag) > MAX_EXPONENT:
            raise Unsure
        result = self.functions[name](value)
        if not CANCELLED < abs(result) < 1 / CANCELLED:
            raise Unsure
        return result

    def off_the_cut(self, value: Any) -> None:
        """Refuses a negative number with an imaginary part that is only rounding."""
        if isinstance(value, self.context.mpc) and value.real < 0 and abs(value.imag) < NOISE * abs(value):
            raise Unsure

    def bounded(self, value: Any) -> Any:
        """Refuses a value that is too large or too small; zero is allowed."""
        if value and not abs(self.context.mag(value)) < MAX_MAGNITUDE:
            raise Unsure
        return value


class NoConstants(dict[str, Any]):
    """Neither e nor pi is a fraction."""

    def __missing__(self, name: str) -> Any:
        raise Unsure


class Exact:
    """The same arithmetic on fractions, for numbers such as 2^{2010}-1 whose digits would not fit."""

    constants = NoConstants()

    def number(self, written: str) -> Fraction:
        return Fraction(written.rstrip("."))

    def negate(self, value: Fraction) -> Fraction:
        return -value

    def add(self, left: Fraction, right: Fraction) -> Fraction:
        return self.bounded(left + right)

    def subtract(self, left: Fraction, right: Fraction) -> Fraction:
        return self.bounded(left - right)

    def multiply(self, left: Fraction, right: Fraction) -> Fraction:
        return self.bounded(left * right)

    def divide(self, left: Fraction, right: Fraction) -> Fraction:
        if not right:
            raise Unsure
        return self.bounded(left / right)

    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or bits * abs(exponent) > MAX_BITS or not base:
            raise Unsure
        return base ** int(exponent)

    def root(self, value: Fraction, degree: Fraction, *, may_be_negative: bool) -> Fraction:
        """A root is rational only by chance; Values is surer of it."""
        raise Unsure

    def factorial(self, value: Fraction) -> Fraction:
        if value.denominator != 1 or not 0 <= value <= MAX_EXACT_FACTORIAL:
            raise Unsure
        return Fraction(math.factorial(int(value)))

    def binomial(self, above: Fraction, below: Fraction) -> Fraction:
        if above.denominator != 1 or below.denominator != 1 or not 0 <= below <= above <= MAX_EXACT_FACTORIAL:
            raise Unsure
        return Fraction(math.comb(int(above), int(below)))

    def apply(self, name: str, value: Fraction) -> Fraction:
        """No function here has rational values."""
        raise Unsure

    def bounded(self, value: Fraction) -> Fraction:
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise Unsure
        return value
