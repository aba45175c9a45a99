"""The verifier."""

from launch.doctor.finding import Finding, error, ok
from launch.doctor.known import known
from launch.doctor.machine import Machine


def function(machine: Machine) -> Finding:
    """The user's reward function can be imported."""
    reward = known(machine.reward)
    if not reward.function:
        return ok(f"built in: {machine.config.verifier.kind}")
    if reward.trouble:
        return error(
            f"verifier.function = '{reward.function}' cannot be used: {reward.trouble}",
            "mend the file; importing it must end by itself, within seconds and without input",
        )
    return ok(f"{reward.function} can be imported")
