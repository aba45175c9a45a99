"""`eval RUN --follow`: evaluates each new checkpoint of a run while it trains, and prints the results.

Results go to eval/, like those of the run itself, and are for the same tasks and draws: the run's [eval] decides. An
existing result is not made again, so the command may be ended and started again at any time. It ends when the run has
ended. With `eval.beside` it then also settles which checkpoint is the best, as the run's own evaluator does.
"""

from collections.abc import Mapping
from pathlib import Path

from launch.commands.open_run import open_run
from shared.errors import ConfigError
from shared.process.entry_point import keep_to_itself


def follow_run(*, directory: Path, options: Mapping[str, int | None]) -> int:
    """options: of `eval`, by name. None of them goes with --follow."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(
            f"--follow evaluates as [eval] of the run says and got {', '.join(given)}; use `eval` without --follow for"
            " another evaluation."
        )
    keep_to_itself()
    run, config = open_run(directory, compute_as="actor")
    # Imported when the threads are pinned: it needs torch.
    from launch.evaluator.follow import follow_by_hand, following

    with following(run, config) as follower:
        follow_by_hand(follower)
    return 0
