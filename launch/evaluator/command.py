"""`eval RUN --follow`: evaluates each new checkpoint of a run while it trains, and prints the results.

Results go to eval/, as those of the run itself. A result that is there is not made again, so the command may be ended
and started again at any time. It ends when the run has ended. With `eval.beside` it then also settles which checkpoint
is the best, as the run's own evaluator does.
"""

from pathlib import Path

from msgspec import structs

from launch.commands.evaluate import overridden
from launch.commands.open_run import open_run
from shared.errors import ConfigError
from shared.process.entry_point import keep_to_itself


def follow_run(*, directory: Path, problems: int | None, samples: int | None, long_cap: int | None, test: bool) -> int:
    keep_to_itself()
    if test:
        raise ConfigError(
            "--follow evaluates on the held-out tasks and got --test; use `eval --test` when the run has ended."
        )
    run, config = open_run(directory, compute_as="actor")
    given = {"problems": problems, "samples": samples, "long_cap": long_cap}
    config = structs.replace(config, eval=overridden(config.eval, given))
    # Imported when the threads are pinned: it needs torch.
    from launch.evaluator.follow import follow_by_hand, following

    with following(run, config) as follower:
        follow_by_hand(follower)
    return 0
