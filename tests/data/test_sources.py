"""Sources: what is read, what is skipped and counted, and what stops with a message."""

import gzip
import json
import sys
import types
import typing

import pytest

from tlt_jax.config import ConfigError
from tlt_jax.config.base import SourceKind
from tlt_jax.config.data_sections import SourceConfig
from tlt_jax.data.sources import SOURCES, read_documents


def jsonl(path, **settings):
    return SourceConfig(kind="jsonl", path=str(path), **settings)


def test_registry_holds_the_kinds_that_the_config_offers():
    assert set(SOURCES) == set(typing.get_args(SourceKind))


def test_stdlib_is_read_without_tests_and_packages():
    documents, skipped = read_documents(SourceConfig(kind="stdlib"))
    names = [document.name for document in documents]
    assert names == sorted(names) and len(set(names)) == len(names) > 300
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]
    assert set(skipped) == {"unreadable", "empty"}


def test_stdlib_honours_declared_encodings(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "nonsense.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_bytes(b"x = 1\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    documents, skipped = read_documents(SourceConfig(kind="stdlib"))
    assert [(d.name, d.text) for d in documents] == [("latin.py", "# -*- coding: latin-1 -*-\nx = 'é'\n")]
    assert skipped == {"unreadable": 2, "empty": 1}


def test_directory(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b.py": b"b",
        "sub/a.py": b"\xef\xbb\xbfa",
        "c.txt": b"c",
        "bin.py": b"x\0y",
        "bad.py": b"\xff",
        ".git/h.py": b"h",
    }.items():
        (tmp_path / name).write_bytes(content)
    documents, skipped = read_documents(SourceConfig(kind="directory", path=str(tmp_path), pattern="**/*.py"))
    assert [(d.name, d.text) for d in documents] == [("b.py", "b"), ("sub/a.py", "a")]
    assert skipped == {"binary": 1, "unreadable": 1, "empty": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "directory", "path": "no/such/folder"}, "data.source.path is 'no/such/folder'"),
        ({"kind": "jsonl", "path": "no/such/file"}, "data.source.path is 'no/such/file'"),
    ],
)
def test_missing_path(settings, message):
    with pytest.raises(ConfigError, match=message):
        read_documents(SourceConfig(**settings))


def test_runs_below_a_directory_are_no_documents(tmp_path):
    """Or a run whose directory lies there would not find its data again."""
    runs = ("runs/old/log.txt", "runs/old/.lock", "runs/old/export/config.json")
    prepared = ("data/12ab/manifest.json", "data/12ab/meta.json", "data/12ab/tokenizer.json")
    for name in ("a.txt", "b/c.txt", "d/log.txt", *runs, *prepared):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    documents, _ = read_documents(SourceConfig(kind="directory", path=str(tmp_path)))
    assert [document.name for document in documents] == ["a.txt", "b/c.txt", "d/log.txt"]


def test_empty_folder_and_bad_pattern(tmp_path):
    with pytest.raises(ConfigError, match="no document found"):
        read_documents(SourceConfig(kind="directory", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"data\.source.pattern is '/x'"):
        read_documents(SourceConfig(kind="directory", path=str(tmp_path), pattern="/x"))


def test_jsonl_line_ends_blank_lines_and_names(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "t\\u2028wo\xe2\x80\xa8!", "more": 1}\n\n{"text": "three"}'
    )
    documents, skipped = read_documents(jsonl(path))
    assert [(d.name, d.text) for d in documents] == [
        ("a.jsonl:1", "one"), ("a.jsonl:4", "t\u2028wo\u2028!"), ("a.jsonl:6", "three"),
    ]  # fmt: skip
    assert skipped == {"bad_lines": 0, "empty": 0}


def test_jsonl_empty_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="no document found"):
        read_documents(jsonl(tmp_path / "a.jsonl"))


BAD = {
    "cut": (b'{"text": "x', "not JSON"),
    "two on a line": (b'{"text": "x"} {"text": "y"}', "not JSON"),
    "list": (b'["text"]', "expected an object, got list"),
    "missing": (b'{"body": "x"}', "no field 'text' (`data.source.text_field`); it has body"),
    "null": (b'{"text": null}', "field 'text' (`data.source.text_field`) is null"),
    "number": (b'{"text": 3}', "field 'text' (`data.source.text_field`) is int"),
    "not utf-8": (b'{"text": "\xff"}', "not JSON"),
    "surrogate": (b'{"text": "\\ud800"}', "lone surrogate"),
    "deep": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_jsonl_bad_line(tmp_path, case):
    line, message = BAD[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: ") as caught:
        read_documents(jsonl(path))
    assert message in str(caught.value)
    documents, skipped = read_documents(jsonl(path, on_bad_line="skip"))
    assert [d.text for d in documents] == ["ok", "fine"]
    assert skipped["bad_lines"] == 1


def test_jsonl_long_line_and_gzip(tmp_path):
    text = "word " * 2_000_000  # 10 MB
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(json.dumps({"content": text}) + "\n" + json.dumps({"content": "short"}) + "\n")
    documents, _ = read_documents(jsonl(path, text_field="content"))
    assert [len(d.text) for d in documents] == [10_000_000, 5]


def test_jsonl_broken_gzip(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_documents(jsonl(tmp_path / "a.jsonl.gz"))


def test_hub(monkeypatch):
    asked = {}

    def load_dataset(name, split, token):
        asked.update(name=name, split=split, token=token)
        return [{"text": "one"}, {"text": None}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = SourceConfig(kind="hub", hub_name="some/set", hub_split="dev", hub_token="secret", on_bad_line="skip")
    documents, skipped = read_documents(source)
    assert [(d.name, d.text) for d in documents] == [("dev:0", "one"), ("dev:2", "two")]
    assert skipped["bad_lines"] == 1
    assert asked == {"name": "some/set", "split": "dev", "token": "secret"}
    with pytest.raises(ConfigError, match=r"some/set, record 1: field 'text' \(`data.source.text_field`\) is null"):
        read_documents(SourceConfig(kind="hub", hub_name="some/set"))


def test_hub_errors_do_not_tell_the_token(monkeypatch):
    def load_dataset(name, split, token):
        raise RuntimeError(f"401 for {token}")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigError, match=r"data\.source.hub_name is 'some/set'") as caught:
        read_documents(SourceConfig(kind="hub", hub_name="some/set", hub_token="secret"))
    assert "secret" not in str(caught.value)


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="extra `hub`"):
        read_documents(SourceConfig(kind="hub", hub_name="some/set"))
