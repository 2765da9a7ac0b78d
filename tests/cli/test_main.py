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
    assert "unknown verb 'runn'; expected one of run, validate" in said(capsys, "runn", code=2)


@pytest.mark.parametrize("path", ["", "~nobody-of-that-name/c.yaml", "a\0b", "x" * 300, "nowhere.yaml"])
def test_a_config_that_cannot_be_there_is_refused(capsys, path):
    text = said(capsys, "validate", "--config", path, code=2)
    assert text.startswith("error: ") and text.count("\n") == 1


def test_validate_looks_at_what_kind_of_thing_a_path_is(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    file, folder = tmp_path / "file", tmp_path / "folder"
    wrong = {
        f"data.source={{kind: directory, path: {file}}}": "expected a folder",
        f"data.source={{kind: jsonl, path: {folder}}}": "expected a file",
        f"data.tasks={{kind: jsonl, path: {folder}}}": "expected a file",
        f"data.tokenizer.path={folder}": "expected a tokenizer.json",
        f"model.init_from={folder}": "expected a Hugging Face directory",
    }
    for override, expected in wrong.items():
        text = said(capsys, "validate", override, code=2)
        assert expected in text and text.count("\n") == 1
    (folder / "tokenizer.json").write_text("{}")
    said(
        capsys, "validate", f"data.tokenizer.path={folder}", f"data.source={{kind: directory, path: {folder}}}", code=0
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/full/log.txt"), "No space left on device: '/full/log.txt'"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: '/x'"),
        (OSError(errno.EFBIG, "File too large", "/x"), "File too large: '/x'"),
        (ValueError("OUT_OF_RANGE: Error writing /x: Failed writing to file"), "out of memory or disk"),
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


def test_a_report_that_cannot_be_written_is_one_message(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "report.html/x").mkdir(parents=True)
    assert "report.html" in said(capsys, "report", str(tmp_path), code=2)


@pytest.mark.parametrize("words", [("validate", "--bogus"), ("export", "run"), ("run", "--config"), ("report",)])
def test_arguments_that_cannot_be_are_refused_in_one_line(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and f"see tlt {words[0]} --help" in text and text.count("\n") == 1
