"""Mutation tests: small defects, one at a time, that the test suites must notice. `make mutants` runs it.

Each mutant of the tables (core.py, kernels.py, files.py, binding.py, front.py) is a text of one file and what
replaces it. In a scratch worktree of HEAD the file is changed, what depends on it is rebuilt, and its tests run, the
narrowest selection first, until one fails: the mutant is caught. One that no test notices has survived, and
needs a test, or a reason in its table. Results are kept by the mutant's text: a run that is interrupted goes on
where it stopped, and `--again survived` repeats those that may have new tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRATCH = ROOT / "build" / os.environ.get("RAREFY_MUTATION_SCRATCH", "mutation")
TREE = SCRATCH / "tree"
BUILD = SCRATCH / "build"
RESULTS = SCRATCH / "results.json"
TABLES = ("core", "kernels", "files", "binding", "front")
# The CPU kernels are templates: their mutants are compiled for one instruction set, the best of the machine,
# from a copy of the headers. "{isa}" in a test's name stands for it.
OVERLAY = TREE / "overlay"
ISA = next(
    (isa for isa, flag in (("avx512", "avx512vl"), ("avx2", "avx2")) if flag in _CPU.split()), "scalar"
)
GIB = 2**30


@dataclass(frozen=True)
class Mutant:
    """One defect: `old`, which occurs once in `file`, becomes `new`."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    alive: str  # why no test can tell, or ""

    @property
    def key(self) -> str:
        return hashlib.sha1("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def change(self) -> str:
        def short(text: str) -> str:
            text = re.sub(r"\s+", " ", text).strip()
            return text if len(text) <= 60 else f"{text[:57]}..."

        return f"{short(self.old)}  →  {short(self.new) or '(nothing)'}"


def load_tables(names: list[str]) -> list[Mutant]:
    """All mutants of these tables; a table's GROUPS are (file, tests, [(old, new[, {tests, alive}])])."""
    sys.path.insert(0, str(HERE))
    mutants = []
    for name in names:
        for file, tests, changes in importlib.import_module(name).GROUPS:
            for old, new, *rest in changes:
                options = rest[0] if rest else {}
                chosen = tuple(options.get("tests", tests))
                mutants.append(Mutant(file, old, new, chosen, options.get("alive", "")))
    return mutants


def applicable(mutant: Mutant, root: Path) -> str:
    """Empty where the mutant fits the file, else why it does not."""
    path = root / mutant.file
    if not path.exists():
        return "no such file"
    count = path.read_text().count(mutant.old)
    return "" if count == 1 else f"its text occurs {count} times"


# Running -------------------------------------------------------------------------------------------


_FOREVER = 1200  # seconds
# Who waits for ever takes no processor time: he gets this much of the clock for each second of it, and a start.
_PATIENCE, _START = 40, 120


def run(command: list[str], cpu: float = 0, memory: int = 0, **options) -> tuple[int | None, str]:
    """Exit code (None: out of time) and output; the process and its children are gone afterwards.

    Time is the processor's, so that a busy machine makes no difference; who waits for ever is ended as well.
    """

    def limit() -> None:
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        if cpu:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=limit,
        **options,
    )
    try:
        output, _ = process.communicate(timeout=min(_FOREVER, _START + _PATIENCE * cpu) if cpu else _FOREVER)
        out_of_time = cpu and process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return (None if out_of_time else process.returncode), output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


# A process that has imported all that takes long, and forks for each run of pytest.
_FORKING = """
import json, os, sys
import numpy, pytest, safetensors.torch, scipy.sparse, torch, torch._dynamo, torch.export, tqdm
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        sys.path.insert(0, request["environment"]["PYTHONPATH"])
        sys.dont_write_bytecode = True
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = int(pytest.main(request["arguments"]))
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Pytest:
    """Runs pytest in forks of a warm interpreter: starting takes longer than most tests."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _FORKING]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, arguments: list[str], environment: dict[str, str], cpu: float) -> tuple[int | None, str]:
        output = SCRATCH / "pytest.log"
        request = {
            "cwd": str(TREE),
            "environment": environment,
            "output": str(output),
            "arguments": arguments,
        }
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        child = int(self.server.stdout.readline())
        late = threading.Timer(min(_FOREVER, _START + _PATIENCE * cpu), os.killpg, (child, signal.SIGKILL))
        late.start()
        code = int(self.server.stdout.readline())
        expired = not late.is_alive()
        late.cancel()
        return (None if expired else code), output.read_text(errors="replace")


# What a test step needs: its build target, its binary.
BINARIES = {
    "cpp": ("rarefy_tests", "tests/cpp/rarefy_tests"),
    "alloc": ("rarefy_allocation_tests", "tests/cpp/rarefy_allocation_tests"),
    "fuzz": ("rarefy_fuzz_tests", "tests/fuzz/rarefy_fuzz_tests"),
}


def prepare(revision: str, targets: list[str], jobs: int) -> None:
    """A worktree of `revision` and a configured build of it, at -O1: mutants are compiled once each."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(ROOT)]
    if not (TREE / ".git").exists():
        shutil.rmtree(TREE, ignore_errors=True)
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(TREE), revision], check=True)
    sha = subprocess.run(
        [*git, "rev-parse", revision], check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["git", "-C", str(TREE), "checkout", "-q", "--force", "--detach", sha], check=True)
    subprocess.run(["git", "-C", str(TREE), "clean", "-qfd"], check=True)
    # The instruction sets' own -O3 would be most of the time.
    cmake = TREE / "src" / "CMakeLists.txt"
    overlay = f"set_source_files_properties(cpu/isa/{ISA}.cc PROPERTIES INCLUDE_DIRECTORIES {OVERLAY})\n"
    cmake.write_text(cmake.read_text().replace("-O3", "-O1") + overlay)
    shutil.copytree(TREE / "src" / "cpu", OVERLAY / "cpu", ignore=shutil.ignore_patterns("*.cc"))
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    options = {
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1",
        "RAREFY_CUDA": "off",
        "RAREFY_TEST_PACKAGING": "OFF",
        "RAREFY_BUILD_TORCH": "ON",
        "Python3_EXECUTABLE": sys.executable,
    }
    defines = [f"-D{key}={value}" for key, value in options.items()] + launcher
    subprocess.run(
        ["cmake", "-S", str(TREE), "-B", str(BUILD), "-G", "Ninja", *defines],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", str(BUILD), "-j", str(jobs), "--target", *targets], check=True)


def target_of(step: str) -> str:
    kind = step.split(":")[0]
    return "rarefy_torch" if kind == "py" else BINARIES[kind][0]


def build(step: str, jobs: int) -> bool:
    code, output = run(["cmake", "--build", str(BUILD), "-j", str(jobs), "--target", target_of(step)])
    if code is None or (code != 0 and "error" not in output.lower()):
        raise RuntimeError(output[-2000:])
    return code == 0


_pytest: Pytest | None = None


def test(step: str, cpu: float) -> tuple[int | None, str]:
    kind, selection = step.split(":", 1)
    environment = {**os.environ, "TMPDIR": str(SCRATCH / "tmp"), "PYTHONPATH": str(TREE / "python")}
    (SCRATCH / "tmp").mkdir(exist_ok=True)
    if kind == "py":
        global _pytest
        _pytest = _pytest or Pytest()
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *selection.split(" ")]
        return _pytest.run(arguments, {**environment, "PYTHONDONTWRITEBYTECODE": "1"}, cpu)
    binary = str(BUILD / BINARIES[kind][1])
    selection = selection.replace("{isa}", ISA)
    command = [binary, f"--gtest_filter={selection}", "--gtest_brief=1", "--gtest_fail_fast"]
    return run(command, cpu, 8 * GIB, cwd=SCRATCH, env=environment)


class Bench:
    """Runs steps, and knows how much processor time each takes on the unchanged tree."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.baseline: dict[str, float] = {}

    def measure(self, step: str) -> None:
        if step in self.baseline:
            return
        if not build(step, self.jobs):
            raise SystemExit(f"{step} does not build without a mutant")
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        code, output = test(step, _FOREVER)
        if code != 0 or "no tests ran" in output or "Running 0 tests" in output:
            raise SystemExit(f"{step} must pass without a mutant:\n{output[-3000:]}")
        self.baseline[step] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """(state, the step that says so)."""
        path = TREE / mutant.file
        if "{isa}" in mutant.tests[0] or mutant.file == f"src/cpu/simd/{ISA}.h":
            path = OVERLAY / Path(mutant.file).relative_to("src")
        original = path.read_text()
        if applicable(mutant, TREE):
            return "not applicable", ""
        try:
            for step in mutant.tests:
                self.measure(step)  # on the unchanged tree, and only when it comes to it
                path.write_text(original.replace(mutant.old, mutant.new))
                if not (mutant.file.endswith(".py") or build(step, self.jobs)):
                    return "does not build", step
                code, _ = test(step, 10 + 5 * self.baseline[step])
                if code is None:
                    return "timeout", step
                if code != 0:
                    return "caught", step
                path.write_text(original)
            return "survived", ""
        finally:
            path.write_text(original)


def summary(mutants: list[Mutant], results: dict[str, dict]) -> bool:
    states = [results.get(mutant.key, {}).get("state", "not run") for mutant in mutants]
    for state in sorted(set(states)):
        print(f"{states.count(state):4d}  {state}")
    judged = [(m, s) for m, s in zip(mutants, states, strict=True) if s in ("caught", "timeout", "survived")]
    alive = [mutant for mutant, state in judged if state == "survived"]
    for mutant in alive:
        print(f"survived: {mutant.file}: {mutant.change()}{'  (explained)' if mutant.alive else ''}")
    if judged:
        print(f"{1 - len(alive) / len(judged):.1%} of {len(judged)} caught")
    return bool(judged) and len(alive) <= 0.05 * len(judged) and all(mutant.alive for mutant in alive)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--file", help="only mutants of files whose path contains this")
    parser.add_argument("--again", action="append", default=[], help="run those of this state once more")
    parser.add_argument("--only", help="run those of this state once more, and no new ones")
    parser.add_argument("--check", action="store_true", help="only say which mutants fit HEAD no more")
    parser.add_argument("--summary", action="store_true", help="only print the results so far")
    parser.add_argument("--revision", default="HEAD")
    parser.add_argument("--every", type=int, default=1, help="a sample: one of so many of what is left")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    mutants = load_tables(options.tables or list(TABLES))
    if options.file:
        mutants = [mutant for mutant in mutants if options.file in mutant.file]
    if len({mutant.key for mutant in mutants}) != len(mutants):
        raise SystemExit("two mutants are the same")
    if options.check:
        bad = [(mutant, why) for mutant in mutants if (why := applicable(mutant, ROOT))]
        for mutant, why in bad:
            print(f"{mutant.file}: {why}: {mutant.change()}")
        print(f"{len(mutants) - len(bad)} of {len(mutants)} mutants fit")
        return bool(bad)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.summary:
        return not summary(mutants, results)

    wanted = (options.only,) if options.only else ("", *options.again)
    todo = [m for m in mutants if results.get(m.key, {}).get("state", "") in wanted]
    todo = todo[:: options.every]
    print(f"{len(mutants)} mutants, {len(todo)} to run", flush=True)
    if todo:
        targets = sorted({target_of(step) for mutant in todo for step in mutant.tests})
        prepare(options.revision, targets, options.jobs)
    bench = Bench(options.jobs)
    for number, mutant in enumerate(todo, 1):
        start = time.monotonic()
        state, step = bench.judge(mutant)
        seconds = time.monotonic() - start
        results[mutant.key] = {"state": state, "by": step, "seconds": round(seconds), "file": mutant.file}
        partial = RESULTS.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(RESULTS)
        print(
            f"[{number}/{len(todo)}] {state:8s} {seconds:4.0f} s  {mutant.file}: {mutant.change()}  {step}",
            flush=True,
        )
    return not summary(mutants, results)


if __name__ == "__main__":
    sys.exit(main())
