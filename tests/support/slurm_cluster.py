"""A Slurm of one node that lives for a test: munged, slurmctld and slurmd on loopback, with files in one folder.

Needs root and Debian's slurm-wlm and munge. There is no accounting and no cgroup: processes of a job are found by their
parents (proctrack/linuxproc).

    low         preempted without notice: TERM to all processes, KILL after KillWait, back into the queue
    noticed     preempted with a GraceTime
    high        its jobs preempt those of both
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.runs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
WAIT_S = 60.0
CONFIG = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=5
KillWait={kill_wait_s}
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=noticed Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Its commands."""

    folder: Path
    """Configuration, state and logs."""

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """What it prints."""
        argv = [str(word) for word in words]
        done = subprocess.run(argv, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=WAIT_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, *words: str | Path, cwd: Path) -> str:
        """The number of the job."""
        return self.command("sbatch", "--parsable", *words, cwd=cwd).strip()

    def state(self, job: str) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED`, ..."""
        return self.about(job)["JobState"]

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol` shows of a job."""
        words = self.command("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_now(self, job: str) -> None:
        """A requeued job would wait two minutes, so that it does not start on a node that has just failed."""
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")

    def cancel(self, job: str) -> None:
        """It may have ended."""
        subprocess.run(["scancel", job], env=self.environment, capture_output=True, check=False)


def missing_programs() -> list[str]:
    """What a cluster needs and this machine lacks."""
    found = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    return found if os.geteuid() == 0 else [*found, "root"]


@contextmanager
def slurm_cluster(folder: Path, *, cpus: int = 2, kill_wait_s: int = 30) -> Iterator[Cluster]:
    """cpus: that the node says it has."""
    write_files(folder, cpus, kill_wait_s)
    cluster, config = Cluster(folder=folder), folder / "slurm.conf"
    munge = [f"--{name}={folder / file}" for name, file in MUNGE_FILES.items()]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for argv in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D", "-c", "-f", config],
            ["slurmd", "-D", "-c", "-f", config],
        ):
            daemons.append(daemon(argv, cluster))
        wait_for_node(cluster, daemons)
        yield cluster
    finally:
        for process in reversed(daemons):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


MUNGE_FILES = {
    "socket": "munge.socket",
    "key-file": "munge.key",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "munged.seed",
}


def write_files(folder: Path, cpus: int, kill_wait_s: int) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    text = CONFIG.format(
        host=os.uname().nodename.partition(".")[0],
        controller_port=free_port(),
        node_port=free_port(),
        folder=folder,
        cpus=cpus,
        kill_wait_s=kill_wait_s,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")


def daemon(argv: Sequence[str | Path], cluster: Cluster) -> subprocess.Popen[bytes]:
    """In the foreground of a session of its own, so that a Ctrl-C ends it here and not in the middle."""
    program = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or argv[0]
    output = (cluster.folder / f"{argv[0]}.out").open("wb")
    with output:
        return subprocess.Popen(
            [str(program), *map(str, argv[1:])],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_node(cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            if cluster.command("sinfo", "--noheader", "--format=%t").split()[:1] == ["idle"]:
                return
        except RuntimeError as error:
            said = str(error)
        else:
            said = "the node is not idle"
        ended = [process.args for process in daemons if process.poll() is not None]
        if ended or time.monotonic() > until:
            logs = "".join(
                f"{file.name}:\n{file.read_text()}" for file in sorted(cluster.folder.glob("*.[lo][ou][gt]"))
            )
            raise RuntimeError(f"the cluster did not start ({said}; ended: {ended}):\n{logs}")
        time.sleep(0.2)
