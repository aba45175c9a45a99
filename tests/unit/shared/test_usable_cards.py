"""Which cards a run can use: from a driver made up for each case; and what is said where there is none."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from shared.config.processes import ActorConfig, ComputeConfig
from shared.errors import ConfigError
from shared.process.card import driver_version
from shared.process.usable_cards import (
    LIBRARY,
    Found,
    FoundCard,
    check_cards,
    cpu_instead,
    cuda_build,
    driver_library,
    find_cards,
    has_card,
    newest_cuda,
    roles_here,
    why_none,
    with_cards,
)

CUDA = ComputeConfig(device="cuda", dtype="bf16")
AMPERE = FoundCard(name="RTX 3070", capability=(8, 6))
TURING = FoundCard(name="Tesla T4", capability=(7, 5))
SOUND = Found(
    torch="2.13.0",
    build="13.0",
    driver="580.65.06",
    newest=(13, 0),
    trouble="",
    cards=(AMPERE,),
    is_hidden=False,
)
NO_CARDS = replace(SOUND, cards=())


class FakeLibrary:
    """The part of libcuda.so.1 that is called, with these cards; `code` is what its start returns."""

    def __init__(self, *cards: FoundCard, code: int = 0) -> None:
        self.cards = cards
        self.code = code

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 12080
        return 0

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 100 + number
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = self.cards[device.value - 100].name.encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.cards[device.value - 100].capability[{75: 0, 76: 1}[attribute]]
        return 0

    def cuDeviceGetUuid_v2(self, found: Any, device: Any) -> int:
        uuid = self.cards[device.value - 100].uuid.removeprefix("GPU-")
        found.raw = bytes.fromhex(uuid.replace("-", "") or "00" * 16)
        return 0 if uuid else 1

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = {100: b"no CUDA-capable device is detected"}.get(code)
        return 0


def refusal(found: Found, compute: ComputeConfig = CUDA) -> str:
    """What is said to somebody who wants to run there."""
    with pytest.raises(ConfigError) as error:
        check_cards(compute, find=lambda: found)
    return str(error.value)


# --- the driver


def test_the_driver_lists_its_cards() -> None:
    known = replace(AMPERE, uuid="GPU-00112233-4455-6677-8899-aabbccddeeff")
    library = FakeLibrary(known, TURING)
    assert newest_cuda(library) == (12, 8) and newest_cuda(None) is None
    assert with_cards(NO_CARDS, library) == replace(SOUND, cards=(known, TURING))


@pytest.mark.parametrize(("code", "said"), [(100, "no CUDA-capable device is detected"), (999, "error 999")])
def test_a_driver_that_does_not_start_says_why(code: int, said: str) -> None:
    found = with_cards(SOUND, FakeLibrary(AMPERE, code=code))
    assert (found.cards, found.trouble) == ((), said)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC 12",
            "535.129.03",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a@b)", "580.65.06"),
        ("NVRM version: something else\n999.1", ""),
    ],
)
def test_the_version_of_the_driver_is_the_kernels(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("line", "build"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda: Optional[str] = None", ""), ("", "")],
)
def test_the_build_is_read_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, build: str
) -> None:
    package = tmp_path / f"torch_{abs(hash(line))}"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it was loaded')")
    (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6.4'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda_build(package.name) == build and cuda_build("no_such_package") == ""


def test_the_build_here_is_what_torch_itself_says() -> None:
    import torch

    assert cuda_build() == (torch.version.cuda or "")
    assert find_cards().torch.partition("+")[0] == torch.__version__.partition("+")[0]


TOO_OLD = replace(SOUND, driver="535.129.03", newest=(12, 2))
AUTO = ComputeConfig()


@pytest.fixture
def driver_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """As the driver makes them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    return (str(tmp_path / "nvidiactl"),)


def test_a_card_counts_where_torch_can_use_it(driver_files: tuple[str, ...], tmp_path: Path) -> None:
    assert has_card(lambda: SOUND, driver_files)
    assert not any(has_card(lambda found=found: found, driver_files) for found in (NO_CARDS, TOO_OLD))
    assert not has_card(lambda: replace(SOUND, build=""), driver_files)
    assert not has_card(never, (str(tmp_path / "nothing"),)), "without a driver nobody is asked"


def test_a_card_that_auto_cannot_use_is_named_before_the_cpu_computes(driver_files: tuple[str, ...]) -> None:
    assert cpu_instead(AUTO, lambda: TOO_OLD, driver_files) == (
        "RTX 3070 cannot be used: driver 535.129.03 (CUDA 12.2) is too old for PyTorch 2.13.0, which was built for CUDA"
        " 13.0; update the driver, or install a PyTorch that was built for CUDA 12. compute.device is 'auto', so the"
        " CPU computes, which takes many times as long."
    )
    without_cuda = cpu_instead(AUTO, lambda: replace(SOUND, torch="2.13.0+cpu", build=""), driver_files)
    assert without_cuda.startswith(
        "RTX 3070 cannot be used: this PyTorch (2.13.0+cpu) was built without CUDA, beside driver 580.65.06 (CUDA 13.0)"
        "; install a build of PyTorch with CUDA"
    )
    assert cpu_instead(AUTO, lambda: NO_CARDS, driver_files).startswith("the card of this machine cannot be used: ")


def test_nothing_is_said_where_the_cpu_was_meant(
    driver_files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu_instead(AUTO, lambda: SOUND, driver_files) == "", "the card computes"
    assert cpu_instead(ComputeConfig(device="cpu"), never, driver_files) == ""
    assert cpu_instead(CUDA, never, driver_files) == "", "which ends instead"
    assert cpu_instead(AUTO, never, ("/nowhere",)) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpu_instead(AUTO, never, driver_files) == ""


def never() -> Found:
    raise AssertionError("nobody wants a card")


# --- what is said


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(NO_CARDS, build="", newest=None), "(2.13.0) was built without CUDA, and there is no NVIDIA driver;"),
        (replace(NO_CARDS, build=""), "built without CUDA, beside driver 580.65.06 (CUDA 13.0); install a build of"),
        (
            replace(NO_CARDS, newest=None),
            "there is no NVIDIA driver for PyTorch 2.13.0, which was built for CUDA 13.0; install the driver",
        ),
        (
            replace(NO_CARDS, driver="535.129.03", newest=(12, 2)),
            "driver 535.129.03 (CUDA 12.2) is too old for PyTorch 2.13.0, which was built for CUDA 13.0; update the"
            " driver, or install a PyTorch that was built for CUDA 12",
        ),
        (replace(NO_CARDS, is_hidden=True), "CUDA_VISIBLE_DEVICES hides every card; unset CUDA_VISIBLE_DEVICES"),
        (replace(NO_CARDS, trouble="all busy"), "driver 580.65.06 (CUDA 13.0) shows no card (all busy); check it"),
        (replace(NO_CARDS, driver=""), "driver (CUDA 13.0) shows no card; check it"),
    ],
)
def test_a_missing_card_is_named_by_what_was_found(found: Found, words: str) -> None:
    said = refusal(found)
    assert said.startswith("compute.device is 'cuda', but ") and words in said
    assert said.endswith("; or use --set compute.device=cpu.") and "\n" not in said


def test_within_a_major_version_an_older_driver_serves() -> None:
    assert why_none(replace(SOUND, build="13.2")) == ("", "")
    assert check_cards(CUDA, find=lambda: replace(SOUND, build="13.2"))["cuda"] == "13.2"


def test_a_card_without_bf16_is_refused_unless_it_computes_in_fp32() -> None:
    found = replace(SOUND, cards=(AMPERE, TURING))
    second = ComputeConfig(device="cuda", dtype="auto", actor_card=1)
    assert refusal(found, second) == (
        "Card 1, Tesla T4, has compute capability 7.5 and no bf16, which needs 8.0; use --set compute.dtype=fp32, or"
        " another card."
    )
    fp32 = ComputeConfig(device="cuda", dtype="fp32", actor_card=1)
    assert check_cards(fp32, find=lambda: found)["actor"] == "Tesla T4"
    assert check_cards(second, ("learner",), lambda: found)["learner"] == "RTX 3070", "the actor is elsewhere"


def test_a_number_that_no_card_has() -> None:
    compute = ComputeConfig(device="cuda", learner_card=2)
    said = refusal(replace(SOUND, cards=(AMPERE, AMPERE)), compute)
    assert said == (
        "compute.learner_card = 2, but the cards here are 0: RTX 3070, 1: RTX 3070; set it to one of these numbers."
    )


def test_each_rank_needs_a_card_that_is_fit() -> None:
    two = ComputeConfig(device="cuda", ranks=2)
    assert refusal(replace(SOUND, cards=(AMPERE,)), two) == (
        "compute.ranks = 2 needs the cards 0 to 1, one for each rank, but there are 1 here, numbered from 0; use fewer"
        " ranks, or another compute.learner_card."
    )
    mixed = replace(SOUND, cards=(AMPERE, TURING))
    assert refusal(mixed, two).startswith("Card 1, Tesla T4, has compute capability 7.5 and no bf16")
    assert check_cards(two, ("actor",), lambda: mixed)["actor"] == "RTX 3070", "the learner is elsewhere"
    assert check_cards(two, find=lambda: replace(SOUND, cards=(AMPERE, AMPERE)))["learner"] == "RTX 3070"


def test_what_run_json_says_of_the_cards() -> None:
    two = replace(SOUND, cards=(AMPERE, FoundCard(name="H200", capability=(9, 0))))
    compute = ComputeConfig(device="cuda", dtype="bf16", learner_card=1)
    assert check_cards(compute, find=lambda: two) == {
        "learner": "H200",
        "actor": "RTX 3070",
        "driver": "580.65.06",
        "cuda": "13.0",
    }


def test_an_actor_whose_servers_sample_has_no_card() -> None:
    far = ComputeConfig(device="cuda", dtype="bf16", actor_card=5)
    roles = roles_here(ActorConfig(engine="vllm_server"))
    assert check_cards(far, roles, lambda: SOUND) == {"learner": "RTX 3070", "driver": "580.65.06", "cuda": "13.0"}
    with pytest.raises(ConfigError, match=r"compute\.actor_card = 5"):
        check_cards(far, roles_here(ActorConfig(engine="vllm")), lambda: SOUND)


def test_a_cpu_needs_no_card() -> None:
    assert check_cards(ComputeConfig(device="cpu"), find=never) == {}
    if not os.path.exists("/dev/nvidiactl"):
        assert check_cards(ComputeConfig(), find=never) == {}


# --- the command line

WITHOUT_TORCH = """
import sys
from launch.__main__ import main
print(main(sys.argv[1:]), "torch" in sys.modules)
"""


@pytest.mark.skipif(driver_library() is not None, reason="there is a driver")
@pytest.mark.parametrize("preset", ["gsm8k_8gb", "math_8gb"])
def test_a_preset_for_a_card_ends_at_once_without_one(tmp_path: Path, preset: str) -> None:
    before = os.times()
    argv = [sys.executable, "-c", WITHOUT_TORCH, "run", preset, "--out", str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    after = os.times()
    # Processor time, as in test_cli.py: nothing here waits, and a busy machine must not fail the test.
    assert after.children_user - before.children_user + after.children_system - before.children_system < 2.0
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("error: compute.device is 'cuda', but ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(driver_library() is not None, reason="there is a driver")
def test_a_run_that_was_prepared_for_a_card_does_not_start_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "embedded", "--set", "compute.device=cuda", "--prepare", "--out", out]) == 0
    config = (tmp_path / "run" / "config.json").read_bytes()
    capsys.readouterr()
    assert main(["resume", out]) == 2
    assert "compute.device is 'cuda', but " in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == config, "nothing was chosen for a machine that cannot run"


ONE_CARD = """
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 'X'; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 9; return 0; }
"""
"""The driver of a machine with one card."""
SERVED = ("--set", "actor.engine=vllm_server", "--set", 'server.urls=["http://localhost:1/v1"]')
SECOND = ("--set", "compute.device=cuda", "--set", "compute.actor_card=1")


@pytest.fixture
def with_one_card(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a process that finds that driver, and a PyTorch that was built for it."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler")
    folder = tmp_path / "made up"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text("cuda = '13.0'\n")
    argv = [compiler, "-shared", "-fPIC", "-o", str(folder / LIBRARY), "-xc", "-"]
    subprocess.run(argv, input=ONE_CARD, text=True, timeout=60, check=True)
    paths = os.pathsep.join((str(folder), str(Path(__file__).parents[3])))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": paths, "PATH": "/nowhere"}


MACHINE_OF = """
import sys
from pathlib import Path
from launch.commands.resume import check_machine
from shared.config.load import config_from_json
config = config_from_json(Path(sys.argv[1], "config.json").read_bytes())
check_machine(config.actor, config.compute)
"""


@pytest.mark.parametrize(("engine", "is_refused"), [(SERVED, False), ((), True)])
def test_run_and_resume_look_at_the_actors_card_only_if_it_computes_here(
    engine: tuple[str, ...], is_refused: bool, tmp_path: Path, with_one_card: dict[str, str]
) -> None:
    out, missing = str(tmp_path / "run"), "compute.actor_card = 1, but the cards here are 0: X"
    assert main(["run", "embedded", *SECOND, *engine, "--prepare", "--out", out]) == 0

    def said(*argv: str) -> str:
        done = subprocess.run(
            [sys.executable, *argv], env=with_one_card, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stderr

    other = ("--set", f"lora.start_from={tmp_path}", "--out", f"{out}2")
    error = said("-m", "launch", "run", "embedded", *SECOND, *engine, *other)
    assert (missing in error) == is_refused
    assert ("lora.start_from" in error) != is_refused, "what is refused next"
    error = said("-c", MACHINE_OF, out)
    assert missing in error if is_refused else error == ""
