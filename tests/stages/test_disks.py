"""Disks that are full, or cannot be written: one message, nothing lost, and the same command goes on where there is
room again.

Where the system lets no user make a namespace to mount such a disk in, these tests are skipped, and say so.
"""

import pytest
from support import namespace, program

from tlt_jax.checkpoint.store import Store

pytestmark = pytest.mark.faults
OPTIONS = "'stages=[pretrain]' budget.total=8 checkpoint.every_steps=1 checkpoint.keep=20 checkpoint.every_seconds=null"
STEPS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder in which pretraining ran to its end without a break."""
    folder = tmp_path_factory.mktemp("whole")
    program.run(folder, "stages=[pretrain]", f"budget.total={STEPS}")
    return folder


def one_error(text: str) -> str:
    """The one message of a command that was refused."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text and "Exception ignored" not in text, text
    return errors[0]


# How the disk comes to be full, as a script that runs beside the program; and how room is made.
FILLED = {
    "it is too small for all checkpoints": ("", "mount -o remount,size=64m disk"),
    "its last room goes between two rows": (
        "until [ $(cat disk/runs/tiny/metrics.jsonl 2>/dev/null | wc -l) -ge 3 ]; do sleep 0.01; done;"
        "cat /dev/zero >disk/filler 2>/dev/null || true",
        "rm disk/filler; mount -o remount,size=64m disk",
    ),
    "it has no more files, which no look at its room tells": (
        "until [ -e disk/runs/tiny/checkpoints/manifests/2.json ]; do sleep 0.01; done;"
        "mount -o remount,nr_inodes=$(($(df --output=iused disk | tail -1) + 9)) disk",
        "mount -o remount,nr_inodes=100000 disk",
    ),
}
SIZES = {"it is too small for all checkpoints": "2200k"}


@pytest.mark.parametrize("case", FILLED)
def test_a_full_disk_is_one_message_and_the_run_goes_on_when_there_is_room(whole, tmp_path, case):
    fill, make_room = FILLED[case]
    text = namespace.script(
        f"""
        mount -t tmpfs -o size={SIZES.get(case, "64m")} none disk
        ({fill or ":"}) & filling=$!
        code=0; $RUN {OPTIONS} >first.txt 2>&1 || code=$?
        kill $filling 2>/dev/null || true
        wait $filling || true
        echo "first: $code"
        cp -a disk/runs first
        {make_room}
        code=0; $RUN {OPTIONS} >second.txt 2>&1 || code=$?
        echo "second: $code"
        cp -a disk/runs runs
        """,
        tmp_path,
    )
    first, second = ((tmp_path / name).read_text() for name in ("first.txt", "second.txt"))
    assert "first: 2\n" in text, text + first
    message = one_error(first)
    assert "No space left" in message or "MiB free, and a checkpoint takes" in message or "disk is full" in message
    assert "second: 0\n" in text, text + second
    assert "going on from checkpoint" in second
    with Store(tmp_path / "first/tiny/checkpoints", read_only=True) as store:
        newest = store.newest()
        assert newest is not None and store.document(newest)["step"] >= 1
    assert not list((tmp_path / "runs/tiny/checkpoints/steps").glob("*tmp*"))
    assert program.parameters(tmp_path) == program.parameters(whole)
    assert [row["step"] for row in program.rows(tmp_path)] == list(range(1, STEPS + 1))


def test_where_nothing_can_be_written_nothing_is_done(whole, tmp_path):
    """A run, an export, a report and a data cache on a disk that is mounted to be read; found before any work."""
    text = namespace.script(
        f"""
        cp -a {whole}/runs {whole}/data disk
        mount --bind disk disk
        mount -o remount,bind,ro disk
        run() {{ echo "== $1"; shift; code=0; "$@" 2>&1 || code=$?; echo "code $code"; }}
        TLT="${{RUN%% --config*}}"
        run "the run" $RUN 'stages=[pretrain]' run.seed=0
        run "a new run" $RUN run.name=new
        run "the data" $RUN run.output_dir=elsewhere data.cache_dir=disk/data data.max_documents=30
        run "the data that are there" $RUN run.output_dir=elsewhere data.cache_dir=disk/data 'stages=[pretrain]' \\
            budget.total=1 run.export=false
        run "the report" $TLT report disk/runs/tiny
        run "the export" $TLT export disk/runs/tiny disk/exported
        """,
        tmp_path,
    )
    said = {part.partition("\n")[0]: part for part in text.split("== ")[1:]}
    for name, words in {
        "the run": ["`run.output_dir`", "Read-only file system"],
        "a new run": ["`run.output_dir`", "Read-only file system"],
        "the data": ["data.cache_dir is", "Read-only file system"],
        "the report": ["Read-only file system", "report.html"],
        "the export": ["Read-only file system", "exported"],
    }.items():
        assert "code 2" in said[name], said[name]
        assert all(word in one_error(said[name]) for word in words), said[name]
        assert "training the tokenizer" not in said[name]
    assert "code 0" in said["the data that are there"] and "from the cache" in said["the data that are there"]
