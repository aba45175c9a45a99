"""Facts about cards: what nvidia-smi prints, PyTorch in a process of its own, and how that process may end."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from launch.card.cards import Card, CardProcess, Cards, chosen_card, look_at_cards, read_cards
from launch.doctor import hardware_checks, run_checks
from launch.doctor.finding import Missing
from launch.doctor.hardware_checks import runs_on
from launch.doctor.libraries import Driver, RoundTrip, TorchBuild, look_at_torch, read_stages
from launch.doctor.machine import cached_base_bytes, waiting_bytes
from launch.doctor.probe import ProbeOutput, run_probe
from launch.plan.cost import memory_beside_card
from launch.plan.memory import size
from shared.model.kernels.toolchain import Toolchain
from shared.process.usable_cards import FoundCard, find_cards
from tests.support.machines import (
    GIB,
    QWEN_15B,
    ROUND_TRIP,
    TOOLCHAIN,
    TORCH_CUDA,
    both,
    cards,
    configured,
    planned,
    sound,
)
from tests.support.machines import torch as with_torch
from tests.support.runs import alive

MIB = 2**20
CARDS = """GPU-a, NVIDIA GeForce RTX 3070, 580.65.06, 8192, 4096, Default
GPU-b, NVIDIA H200, 580.65.06, 143771, 143000, Exclusive_Process
"""
PROCESSES = """GPU-a, 4242, /usr/bin/python3, 3900
GPU-a, 77, [Not Found], [N/A]
"""
NUMBERED = replace(
    find_cards(),
    cards=(
        FoundCard(name="NVIDIA H200", capability=(9, 0), uuid="GPU-b"),
        FoundCard(name="NVIDIA GeForce RTX 3070", capability=(8, 6), uuid="GPU-a"),
    ),
)
"""CUDA numbers the fastest card first."""
SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) cat <<EOF
{cards}EOF
;;
--query-compute-apps=*) cat <<EOF
{processes}EOF
;;
esac
"""


ON_CARD = both(with_torch(), configured(compute={"device": "cuda"}))


def program(path: Path, text: str) -> str:
    """A stand-in for nvidia-smi."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# --- nvidia-smi


def test_which_process_uses_which_card() -> None:
    first, second = read_cards(CARDS, PROCESSES)
    assert first == Card(
        uuid="GPU-a",
        name="NVIDIA GeForce RTX 3070",
        driver="580.65.06",
        total=8192 * MIB,
        free=4096 * MIB,
        mode="Default",
        processes=(
            CardProcess(pid=4242, name="/usr/bin/python3", num_bytes=3900 * MIB),
            CardProcess(pid=77, name="[Not Found]", num_bytes=None),
        ),
    )
    assert (second.mode, second.processes) == ("Exclusive_Process", ())


def test_nvidia_smi_is_called_and_its_output_is_checked(tmp_path: Path) -> None:
    smi = program(tmp_path / "smi", SMI.format(cards=CARDS, processes=PROCESSES))
    cards = look_at_cards(smi, lambda: NUMBERED)
    assert cards.trouble == "" and cards.numbered == ("GPU-b", "GPU-a")
    assert len(cards.cards) == 2
    machine = replace(configured(compute={"learner_card": 1})(sound()), cards=cards)
    assert "/usr/bin/python3 (process 4242, 3.8 GiB)" in hardware_checks.memory(machine).found
    assert "one process at most" in hardware_checks.sharing(machine).found
    assert "the CPU is used" in hardware_checks.present(machine).found


@pytest.mark.parametrize(
    ("visible", "number", "name"),
    [
        ({}, 0, "RTX 3070"),
        ({}, 1, "H200"),
        ({}, 7, "H200"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 0, "H200"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1, "RTX 3070"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, 0, "H200"),
    ],
)
def test_the_card_that_a_run_would_take(visible: dict[str, str], number: int, name: str) -> None:
    cards = Cards(trouble="", cards=read_cards(CARDS, PROCESSES), variables=visible)
    machine = replace(configured(compute={"learner_card": number})(sound()), cards=cards)
    assert name in hardware_checks.memory(machine).found


@pytest.mark.parametrize(("number", "name"), [(0, "H200"), (1, "RTX 3070"), (7, "RTX 3070")])
def test_a_number_is_that_of_cuda(number: int, name: str) -> None:
    listed = Cards(trouble="", cards=read_cards(CARDS, PROCESSES), variables={}, numbered=("GPU-b", "GPU-a"))
    chosen = chosen_card(listed, number)
    assert chosen is not None and name in chosen.name


def test_a_part_of_a_card_is_not_the_whole_one() -> None:
    listed = Cards(trouble="", cards=read_cards(CARDS, PROCESSES), variables={}, numbered=("GPU-part",))
    finding = hardware_checks.memory(ON_CARD(replace(sound(), cards=listed)))
    assert finding.level == "note" and finding.found.startswith("nvidia-smi does not list card 0 of CUDA")


def test_memory_that_nvidia_smi_does_not_say_is_not_known() -> None:
    listed = read_cards("GPU-a, NVIDIA GB10, 580.95.05, [N/A], [N/A], Default\n", "")
    assert (listed[0].total, listed[0].free) == (None, None)
    machine = ON_CARD(replace(sound(), cards=Cards(trouble="", cards=listed, variables={})))
    finding = hardware_checks.memory(machine)
    assert finding.level == "note" and finding.found.startswith("the memory of NVIDIA GB10 is not known")


@pytest.mark.parametrize("key", ["learner_card", "actor_card"])
def test_a_card_that_is_not_there_is_an_error(key: str) -> None:
    machine = replace(configured(compute={key: 1})(sound()), torch=TORCH_CUDA)
    finding = hardware_checks.present(machine)
    assert finding.level == "error" and "to at most 0" in finding.remedy
    assert hardware_checks.present(replace(sound(), torch=TORCH_CUDA)).level == "ok"


def test_a_card_of_an_actor_whose_servers_sample_is_not_looked_at() -> None:
    served = {"actor": {"engine": "vllm_server"}, "server": {"urls": ["http://host:8000/v1"]}}
    here = configured(compute={"device": "cuda", "actor_card": 1}, **served)
    finding = hardware_checks.present(replace(here(sound()), torch=TORCH_CUDA))
    assert finding.level == "ok"
    finding = hardware_checks.sharing(both(here, cards(mode="Exclusive_Process"))(sound()))
    assert finding.level == "note" and finding.found.endswith("and a run needs one")
    assert hardware_checks.sharing(both(ON_CARD, cards(mode="Exclusive_Process"))(sound())).level == "error"
    finding = hardware_checks.sharing(both(here, cards(mode="Prohibited"))(sound()))
    assert finding.level == "error" and finding.found.endswith("no process, and a run needs one")
    first = configured(compute={"device": "cuda", "learner_card": 1}, **served)
    finding = hardware_checks.present(replace(first(sound()), torch=TORCH_CUDA))
    assert finding.level == "error" and finding.remedy == "set compute.learner_card to at most 0"


def test_a_rank_without_a_card_is_an_error() -> None:
    finding = hardware_checks.present(replace(configured(compute={"ranks": 2})(sound()), torch=TORCH_CUDA))
    assert finding.level == "error" and "to at most 0, and use fewer ranks" in finding.remedy
    both_fit = msgspec.structs.replace(TORCH_CUDA, devices=2 * TORCH_CUDA.devices)
    assert hardware_checks.present(replace(configured(compute={"ranks": 2})(sound()), torch=both_fit)).level == "ok"


def test_a_run_that_fits_on_the_card_is_fine() -> None:
    finding = hardware_checks.memory(
        both(configured(compute={"device": "cuda"}), cards(), planned(5 * GIB, fits=True))(sound())
    )
    assert finding.level == "ok" and finding.found.endswith("a run needs 5.0 GiB")


def test_no_program_is_no_card() -> None:
    cards = look_at_cards("no-such-program-anywhere")
    assert (cards.trouble, cards.cards) == ("", ())


def test_a_driver_that_fails(tmp_path: Path) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    smi = program(tmp_path / "smi", f"#!/bin/sh\necho '{words}'\nexit 18\n")
    cards = look_at_cards(smi)
    assert cards.trouble == words
    assert look_at_cards(program(tmp_path / "smi2", "#!/bin/sh\nexit 3\n")).trouble.endswith("exit code 3")
    build = msgspec.structs.replace(TORCH_CUDA, devices=())
    finding = hardware_checks.present(replace(sound(), cards=cards, torch=build))
    assert finding.level == "warning"
    assert "version mismatch" in finding.found


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "nvidia-smi did not answer within 0.2 s"),
        ("#!/no/such/shell\n", "nvidia-smi cannot be started: No such file or directory"),
    ],
)
def test_an_nvidia_smi_that_hangs_or_does_not_start(tmp_path: Path, text: str, trouble: str) -> None:
    found = look_at_cards(program(tmp_path / "smi", text), limit_s=0.2)
    assert (found.trouble, found.cards) == (trouble, ())
    assert hardware_checks.memory(replace(sound(), cards=found)).found == f"not known: {trouble}"


def test_a_variable_of_the_allocator_is_seen_and_finding_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cards = look_at_cards("no-such-program-anywhere")
    finding = hardware_checks.allocator(replace(sound(), cards=cards))
    assert finding.level == "warning"
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.found


# --- host memory


@pytest.mark.parametrize(
    ("compute", "blocks"),
    [
        ({}, 0),
        ({"residency": "release"}, 0),
        ({"residency": "swap"}, 2),
        ({"residency": "swap", "actors": 3}, 4),
        ({"residency": "swap", "actor_card": 1}, 0),
        ({"residency": "swap", "actor_card": 1, "actors": 3}, 3),
        ({"residency": "shared"}, 0),
        ({"residency": "shared", "actor_card": 1, "actors": 3}, 3),
    ],
)
def test_bases_that_wait_in_host_memory_count_for_each_process(compute: dict[str, Any], blocks: int) -> None:
    machine = configured(compute={"device": "cuda", **compute})(sound())
    base = cached_base_bytes(machine, QWEN_15B)["nf4"]
    assert waiting_bytes(machine, QWEN_15B) == blocks * base
    plain = memory_beside_card(QWEN_15B, 16, "ddp")
    with_them = memory_beside_card(QWEN_15B, 16, "ddp", blocks * base)
    assert with_them.started - plain.started == with_them.total - plain.total == blocks * base
    large = replace(machine, model=replace(machine.model, shape=QWEN_15B))
    assert f"a run needs about {size(with_them.total)}" in hardware_checks.available(large).found


# --- which kernels run where


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_86", (8, 6), True),
        ("sm_86", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 6), False),
        ("sm_120", (12, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_100f", (10, 3), False),
        ("gfx90a", (9, 0), False),
    ],
)
def test_kernels_for_a_card(built: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(built, capability) is runs


# --- what Triton needs


def test_a_card_with_all_that_triton_needs() -> None:
    finding = hardware_checks.kernels(ON_CARD(sound()))
    assert (finding.level, finding.found) == ("ok", "Triton 3.7.1 can compile kernels with /usr/bin/gcc")


@pytest.mark.parametrize(
    ("toolchain", "found", "remedy"),
    [
        (replace(TOOLCHAIN, triton=None), "Triton is not installed", "https://pytorch.org/get-started"),
        (replace(TOOLCHAIN, compiler=None), "there is no C compiler", "apt-get install gcc"),
        (replace(TOOLCHAIN, has_header=False), "/usr/include/python3.11/Python.h", "apt-get install python3-dev"),
        (replace(TOOLCHAIN, cache_serves=False), "/home/user/.triton/cache", "set TRITON_CACHE_DIR"),
    ],
    ids=["triton", "compiler", "header", "cache"],
)
def test_what_triton_lacks_is_a_warning_with_its_remedy(toolchain: Toolchain, found: str, remedy: str) -> None:
    machine = replace(sound(), toolchain=toolchain)
    finding = hardware_checks.kernels(ON_CARD(machine))
    assert finding.level == "warning"
    assert found in finding.found and "PyTorch's own operations compute" in finding.found
    assert remedy in finding.remedy and "compute.kernels=torch" in finding.remedy
    if toolchain.compiler:
        assert hardware_checks.kernels(machine).level == "ok", "nothing of it is needed without a card"


def test_without_a_card_and_a_compiler_token_steps_take_longer() -> None:
    machine = replace(sound(), toolchain=replace(TOOLCHAIN, compiler=None))
    finding = hardware_checks.kernels(machine)
    assert finding.level == "note" and "token steps and updates, which then take up to twice as long" in finding.found
    assert "apt-get install gcc" in finding.remedy
    config = structs.replace(machine.config, actor=structs.replace(machine.config.actor, token_step="torch"))
    assert hardware_checks.kernels(replace(machine, config=config)).level == "note", "updates do"
    config = structs.replace(config, compute=structs.replace(config.compute, kernels="torch"))
    assert hardware_checks.kernels(replace(machine, config=config)).level == "ok"
    chosen = configured(compute={"device": "cuda", "kernels": "torch"})(with_torch()(machine))
    assert hardware_checks.kernels(chosen).level == "ok", "nor where PyTorch is asked for"


def test_all_that_triton_lacks_is_named_at_once() -> None:
    machine = replace(sound(), toolchain=replace(TOOLCHAIN, compiler=None, has_header=False))
    finding = hardware_checks.kernels(ON_CARD(machine))
    assert "no C compiler; there is no /usr" in finding.found
    assert "libc6-dev), or name one in CC; install Python's headers" in finding.remedy


# --- the probe


@pytest.mark.slow
def test_torch_and_bitsandbytes_as_they_are_here() -> None:
    facts = look_at_torch("cpu", 100.0)
    assert isinstance(facts.driver, Driver)
    assert isinstance(facts.torch, TorchBuild)
    assert isinstance(facts.bitsandbytes, RoundTrip)
    assert facts.bitsandbytes.device == "cpu"
    machine = replace(sound(), torch=facts.torch, bitsandbytes=facts.bitsandbytes)
    assert run_checks.torch(machine).level == "ok"
    assert run_checks.bitsandbytes(machine).level == "ok", facts.bitsandbytes
    # Not exact, or nothing was quantised.
    assert facts.bitsandbytes.round_trip > 0.05


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("import os; os.abort()", "killed by signal 6 (Aborted)"),
        (
            "raise ImportError('libcudart: cannot open')",
            "ImportError: libcudart: cannot open (exit code 1)",
        ),
        ("import time; time.sleep(60)", "not finished within 2 s"),
    ],
    ids=["crash", "error", "hang"],
)
def test_a_torch_that_does_not_load_is_a_finding(
    torch: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hangs = "sleep" in torch
    facts = look_at_torch("auto", 2.0 if hangs else 60.0)
    assert facts.torch == facts.bitsandbytes == Missing(reason, timed_out=hangs)
    finding = run_checks.torch(replace(sound(), torch=facts.torch))
    said = f"PyTorch was not checked: {reason}" if hangs else f"PyTorch does not load: {reason}"
    assert (finding.level, finding.found) == ("note" if hangs else "error", said)


def test_a_crash_of_the_last_stage_leaves_the_first_ones() -> None:
    lines = (msgspec.json.encode(Driver(cuda=(13, 0))), msgspec.json.encode(TORCH_CUDA))
    facts = read_stages(ProbeOutput(lines=lines, trouble="killed by signal 11 (Segmentation fault)"))
    assert facts.driver == Driver(cuda=(13, 0))
    assert facts.torch == TORCH_CUDA
    assert facts.bitsandbytes == Missing("killed by signal 11 (Segmentation fault)")


def test_all_stages_come_back_as_they_were_told() -> None:
    told = tuple(msgspec.json.encode(stage) for stage in (Driver(cuda=None), TORCH_CUDA, ROUND_TRIP))
    facts = read_stages(ProbeOutput(lines=told, trouble=""))
    assert (facts.driver, facts.torch, facts.bitsandbytes) == (Driver(cuda=None), TORCH_CUDA, ROUND_TRIP)


def test_a_probe_and_what_it_started_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        # The child inherits stdout: with a pipe, its parent's end would not be the end of the reading.
        (Path(name) / "stray.py").write_text(
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print('{\"pid\": %d}' % child.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        monkeypatch.setenv("PYTHONPATH", name)
        # A slow machine may not even start it within the first limit.
        told = next(told for limit_s in (2.0, 10.0, 60.0) if (told := run_probe("stray", [], limit_s)).lines)
    assert told.trouble.startswith("not finished within ")
    pid = msgspec.json.decode(told.lines[0])["pid"]
    # The signal is sent; the kernel takes its time to end the process.
    end = time.monotonic() + 30
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(pid)


def test_a_probe_that_ends_well_has_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text("import sys; print('noise'); print('{}'); print('a warning', file=sys.stderr)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_probe("fine", [], 60.0) == ProbeOutput(lines=(b"{}",), trouble="")
