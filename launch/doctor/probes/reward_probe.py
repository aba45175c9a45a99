"""`python -m launch.doctor.probes.reward_probe FILE.py:NAME`: exit 0 if that is a function that can be imported."""

import sys

from actor.reward_function import load_reward_function
from shared.errors import RewardError
from shared.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    try:
        load_reward_function(sys.argv[1])
    except RewardError as error:
        sys.exit(str(error))
