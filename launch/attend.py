"""Supervise a run that has its directory, show it while it runs, report when it ends. `run` and `resume` share this."""

import sys

from rich.console import Console

from launch.audience import screen
from launch.next_command import next_command
from launch.report import print_report
from launch.restarts import Patience
from launch.starter import FreshStarter, Starter, ZygoteStarter
from launch.supervise import Supervisor
from launch.topology import Topology, topology
from shared.config import Config
from shared.process_edge import keep_to_itself
from shared.run_dir import RunDir

PLAIN_WIDTH = 100


class OurConsole(Console):
    """A console that leaves it to its caller what a reader who has gone means."""

    def on_broken_pipe(self) -> None:
        """rich would end the process, and the run with it."""
        raise BrokenPipeError


def attend(run: RunDir, config: Config, *, verbose: bool) -> None:
    """Until the run ends; raises what went wrong."""
    keep_to_itself()
    console = make_console()
    try:
        with screen(console, run, config.run.steps, verbose=verbose) as audience:
            plan = topology(run.path, config)
            patience = Patience(silence_s=config.link.silence_s)
            Supervisor(plan, audience, starter_for(plan), patience).run()
    except KeyboardInterrupt:
        print(f"stopped at once; nothing is lost, go on with: {next_command('resume', str(run.path))}")
        raise
    print_report(console, run, config.run.steps)


def starter_for(plan: Topology) -> Starter:
    """Forking what is loaded already, where a fork is safe."""
    if sys.platform != "linux":
        return FreshStarter()
    return ZygoteStarter(plan.learner.environment, plan.learner.log.with_name("zygote.log"))


def make_console() -> Console:
    """As wide as the terminal; a fixed width where there is none."""
    console = OurConsole(highlight=False)
    return console if console.is_terminal else OurConsole(highlight=False, width=PLAIN_WIDTH)
