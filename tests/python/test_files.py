"""Files replaced in one step: order of sync and rename, failures, threads, long names, permissions."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

import rarefy
from rarefy.files import replacing


@pytest.fixture
def calls(monkeypatch):
    """A log of fsync and replace, which still happen."""
    log = []
    fsync, replace = os.fsync, Path.replace

    def logged_fsync(descriptor):
        log.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def logged_replace(self, target):
        log.append(f"replace {Path(target).name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "replace", logged_replace)
    return log


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_end(tmp_path, calls):
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text("new")
        assert not (tmp_path / "x").exists()
    assert calls == [f"fsync {temporary.name}", "replace x", f"fsync {tmp_path.name}"]
    assert (tmp_path / "x").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("moment", ["writing", "syncing"])
def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, moment):
    (tmp_path / "x").write_text("old")

    def no_space(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if moment == "syncing":
        monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), replacing(tmp_path / "x") as temporary:
        temporary.write_text("half of the new")
        if moment == "writing":
            no_space(0)
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "x").read_text() == "new"


def test_permissions_are_those_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "x") as temporary:
            temporary.unlink()
            temporary.touch(0o600)  # as libraries do that write beside and rename
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_many_threads_save_to_one_path(tmp_path):
    layers = [torch.nn.Sequential(rarefy.BlockSparseLinear(16, 16, block_shape=(4, 4))) for _ in range(4)]
    path, failures = tmp_path / "x", []

    def save(layer):
        for _ in range(15):
            try:
                rarefy.save_file(layer, path)
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=save, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and [p.name for p in tmp_path.iterdir()] == ["x"]
    read = torch.nn.Sequential(rarefy.BlockSparseLinear(16, 16, block_shape=(4, 4)))
    rarefy.load_file(read, path)
    assert any(torch.equal(read[0].weight.to_dense(), layer[0].weight.to_dense()) for layer in layers)


@pytest.mark.parametrize("length", [250, 255])
def test_names_as_long_as_the_file_system_takes(tmp_path, length):
    path = tmp_path / ("n" * length)
    rarefy.save_file(torch.nn.Linear(2, 2), path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_save_file_syncs_before_it_renames(tmp_path, calls):
    rarefy.save_file(torch.nn.Linear(2, 2), tmp_path / "x")
    assert [call.split()[0] for call in calls] == ["fsync", "replace", "fsync"]
