"""Finding and loading the compiled library: without it, under other Pythons, and what it links to."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rarefy
from rarefy import __main__

PACKAGE = Path(rarefy.__file__).parent
LIBRARY = PACKAGE / "lib" / "librarefy_torch.so"
ROOT = PACKAGE.parents[1]


def python(*arguments: str, path: Path = PACKAGE.parent, executable: str = sys.executable):
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(
        [executable, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.fixture(scope="module")
def without_library(tmp_path_factory) -> Path:
    """The package as a source tree that was never built has it."""
    path = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, path / "rarefy", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return path


def test_import_without_the_library_works(without_library):
    run = python("-c", "import rarefy; print(rarefy.backend_info()['problem'])", path=without_library)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(
        r"rarefy's compiled library is missing \(.*librarefy_torch.so\): "
        r"run `make setup` in a source tree, or `pip install rarefy`\n",
        run.stdout,
    )


def test_first_use_without_the_library_says_what_to_do(without_library):
    code = "import torch, rarefy; rarefy.ops.bsr_plan(torch.zeros(1), torch.zeros(0), 0, 0, 1, 1)"
    run = python("-c", code, path=without_library)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: rarefy's compiled library is missing") and "make setup" in last


def test_a_broken_library_is_reported_with_its_cause(without_library, tmp_path):
    shutil.copytree(without_library / "rarefy", tmp_path / "rarefy")
    broken = tmp_path / "rarefy" / "lib" / LIBRARY.name
    broken.parent.mkdir()
    broken.write_bytes(b"not a shared library, though long enough to have a header of one\n")
    run = python("-m", "rarefy", "--json", path=tmp_path)
    info = json.loads(run.stdout)
    assert run.returncode == 1 and info["library"] is None
    assert re.search(
        r"does not load \(.*(too short|invalid ELF header).*\): run `make setup`", info["problem"]
    )


def test_an_old_torch_is_reported(without_library):
    code = (
        "import torch; torch.__version__ = '2.9.1+cpu'; "
        "import rarefy; print(rarefy.backend_info()['problem'])"
    )
    run = python("-c", code, path=without_library)
    assert run.stdout == "rarefy needs torch 2.10 or later; got 2.9.1+cpu: pip install 'torch>=2.10'\n"


def test_python_m_rarefy_reports_what_is_in_use():
    plain, as_json = python("-m", "rarefy"), python("-m", "rarefy", "--json", "--block", "4x1")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr + as_json.stderr
    info = json.loads(as_json.stdout)
    assert info["library"] == str(LIBRARY) and info["torch"] == torch.__version__
    rows = {(row["op"], row["dtype"]) for row in info["kernels"] if row["device"] == "cpu"}
    assert rows == {
        (op, dtype)
        for op in ("linear", "grad_input", "grad_weight")
        for dtype in ("f64", "f32", "bf16", "f16")
    }
    assert all(row["kernel"] and row["why"] for row in info["kernels"] if row["device"] == "cpu")
    assert info["cpu"] in plain.stdout


@pytest.mark.parametrize("block", ["axb", "0x4"])
def test_python_m_rarefy_refuses_a_bad_block(block, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rarefy", "--block", block])
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    assert "--block must be RxC" in capsys.readouterr().err


@pytest.mark.parametrize("block_shape", [(0, 4), (4,), (4, 2.0), (4, 4, 4), (-1, 1)])
def test_backend_info_refuses_a_bad_block_shape(block_shape):
    kind = TypeError if 2.0 in block_shape else ValueError
    with pytest.raises(kind, match=r"\[backend_info\] block_shape"):
        rarefy.backend_info(block_shape)


def test_one_version_everywhere():
    header = (ROOT / "include" / "rarefy" / "version.h").read_text()
    version = re.search(r'#define RAREFY_VERSION "([^"]+)"', header)[1]
    assert rarefy.__version__ == version == rarefy.backend_info()["version"]


# What the binary is linked with ------------------------------------------------------------------


def symbols(*options: str) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", "--format=posix", *options, str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    # "name U", with spaces inside demangled names, and @version after some.
    return [re.sub(r"(@\S*)? [A-Za-z]( [0-9a-f]+)*\s*$", "", line) for line in listing.splitlines()]


def test_only_the_stable_shim_of_torch_is_used():
    """C++ names of torch change between its versions, and Python's between Pythons."""
    undefined = symbols("--undefined-only", "--demangle")
    shim = {name for name in undefined if name.startswith(("aoti_torch_", "torch_"))}
    assert {"torch_call_dispatcher", "torch_parallel_for", "torch_library_impl"} <= shim
    foreign = re.compile(r"\b(c10|at|torch|caffe2|rarefy)::|^_?Py|GOMP|omp_|kmp|cuda")
    assert [name for name in undefined if name not in shim and foreign.search(name)] == []


def test_only_system_libraries_and_torch_are_needed():
    listing = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", listing))
    system = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2"}
    system |= {"librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert needed - system == {"libtorch.so"}
    assert "RPATH" not in listing and "RUNPATH" not in listing  # no path of the build machine


def test_nothing_is_exported():
    """Two versions of the core in one process must not find each other's symbols."""
    assert [name for name in symbols("--defined-only") if "rarefy" in name] == []


@pytest.mark.parametrize("name", ["python3.10", "python3.11", "python3.12", "python3.13"])
def test_the_same_binary_loads_in_another_python(name):
    executable = shutil.which(name)
    if executable is None or python("-c", "import torch", executable=executable).returncode != 0:
        pytest.skip(f"no {name} with torch on PATH")
    run = python("-m", "rarefy", "--json", executable=executable)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["library"] == str(LIBRARY)


def test_lost_output_is_an_exit_code_and_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rarefy"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Path("/dev/full").open("w"))  # noqa: SIM115 (closing it fails, too)
        assert __main__._run() == 3
    expected = "rarefy: the standard output must be writable; got No space left on device\n"
    assert capsys.readouterr().err == expected


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    # As in `python -m rarefy | head -1`, when head has ended.
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "rarefy"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert run.returncode == -signal.SIGPIPE and run.stderr == ""


@pytest.mark.parametrize("devices", [[], ["a GPU"]])
def test_kernels_of_a_device_that_is_not_there_are_not_listed(devices, monkeypatch, capsys):
    kernels = [
        {"device": device, "op": "linear", "dtype": "f32", "kernel": f"{device}_linear", "why": "first"}
        for device in ("cpu", "cuda")
    ]
    info = {"problem": None, "cuda_built": True, "cuda_devices": devices, "kernels": kernels}
    monkeypatch.setattr(__main__, "backend_info", lambda _block: info)
    monkeypatch.setattr(sys, "argv", ["rarefy"])
    assert __main__.main() == 0
    shown = capsys.readouterr().out
    assert "cpu_linear" in shown and ("cuda_linear" in shown) == bool(devices)
    assert re.search(r"cuda_devices +(none|a GPU)\n", shown)


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
