"""Gives the model an environment of OpenEnv: it writes actions and reads observations.

    [environment]
    function = "launch/examples/openenv_client.py:Env"
    variables = ["OPENENV_URL"]
    max_turns = 8
    step_limit_s = 30.0

    [verifier]
    kind = "environment"                # the sum of the rewards of all steps

    OPENENV_URL=http://127.0.0.1:8000 python -m launch run my.toml

The environment runs as a server, here or in a container, and each completion of an order has a session of its own
there, so it must allow as many (`max_concurrent_envs`). This file is for one that takes a message, such as `echo_env`:
give `act` the arguments, the types and the docstring of your own action, or write several methods that build one each.
With the package of your environment use its client instead of the generic one, and its classes instead of dictionaries.
Needs `pip install openenv`.
"""
# openenv is in an extra; types are checked without it.
# pyright: reportMissingImports=false

import json
import os
from typing import Any

from openenv.core import GenericEnvClient


class Env:
    """One session with the server."""

    def __init__(self) -> None:
        self.client = GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync()
        self.client.connect()

    def reset(self, **columns: Any) -> str:
        """What the environment shows first goes behind the question."""
        self.total, self.done = 0.0, False
        return "\n" + self._seen(self.client.reset())

    def act(self, message: str) -> str:
        """
        Sends a message to the environment and shows what it answers.

        Args:
            message: What to send.
        """
        if self.done:
            return "The episode has ended."
        return self._seen(self.client.step({"message": message}))

    def get_reward(self) -> float:
        return self.total

    def _seen(self, result: Any) -> str:
        """An observation as text; a step's reward is added up. Public methods are tools, so this is none."""
        self.total += result.reward or 0.0
        self.done = result.done
        return json.dumps(result.observation)
