"""`pip install .` as a new user does it: the wheel in a fresh environment, and the command `tandem` in any folder.

The libraries are those of this environment, so that nothing is fetched.
"""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.presets.load import PRESETS_DIR
from tests.support.runs import ROOT, SMALL, rows, sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with the wheel, and a folder to stand in."""

    bin: Path
    """Its programs."""
    folder: Path
    """It has folders with the names of our packages, which must not replace them."""

    def tandem(self, *words: str) -> str:
        """What the command prints; it must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        command = ["tandem", *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = root.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    python = root / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, text=True)
    (site,) = root.glob("venv/lib/python*/site-packages")
    # After the installation: pip would find this project there, and install nothing.
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for package in ("shared", "launch"):
        (root / "anywhere" / package).mkdir(parents=True)
        (root / "anywhere" / package / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return Installed(bin=python.parent, folder=root / "anywhere")


def test_help_names_the_command(installed: Installed) -> None:
    said = installed.tandem("--help")
    assert said.startswith("usage: tandem ") and "  tandem run my.toml" in said and "python -m launch" not in said
    refused = installed.run("trian")
    assert refused.returncode == 2 and "see `tandem --help`" in refused.stderr


def test_a_run_starts_from_any_folder(installed: Installed) -> None:
    said = installed.tandem("run", "embedded", "--out", "runs/first", *sets(SMALL | {"run.steps": 2}))
    assert len(rows(installed.folder / "runs/first")) == 2
    assert "tandem generate runs/first --chat" in said, "the next commands are ones that work here"


@pytest.mark.long
def test_presets_and_plans_are_inside(installed: Installed) -> None:
    assert "phase" in installed.tandem("plan", "qwen3b_8gb", "--gpu-gb", "8")
    refused = installed.run("run", "no-such-preset")
    assert refused.returncode == 2
    assert all(path.stem in refused.stderr for path in PRESETS_DIR.glob("*.toml"))


def test_documents_and_examples_are_inside(installed: Installed) -> None:
    (site,) = installed.bin.parent.glob("lib/python*/site-packages")
    for file in ("launch/README.md", "launch/examples/first_run.ipynb", "launch/examples/judge.py", "launch/run.ps1"):
        assert (site / file).read_bytes() == (ROOT / file).read_bytes()
