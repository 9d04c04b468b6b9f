"""The probe against faked machines, and against what this real machine says of itself."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from machines import MACHINES, Machine, fake

from gpt2demo import host, nvidia
from gpt2demo.config import PRECISIONS, InputError
from gpt2demo.device import (
    DeviceInfo,
    Support,
    memory_free_bytes,
    probe_device,
    resolve_device,
    warnings_for,
)

NATIVE, EMULATED, NO_EFFECT, MISSING = "native", "emulated", "no effect", "not available"

# machine -> precision -> (status, words and figures that its reason must hold)
EXPECTED = {
    "GTX 1060": {
        "fp32": (NATIVE, "4.4 TFLOP/s"),
        "tf32": (NO_EFFECT, "8.0", "6.1", "exactly as fp32"),
        "bf16": (EMULATED, "8.0", "6.1", "slower than fp32"),
        "fp16": (EMULATED, "1/64", "no gain"),
        "fp64": (NATIVE, "1/32", "0.14 TFLOP/s"),
    },
    "GTX 1650": {
        "fp32": (NATIVE, "Full float32"),
        "tf32": (NO_EFFECT, "8.0", "7.5", "exactly as fp32"),
        "bf16": (EMULATED, "7.5", "slower than fp32."),
        "fp16": (NATIVE, "no tensor cores", "loss"),
        "fp64": (NATIVE, "1/32"),
    },
    "T4": {
        "fp32": (NATIVE, "8.1 TFLOP/s"),
        "tf32": (NO_EFFECT, "8.0", "7.5", "exactly as fp32"),
        "bf16": (EMULATED, "7.5", "slower than fp32", "use fp16"),
        "fp16": (NATIVE, "tensor cores", "65 TFLOP/s", "8.1", "The one to use"),
        "fp64": (NATIVE, "1/32"),
    },
    "RTX 2080": {
        "fp32": (NATIVE, "Full float32"),
        "tf32": (NO_EFFECT, "7.5", "exactly as fp32"),
        "bf16": (EMULATED, "7.5", "slower than fp32", "use fp16"),
        "fp16": (NATIVE, "tensor cores", "The one to use"),
        "fp64": (NATIVE, "1/32"),
    },
    "V100": {
        "fp32": (NATIVE, "15.7 TFLOP/s"),
        "tf32": (NO_EFFECT, "8.0", "7.0", "exactly as fp32"),
        "bf16": (EMULATED, "7.0", "slower than fp32", "use fp16"),
        "fp16": (NATIVE, "tensor cores", "125 TFLOP/s", "15.7", "The one to use"),
        "fp64": (NATIVE, "7.8 TFLOP/s", "15.7"),
    },
    "RTX 3060": {
        "fp32": (NATIVE, "12.7 TFLOP/s"),
        "tf32": (NATIVE, "rated like fp32", "12.7 TFLOP/s", "modest"),
        "bf16": (NATIVE, "tensor cores", "25.5 TFLOP/s", "12.7"),
        "fp16": (NATIVE, "as bf16", "25.5 TFLOP/s", "gradient scaler"),
        "fp64": (NATIVE, "1/64", "0.2 TFLOP/s"),
    },
    "A10G": {
        "fp32": (NATIVE, "35 TFLOP/s"),
        "tf32": (NATIVE, "tensor cores", "8.6"),
        "bf16": (NATIVE, "70 TFLOP/s", "35"),
        "fp16": (NATIVE, "70 TFLOP/s", "gradient scaler"),
        "fp64": (NATIVE, "1/64"),
    },
    "A100": {
        "fp32": (NATIVE, "19.5 TFLOP/s", "no tensor cores"),
        "tf32": (NATIVE, "156 TFLOP/s", "19.5"),
        "bf16": (NATIVE, "312 TFLOP/s dense against 19.5 in fp32"),
        "fp16": (NATIVE, "312 TFLOP/s", "gradient scaler"),
        "fp64": (NATIVE, "rated like fp32", "19.5 TFLOP/s", "twice the memory"),
    },
    "L4": {
        "fp32": (NATIVE, "30.3 TFLOP/s"),
        "tf32": (NATIVE, "60 TFLOP/s", "30.3"),
        "bf16": (NATIVE, "121 TFLOP/s", "30.3"),
        "fp16": (NATIVE, "121 TFLOP/s"),
        "fp64": (NATIVE, "1/64"),
    },
    "RTX 4090": {
        "fp32": (NATIVE, "82.6 TFLOP/s"),
        "tf32": (NATIVE, "rated like fp32", "82.6 TFLOP/s"),
        "bf16": (NATIVE, "165.2 TFLOP/s", "82.6"),
        "fp16": (NATIVE, "165.2 TFLOP/s"),
        "fp64": (NATIVE, "1/64", "1.3 TFLOP/s"),
    },
    "H100": {
        "fp32": (NATIVE, "67 TFLOP/s"),
        "tf32": (NATIVE, "494.5 TFLOP/s", "67"),
        "bf16": (NATIVE, "989 TFLOP/s", "67"),
        "fp16": (NATIVE, "989 TFLOP/s"),
        "fp64": (NATIVE, "67 TFLOP/s"),
    },
    "H200": {
        "fp32": (NATIVE, "67 TFLOP/s"),
        "tf32": (NATIVE, "494.5 TFLOP/s"),
        "bf16": (NATIVE, "989 TFLOP/s"),
        "fp16": (NATIVE, "989 TFLOP/s"),
        "fp64": (NATIVE, "67 TFLOP/s"),
    },
    "B200": {
        "fp32": (NATIVE, "75 TFLOP/s"),
        "tf32": (NATIVE, "1125 TFLOP/s", "75"),
        "bf16": (NATIVE, "2250 TFLOP/s", "75"),
        "fp16": (NATIVE, "2250 TFLOP/s"),
        "fp64": (NATIVE, "37 TFLOP/s", "75"),
    },
    "RTX 4090 Laptop": {  # not in the table: the same verdicts, no figures
        "fp32": (NATIVE, "Full float32"),
        "tf32": (NATIVE, "tensor cores", "8.9"),
        "bf16": (NATIVE, "tensor cores", "8.9"),
        "fp16": (NATIVE, "as bf16"),
        "fp64": (NATIVE, "1/64"),
    },
    "GTX 1060, CUDA 13 torch": dict.fromkeys(PRECISIONS, (MISSING, "no code", "6.1")),
    "MI300X": {
        "fp32": (NATIVE, "163.4 TFLOP/s"),
        "tf32": (NATIVE, "xf32", "653.7 TFLOP/s", "163.4", "ROCm"),
        "bf16": (NATIVE, "1307.4 TFLOP/s", "163.4"),
        "fp16": (NATIVE, "1307.4 TFLOP/s", "163.4"),
        "fp64": (NATIVE, "163.4 TFLOP/s"),
    },
    "RX 6800": {
        "fp32": (NATIVE, "Full float32"),
        "tf32": (NO_EFFECT, "gfx1030", "no TF32", "as fp32"),
        "bf16": (EMULATED, "gfx1030", "slower than fp32"),
        "fp16": (NATIVE, "no matrix units"),
        "fp64": (NATIVE, "unknown"),
    },
    "Arc A770": {
        "fp32": (NATIVE, "Full float32"),
        "tf32": (NO_EFFECT, "CUDA"),
        "bf16": (NATIVE, "driver reports"),
        "fp16": (NATIVE, "driver reports"),
        "fp64": (MISSING, "no float64"),
    },
    "Apple M2": {
        "fp32": (NATIVE, "Metal"),
        "tf32": (NO_EFFECT, "no TF32", "as fp32"),
        "bf16": (NATIVE, "macOS 14"),
        "fp16": (NATIVE, "Metal"),
        "fp64": (MISSING, "Metal has no float64", "cpu"),
    },
    "CPU with avx512_bf16": {
        "fp32": (NATIVE, "float32"),
        "tf32": (NO_EFFECT, "no TF32", "as fp32"),
        "bf16": (NATIVE, "avx512_bf16"),
        "fp16": (EMULATED, "backward", "170x slower"),
        "fp64": (NATIVE, "half", "twice the memory"),
    },
    "CPU with AVX-512 alone": {
        "fp32": (NATIVE, "float32"),
        "tf32": (NO_EFFECT, "as fp32"),
        "bf16": (EMULATED, "No bf16 instructions", "slower than fp32"),
        "fp16": (EMULATED, "backward", "170x slower"),
        "fp64": (NATIVE, "half"),
    },
    "CPU with AVX2 alone": {
        "fp32": (NATIVE, "float32"),
        "tf32": (NO_EFFECT, "as fp32"),
        "bf16": (EMULATED, "backward", "60x slower"),
        "fp16": (EMULATED, "backward", "170x slower"),
        "fp64": (NATIVE, "half"),
    },
    "CPU with amx_bf16": {
        "fp32": (NATIVE, "float32"),
        "tf32": (NO_EFFECT, "as fp32"),
        "bf16": (NATIVE, "amx_bf16"),
        "fp16": (NATIVE, "avx512_fp16"),
        "fp64": (NATIVE, "half"),
    },
    "CPU with amx_fp16": {
        "fp32": (NATIVE, "float32"),
        "tf32": (EMULATED, "AMX", "not equal"),
        "bf16": (NATIVE, "amx_bf16"),
        "fp16": (NATIVE, "amx_fp16"),
        "fp64": (NATIVE, "half"),
    },
    "Arm CPU with bf16": {
        "fp32": (NATIVE, "float32"),
        "tf32": (NO_EFFECT, "as fp32"),
        "bf16": (NATIVE, "(bf16)"),
        "fp16": (NATIVE, "fp16_arith"),
        "fp64": (NATIVE, "half"),
    },
}
ZEN4_SUPPORT = EXPECTED["CPU with avx512_bf16"]  # what runs on the CPU beside an unusable GPU
for _machine in (
    "driver too old",
    "GPUs hidden",
    "CUDA torch, no GPU",
    "ROCm torch, NVIDIA GPU",
    "CPU-only torch on a GPU machine",
):
    EXPECTED[_machine] = ZEN4_SUPPORT


@pytest.fixture
def probe(monkeypatch, tmp_path):
    def probe_of(name: str, requested: str = "auto") -> DeviceInfo:
        fake(monkeypatch, tmp_path, MACHINES[name])
        return probe_device(requested)

    return probe_of


def test_every_machine_has_its_expectation():
    assert set(EXPECTED) == set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_support(probe, name):
    info = probe(name)
    assert list(info.support) == list(PRECISIONS)
    for precision, (status, *words) in EXPECTED[name].items():
        support = info.support[precision]
        assert support.status == status, f"{precision}: {support}"
        for word in words:
            assert word in support.reason, f"{precision}: {support.reason}"


@pytest.mark.parametrize("name", MACHINES)
def test_sentences_are_short_and_whole(probe, name):
    info = probe(name)
    for support in info.support.values():
        assert len(support.reason) <= 95, f"{len(support.reason)}: {support.reason}"
        assert 1 <= len(re.findall(r"\.(?: |$)", support.reason)) <= 2, support.reason
    sentences = [
        s for p in PRECISIONS for s in (info.support[p].reason, info.support[p].slow or "")
    ]
    for sentence in [s for s in [*sentences, info.problem or ""] if s]:
        assert sentence.endswith("."), sentence
        assert not re.search(r"None|nan|inf\b|!|\.\.|  ", sentence), sentence


@pytest.mark.parametrize("name", MACHINES)
def test_json_is_strict_and_complete(probe, name):
    info = probe(name)
    back = json.loads(json.dumps(info.to_dict(), allow_nan=False))
    assert back["support"]["bf16"]["reason"] == info.support["bf16"].reason
    assert set(back) == set(DeviceInfo.__dataclass_fields__)


def test_facts_of_an_nvidia_gpu(probe):
    info = probe("A100")
    assert (info.type, info.index) == ("cuda", 0)
    assert info.name == "NVIDIA A100-SXM4-40GB"
    assert info.gpu == "NVIDIA A100 SXM4 40GB"
    assert info.memory_total_bytes == 42505273344
    assert info.memory_free_bytes == 42505273344 - 2**30
    assert info.compute_capability == "8.0"
    assert info.driver_version == "580.65.06"
    assert (info.torch_version, info.cuda_version, info.hip_version) == (
        "2.13.0+cu130",
        "13.0",
        None,
    )
    assert info.problem is None


def test_facts_of_other_accelerators(probe):
    amd = probe("MI300X")
    assert (amd.type, amd.name, amd.hip_version) == ("cuda", "AMD Instinct MI300X", "7.2.0")
    assert amd.architecture == "gfx942:sramecc+:xnack-"
    assert (amd.compute_capability, amd.driver_version) == (None, None)
    assert amd.memory_free_bytes == 205 * 10**9


def test_facts_of_an_intel_gpu(probe):
    info = probe("Arc A770")
    assert (info.type, info.index, info.driver_version) == ("xpu", 0, "1.6.32224")
    assert info.memory_total_bytes == 16225243136
    assert (info.gpu, info.problem) == (None, None)


@pytest.mark.parametrize(("cpu_free", "free"), [(10**10, 906503168), (5 * 10**8, 5 * 10**8)])
def test_facts_of_an_apple_gpu(probe, monkeypatch, cpu_free, free):
    monkeypatch.setattr(host, "memory_free_bytes", lambda: cpu_free)
    info = probe("Apple M2")
    assert (info.type, info.index, info.name) == ("mps", None, "Apple M2")
    assert info.memory_total_bytes == 22906503168
    # what Metal allows less what this process holds, or less where the CPU has less to give
    assert info.memory_free_bytes == free


def test_the_table_gives_no_peak_to_a_laptop_card(probe):
    assert probe("RTX 4090 Laptop").gpu is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("driver too old", ("too old", "found version 11040", "CUDA 13.0", "Update the driver")),
        ("CPU-only torch on a GPU machine", ("has an NVIDIA GPU", "2.13.0+cpu", "CPU build")),
        ("GPUs hidden", ("has an NVIDIA GPU", "cannot use it", "No CUDA GPUs are available")),
        ("GTX 1060, CUDA 13 torch", ("no code", "6.1", "sm_75")),
    ],
)
def test_problem(probe, name, words):
    problem = probe(name).problem
    for word in words:
        assert word in problem
    assert "http" not in problem


@pytest.mark.parametrize("name", ["A100", "MI300X", "Apple M2", "CPU with avx512_bf16"])
def test_no_problem_where_all_is_well(probe, name):
    assert probe(name).problem is None


@pytest.mark.parametrize("name", ["CUDA torch, no GPU", "ROCm torch, NVIDIA GPU"])
def test_no_gpu_for_this_build_is_no_problem(probe, name):
    info = probe(name)
    assert (info.type, info.problem, info.driver_version) == ("cpu", None, None)


def test_torch_warnings_become_words_not_output(probe):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert probe("driver too old").problem
    assert caught == []


def test_the_driver_shows_beside_the_problem(probe):
    assert probe("driver too old").driver_version == "470.256.02"


def test_choosing_the_cpu_of_a_gpu_machine_is_no_problem(probe):
    info = probe("T4", "cpu")
    assert (info.type, info.problem, info.support["bf16"].status) == ("cpu", None, NATIVE)


@pytest.mark.parametrize(
    ("name", "precision", "word"),
    [
        ("T4", "bf16", "slower"),
        ("T4", "tf32", "exactly as fp32"),
        ("GTX 1650", "fp16", "slower"),
        ("GTX 1060", "fp16", "no gain"),
        ("RTX 4090", "fp64", "1/64"),
        ("CPU with avx512_bf16", "fp16", "tens of seconds"),
        ("CPU with AVX2 alone", "bf16", "tens of seconds"),
        ("CPU with AVX-512 alone", "bf16", "slower"),
        ("Apple M2", "fp64", "no float64"),
        ("A100", "fp64", None),
        ("A100", "bf16", None),
        ("T4", "fp16", None),
        ("CPU with amx_fp16", "fp16", None),
        ("CPU with avx512_bf16", "bf16", None),
    ],
)
def test_warnings(probe, name, precision, word):
    found = warnings_for(probe(name), precision)
    assert len(found) == (0 if word is None else 1)
    assert word is None or word in found[0]


@pytest.mark.parametrize("name", [n for n in MACHINES if n != "GTX 1060, CUDA 13 torch"])
def test_fp32_is_never_warned_of(probe, name):
    assert warnings_for(probe(name), "fp32") == ()


# choosing a device


def two_gpus(monkeypatch, tmp_path):
    a100 = MACHINES["A100"]
    machine = Machine(cuda="13.0", properties=a100.properties * 2, nvidia_version="580.65.06")
    fake(monkeypatch, tmp_path, machine)


@pytest.mark.parametrize(
    ("requested", "resolved"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_resolve(monkeypatch, tmp_path, requested, resolved):
    two_gpus(monkeypatch, tmp_path)
    assert resolve_device(requested) == torch.device(resolved)


def test_the_second_gpu_is_probed(monkeypatch, tmp_path):
    two_gpus(monkeypatch, tmp_path)
    assert probe_device("cuda:1").index == 1


@pytest.mark.parametrize("requested", ["cuda:2", "mps", "xpu", "xpu:1"])
def test_an_absent_device_is_refused_with_what_is_there(monkeypatch, tmp_path, requested):
    two_gpus(monkeypatch, tmp_path)
    with pytest.raises(InputError) as refusal:
        resolve_device(requested)
    assert refusal.value.field == "device"
    assert str(refusal.value) == (
        f"device {requested} is not here: this machine has cuda:0, cuda:1, cpu."
    )


@pytest.mark.parametrize("requested", ["tpu", "", "cuda:", "cuda:-1", "cpu:0", None, 0])
def test_a_wrong_name_is_refused(requested):
    with pytest.raises(InputError, match="device must be auto, cpu, cuda"):
        resolve_device(requested)


def test_refusing_cuda_says_why_it_is_not_there(monkeypatch, tmp_path):
    fake(monkeypatch, tmp_path, MACHINES["CPU-only torch on a GPU machine"])
    with pytest.raises(InputError, match="CPU build"):
        probe_device("cuda")


def test_order_of_preference(monkeypatch, tmp_path):
    arc = MACHINES["Arc A770"]
    fake(monkeypatch, tmp_path, arc)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert resolve_device("auto") == torch.device("xpu", 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


# queries that fail


def failing(*args):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_gpu_that_does_not_answer(monkeypatch, tmp_path):
    fake(monkeypatch, tmp_path, MACHINES["A100"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", failing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing)
    info = probe_device("cuda")
    assert (info.name, info.memory_total_bytes, info.memory_free_bytes) == (None, None, None)
    assert {s.status for s in info.support.values()} == {MISSING}
    assert memory_free_bytes("cuda:0") is None


def test_a_cpu_that_does_not_answer(monkeypatch, tmp_path):
    fake(monkeypatch, tmp_path, MACHINES["CPU with avx512_bf16"])
    monkeypatch.setattr(torch.cpu, "get_capabilities", failing)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", failing, raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", failing)
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "absent")
    info = probe_device("cpu")
    assert (info.memory_total_bytes, info.memory_free_bytes) == (None, None)
    assert info.support["fp32"].status == NATIVE
    assert info.support["bf16"].status == EMULATED


def test_this_build_answers_none_where_it_has_no_device():
    absent = [k for k in ("cuda", "xpu", "mps") if not torch.get_device_module(k).is_available()]
    assert absent, "a machine with accelerators of every make"
    assert [memory_free_bytes(kind) for kind in absent] == [None] * len(absent)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.64.05  Release Build\n",
            "575.64.05",
        ),
        ("something else\n", None),
    ],
)
def test_driver_version(monkeypatch, tmp_path, text, version):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(nvidia, "_VERSION_FILE", tmp_path / "version")
    assert nvidia.driver_version() == version


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_80"], (8, 6), True),  # binary code runs on later minors of its major
        (["sm_86"], (8, 0), False),
        (["sm_75", "sm_90"], (6, 1), False),
        (["sm_60"], (6, 1), True),
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (10, 0), False),
        (["sm_100f"], (10, 3), True),
        (["sm_75", "compute_75"], (12, 0), True),  # PTX is compiled when it is first used
        (["sm_120", "compute_120"], (9, 0), False),
        ([], (9, 0), True),
    ],
)
def test_code_of_the_build(monkeypatch, built_for, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    assert (nvidia.missing_code(capability) is None) == runs


# the fakes are like the real thing


def fields_in_torch(class_name: str) -> set[str]:
    stub = Path(torch.__file__).parent / "_C" / "__init__.pyi"
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    [found] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign)}


def test_fakes_carry_only_real_names():
    cuda, xpu = fields_in_torch("_CudaDeviceProperties"), fields_in_torch("_XpuDeviceProperties")
    assert {"name", "major", "minor", "total_memory", "gcnArchName"} <= cuda
    documented = torch.cpu.get_capabilities.__doc__
    for machine in MACHINES.values():
        for properties in machine.properties:
            assert set(properties) <= (xpu if machine.xpu else cuda)
        for name in set(machine.capabilities) - {"cpu_name"}:
            assert re.search(rf"\b{name}\b", documented), name


# this real machine, against other readings of it


def test_this_cpu():
    info = probe_device("cpu")
    installed = importlib.metadata.version("torch")  # "2.13.0" is PyPI's "2.13.0+cu130"
    assert info.torch_version.split("+")[0] == installed.split("+")[0]
    assert info.python_version == ".".join(map(str, sys.version_info[:3]))
    assert info.torch_threads == torch.get_num_threads()
    assert 1 <= info.cores <= psutil.cpu_count()
    total, free = info.memory_total_bytes, info.memory_free_bytes
    assert 0 < free < total <= psutil.virtual_memory().total
    assert all(isinstance(s, Support) for s in info.support.values())


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux's /proc")
def test_this_cpu_against_proc():
    info = probe_device("cpu")
    flags = set(re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)[1].split())
    bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    assert (info.support["bf16"].status == NATIVE) == bf16
    if "x86" in info.architecture:
        fp16 = bool(flags & {"avx512_fp16", "amx_fp16"})
        assert (info.support["fp16"].status == NATIVE) == fp16
        assert (info.support["tf32"].status == NO_EFFECT) == ("amx_fp16" not in flags)
    assert info.cores <= int(subprocess.check_output(["nproc", "--all"]))
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    assert info.memory_total_bytes <= int(kib["MemTotal"]) * 1024
    assert info.memory_free_bytes <= (int(kib["MemAvailable"]) + 500_000) * 1024


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text()


def test_high_matmul_precision_changes_nothing_where_we_say_so():
    if probe_device("cpu").support["tf32"].status != NO_EFFECT:
        pytest.skip("this CPU's matmuls follow 'high'")
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    exact = a @ b
    mode = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.equal(a @ b, exact)
    finally:
        torch.set_float32_matmul_precision(mode)


# memory and cores in a container


def control_groups(monkeypatch, tmp_path, membership: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "membership")
    monkeypatch.setattr(host, "_CGROUP_ROOT", tmp_path / "cgroup")


def test_cgroup_v2_limits_of_the_group_and_its_parents(monkeypatch, tmp_path):
    control_groups(
        monkeypatch,
        tmp_path,
        "0::/app/web\n",
        {
            "app/web/memory.max": "max\n",
            "app/web/memory.current": "100\n",
            "app/memory.max": "300000000\n",
            "app/memory.current": "200000000\n",
            "app/memory.stat": "anon 150000000\ninactive_file 40000000\n",
            "app/cpu.max": "150000 100000\n",
            "memory.current": "1\n",
        },
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)
    assert host.memory_total_bytes() == 300_000_000
    assert host.memory_free_bytes() == 140_000_000
    assert memory_free_bytes(torch.device("cpu")) == 140_000_000
    assert host.usable_cores() == 2


def test_cgroup_v1_seen_under_its_own_root(monkeypatch, tmp_path):
    control_groups(
        monkeypatch,
        tmp_path,
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
        {  # inside a container the host's path is not there: its group is the root
            "memory/memory.limit_in_bytes": "200000000\n",
            "memory/memory.usage_in_bytes": "50000000\n",
            "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 10000000\n",
            "cpu/cpu.cfs_quota_us": "100000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert host.memory_total_bytes() == 200_000_000
    assert host.memory_free_bytes() == 160_000_000
    assert host.usable_cores() == 1


def test_no_limit_leaves_the_machine(monkeypatch, tmp_path):
    control_groups(
        monkeypatch,
        tmp_path,
        "4:memory:/\n3:cpu:/\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "0\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert host.memory_total_bytes() == psutil.virtual_memory().total
    if hasattr(psutil.Process, "cpu_affinity"):  # not on macOS
        assert host.usable_cores() == len(psutil.Process().cpu_affinity())
