"""Files that are mapped into memory: how a reader gives back what it has read."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch


def forget_pages(tensor: torch.Tensor) -> None:
    """Takes a tensor's pages out of this process's memory, where they are a file's: they can be read again.

    A mapped file counts as memory of the process as far as it was read, until the kernel wants it back.
    Nothing happens to tensors in memory of their own, and off Linux. What was written to the tensor is lost.
    """
    if tensor.device.type != "cpu" or not (span := tensor.numel() * tensor.element_size()):
        return
    begin, page = tensor.data_ptr(), mmap.PAGESIZE
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for fields in (line.split(maxsplit=5) for line in maps):
        low, high = (int(address, 16) for address in fields[0].split("-"))
        if low <= begin and begin + span <= high:
            first, end = -(-begin // page) * page, (begin + span) // page * page
            if len(fields) == 6 and fields[5].startswith("/") and fields[4] != "0" and end > first:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
            return
