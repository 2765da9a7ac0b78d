"""`prepare`: what comes out, what the digest depends on, determinism, damage and two processes at once."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tlt_jax.config import ConfigError
from tlt_jax.config.data_sections import DataConfig, SourceConfig, TasksConfig, TokenizerConfig
from tlt_jax.data import prepare
from tlt_jax.data.packing import ROW_FIELDS
from tlt_jax.text import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CODE = 'def f{i}(x):\n    """Adds {i} to é."""\n    # step {i}\n    return x + {i}\n'


def quiet(label, fraction):
    assert isinstance(label, str) and 0 <= fraction <= 1


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(30):
        (tmp_path / "corpus" / f"{i:02}.py").write_text(CODE.format(i=i), encoding="utf-8")
    (tmp_path / "corpus" / "copy.py").write_text(CODE.format(i=29), encoding="utf-8")
    (tmp_path / "corpus" / "binary.py").write_bytes(b"\0")
    return tmp_path


def config_of(folder, **settings):
    settings = {
        "tokenizer": TokenizerConfig(vocab_size=300),
        "held_out_fraction": 0.2,
        "context_length": 16,
        **settings,
    }
    source = SourceConfig(kind="directory", path=str(folder / "corpus"))
    return DataConfig(**{"source": source, "cache_dir": str(folder / "cache"), **settings})


def fingerprint(corpus):
    digest = hashlib.sha256(corpus.tokenizer.json.encode())
    for rows in (corpus.train, corpus.held_out):
        for name in ROW_FIELDS:
            digest.update(getattr(rows, name).tobytes())
    for tasks in (corpus.train_tasks, corpus.held_out_tasks):
        for array in [*tasks.prompts, *tasks.completions]:
            digest.update(array.tobytes() + b"|")
    summary = {key: value for key, value in corpus.summary.items() if key != "cached"}
    digest.update(json.dumps([corpus.bytes_per_token, summary], sort_keys=True).encode())
    return digest.hexdigest()


def test_what_comes_out(folder):
    labels = []
    corpus = prepare(config_of(folder), 0, None, lambda label, fraction: labels.append(label))
    summary = corpus.summary
    assert (summary["files"], summary["duplicates"], summary["skipped"], summary["skipped_binary"]) == (30, 1, 1, 1)
    assert summary["train_files"] + summary["held_out_files"] == summary["functions"] == 30
    assert len(corpus.train_tasks) + len(corpus.held_out_tasks) == 30
    assert summary["train_tasks"] == len(corpus.train_tasks) == summary["train_files"]
    assert summary["cached"] is False and len(summary["digest"]) == 64
    assert {"reading", "training the tokenizer", "encoding", "packing"} <= set(labels) and len(labels) > 30
    assert json.loads(json.dumps(summary)) == summary
    eos = corpus.tokenizer.eos_id
    for rows, files in [(corpus.train, summary["train_files"]), (corpus.held_out, summary["held_out_files"])]:
        assert ((rows.targets == eos) & (rows.weights == 1)).sum() == files  # one EOS a document, and it is trained
        assert ((rows.tokens == corpus.tokenizer.bos_id) & (rows.segments > 0)).sum() == files
        assert rows.tokens.shape[1] == 16


def test_bytes_per_token_by_hand(folder):
    corpus = prepare(config_of(folder), 0, None, quiet)
    text = corpus.tokenizer.decode(corpus.held_out.tokens[corpus.held_out.segments > 0])
    targets = corpus.held_out.weights.sum()
    assert corpus.bytes_per_token == len(text.encode("utf-8")) / targets
    assert corpus.summary["held_out_tokens"] == targets + corpus.summary["held_out_files"]


def test_the_tokenizer_sees_the_train_split_alone(folder):
    corpus = prepare(config_of(folder), 0, None, quiet)
    real = corpus.train.tokens[corpus.train.segments > 0]
    texts, start = [], 0
    for end in np.flatnonzero(real == corpus.tokenizer.eos_id):
        texts.append(corpus.tokenizer.decode(real[start : end + 1]))
        start = end + 1
    assert train_tokenizer(texts, 300).json == corpus.tokenizer.json


def test_cached_is_the_same(folder):
    first = prepare(config_of(folder), 0, None, quiet)
    second = prepare(config_of(folder), 0, None, quiet)
    assert (first.summary["cached"], second.summary["cached"]) == (False, True)
    assert fingerprint(first) == fingerprint(second)
    names = [path.name for path in (folder / "cache" / first.summary["digest"]).iterdir()]
    assert {Path(name).suffix for name in names} == {".npy", ".json"}


def test_the_same_in_every_process(folder):
    expected = fingerprint(prepare(config_of(folder), 0, None, quiet))
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; from pathlib import Path;"
        "from test_prepare import *;"
        f"config = config_of(Path({str(folder)!r}), cache_dir=sys.argv[1]);"
        "print(fingerprint(prepare(config, 0, None, quiet)))"
    )
    for seed, cache in [("1", "one"), ("2", "two")]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        command = [sys.executable, "-c", code, str(folder / cache)]
        assert (
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
            == expected
        )


def test_two_processes_at_once(folder):
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; from pathlib import Path;"
        "from test_prepare import *;"
        f"print(fingerprint(prepare(config_of(Path({str(folder)!r})), 0, None, quiet)))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(outputs) == 1
    assert len(list((folder / "cache").iterdir())) == 1


def test_digest_depends_on_what_matters(folder, tmp_path):
    def digest(seed=0, path=None, **settings):
        return prepare(config_of(folder, **settings), seed, path, quiet).summary["digest"]

    base = digest()
    assert digest(cache_dir=str(folder / "elsewhere")) == base
    secret = SourceConfig(kind="directory", path=str(folder / "corpus"), hub_token="secret")
    assert digest(source=secret) == base
    changed = [digest(seed=1), digest(context_length=32), digest(max_documents=20)]
    train_tokenizer(["other text"] * 9, 270).save(tmp_path / "tokenizer")
    changed.append(digest(path=str(tmp_path / "tokenizer")))
    train_tokenizer(["another text"] * 9, 270).save(tmp_path / "tokenizer")  # the same path, other bytes
    changed.append(digest(path=str(tmp_path / "tokenizer")))
    (folder / "corpus" / "00.py").write_text("x = 1\n")
    changed.append(digest())
    assert len({base, *changed}) == len(changed) + 1


def test_digest_depends_on_the_file_of_tasks(folder):
    path = folder / "pairs.jsonl"
    tasks = TasksConfig(kind="jsonl", path=str(path))
    digests = []
    for answer in ("c", "d"):
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "completion": answer}) + "\n" for i in range(9)))
        corpus = prepare(config_of(folder, tasks=tasks), 0, None, quiet)
        assert len(corpus.train_tasks) + len(corpus.held_out_tasks) == 9
        digests.append(corpus.summary["digest"])
    assert digests[0] != digests[1]


def test_a_given_tokenizer_is_used_and_the_configs_goes_first(folder, tmp_path):
    for name, text in [("a", "aaaa"), ("b", "bbbb")]:
        train_tokenizer([text] * 9, 260).save(tmp_path / name)
    theirs = prepare(config_of(folder), 0, str(tmp_path / "a"), quiet).tokenizer
    assert theirs.json == (tmp_path / "a" / "tokenizer.json").read_text()
    config = config_of(folder, tokenizer=TokenizerConfig(path=str(tmp_path / "b" / "tokenizer.json")))
    assert (
        prepare(config, 0, str(tmp_path / "a"), quiet).tokenizer.json == (tmp_path / "b" / "tokenizer.json").read_text()
    )


def test_a_damaged_entry_is_prepared_again(folder, caplog):
    first = prepare(config_of(folder), 0, None, quiet)
    path = folder / "cache" / first.summary["digest"] / "train.tokens.npy"
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "tlt_jax"):
        second = prepare(config_of(folder), 0, None, quiet)
    assert "is damaged" in caplog.text and second.summary["cached"] is False
    assert fingerprint(first) == fingerprint(second)
    assert prepare(config_of(folder), 0, None, quiet).summary["cached"] is True


def test_max_documents(folder):
    assert prepare(config_of(folder, max_documents=5), 0, None, quiet).summary["files"] == 5


def test_user_errors(folder):
    with pytest.raises(ConfigError, match="1 documents found; expected at least 2"):
        prepare(config_of(folder, max_documents=1), 0, None, quiet)
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir is"):
        prepare(config_of(folder, cache_dir=str(folder / "file")), 0, None, quiet)
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(config_of(folder), 0, "no/such/tokenizer.json", quiet)


def test_a_corpus_without_functions_has_no_tasks(folder):
    for path in (folder / "corpus").glob("*.py"):
        path.write_text(f"prose about {path.name}, (and more.\n")
    corpus = prepare(config_of(folder), 0, None, quiet)
    assert len(corpus.train_tasks) == len(corpus.held_out_tasks) == 0 and len(corpus.train)
