"""Makes the folder of wheels that a machine with a card, but without network, needs beside its own packages.

    python -m benchmarks.gpu.carry .whl        (here, with network; prints the command for the other machine)

The other machine has Python 3.12 and what an image for PyTorch on CUDA 13 usually has (THERE). The folder gets the rest
of what pyproject.toml names, and what TRL needs. bitsandbytes' wheel has libraries for all CUDA versions, 41 MiB; those
of the CPU and of CUDA 13.0 are kept, which work alone. The folder is in .gitignore: it never becomes part of a commit.

Left out on purpose: vLLM, which is gigabytes.
"""

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

PYTHON = "3.12"
WHEELS = (
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "setproctitle==1.3.8",
    "transformers==5.23.0",
    "math-verify==0.9.0",
    "latex2sympy2_extended==1.11.0",
    "antlr4-python3-runtime==4.13.2",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "trl==1.16.0",
)
"""With each one's needs, since pip is told to look for none."""
SLIMMED = "bitsandbytes==0.50.2"
THERE = frozenset(
    (
        *("torch", "huggingface-hub", "safetensors", "msgpack", "numpy", "sympy", "mpmath", "rich", "packaging"),
        *("jinja2", "pyyaml"),
    )
)
"""What pyproject.toml names and the other machine has; another version may do, `doctor` compares them."""
GLIBC = (17, 24, 26, 27, 28)
"""Minor versions of glibc that these wheels were built for. pip matches a tag exactly."""
KEPT = re.compile(r"libbitsandbytes_(cpu|cuda130)\.so$")
MOST_MIB = 30
OPTIONS = "--no-index --no-deps --no-compile --no-cache-dir"
THERE_COMMAND = """\
python3 -m pip install -q {options} --upgrade --target /tmp/site {folder}/*.whl && export PYTHONPATH=/tmp/site || exit
python3 -m benchmarks.gpu_suite --part A --budget-s 540 --out "$OUT"     # in the next calls: --part B, --part C"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="is made; git must ignore it")
    folder = parser.parse_args().folder
    refuse_if_not_ignored(folder)
    fill(folder)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
    if size > MOST_MIB:
        raise SystemExit(f"{folder} has {size:.1f} MiB; at most {MOST_MIB} can be carried, so leave something out")
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size:.1f} MiB. There, beside this folder:\n")
    print(THERE_COMMAND.format(options=OPTIONS, folder=folder))


def refuse_if_not_ignored(folder: Path) -> None:
    """SystemExit unless git leaves it out of commits."""
    asked = subprocess.run(["git", "check-ignore", "--quiet", f"{folder}/"], check=False)
    if asked.returncode == 1:
        raise SystemExit(f"git does not ignore {folder}; take .whl, or name it in .git/info/exclude")


def fill(folder: Path) -> None:
    """Download all, slim one. What was there before goes: two versions of a package would stop the installation."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        download([SLIMMED], Path(temporary))
        (whole,) = Path(temporary).glob("*.whl")
        slim(whole, folder / whole.name)
    download(WHEELS, folder)


def download(requirements: Iterable[str], folder: Path) -> None:
    """Wheels for the other machine, whatever this one is."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    options += [word for platform in platforms for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *requirements]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("pip could not fetch the wheels; what it said is above")


def slim(whole: Path, out: Path) -> None:
    """The same wheel without the libraries for other versions of CUDA, with a new list of files."""
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        entries = {info.filename: info for info in source.infolist()}
        record = next(name for name in entries if name.endswith(".dist-info/RECORD"))
        rows: list[tuple[str, str, str]] = []
        for name in entries:
            if name != record and ("/libbitsandbytes_" not in name or KEPT.search(name)):
                content = source.read(name)
                target.writestr(entries[name], content, zipfile.ZIP_DEFLATED)
                rows.append((name, f"sha256={digest(content)}", str(len(content))))
        if not any(name.endswith("_cuda130.so") for name, _, _ in rows):
            raise SystemExit(f"{whole.name} has no library for CUDA 13.0; look at the names in it and change KEPT")
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        target.writestr(record, text.getvalue())


def digest(content: bytes) -> str:
    """As a wheel's list of files has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
