"""A calculator and a guessing game, for `[environment] function`, as the presets `calculator` and `guessing_game` use.

    tandem run calculator
    tandem run guessing_game

The contract is in actor/environments/README.md: public methods are the tools, and their types and docstrings are what
the model is told about them.
"""

import re
from typing import Any

MAX_GUESSES = 5
LARGEST_SECRET = 31
CALCULATION = re.compile(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*")


class Calculator:
    """One tool. The verifier scores the answer that the model gives in the end."""

    def reset(self, **columns: Any) -> None:
        """Nothing to begin."""

    def calculate(self, expression: str) -> int:
        """
        Computes a sum, a difference or a product of two numbers.

        Args:
            expression: For example 12 + 30.
        """
        read = CALCULATION.fullmatch(expression)
        if read is None:
            raise ValueError(f"expected two numbers with +, - or * between them, got {expression}")
        left, right = int(read[1]), int(read[3])
        return {"+": left + right, "-": left - right, "*": left * right}[read[2]]


class GuessingGame:
    """Five guesses. The reward is 1 if one of them was right, else a tenth for each that could have been right.

    Which number was drawn decides more about the end than a single guess does. With the end alone as reward, 60 steps
    of 64 games taught nothing; what is earned by each guess does.
    """

    def reset(self, answer: str, **columns: Any) -> None:
        self.secret, self.guesses, self.found = int(answer), 0, False
        self.low, self.high = 1, LARGEST_SECRET
        self.sensible = 0

    def guess(self, number: int) -> str:
        """
        Compares a guess with the number.

        Args:
            number: The guess.
        """
        if self.guesses == MAX_GUESSES:
            return "no more guesses"
        self.guesses += 1
        self.sensible += self.low <= number <= self.high
        if number == self.secret:
            self.found = True
            return "yes"
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return "higher"
        self.high = min(self.high, number - 1)
        return "lower"

    def get_reward(self) -> float:
        return 1.0 if self.found else 0.1 * self.sensible
