"""examples/serve: an AOTInductor package of a sparse model, run by a program in C++ without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rarefy._load import LIBRARY

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/serve"


def _run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env, check=False)


@pytest.mark.timeout(1200)  # two compilations of libtorch's headers: a minute and a half of a core
def test_a_package_is_served_without_python(tmp_path):
    if not (shutil.which("cmake") and shutil.which("g++")):
        pytest.skip("no cmake or compiler")
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = _run(sys.executable, EXAMPLE / "export_model.py", tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for command in (
        (
            "-S",
            EXAMPLE,
            "-B",
            tmp_path / "build",
            f"-DTORCH_DIR={torch.__path__[0]}",
            "-DCMAKE_BUILD_TYPE=Debug",
        ),
        ("--build", tmp_path / "build"),
    ):
        done = _run("cmake", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    serve = tmp_path / "build/serve"
    assert "libpython" not in _run("ldd", serve).stdout
    for model, rows in (("layers", 5), ("sparse", 32)):
        done = _run(serve, LIBRARY, tmp_path / model, env={})
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{rows} rows, largest difference ")
    # Without the library the ops are not there, and the program says so.
    done = _run(serve, tmp_path / "nowhere.so", tmp_path / "layers", env={})
    assert done.returncode == 1 and "nowhere.so" in done.stderr
