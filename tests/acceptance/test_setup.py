"""launch/setup.sh with a real venv and a real pip, on a stand-in project that needs no network.

The project brings its own build backend, which notes every build; so the tests can count how often pip was at work.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SETUP = Path(__file__).resolve().parents[2] / "launch" / "setup.sh"

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "stand-in"
version = "1.0"
dependencies = []

[project.optional-dependencies]
dev = []
ui = []
"""

BACKEND = '''\
"""The smallest backend for editable installs: a wheel with a .pth file; fails or dawdles when a file asks for it."""

import pathlib
import time
import zipfile


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    root = pathlib.Path.cwd()
    with open(root / "builds", "a") as log:
        log.write("built\\n")
    if (root / "fail").exists():
        raise SystemExit("asked to fail")
    time.sleep(30 if (root / "dawdle").exists() else 0)
    info = "stand_in-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\\nName: stand-in\\nVersion: 1.0\\nProvides-Extra: dev\\nProvides-Extra: ui\\n"
    wheel = "Wheel-Version: 1.0\\nGenerator: own\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files = {"stand_in.pth": f"{root}\\n", f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    record = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    name = "stand_in-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return name
'''


@dataclass(frozen=True, kw_only=True)
class Project:
    """A clone of the stand-in project."""

    root: Path
    """Its folder."""

    @property
    def stamp(self) -> Path:
        """What marks the set-up as done."""
        return self.root / ".venv" / "tandem-setup"

    @property
    def builds(self) -> int:
        """How often pip has installed it."""
        log = self.root / "builds"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def extras(self) -> set[str]:
        """Extras of the finished set-up."""
        return set(self.stamp.read_text().splitlines()[1].split())

    def command(self, *extras: str, python: str = "") -> list[str]:
        """A shell that sources the script and sets up, standing in another folder."""
        setting = f"PYTHON={python} " if python else ""
        return ["bash", "-c", f'source "$0"; {setting}set_up "$@"', str(self.root / "launch" / "setup.sh"), *extras]

    def set_up(self, *extras: str, python: str = "") -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        command = self.command(*extras, python=python)
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)

    def python_runs(self) -> bool:
        """The venv's Python starts and has the project's folder on its path."""
        code = "import sys; print(*sys.path, sep='\\n')"
        done = subprocess.run([self.root / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=False)
        return done.returncode == 0 and str(self.root) in done.stdout.splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fresh clone, in a folder with a space in its name."""
    root = tmp_path / "a clone"
    (root / "launch").mkdir(parents=True)
    shutil.copy(SETUP, root / "launch")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    return Project(root=root)


def test_a_second_call_does_nothing_and_extras_add_up(project: Project) -> None:
    first = project.set_up()
    assert first.returncode == 0, first.stderr
    assert project.python_runs()
    assert (project.builds, project.extras()) == (1, set())
    again = project.set_up()
    assert (again.returncode, again.stderr, project.builds) == (0, "", 1)

    assert project.set_up("dev").returncode == 0
    assert (project.builds, project.extras()) == (2, {"dev"})
    assert project.set_up().stderr == project.set_up("dev").stderr == ""
    assert project.builds == 2
    assert project.set_up("ui").returncode == 0
    assert (project.builds, project.extras()) == (3, {"dev", "ui"})


def test_a_changed_pyproject_is_installed_again_with_the_same_extras(project: Project) -> None:
    project.set_up("dev")
    (project.root / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert project.set_up().returncode == 0
    assert (project.builds, project.extras()) == (2, {"dev"})


def test_a_killed_install_is_repeated(project: Project) -> None:
    (project.root / "dawdle").touch()
    with subprocess.Popen(project.command(), cwd="/", stderr=subprocess.PIPE, start_new_session=True) as running:
        wait_for_build(project)
        os.killpg(running.pid, signal.SIGKILL)
    (project.root / "dawdle").unlink()
    assert not project.stamp.exists()
    assert project.set_up().returncode == 0
    assert project.python_runs()
    assert project.builds == 2


@pytest.mark.parametrize(
    "damage",
    [
        *(pytest.param(package, marks=pytest.mark.long) for package in ("half a package", "set-aside package")),
        "no interpreter",
    ],
)
def test_a_broken_venv_is_made_again(project: Project, damage: str) -> None:
    project.set_up()
    site = next(project.root.glob(".venv/lib/python*/site-packages"))
    match damage:
        case "half a package":
            (site / "half-1.0.dist-info").mkdir()
            project.stamp.unlink()
        case "set-aside package":
            (site / "~orch").mkdir()
            project.stamp.unlink()
        case _:
            for name in ("python", "python3"):
                (project.root / ".venv" / "bin" / name).unlink()
    assert project.set_up().returncode == 0
    assert project.python_runs()
    assert not (site / "half-1.0.dist-info").exists()
    assert not (site / "~orch").exists()


def test_a_venv_of_another_program_stays_and_is_one_sentence(project: Project) -> None:
    """As uv makes one."""
    venv = project.root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    made = "home = /usr/bin\nimplementation = CPython\nuv = 0.9.7\nversion_info = 3.12.3\n"
    (venv / "pyvenv.cfg").write_text(made)
    done = project.set_up()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {venv} was not made by this script") and len(done.stderr.splitlines()) == 1
    assert f"TANDEM_PYTHON={venv}/bin/python" in done.stderr
    assert (venv / "pyvenv.cfg").read_text() == made and (venv / "bin" / "python").is_symlink()


def test_a_failed_install_says_so_and_keeps_what_worked(project: Project) -> None:
    project.set_up()
    (project.root / "fail").touch()
    failed = project.set_up("dev")
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith("error: pip could not install into .venv; ")
    # Without the extra nothing is missing, so nothing is installed and nothing can fail.
    assert (project.set_up().returncode, project.extras()) == (0, set())
    (project.root / "fail").unlink()
    assert project.set_up("dev").returncode == 0
    assert project.extras() == {"dev"}


def test_a_moved_folder_gets_a_venv_of_its_own(project: Project) -> None:
    project.set_up()
    moved = Project(root=project.root.rename(project.root.with_name("moved")))
    assert moved.set_up().returncode == 0
    assert moved.python_runs()


def test_two_calls_at_once_install_once(project: Project) -> None:
    calls = [subprocess.Popen(project.command(), cwd="/", stderr=subprocess.PIPE, text=True) for _ in range(2)]
    output = [call.communicate(timeout=60)[1] for call in calls]
    assert [call.returncode for call in calls] == [0, 0], output
    assert project.builds == 1
    assert sorted(map(bool, output)) == [False, True]


def test_a_named_python_that_is_too_old_is_passed_over(project: Project, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert project.set_up(python=str(old)).returncode == 0
    assert project.python_runs()


def python_of(folder: Path, name: str, minor: int) -> Path:
    """This Python, which says that it is 3.`minor`."""
    python = folder / name
    code = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    python.chmod(0o755)
    return python


def test_a_python_that_pytorch_is_not_built_for_is_the_last_choice(project: Project, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("cksum", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or name)

    def found(**given: str) -> str:
        command = [shutil.which("bash") or "bash", "-c", 'source "$0"; find_python', project.command()[3]]
        environment = {"PATH": str(programs)} | given
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()

    newest = str(python_of(programs, "python3", 15))
    assert found() == newest
    older = str(python_of(programs, "python3.12", 12))
    assert found() == older and found(PYTHON=newest) == newest
    python_of(programs, "python3", 14)
    assert found() == newest


def given_python(folder: Path, lacks: str) -> Path:
    """A Python of the caller's, which says what it lacks."""
    python = folder / "given-python"
    python.write_text(f"#!/bin/sh\necho {lacks}\n")
    python.chmod(0o755)
    return python


def test_a_given_python_is_taken_as_it_is(project: Project, tmp_path: Path) -> None:
    environment = os.environ | {"TANDEM_PYTHON": str(given_python(tmp_path, ""))}
    command = ["bash", "-c", 'source "$0"; set_up dev && tandem_python', project.command()[3]]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, environment["TANDEM_PYTHON"], "")
    assert not (project.root / ".venv").exists()


def test_a_given_python_without_the_packages_is_one_sentence(project: Project, tmp_path: Path) -> None:
    environment = os.environ | {"TANDEM_PYTHON": str(given_python(tmp_path, "torch zmq"))}
    done = subprocess.run(project.command(), cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "lacks: torch zmq; install that" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize("system", ["darwin23", "msys"])
def test_another_system_is_one_sentence_before_anything_is_made(project: Project, system: str) -> None:
    environment = os.environ | {"OSTYPE": system}
    done = subprocess.run(project.command(), cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: this system is '{system}', and Tandem needs Linux; ")
    assert len(done.stderr.splitlines()) == 1
    assert not (project.root / ".venv").exists()


def test_no_python_is_one_sentence(project: Project, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "flock", "grep", "sed", "sort", "tr"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    done = subprocess.run(
        project.command(), cwd="/", env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no Python 3.11 or newer with its venv module was found; install one")
    assert len(done.stderr.splitlines()) == 1
    assert not (project.root / ".venv").exists()


def wait_for_build(project: Project) -> None:
    """Until pip has reached the backend."""
    give_up = time.monotonic() + 60
    while not project.builds:
        assert time.monotonic() < give_up, "pip did not start to build"
        time.sleep(0.05)
