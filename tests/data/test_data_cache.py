"""The cache of prepared data: whole or absent, checked, safe for two at once."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from tlt_jax.data import cache


def fill(path):
    cache.save_ragged(path, "some", [np.arange(3), np.zeros(0), np.arange(2)])


def test_written_and_read(tmp_path):
    assert cache.check_entry(tmp_path, "abc") is None
    cache.write_entry(tmp_path, "abc", fill)
    entry = cache.check_entry(tmp_path, "abc")
    assert [array.tolist() for array in cache.load_ragged(entry, "some")] == [[0, 1, 2], [], [0, 1]]
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]


def truncate(entry):
    path = entry / "some.tokens.npy"
    path.write_bytes(path.read_bytes()[:-4])


def flip(entry):
    path = entry / "some.tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(entry):
    (entry / "some.tokens.npy").unlink()


def spoil_manifest(entry):
    (entry / cache.MANIFEST).write_text('{"some')


def remove_manifest(entry):
    (entry / cache.MANIFEST).unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove, spoil_manifest, remove_manifest])
def test_a_damaged_entry_is_logged_and_removed(tmp_path, caplog, damage):
    cache.write_entry(tmp_path, "abc", fill)
    damage(tmp_path / "abc")
    with caplog.at_level(logging.WARNING, "tlt_jax"):
        assert cache.check_entry(tmp_path, "abc") is None
    assert "is damaged" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_failure_while_filling_leaves_nothing(tmp_path):
    def fail(path):
        fill(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.write_entry(tmp_path, "abc", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_writers_keeps_the_firsts_entry(tmp_path):
    def slow(path):
        cache.write_entry(tmp_path, "abc", fill)  # another process gets there first
        fill(path)

    cache.write_entry(tmp_path, "abc", slow)
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    assert cache.check_entry(tmp_path, "abc")


def test_sweep_takes_what_dead_processes_left(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = cache._host()
    gone = [f"abc.tmp-{host}-{dead.pid}-1", "abc.tmp-otherhost-1-2"]
    kept = [f"abc.tmp-{host}-{os.getpid()}-1", "abc.tmp-otherhost-1-1", "abc", "my.tmp-notes-a-b"]
    for name in [*gone, *kept]:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / gone[1], (0, 0))
    cache.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
