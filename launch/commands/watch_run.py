"""Start the processes of a run, show it while it trains, and report when it ends. `run` and `resume` share this."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from secrets import token_hex

from launch.display.console import make_console, next_command
from launch.display.page.command import write_report
from launch.display.report import print_report
from launch.display.screens import make_screen
from launch.on_ray.cluster import cluster_with_room
from launch.on_ray.placement import Machine, Place
from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.starter import ForkServerStarter
from launch.supervisor.supervise import Screen, Supervise, Supervisor
from launch.supervisor.topology import Topology, arithmetic, topology
from launch.why.command import add_verdict
from protocol.plain_text import for_terminal
from shared.config.tree import Config
from shared.errors import UserError
from shared.process.entry_point import keep_to_itself
from shared.process.trace import join_traces
from shared.run.run_dir import RunDir


def supervise_here(plan: Topology, screen: Screen, limits: SupervisorLimits) -> None:
    log = plan.learner.log.with_name("fork_server.log")
    starter = ForkServerStarter(plan.learner.environment, plan.run_dir, log)
    Supervisor(plan, screen, starter, limits).run()


def supervising(on: Machine, places: Sequence[Place]) -> AbstractContextManager[Supervise]:
    """places: of Ray."""
    return nullcontext(supervise_here) if on == "here" else cluster_with_room(places, Path.cwd())


def watch_run(run: RunDir, config: Config, *, verbose: bool, trace: bool, supervise: Supervise) -> None:
    """Returns when the run has ended; raises ProcessFailed if one of its processes crashed."""
    keep_to_itself()
    console, failed_with = make_console(), ""
    print(f"computes in {arithmetic(config.compute, config.model, config.actor)}")
    try:
        with make_screen(console, run, config.run.steps, verbose=verbose) as screen:
            plan = topology(run.path, config, trace=trace, meeting=token_hex(8))
            supervise(plan, screen, SupervisorLimits(silence_s=config.link.silence_s))
    except KeyboardInterrupt:
        print(f"stopped; nothing is lost, continue with: {next_command('resume', str(run.path))}")
        raise
    except UserError as error:
        failed_with = str(error)
        raise
    finally:
        if trace and write_or_warn("trace.json", join_traces, run):
            print(f"{run.trace} shows when each process computed; open it in https://ui.perfetto.dev")
        write_or_warn("the verdict in summary.json", partial(add_verdict, error=failed_with), run)
        write_or_warn("report.html", write_report, run)
    print_report(console, run, config.run.steps, can_be_extended=config.can_be_extended)


def write_or_warn(what: str, write: Callable[[RunDir], object], run: RunDir) -> bool:
    """Write a file of a run that has ended, or print a warning, so that the user still learns how the run ended."""
    try:
        write(run)
    except (UserError, OSError) as error:
        print(for_terminal(f"warning: {what} could not be written: {error}"), file=sys.stderr)
        return False
    return True
