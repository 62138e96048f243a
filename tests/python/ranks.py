"""Ranks of torch.distributed for tests: two processes, or this process alone.

No process group is freed here. One of gloo waits for its threads while it holds Python's lock, and a thread
that drops the last reference to a tensor waits for that lock: once in some hundred runs both wait for ever
(torch 2.11, with a dense model too; a debugger shows ~AsyncAllreduceWork below `take_gil`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path

import torch
from torch import distributed

KEPT = []  # groups that this process has left, never freed


def results_of_ranks(body, folder: Path, backend: str = "gloo") -> list:
    """What `body(rank)`, a function of a module, returns in each of two processes of one group."""
    context = torch.multiprocessing.start_processes(
        _run, args=(body, str(folder), backend), nprocs=2, join=False, start_method="spawn"
    )
    while not context.join(timeout=90):
        pass
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def _run(rank, body, folder, backend):
    if backend == "nccl":
        torch.cuda.set_device(rank)
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that waits for ever says where
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    torch.save(body(rank), f"{folder}/{rank}.pt")
    distributed.barrier()  # no rank leaves while the other may still want it
    os._exit(0)  # frees nothing


@contextlib.contextmanager
def one_rank(folder: Path):
    """A group of this process alone, the default one inside."""
    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    KEPT.append(distributed.group.WORLD)
    try:
        yield
    finally:
        distributed.destroy_process_group()
