"""The program's words and exit codes, in this process: what needs no run."""

import errno
import json

import pytest

from tlt_jax import __version__
from tlt_jax.cli import validate
from tlt_jax.main import main


def said(capsys, *words: str, code: int) -> str:
    assert main(words) == code
    out = capsys.readouterr()
    return out.out + out.err


def test_the_version_and_the_verbs(capsys):
    assert __version__ in said(capsys, "--version", code=0)
    for words in ((), ("--help",)):
        assert "validate" in said(capsys, *words, code=0)


def test_validate_takes_files_and_folders_that_are_there(capsys, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    given = [f"data.tokenizer.path={tmp_path}", f"data.source={{kind: directory, path: {tmp_path}}}"]
    said(capsys, "validate", *given, code=0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/full/log.txt"), "No space left on device: '/full/log.txt'"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: '/x'"),
        (OSError(errno.EFBIG, "File too large", "/x"), "File too large: '/x'"),
        (ValueError("OUT_OF_RANGE: Error writing /x: Failed writing to file"), "the disk is full"),
        (MemoryError("Unable to allocate 8 EiB"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte"), "out of memory"),
    ],
)
def test_what_the_machine_does_not_allow_is_one_message(capsys, monkeypatch, error, words):
    def fail(_):
        raise error

    monkeypatch.setattr(validate, "main", fail)
    text = said(capsys, "validate", code=2)
    assert text.startswith("error: ") and words in text and text.count("\n") == 1


def test_our_own_faults_are_1_with_a_traceback(capsys, monkeypatch, caplog):
    def fail(_):
        raise KeyError("x")

    monkeypatch.setattr(validate, "main", fail)
    said(capsys, "validate", code=1)
    assert "Traceback" in caplog.text


def test_an_interruption_is_130(monkeypatch):
    def fail(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(validate, "main", fail)
    assert main(["validate"]) == 130


ODD = [
    "[]",
    "3",
    '{"phases": 3}',
    '{"phases": [3, {"stage": [], "phase": {}}], "facts": [1]}',
    '{"phases": [{"stage": "align", "phase": "ppo", "before": [1], "time": {"a": "b"}}]}',
    "[" * 100_000,
    '{"finished": true, "facts": {"data": [[], {}], "versions": 3, "started": "x"}}',
]


@pytest.mark.parametrize("results", ODD)
@pytest.mark.parametrize(
    "config",
    [
        "run: !!bool x\n",
        "[" * 20_000,
        "stages: &a [*a, [b]]\n",
        "run: [a]\nstages: 3\nsampling: 1\n",
        "- a\n",
        "run: {name: [a]}\n",
    ],
)
def test_a_report_is_made_of_whatever_is_there(capsys, tmp_path, results, config):
    (tmp_path / "results.json").write_text(results)
    (tmp_path / "config.yaml").write_text(config)
    rows = [{"step": 1, "phase": "ppo", "rl/reward": "high"}, {"step": 2, "phase": [], "rl/reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said(capsys, "report", str(tmp_path), code=0)
    assert "2 entries hold values of another kind" in (tmp_path / "report.html").read_text()
