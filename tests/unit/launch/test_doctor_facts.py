"""What doctor sees of a machine: versions, cores, memory, limits, time; from real files made up for each case."""

import resource
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from launch.doctor import hardware_checks
from launch.doctor.finding import Missing
from launch.doctor.hardware import Limits, look_at_limits, look_at_processor
from launch.doctor.libraries import look_at_software
from launch.doctor.probe import Look
from shared.process.free_memory import Cgroup, look_at_cgroup, look_at_memory
from shared.process.processor import read_flags
from tests.support.machines import GIB, QWEN_15B, but, configured, sound

ROOT = Path(__file__).resolve().parents[3]
MEMINFO = """MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:    8000000 kB
SwapTotal:       4000000 kB
SwapFree:        3000000 kB
HugePages_Total:       0
"""
PYPROJECT = """[project]
name = "x"
requires-python = ">=3.11"
dependencies = [
    "numpy>=2.3,<3",
    "no-such-library-anywhere==1.0",
]
"""

# --- software


def test_version_ranges_are_those_of_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    software = look_at_software(tmp_path / "pyproject.toml")
    assert software.python == ".".join(map(str, sys.version_info[:3]))
    assert software.python_versions == ">=3.11"
    assert software.waits_steadily == (sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT") == 1)
    numpy, absent = software.libraries
    assert (numpy.name, numpy.installed) == ("numpy", version("numpy"))
    assert set(numpy.versions.split(",")) == {">=2.3", "<3"}
    assert (absent.name, absent.versions, absent.installed) == ("no-such-library-anywhere", "==1.0", None)


def test_our_own_version_ranges_are_read() -> None:
    libraries = {library.name: library for library in look_at_software().libraries}
    assert libraries["torch"].installed == version("torch")
    assert libraries["torch"].versions == ">=2.11,<2.14", "more than the one that is installed"
    assert "pytest" not in libraries, "an extra is no dependency of a run"


def test_without_pyproject_the_installed_distribution_tells(tmp_path: Path) -> None:
    info = tmp_path / "tandem_rl-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: tandem-rl\nVersion: 9.9\nRequires-Python: >=3.50\n"
        "Requires-Dist: numpy<3,>=2.3\nRequires-Dist: pytest; extra == 'dev'\n"
    )
    code = (
        "import sys; from pathlib import Path; from launch.doctor.libraries import look_at_software;"
        "s = look_at_software(Path('no-such-file')); print(s.python_versions, *(x.name for x in s.libraries))"
    )
    # First on the path, so that it is this distribution that is found.
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [">=3.50", "numpy"]


# --- processor


def test_flags_are_those_of_the_first_core(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx avx2\n\nprocessor : 1\nflags\t\t: fpu\n")
    assert read_flags(cpuinfo) == {"fpu", "avx", "avx2"}
    cpuinfo.write_text("processor : 0\nFeatures\t: fp asimd\n")
    assert read_flags(cpuinfo) == {"fp", "asimd"}
    assert read_flags(tmp_path / "none") == frozenset()


def test_a_variable_of_the_environment_is_seen_and_finding_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    monkeypatch.setenv("UNRELATED", "1")
    processor = look_at_processor()
    assert processor.variables["OMP_THREAD_LIMIT"] == "1"
    assert "UNRELATED" not in processor.variables
    machine = but("processor", variables=processor.variables)(sound())
    finding = hardware_checks.variables(machine)
    assert finding.level == "warning"
    assert "OMP_THREAD_LIMIT=1" in finding.found
    assert "OMP_NUM_THREADS" not in finding.found


def test_this_processor_has_cores() -> None:
    processor = look_at_processor()
    assert processor.cores >= 1
    assert processor.name


# --- containers


def cgroup_files(root: Path, files: dict[str, str]) -> None:
    """A made-up cgroup file system."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_limits_of_cgroup_2_and_the_smallest_of_all_levels(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    files = {
        "outer/inner/cpu.max": "150000 100000",
        "outer/inner/memory.max": "5000",
        "outer/inner/memory.current": "100",
        "outer/cpu.max": "max 100000",
        "outer/memory.max": "4000",
        "outer/memory.current": "1000",
        "memory.max": "max",
        "memory.current": "90000",
        "other/cpu.max": "10000 100000",
    }
    cgroup_files(root, files)
    assert look_at_cgroup(root, own) == Cgroup(cpus=1.5, memory_limit=4000, memory_left=3000)


def test_inside_a_container_the_root_is_its_own(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/\n")
    cgroup_files(root, {"cpu.max": "50000 100000", "memory.max": "1000", "memory.current": "400"})
    assert look_at_cgroup(root, own) == Cgroup(cpus=0.5, memory_limit=1000, memory_left=600)
    cgroup_files(root, {"memory.stat": "anon 90\ninactive_file 250\nactive_file 50\n"})
    assert look_at_cgroup(root, own).memory_left == 900, "cached files are given up when memory is short"


def test_a_path_that_only_the_host_has_leads_to_the_root(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/system.slice/docker-abc.scope\n")
    cgroup_files(root, {"cpu.max": "200000 100000"})
    assert look_at_cgroup(root, own).cpus == 2.0


def test_limits_of_cgroup_1(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("4:memory:/box\n2:cpu,cpuacct:/box\n")
    files = {
        "cpu/box/cpu.cfs_quota_us": "300000",
        "cpu/box/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "memory/box/memory.limit_in_bytes": "5000",
        "memory/box/memory.usage_in_bytes": "4000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "4000",
    }
    cgroup_files(root, files)
    assert look_at_cgroup(root, own) == Cgroup(cpus=3.0, memory_limit=5000, memory_left=1000)


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert look_at_cgroup(tmp_path / "none", tmp_path / "none") == Cgroup(
        cpus=None, memory_limit=None, memory_left=None
    )


# --- memory


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    memory = look_at_memory(tmp_path / "meminfo")
    assert (memory.total, memory.available) == (16_000_000 * 1024, 8_000_000 * 1024)
    assert (memory.swap_total, memory.swap_free) == (4_000_000 * 1024, 3_000_000 * 1024)


FREE_IN_A_CONTAINER = """
import sys
from pathlib import Path
from shared.process import processor
# Before free_memory takes them for its defaults.
processor.CGROUPS, processor.OWN_CGROUP = map(Path, sys.argv[1:])
from shared.process.free_memory import free_memory
print(free_memory())
"""


@pytest.mark.parametrize("limit", ["5000", str(1 << 60), "max"])
def test_free_memory_is_what_both_machine_and_container_have(tmp_path: Path, limit: str) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/\n")
    cgroup_files(root, {"memory.max": limit, "memory.current": "2000"})
    done = subprocess.run(
        [sys.executable, "-c", FREE_IN_A_CONTAINER, root, own], cwd=ROOT, capture_output=True, text=True, check=True
    )
    free = int(done.stdout)
    assert free == 3000 if limit == "5000" else 3000 < free < 1 << 50


# --- limits

SHOW_LIMITS = """
import resource
resource.setrlimit(resource.{which}, ({value}, {hard} or resource.getrlimit(resource.{which})[1]))
from launch.doctor.hardware import look_at_limits
print(look_at_limits())
"""


@pytest.mark.parametrize(
    ("which", "value", "hard", "seen"),
    [
        ("RLIMIT_NOFILE", 100, 100, "open_files=100,"),
        # A process of a run raises it.
        ("RLIMIT_NOFILE", 100, 900, "open_files=900,"),
        ("RLIMIT_FSIZE", 1 << 20, 0, "file_bytes=1048576,"),
        ("RLIMIT_AS", 4 * GIB, 0, f"address_bytes={4 * GIB},"),
        ("RLIMIT_NPROC", 90, 0, "processes=90)"),
    ],
)
def test_a_real_limit_is_seen(which: str, value: int, hard: int, seen: str) -> None:
    """hard: 0 leaves it as it is."""
    code = SHOW_LIMITS.format(which=which, value=value, hard=hard)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert seen in done.stdout


def test_unlimited_is_none() -> None:
    seen = look_at_limits()
    here = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    assert (seen.file_bytes is None) == (here == resource.RLIM_INFINITY)
    machine = but("limits", open_files=None, file_bytes=None, address_bytes=None, processes=None)(sound())
    for check in (
        hardware_checks.open_files,
        hardware_checks.file_size,
        hardware_checks.address_space,
        hardware_checks.processes,
    ):
        assert check(machine).level == "ok"


def test_the_limits_are_the_soft_ones() -> None:
    assert isinstance(look_at_limits(), Limits)
    now = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert look_at_limits().processes == (None if now == resource.RLIM_INFINITY else now)


def test_the_largest_file_may_be_the_dense_base() -> None:
    shaped = but("model", shape=QWEN_15B)(but("limits", file_bytes=4 * GIB)(sound()))
    found = hardware_checks.file_size(configured(compute={"dtype": "fp32"})(shaped))
    assert found.level == "error" and "needs about 6.6 GiB" in found.found


def test_the_memory_that_is_needed_is_that_on_the_cores_of_the_container() -> None:
    """Where threads share cores, actors take turns, and one of them at a time has the memory of an order."""
    many = configured(compute={"actors": 2, "dtype": "bf16"}, model={"path": "somewhere"})(
        but("model", shape=QWEN_15B)(sound())
    )
    many = but("processor", cores=8)(many)
    said = {cpus: hardware_checks.available(but("cgroup", cpus=cpus)(many)).found for cpus in (None, 8.0, 1.5)}
    alone = hardware_checks.available(but("processor", cores=1)(many)).found
    assert said[None] == said[8.0] != said[1.5] == alone


# --- a look that takes too long, or fails


def test_a_look_that_never_ends_is_given_up() -> None:
    look = Look(lambda: time.sleep(60), 0.05)
    assert look.result() == Missing("not finished within 0.05 s")


def test_a_look_that_fails_says_why() -> None:
    assert Look(lambda: 1 // 0, 10.0).result() == Missing("ZeroDivisionError: integer division or modulo by zero")


def test_a_look_gives_what_it_saw_even_after_its_time() -> None:
    look = Look(lambda: 7, 0.0)
    end = time.monotonic() + 30
    while look.results.empty() and time.monotonic() < end:
        time.sleep(0.001)
    assert look.result() == 7
