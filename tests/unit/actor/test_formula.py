r"""The small reader of formulas: what it reads it reads as mathematicians do, and what is unclear it leaves alone."""

import cmath
import contextlib
import math
import random

import mpmath
import pytest
import sympy

from actor.verifiers.answer_text import Unreadable
from actor.verifiers.formula import read_formula
from actor.verifiers.formula_value import Unsure, Values
from actor.verifiers.math_equality import formulas_equal, read, same_values

VALUES = Values()
AT = {"x": 1.7, "y": -0.6, "n": 3.0, "\\theta": 0.4, "x_1": 2.1, "x_12": 0.3}


def value(written: str) -> complex:
    formula = read_formula(written)
    assert formula is not None, written
    return complex(formula.value(VALUES, {name: VALUES.number(str(number)) for name, number in AT.items()}))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("2+3*4", 14),
        ("2-3-4", -5),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^{3+1}", 16),
        ("2^3", 8),
        ("12/4/3", 1),
        ("2\\cdot-3", -6),
        ("2(3)", 6),
        ("(2)(3)", 6),
        ("4(-2)", -8),
        ("\\frac{x}{2}y", 1.7 / 2 * -0.6),
        ("xy", 1.7 * -0.6),
        ("xy", 1.7 * -0.6),
        ("x(y+1)", 1.7 * 0.4),
        ("3x^2y", 3 * 1.7**2 * -0.6),
        ("6 \\div 3", 2),
        (".5x + 2.", 2.85),
        ("\\sqrt{2}", math.sqrt(2)),
        ("\\sqrt[3]{8}x", 3.4),
        ("2\\sqrt{3}i", 2j * math.sqrt(3)),
        ("i^2", -1),
        ("e^{i\\pi} + 2", 1),
        ("e^x", math.exp(1.7)),
        ("\\pi n", 3 * math.pi),
        ("\\sin x\\cos x", math.sin(1.7) * math.cos(1.7)),
        ("\\sin^2 x", math.sin(1.7) ** 2),
        ("\\tan{x} + 1", math.tan(1.7) + 1),
        ("\\ln(x+1)", math.log(2.7)),
        ("\\cos\\theta", math.cos(0.4)),
        ("x_1x_{12}", 2.1 * 0.3),
        ("5!", 120),
        ("n \\cdot (n-1)!", 6),
        ("-n!^2", -36),
        ("\\binom{5}{2}", 10),
        ("\\sqrt[3]{-8}", -2),
        ("\\sqrt[5]{-32} + 1", -1),
        ("\\sqrt{-4}", 2j),
        ("\\sqrt[4]{-1}", cmath.exp(1j * math.pi / 4)),
        ("\\sqrt[3]{-1.7x}", 1.7 ** (2 / 3) * cmath.exp(1j * math.pi / 3)),
        ("(-8)^{\\frac{1}{3}}", 2 * cmath.exp(1j * math.pi / 3)),
    ],
)
def test_what_has_one_meaning_has_its_value(written: str, expected: complex) -> None:
    assert value(written) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    "written",
    [
        "1/2x",
        "\\sin 2x",
        "\\sin x^2",
        "\\sin{x}^2",
        "\\sin{x}\\cdot y",
        "f(x)",
        "dx",
        "2\\frac{1}{2}",
        "2 3",
        "x 3",
        "x_{12y}",
        "x^-1",
        "x^23",
        "2^3^4",
        "x'",
        "5!!",
        "|x|",
        "3%",
        "(1,2)",
        "1,2",
        "{x+1}",
        "[x+1]",
        "x=1",
        "x>1",
        "\\cot x",
        "\\log 100",
        "\\text{a}",
        "E",
        "I",
        "2.5.1",
        "",
        "(",
        "(x",
        "x)",
        "\\frac{1}",
        "\\sqrt",
        "x^",
        "x+",
        ".",
        "(" * 40 + "x" + ")" * 40,
    ],
)
def test_what_is_unclear_or_unknown_is_left_to_others(written: str) -> None:
    assert read_formula(written) is None


@pytest.mark.parametrize(
    "written",
    [
        "1/0",
        "0^{-1}",
        "\\frac{1}{x-x}",
        "(10^{30}+1)-10^{30}",
        "\\sin\\pi",
        "\\tan(\\frac{\\pi}{2})",
        "\\ln(0)",
        "\\ln(1)",
        "9^{9999}",
        "((9^{999})^{999})^{999}",
        "e^{e^{e^{9}}}",
        "\\cos(999i^{2}e^{9}i)",
        "\\sqrt{((-8)^{\\frac{1}{3}})^3}",
        "1+10^{-30}",
        "9999!",
        "(-2)!",
        "i!",
        "\\binom{9999}{2}",
    ],
)
def test_where_sixty_digits_are_not_enough_gives_no_result(written: str) -> None:
    with pytest.raises(Unsure):
        value(written)


def test_nobody_elses_precision_changes_it() -> None:
    with mpmath.workdps(3):
        third = VALUES.divide(VALUES.number("1"), VALUES.number("3"))
        assert third * 3 - 1 == 0 or abs(third * 3 - 1) < 1e-50


def written_at_random(stream: random.Random, depth: int) -> str:
    """A formula with one meaning."""

    def inner() -> str:
        return written_at_random(stream, depth - 1)

    forms = [lambda: stream.choice(["x", "y", "n", "2", "3", "0.5", "7", "\\pi", "e"])]
    if depth:
        forms += [
            lambda: f"\\frac{{{inner()}}}{{{inner()}}}",
            lambda: f"\\sqrt{{{inner()}}}",
            lambda: f"({inner()} + {inner()})",
            lambda: f"({inner()} - {inner()})",
            lambda: f"({inner()}) \\cdot ({inner()})",
            lambda: f"({inner()})^{stream.randint(2, 3)}",
            lambda: f"\\{stream.choice(['sin', 'cos', 'ln'])}({inner()})",
        ]
    return stream.choice(forms)()


def test_it_agrees_with_the_general_reader() -> None:
    """On formulas at random, against math-verify's tree as sympy computes it: the other road of the same comparison."""
    stream, compared = random.Random(5), 0
    names = {letter: sympy.Symbol(letter, real=True) for letter in ("x", "y", "n")}
    at = {names[letter]: sympy.Float(str(AT[letter]), 30) for letter in names}
    while compared < 40:
        written = written_at_random(stream, 3)
        formula, tree = read_formula(written), read(written)
        if formula is None or tree is None or len(written) < 8:
            continue
        try:
            ours = value(written)
        except Unsure:
            continue
        assert ours == pytest.approx(complex(tree.evalf(30, subs=at)), rel=1e-12), written
        compared += 1


@pytest.mark.parametrize(
    ("gold", "given", "same"),
    [
        ("x^2-1", "(x+1)(x-1)", True),
        ("x^2-1", "(x+1)(x-2)", False),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("\\sqrt{8}", "2.828427124", False),
        ("e^{-20}", "10^{-9}", False),
        ("5+i", "(2+3i)(1-i)", True),
        ("|x|", "x", None),
        ("0", "\\sin\\pi", None),
        ("x", "y", False),
        ("2^{1000}-1", "2^{1000}", False),
        ("4^{1005}", "2^{2010}", True),
        ("1-\\frac{1}{2^{2010}}", "1-2^{-2010}", True),
        ("2^{99999}", "4^{9999}", None),
        ("\\frac{n!}{2!(n-2)!}", "\\binom{n}{2}", True),
        ("\\sqrt[3]{-5}", "-\\sqrt[3]{5}", True),
        ("\\sqrt[3]{x}", "x^{\\frac{1}{3}}", True),
        ("x_1+x_2", "x_{2}+x_1", True),
        ("x_1+x_2", "x_1+x_3", False),
    ],
)
def test_same_values_or_unsure(gold: str, given: str, same: bool | None) -> None:
    assert same_values(gold, given) is same


@pytest.mark.parametrize("given", ["(2)(3)", "4(\\frac{1}{4})", "2(3)", "(2)3"])
def test_numbers_side_by_side_are_no_sum(given: str) -> None:
    """math-verify reads each of these as one."""
    with contextlib.suppress(Unreadable):
        assert not formulas_equal("5", given)
    with pytest.raises(Unreadable, match="side by side"):
        formulas_equal("|x|+5", f"|x|+{given}")
