"""Supervise a run that has its directory, show it while it runs, report when it ends. `run` and `resume` share this."""

import sys

from launch.display.console import make_console
from launch.display.next_command import next_command
from launch.display.report import print_report
from launch.display.screens import screen
from launch.supervisor.restarts import Patience
from launch.supervisor.starter import ForkServerStarter, FreshStarter, Starter
from launch.supervisor.supervise import Supervisor
from launch.supervisor.topology import Topology, topology
from shared.config.tree import Config
from shared.process.entry_point import keep_to_itself
from shared.run.run_dir import RunDir


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
    return ForkServerStarter(plan.learner.environment, plan.learner.log.with_name("fork_server.log"))
