"""Bad inputs: each ends with exit code 2 and one message that names what is wrong, and nothing that was there is lost.

One table: config (and, in support/bad_overrides.py, its overrides), data, tokenizer, model, run directory, environment,
and the words of the verbs. What a row breaks lies in a folder of its own, with a finished run (runs/done), one that
stands in the middle (runs/standing), a model (model) and a corpus, none of which may change but for its log.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from support import program
from support.bad_data import CORPUS, DATA, MODELS, TOKENIZERS
from support.bad_overrides import OVERRIDES
from support.broken import Broken, Row, each, nothing, remove, resume, run, write, write_rows

from tlt_jax.main import main
from tlt_jax.observe import close_logging

BASE = {
    "run": {"name": "done", "output_dir": "runs", "trackers": []},
    "stages": ["pretrain"],
    "budget": {"unit": "steps", "total": 3},
    "model": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 24}
    | {"exit_layer": 1, "exit_rank": 4},
    "data": {
        "source": {"kind": "jsonl", "path": "corpus.jsonl"},
        "tokenizer": {"vocab_size": 300},
        "context_length": 32,
        "held_out_fraction": 0.3,
        "cache_dir": "data",
        "tasks": {"max_prompt_tokens": 8, "max_completion_tokens": 8},
    },
    "pretrain": {"batch_size": 4, "eval_every": 100, "eval_rows": 4, "exit_weight": 0, "optimizer": {"name": "adamw"}},
    "finetune": {"warmup": {"batch_size": 4}},
    "align": {"reward_model": {"batch_size": 4}},
    "checkpoint": {"every_steps": 1, "every_seconds": None, "keep": 10},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory, compilation_cache) -> Path:
    """The folder that every row gets a copy of."""
    folder = tmp_path_factory.mktemp("bench")
    config = BASE | {"device": {"compilation_cache": compilation_cache}}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    write_rows("corpus.jsonl", [{"text": text} for text in CORPUS], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "--config", "base.yaml"]) == 0
    shutil.copytree(folder / "runs/done/export", folder / "model")
    standing = shutil.copytree(folder / "runs/done", folder / "runs/standing")
    for checkpoint in (3, 4):  # as after a kill: there is a row of a step that no checkpoint holds
        shutil.rmtree(standing / f"checkpoints/steps/{checkpoint}")
        (standing / f"checkpoints/manifests/{checkpoint}.json").unlink()
    results = json.loads((standing / "results.json").read_text())
    (standing / "results.json").write_text(json.dumps(results | {"finished": False}))
    return folder


# Config files. {name: (content, what is said)}
FILES = {
    "a list": ("- a\n- b\n", ["expected `key: value` pairs", "list"]),
    "words": ("just words", ["expected `key: value` pairs", "str"]),
    "a number": ("3", ["expected `key: value` pairs", "int"]),
    "a list that does not end": ("a: [1\n", ["cannot be read as YAML"]),
    "two colons": ("a: b: c\n", ["cannot be read as YAML"]),
    "an object of Python's": ("run: !!python/object/apply:os.system [ls]\n", ["cannot be read as YAML"]),
    "a list as a key": ("? [a, b]\n: 1\n", ["['a', 'b'] stands for a key", "expected a name"]),
    "a tab": ("\tx: 1", ["cannot be read as YAML"]),
    "bytes that are no UTF-8": (b"run: {name: \xff\xfe}\n", ["cannot be read as YAML"]),
    "UTF-16": ("run: {name: a}\n".encode("utf-16"), ["cannot be read as YAML", "utf-8"]),
    "a key twice": ("run: {seed: 1}\nmodel:\n  width: 1\n  layers: 2\n  width: 3\n", ["'width'", "twice", "line 3"]),
}


def flip_all(_: Broken) -> None:
    """One bit in the largest file of each checkpoint."""
    for step in Path("runs/standing/checkpoints/steps").iterdir():
        largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)


def lock(broken: Broken) -> None:
    handle = os.open("runs/standing/.lock", os.O_WRONLY | os.O_CREAT)
    broken.stack.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX)


RUN = "runs/standing"
RUNS = {
    "all checkpoints damaged": Row(flip_all, resume(), ["none of the checkpoints", RUN, "verifies"]),
    "all manifests gone": Row(
        remove(f"{RUN}/checkpoints/manifests"), resume(), ["none of the checkpoints", "verifies"]
    ),
    "a finished run without checkpoints": Row(
        remove("runs/done/checkpoints"), run(), ["results.json", "runs/done", "there is no checkpoint"]
    ),
    "a row of garbage": Row(
        lambda _: Path(f"{RUN}/metrics.jsonl").write_text("garbage\n" + Path(f"{RUN}/metrics.jsonl").read_text()),
        resume(),
        [f"{RUN}/metrics.jsonl, line 1", "not a JSON object"],
    ),
    "a sample of garbage": Row(
        write(f"{RUN}/samples.jsonl", 'garbage\n{"step": 1}\n'),
        resume(),
        [f"{RUN}/samples.jsonl, line 1", "not a JSON object"],
    ),
    "a config of garbage": Row(write(f"{RUN}/config.yaml", "a: ["), resume(), [f"{RUN}/config.yaml", "YAML"]),
    "told not to resume": Row(nothing, resume("run.resume=never"), ["`run.resume`", RUN]),
    "another seed": Row(nothing, resume("run.seed=3"), [RUN, "began with other data", "`run.seed`"]),
    "other documents": Row(
        lambda _: write_rows("corpus.jsonl", [{"text": text} for text in CORPUS[1:]]), resume(), ["other data"]
    ),
    "another shape": Row(nothing, resume("model.rope_theta=5e3"), [RUN, "`model.rope_theta` was 10000.0, now 5000.0"]),
    "another optimiser": Row(
        nothing, resume("pretrain.optimizer.name=lion"), ["checkpoint 2", "does not fit the config"]
    ),
    "another batch": Row(
        nothing, resume("pretrain.batch_size=8"), ["`pretrain.batch_size`: the run began with 4, now 8"]
    ),
    "another run in it": Row(lock, resume(), [RUN, "in use by another run"]),
    "a file in its place": Row(write("runs/new", "mine"), run("run.name=new"), ["`run.output_dir`", "runs/new"]),
    "a file for the output": Row(nothing, run("run.output_dir=corpus.jsonl"), ["`run.output_dir`", "corpus.jsonl"]),
    "an export of nothing": Row(nothing, ["export", "nowhere", "exported"], ["'nowhere'", "no run here"]),
    "an export over files of somebody": Row(
        write("model/notes.txt", "mine"), ["export", "runs/done", "model"], ["notes.txt", "no export writes"]
    ),
    "an export onto a file": Row(nothing, ["export", "runs/done", "corpus.jsonl"], ["corpus.jsonl", "is a file"]),
    "an export of damaged checkpoints": Row(flip_all, ["export", RUN, "exported"], ["none of the checkpoints", RUN]),
    "an export without its tokenizer": Row(
        remove(f"{RUN}/tokenizer.json"), ["export", RUN, "exported"], [f"{RUN}/tokenizer.json", "does not exist"]
    ),
    "an export whose config is garbage": Row(
        write(f"{RUN}/config.yaml", "run: {nam: a}"), ["export", RUN, "exported"], ["`run.nam`"]
    ),
    "a report of nothing": Row(nothing, ["report", "nowhere"], ["nowhere", "no run here"]),
    "a report of a file": Row(nothing, ["report", "corpus.jsonl"], ["corpus.jsonl", "no run here"]),
    "a report that cannot be written": Row(
        each(remove(f"{RUN}/report.html"), write(f"{RUN}/report.html/x", "mine")), ["report", RUN], ["report.html"]
    ),
}


def take_a_port(broken: Broken) -> None:
    taken = broken.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    broken.port = taken.getsockname()[1]


def free_port(broken: Broken) -> None:
    broken.port = program.free_ports()


def company(address: str) -> list[str]:
    return run(
        "run.name=new", f"device.coordinator={address}", "device.processes=2", "device.process=0",
        "device.join_seconds=0.2",
    )  # fmt: skip


ENVIRONMENT = {
    "devices that the mesh does not make up": Row(
        nothing, run("device.mesh.data=3"), ["`device.mesh`", "product of 1"]
    ),
    "other devices than JAX runs with": Row(nothing, run("device.cpu_devices=2"), ["`device.cpu_devices` is 2"]),
    "a batch that the devices do not divide": Row(
        nothing, run("device.cpu_devices=2", "pretrain.batch_size=3"), ["`pretrain.batch_size", "a multiple of 2"], {}
    ),
    "too little memory": Row(nothing, run("run.name=new", "model.hidden=2147483647"), ["GiB that are here"]),
    "no such platform here": Row(
        nothing, run("run.name=new", "device.platform=tpu"), ["`device.platform`", "'tpu'"], {}
    ),
    "a variable that names no platform": Row(
        nothing, run("run.name=new"), ["`device.platform`", "nonsense"], {"JAX_PLATFORMS": "nonsense"}
    ),
    "64-bit types": Row(nothing, run("run.name=new"), ["JAX_ENABLE_X64", "32-bit"], {"JAX_ENABLE_X64": "1"}),
    "a variable that JAX cannot read": Row(
        nothing, run("run.name=new"), ["JAX does not start", "'maybe'", "JAX_ENABLE_X64"], {"JAX_ENABLE_X64": "maybe"}
    ),
    "a variable with a flag whose value XLA cannot read": Row(
        nothing,
        run("run.name=new"),
        ["XLA_FLAGS", "--xla_cpu_enable_fast_math=maybe", "Couldn't interpret"],
        {"XLA_FLAGS": "--xla_cpu_enable_fast_math=maybe"},
    ),
    "a flag of the config's whose value XLA cannot read": Row(
        nothing,
        run("run.name=new", "device.xla_flags=--xla_cpu_enable_fast_math=maybe"),
        ["`device.xla_flags`", "--xla_cpu_enable_fast_math=maybe", "Couldn't interpret"],
        {},
    ),
    "a variable with a flag that XLA does not know": Row(
        nothing, run("run.name=new"), ["XLA_FLAGS", "--xla_nonsense=1"], {"XLA_FLAGS": "--xla_nonsense=1"}
    ),
    "a file for the compilation cache": Row(
        nothing, run("device.compilation_cache=corpus.jsonl/x"), ["`device.compilation_cache`", "corpus.jsonl/x"]
    ),
    "a port that is taken": Row(take_a_port, company("127.0.0.1:{port}"), ["port {port} of 127.0.0.1 cannot be had"]),
    "an address without a port": Row(nothing, company("localhost"), ["`device.coordinator`", "host:port"]),
    "a process that does not come": Row(free_port, company("127.0.0.1:{port}"), ["process 1 did not come within 0.2"]),
}
VERBS = {
    "an unknown verb": Row(nothing, ["runn"], ["unknown verb 'runn'", "run, validate", "did you mean 'run'"]),
    "an unknown option": Row(nothing, ["validate", "--bogus"], ["--bogus", "tlt validate --help"]),
    "too few arguments for export": Row(nothing, ["export", "run"], ["FOLDER", "tlt export --help"]),
    "no argument for report": Row(nothing, ["report"], ["RUN_DIR", "tlt report --help"]),
    "--config without a file": Row(nothing, ["run", "--config"], ["--config", "tlt run --help"]),
    "no such config": Row(nothing, ["run", "--config", "bas.yaml"], ["'bas.yaml'", "did you mean 'base.yaml'"]),
    "a folder for a config": Row(nothing, ["validate", "--config", "runs"], ["'runs'", "is no regular file"]),
    "a pipe for a config": Row(
        lambda _: os.mkfifo("pipe"), ["validate", "--config", "pipe"], ["'pipe'", "is no regular file"]
    ),
    "an empty path": Row(nothing, ["validate", "--config", ""], ["--config", "expected a path"]),
    "nobody's home": Row(nothing, ["validate", "--config", "~nobody-of-that-name/c"], ["no such user's home"]),
    "a zero byte in a path": Row(nothing, ["validate", "--config", "a\0b"], ["--config", "zero bytes"]),
    "too long a path": Row(nothing, ["validate", "--config", "x" * 300], ["cannot be looked for"]),
    "a path in export that cannot be": Row(nothing, ["export", "runs/done", "a\0b"], ["FOLDER", "zero bytes"]),
    "no such kind of cluster": Row(nothing, ["launch", "--target", "pbs"], ["--target", "'pbs'", "slurm"]),
    "a time that SLURM does not take": Row(
        nothing, ["launch", "--target", "slurm", "--time", "1h"], ["--time", "'1h'", "12:00:00"]
    ),
    "no time at all": Row(nothing, ["launch", "--target", "slurm", "--time", "0:00"], ["--time", "'0:00'"]),
    "a partition of two lines": Row(
        nothing, ["launch", "--target", "slurm", "--partition", "a\nb"], ["--partition", "letters, digits"]
    ),
    "more nodes than there are": Row(
        nothing, ["launch", "--target", "slurm", "--nodes", "9" * 5000], ["--nodes", "0 to 999999"]
    ),
    "a launch of a bad config": Row(nothing, ["launch", "--target", "slurm", "run.sede=1"], ["`run.sede`"]),
    "an override below a value": Row(
        nothing, run("run.name.first=a"), ["'run.name.first=a'", "`run.name` is a value, not a section"]
    ),
    "a plan of a model that is not there": Row(
        nothing, run("--dry-run", "model.init_from=nowhere"), ["`model.init_from`", "'nowhere'"]
    ),
    "a plan for other devices": Row(nothing, run("--dry-run", "device.mesh.data=3"), ["`device.mesh`"]),
}
VALIDATED = {
    "a file for a folder": (["data.source={kind: directory, path: corpus.jsonl}"], ["expected a folder"]),
    "a folder for a file": (["data.source={kind: jsonl, path: runs}"], ["data.source.path", "expected a file"]),
    "a folder of tasks": (["data.tasks={kind: jsonl, path: runs}"], ["data.tasks.path", "expected a file"]),
    "a folder without a tokenizer": (["data.tokenizer.path=runs"], ["`data.tokenizer.path`", "a tokenizer.json"]),
    "a folder without a model": (["model.init_from=data"], ["`model.init_from`", "a Hugging Face directory"]),
    "shares that add up to nothing": (["stages=[pretrain]", "budget.pretrain=0"], ["budget", "add up to 0"]),
}
TABLE = {
    **{
        f"config: {n}": Row(write("c.yaml", c), ["validate", "--config", "c.yaml"], said)
        for n, (c, said) in FILES.items()
    },
    **{f"override: {override}": Row(nothing, ["validate", override], said) for override, said in OVERRIDES.items()},
    **{f"validate: {n}": Row(nothing, ["validate", *words], said) for n, (words, said) in VALIDATED.items()},
    **{f"data: {name}": row for name, row in DATA.items()},
    **{f"tokenizer: {name}": row for name, row in TOKENIZERS.items()},
    **{f"model: {name}": row for name, row in MODELS.items()},
    **{f"run: {name}": row for name, row in RUNS.items()},
    **{f"environment: {name}": row for name, row in ENVIRONMENT.items()},
    **{f"verb: {name}": row for name, row in VERBS.items()},
}


def contents() -> dict[str, bytes]:
    """{name: bytes} of every file below the current folder."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.fixture
def own_copy(bench, tmp_path, monkeypatch) -> None:
    """A copy of the bench as the current folder."""
    shutil.copytree(bench, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_the_table_is_long_enough():
    assert len(TABLE) - len(OVERRIDES) >= 60


@pytest.mark.parametrize("name", TABLE)
def test_a_bad_input_is_one_message_and_nothing_is_lost(own_copy, capsys, name):
    row = TABLE[name]
    with ExitStack() as stack:
        broken = Broken(stack)
        row.breaks(broken)
        before = contents()
        words, said = ([text.replace("{port}", str(broken.port)) for text in texts] for texts in (row.words, row.said))
        capsys.readouterr()
        code, out, err = answer(words, capsys) if row.variables is None else process_answer(words, row.variables)
        after = contents()
    assert code == 2, out + err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "Traceback" not in out + err and "error: " not in out and len(err) < 2000
    for part in said:
        assert part in err, err
    for path, content in before.items():
        kept = after.get(path)
        assert kept == content or (Path(path).name == "log.txt" and kept and kept.startswith(content)), path


def answer(words: list[str], capsys) -> tuple[int, str, str]:
    """(exit code, output, errors) of the program in this process."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    finally:
        close_logging()
    out, err = capsys.readouterr()
    return code, out, err


def process_answer(words: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """The same of a process of its own, with these variables."""
    environment = {**os.environ, "PYTHONPATH": str(program.ROOT), **variables}
    command = [sys.executable, "-m", "tlt_jax.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr
