"""Shared-memory transport: reading and cleanup. `test_transport_contract.py` covers the behaviour common to all
transports."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from weights.published import PublishedVersions, assert_equal, weights
from weights.racing import race

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files import clean_dead_shards, shard_folder
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    with SharedMemoryTransport("test", root=tmp_path) as transport:
        yield transport


def reader() -> SharedMemoryTransport:
    return SharedMemoryTransport("reader")


def pulled(manifest: Manifest) -> dict[str, torch.Tensor]:
    return dict(reader().pull(manifest))


@pytest.mark.parametrize("held", [0, 1, 3])
def test_long_lived_reader_sees_each_version_and_keeps_no_memory(transport: SharedMemoryTransport, held: int) -> None:
    """Both if it drops versions at once, so that their files are reused, and if it holds some."""
    staying, views = reader(), list[tuple[int, dict[str, torch.Tensor]]]()
    for version in range(12):
        size = 1000 if version % 5 else 2000
        manifest = transport.publish(version, weights(version, size).items())
        views = [*views, (version, dict(staying.pull(manifest)))][-held:] if held else []
        for old, found in views:
            assert_equal(found, weights(old, 1000 if old % 5 else 2000))
    transport.publish(12, weights(12).items())  # takes another file if one is still viewed
    views.clear()
    folder, maps = str(Path(manifest.shards[0].location).parent), Path("/proc/self/maps").read_text()
    assert not [line for line in maps.splitlines() if folder in line and line.endswith("(deleted)")]
    transport.close()
    with pytest.raises(StateDictError):
        staying.pull(manifest)


def test_long_lived_reader_maps_each_file_once(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []

    def counted(*args: Any, real: Any = mmap.mmap, **kwargs: Any) -> mmap.mmap:
        if kwargs.get("prot") == mmap.PROT_READ:
            mapped.append(args[1])
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", counted)
    staying = reader()
    for version in range(8):
        assert_equal(dict(staying.pull(transport.publish(version, weights(version).items()))), weights(version))
    assert len(mapped) == 2  # the files of the double buffer


def test_manifest_describes_the_segment(transport: SharedMemoryTransport) -> None:
    manifest = transport.publish(3, weights(3).items())
    assert manifest.version == 3
    assert [(entry.name, entry.dtype, entry.shape) for entry in manifest.shards[0].entries] == [
        ("a", "float32", (1000,)),
        ("b", "float32", (2, 3)),
    ]
    assert all(entry.offset % 64 == 0 for entry in manifest.shards[0].entries)
    assert os.path.getsize(manifest.shards[0].location) == manifest.shards[0].num_bytes


def test_views_share_the_segments_memory(transport: SharedMemoryTransport) -> None:
    found = pulled(transport.publish(1, weights(1).items()))
    assert found["b"].data_ptr() - found["a"].data_ptr() == 4032  # 1000 float32, at the next multiple of 64


READER = """
import pickle, sys
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
manifest = pickle.load(sys.stdin.buffer)
tensors = dict(SharedMemoryTransport("reader").pull(manifest))
print("mapped", flush=True)
sys.stdin.readline()
print({name: tensor.sum().item() for name, tensor in tensors.items()}, flush=True)
"""


def test_mapped_version_stays_valid_in_another_process(transport: SharedMemoryTransport) -> None:
    manifest = transport.publish(1, weights(1).items())
    with subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps(manifest))
        process.stdin.flush()
        assert process.stdout.readline() == b"mapped\n"
        for version in range(2, 6):  # twice around the double buffer
            transport.publish(version, weights(version).items())
        transport.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert eval(process.stdout.readline()) == {"a": 1000.0, "b": 21.0}


def test_mapped_version_is_not_overwritten(transport: SharedMemoryTransport) -> None:
    held = pulled(transport.publish(1, weights(1).items()))["a"]  # one view is enough
    for version in range(2, 6):
        transport.publish(version, weights(version).items())
    assert torch.equal(held, weights(1)["a"])


def test_released_memory_is_reused_once_no_reader_has_it(transport: SharedMemoryTransport) -> None:
    def inode(manifest: Manifest) -> int:
        return os.stat(manifest.shards[0].location).st_ino

    first = transport.publish(1, weights(1).items())
    first_inode, views = inode(first), pulled(first)
    del views
    transport.release(1)
    assert inode(transport.publish(2, weights(2, size=2000).items())) == first_inode
    assert_equal(pulled(transport.publish(3, weights(3).items())), weights(3))


def test_only_the_last_versions_are_kept(transport: SharedMemoryTransport, tmp_path: Path) -> None:
    manifests = [transport.publish(version, weights(version).items()) for version in range(5)]
    for manifest in manifests[:3]:
        with pytest.raises(StateDictError, match="released"):
            reader().pull(manifest)
    assert_equal(pulled(manifests[3]), weights(3))
    assert_equal(pulled(manifests[4]), weights(4))
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 2


@pytest.mark.parametrize("position", [0, 4001, 4095, -1])
def test_flipped_byte_fails_before_any_tensor_is_yielded(transport: SharedMemoryTransport, position: int) -> None:
    manifest = transport.publish(1, weights(1).items())
    with open(manifest.shards[0].location, "r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))
    with pytest.raises(StateDictError, match="checksum"):
        reader().pull(manifest)


def test_partly_old_version_is_detected(transport: SharedMemoryTransport) -> None:
    old, new = (transport.publish(version, weights(version, size=1 << 20).items()) for version in (1, 2))
    half = old.shards[0].num_bytes // 2
    with open(old.shards[0].location, "rb") as source, open(new.shards[0].location, "r+b") as target:
        target.write(source.read(half))
    with pytest.raises(StateDictError, match="checksum"):
        reader().pull(new)


def test_truncated_file_is_detected(transport: SharedMemoryTransport) -> None:
    manifest = transport.publish(1, weights(1).items())
    os.truncate(manifest.shards[0].location, 100)
    with pytest.raises(StateDictError, match="100 bytes"):
        reader().pull(manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_bytes": 8}, "does not fit"), ({"dtype": "float33"}, "float33"), ({"offset": 1 << 40}, "does not fit")],
)
def test_rejects_an_inconsistent_manifest(
    transport: SharedMemoryTransport, change: dict[str, object], message: str
) -> None:
    manifest = transport.publish(1, weights(1).items())
    (shard,) = manifest.shards
    entries = (replace(shard.entries[0], **change), *shard.entries[1:])
    with pytest.raises(StateDictError, match=message):
        reader().pull(replace(manifest, shards=(replace(shard, entries=entries),)))


def test_failed_publishes_leave_nothing(transport: SharedMemoryTransport, tmp_path: Path) -> None:
    manifest = transport.publish(1, weights(1).items())
    with pytest.raises(StateDictError, match="already"):
        transport.publish(1, weights(1).items())
    with pytest.raises(StateDictError, match="twice"):
        transport.publish(2, [("a", torch.ones(1)), ("a", torch.ones(1))])

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        transport.publish(2, failing())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(manifest.shards[0].location)]


def test_full_disk_fails_the_publish_and_keeps_the_last_version(
    transport: SharedMemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = transport.publish(1, weights(1).items())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StateDictError, match=r"version 2, 0\.0 MB: .*No space left"):
            transport.publish(2, weights(2).items())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(manifest.shards[0].location)]
    assert_equal(pulled(manifest), weights(1))
    assert_equal(pulled(transport.publish(2, weights(2).items())), weights(2))


def test_close_leaves_nothing_and_ends_publishing(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("test", root=tmp_path)
    with transport:
        manifest = transport.publish(1, weights(1).items())
    assert list(tmp_path.iterdir()) == []
    transport.close()
    with pytest.raises(StateDictError, match="closed"):
        transport.publish(2, weights(2).items())
    with pytest.raises(StateDictError, match="released"):
        reader().pull(manifest)


def test_close_while_publishing_leaves_nothing(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("test", root=tmp_path)

    class ClosesTransport(torch.Tensor):
        def is_contiguous(self, *_: object, **__: object) -> bool:
            transport.close()
            return True

    with pytest.raises(StateDictError, match="closed"):
        transport.publish(1, [("a", torch.ones(3).as_subclass(ClosesTransport))])
    assert list(tmp_path.iterdir()) == []


WRITER = """
import os, sys, torch
from pathlib import Path
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
SharedMemoryTransport("dead", root=Path(sys.argv[1])).publish(1, [("a", torch.ones(1000))])
print("published", flush=True)
sys.stdin.readline()
"""


def test_only_shards_of_a_killed_writer_are_cleaned_up(transport: SharedMemoryTransport, tmp_path: Path) -> None:
    mine = transport.publish(1, weights(1).items())
    other = tmp_path / "titan_rl-somebody-else"
    other.mkdir()
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"published\n"
        assert clean_dead_shards(tmp_path) == []  # its writer is alive
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=150)
    (removed,) = clean_dead_shards(tmp_path)
    assert "dead" in removed.name
    assert not removed.exists()
    assert set(tmp_path.iterdir()) == {Path(mine.shards[0].location).parent, other}
    assert_equal(pulled(mine), weights(1))


def test_writers_of_one_run_have_separate_folders(tmp_path: Path) -> None:
    folders = [shard_folder("same", tmp_path) for _ in range(2)]
    assert len(set(tmp_path.iterdir())) == 2
    assert clean_dead_shards(tmp_path) == []
    for folder in folders:
        folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_id", ["", "a/b", "../x"])
def test_run_id_must_be_a_file_name(run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id"):
        SharedMemoryTransport(run_id)


def test_keep_must_be_positive() -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        SharedMemoryTransport("test", keep=0)


def test_readers_racing_the_writer_see_whole_versions(transport: SharedMemoryTransport) -> None:
    assert race(lambda version: transport.publish(version, weights(version).items()), pulled, weights)


class Sequences(PublishedVersions):
    """Any order of publishing, releasing, pulling and dropping views, compared with a dict."""

    def __init__(self) -> None:
        super().__init__(SharedMemoryTransport("hypothesis", keep=2))
        self.reader = reader()
        self.held: list[tuple[dict[str, torch.Tensor], int]] = []

    @rule(size=st.integers(0, 5000), dtype=st.sampled_from(DTYPES))
    def publish(self, size: int, dtype: torch.dtype) -> None:
        version = len(self.manifests)
        self.publish_next({"x": torch.full((size,), version).to(dtype), "y": torch.tensor([[version]])})

    @precondition(lambda self: self.manifests)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        version = self.drawn(data)
        if version in self.available:
            self.held.append((dict(self.reader.pull(self.manifests[version])), version))
        else:
            with pytest.raises(StateDictError):
                self.reader.pull(self.manifests[version])

    @precondition(lambda self: self.held)
    @rule()
    def drop(self) -> None:
        self.held.pop(0)

    @invariant()
    def views_never_change(self) -> None:
        for found, version in self.held:
            assert_equal(found, self.contents[version])

    def teardown(self) -> None:
        self.transport.close()
        self.views_never_change()


TestSequences = Sequences.TestCase


def test_removed_folder_is_made_again_with_the_published_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """As by systemd at the logout of the user, unless RemoveIPC=no."""
    with SharedMemoryTransport("test", root=tmp_path) as transport:
        first, second = (transport.publish(version, weights(version).items()) for version in (1, 2))
        (folder,) = tmp_path.iterdir()
        shutil.rmtree(folder)
        third = transport.publish(3, weights(3).items())
        assert folder.is_dir()
        assert clean_dead_shards(tmp_path) == [], "its owner has the lock of the new folder"
        for version, manifest in ((2, second), (3, third)):
            assert_equal(pulled(manifest), weights(version))
        with pytest.raises(StateDictError, match="released"):
            pulled(first)
        for version in (4, 5, 6):
            assert_equal(pulled(transport.publish(version, weights(version).items())), weights(version))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("were removed, and are made again; systemd removes a user's shared memory") == 1


def test_removed_files_are_made_again(tmp_path: Path):
    with SharedMemoryTransport("test", root=tmp_path) as transport:
        manifests = {version: transport.publish(version, weights(version).items()) for version in range(4)}
        for path in next(tmp_path.iterdir()).iterdir():
            path.unlink()
        manifests[4] = transport.publish(4, weights(4).items())
        for version in (3, 4):
            assert_equal(pulled(manifests[version]), weights(version))


def test_folder_that_is_removed_while_a_version_is_written_is_made_again(tmp_path: Path):
    with SharedMemoryTransport("test", root=tmp_path) as transport:
        transport.publish(1, weights(1).items())

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            shutil.rmtree(next(tmp_path.iterdir()))
            yield from weights(2).items()

        assert_equal(pulled(transport.publish(2, tensors())), weights(2))


def test_folder_that_cannot_be_made_again_is_named_and_not_a_lack_of_room(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    with SharedMemoryTransport("test", root=root) as transport:
        transport.publish(1, weights(1).items())
        shutil.rmtree(root)
        with pytest.raises(StateDictError, match=r"no file can be made for version 2, .*No such file or directory"):
            transport.publish(2, weights(2).items())
