"""A benchmark case: what is measured, its name, and how lists of cases are read from TOML."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings it there
    import tomli as tomllib

OPS = ("linear", "grad_input", "grad_weight")
DTYPES = ("f64", "f32", "bf16", "f16")
DEVICES = ("cpu", "cuda")
NAME = re.compile(
    rf"(?P<op>{'|'.join(OPS)})-(?P<M>\d+)x(?P<N>\d+)x(?P<K>\d+)-(?P<rows>\d+)x(?P<cols>\d+)"
    rf"-d(?P<density>[0-9.]+)-(?P<dtype>{'|'.join(DTYPES)})-(?P<device>{'|'.join(DEVICES)})(?P<threads>\d*)"
)


@dataclass(frozen=True)
class Case:
    """One product of one layer: X is (M, K), W is (N, K) with blocks of `block`; `threads` is 0 on CUDA."""

    op: str
    M: int
    N: int
    K: int
    block: tuple[int, int]
    density: float
    dtype: str
    device: str
    threads: int

    @property
    def name(self) -> str:
        """Everything about the case in one word, which --case takes."""
        block = f"{self.block[0]}x{self.block[1]}"
        where = f"{self.device}{self.threads if self.device == 'cpu' else ''}"
        return f"{self.op}-{self.M}x{self.N}x{self.K}-{block}-d{self.density:g}-{self.dtype}-{where}"

    @classmethod
    def parse(cls, name: str) -> Case:
        """The inverse of `name`.

        Raises:
            ValueError: the text names no case.
        """
        match = NAME.fullmatch(name)
        if match is None or (match["device"] == "cpu") != bool(match["threads"]):
            example = "linear-512x3072x768-16x16-d0.25-f32-cpu2"
            raise ValueError(f"[bench] --case must be a case's name, like {example}; got {name!r}")
        sizes = (int(match[key]) for key in "MNK")
        block = (int(match["rows"]), int(match["cols"]))
        density, threads = float(match["density"]), int(match["threads"] or 0)
        return cls(match["op"], *sizes, block, density, match["dtype"], match["device"], threads)


def load_cases(path: Path) -> dict[Case, list[str]]:
    """Read a list of cases, each with the names of the other libraries to measure beside it.

    The file has a `device` and `[[group]]` tables: each is the product of its lists `op`, `M`, `NK`, `block`,
    `density`, `dtype` and (on the CPU) `threads`; `rivals` applies to all of the group. A case that several
    groups name runs once, with the rivals of all of them.
    """
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    cases: dict[Case, list[str]] = {}
    for group in text["group"]:
        for case in expand(group, text["device"]):
            rivals = cases.setdefault(case, [])
            rivals += [rival for rival in group.get("rivals", []) if rival not in rivals]
    return cases


def expand(group: dict[str, Any], device: str) -> list[Case]:
    """The cases of one group, those that share their matrices next to each other."""
    return [
        Case(op, M, N, K, (int(rows), int(cols)), density, dtype, device, threads)
        for (N, K), M, dtype, threads, op, block, density in itertools.product(
            group["NK"],
            group["M"],
            group["dtype"],
            group.get("threads", [0]),
            group["op"],
            group["block"],
            group["density"],
        )
        for rows, cols in [block.split("x")]
    ]
