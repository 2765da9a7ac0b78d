"""Atomic files, and JSON that stays valid."""

import errno
import io
import json
import math
import os

import numpy as np
import pytest

from tlt_jax.observe import read_json, sweep_temporary, to_json, write_json, write_text_atomically
from tlt_jax.observe.files import append_whole


def test_replaces_whole_file_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "deep" / "report.html"
    write_text_atomically(path, "old, longer than the new")
    write_text_atomically(path, "new ✓\r\n")
    assert path.read_bytes() == "new ✓\r\n".encode()
    assert os.listdir(path.parent) == ["report.html"]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "lone surrogate \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


class Full(io.FileIO):
    """A file on a disk that has room for 4 bytes more."""

    room = 4

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(content[: self.room]))
        self.room -= written
        return written


def test_what_is_appended_to_a_full_disk_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"row\n")
    with Full(path, "a") as file, pytest.raises(OSError, match=r"No space left.*rows\.jsonl"):
        append_whole(file, b"another row\n")
    assert path.read_bytes() == b"row\n"
    with Full(path, "a") as file:
        append_whole(file, b"two\n")
    assert path.read_bytes() == b"row\ntwo\n"


def test_not_finite_becomes_null_at_any_depth():
    value = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": np.float32("nan"), "e": np.array([1.5, np.nan])}
    expected = {"a": None, "b": [None, {"c": None}], "d": None, "e": [1.5, None]}
    assert json.loads(to_json(value), parse_constant=pytest.fail) == expected


def test_plain_forms():
    value = {"i": np.int64(3), "f": np.float32(0.5), "t": (1, True), "n": None, 4: "key", "s": "\ud800 ok"}
    assert json.loads(to_json(value)) == {"i": 3, "f": 0.5, "t": [1, True], "n": None, "4": "key", "s": "\ud800 ok"}
    with pytest.raises(TypeError, match=r"object"):
        to_json(object())


def test_read_json_names_the_file(tmp_path):
    write_json(tmp_path / "good.json", {"x": 1})
    assert read_json(tmp_path / "good.json") == {"x": 1}
    (tmp_path / "bad.json").write_text('{"x": ')
    with pytest.raises(ValueError, match=r"bad.json"):
        read_json(tmp_path / "bad.json")


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / ".report.json.17.tmp").write_text("{")
    (tmp_path / "report.json").write_text("{}")
    sweep_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
