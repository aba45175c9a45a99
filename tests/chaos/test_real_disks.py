"""The real thing: a disk of a few megabytes that fills up, one that turns read-only, a limit on the size of a file."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from learner.reports.disk_need import bytes_needed
from shared.config.load import config_from_json
from tests.chaos.pool import ROOT, Pool
from tests.chaos.start import Kill
from tests.chaos.trial import Result, Trial, check
from tests.support.runs import launch, summary

ADAPTER_BYTES = 630_000
Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A small tmpfs of our own, where we may mount one."""
    with ExitStack() as mounted:

        def mount(size: int) -> Path:
            folder = tmp_path / "disk"
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount


def needed(prepared: str) -> int:
    return bytes_needed(config_from_json((Path(prepared) / "config.json").read_bytes()), ADAPTER_BYTES, 0)


@pytest.mark.timeout(600)
def test_a_disk_that_fills_up_stops_the_run_in_words_until_there_is_room(
    hosts: Pool, prepared: str, undisturbed: Result, disk: Disk
) -> None:
    folder = disk(needed(prepared) + 4 * 2**20)
    kills = tuple(Kill(victim="disk", after_s=after_s) for after_s in (0.0, 0.2, 0.5, 0.6, 0.8, 0.9, 1.1))
    result = hosts.run_one(Trial(name="full-disk", run=prepared, disk=str(folder), kills=kills))
    check(result, undisturbed)
    full = [(code, said) for code, said in result.starts if code != 0]
    assert full, "the disk was never full while something was written"
    for code, said in full:
        assert code == 2 and said.startswith("error: "), said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_disk_too_small_for_what_the_run_will_write_is_refused_before_it_trains(
    prepared: str, disk: Disk, tmp_path: Path
) -> None:
    folder = disk(needed(prepared) - 2 * 2**20)
    shutil.copytree(prepared, folder / "run")
    done = launch("resume", folder / "run")
    assert done.returncode == 2 and "may need" in done.stderr and "make room on that disk" in done.stderr
    assert not list((folder / "run" / "checkpoints").iterdir()) and "Traceback" not in done.stderr
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.timeout(600)
def test_a_disk_made_read_only_is_one_sentence_and_the_run_goes_on_once_it_is_not(
    prepared: str, undisturbed: Result, disk: Disk
) -> None:
    folder = disk(2**26)
    shutil.copytree(prepared, folder / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    done = launch("resume", folder / "run")
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert os.strerror(errno.EROFS) in done.stderr and "not read-only" in done.stderr
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    assert launch("resume", folder / "run").returncode == 0
    assert summary(folder / "run")["adapter_sha256"] == undisturbed.outcome["adapter_sha256"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_limit_on_the_size_of_files_is_named_and_the_run_goes_on_without_it(
    prepared: str, undisturbed: Result, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    blocks = ADAPTER_BYTES // 1024 + 100
    command = f'ulimit -f {blocks}; exec "$0" -m launch resume "$1"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, str(run)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr and "ulimit -f unlimited" in done.stderr
    assert launch("resume", run).returncode == 0
    assert summary(run)["adapter_sha256"] == undisturbed.outcome["adapter_sha256"]
