"""The store: what is restored is what was saved, or an error, or an older one; never something damaged."""

import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import tiny

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import ConfigError

DOCUMENT = {"stage": "align", "spent": {"steps": 3, "seconds": 1.25}, "results": [None, True, "größe"], "host": {}}


def arrays(seed: int = 0) -> dict[str, jax.Array]:
    """Every type that a state holds, with the numbers that a careless format loses."""
    rng = np.random.default_rng(seed)
    mesh = tiny.mesh()
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    made = {
        "train/params/policy/layers/attention/query": (
            rng.normal(size=(3, 16, 4, 4)).astype(np.float32),
            P(None, "fsdp", "tensor", None),
        ),
        "train/opt/policy/0/mu": (jnp.asarray(rng.normal(size=(5, 2)), jnp.bfloat16), P()),
        "special": (special, P()),
        "train/step": (np.int32(seed + 7), P()),
        "keys": (rng.integers(0, 2**32, 4, np.uint32), P()),
    }
    return {path: jax.device_put(array, NamedSharding(mesh, spec)) for path, (array, spec) in made.items()}


def bits(tree: dict) -> dict[str, tuple]:
    return {path: (str(np.asarray(a).dtype), np.asarray(a).shape, np.asarray(a).tobytes()) for path, a in tree.items()}


def filled(folder: Path, steps=(2, 10), keep: int | None = None) -> Path:
    with Store(folder, keep) as store:
        for step in steps:
            store.save(step, arrays(step), DOCUMENT | {"step": step})
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store with the steps 2 and 10, made once: tests that damage it copy it."""
    return filled(tmp_path_factory.mktemp("saved") / "checkpoints")


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files(folder: Path, step: int = 10) -> list[Path]:
    return sorted((f for f in (folder / "steps" / str(step)).rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_what_is_restored_is_what_was_saved_to_the_bit(saved):
    wanted = arrays(10)
    with Store(saved, None) as store:
        restored = store.restore(10, wanted)
        host = store.restore_host(10)
    assert bits(restored) == bits(wanted) == bits(host)
    for path, array in restored.items():
        assert array.sharding == wanted[path].sharding, path
        assert array.committed


def test_abstract_arrays_serve_as_the_target(saved):
    abstract = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for path, a in arrays().items()}
    with Store(saved, None) as store:
        assert bits(store.restore(2, abstract)) == bits(arrays(2))


def test_the_document_comes_back(saved):
    with Store(saved, None) as store:
        assert store.document(10) == DOCUMENT | {"step": 10}
        assert store.document(2)["step"] == 2


def test_ten_is_newer_than_two(saved):
    with Store(saved, None) as store:
        assert store.newest() == 10


def test_an_empty_store_has_no_newest(tmp_path):
    with Store(tmp_path / "new", 2) as store:
        assert store.newest() is None


def test_the_newest_are_kept_and_their_manifests_alone(tmp_path):
    folder = filled(tmp_path / "checkpoints", (1, 2, 9, 10), keep=2)
    assert sorted(p.name for p in (folder / "steps").iterdir()) == ["10", "9"]
    assert sorted(p.name for p in (folder / "manifests").iterdir()) == ["10.json", "9.json"]
    with Store(folder, 2) as store:
        assert bits(store.restore(9, arrays())) == bits(arrays(9))


def test_the_arrays_may_be_donated_once_save_returns(tmp_path):
    expected = bits(arrays(3))
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    with Store(tmp_path / "checkpoints", 2) as store:
        given = arrays(3)
        store.save(3, given, {})
        jax.block_until_ready(overwrite(given))
    with Store(tmp_path / "checkpoints", 2) as store:
        assert bits(store.restore(3, arrays())) == expected


def test_leaving_waits_for_the_save(tmp_path):
    with Store(tmp_path / "checkpoints", 2) as store:
        store.save(1, {"big": jax.device_put(np.ones((1000, 1000), np.float32), jax.devices()[0])}, {})
    assert (tmp_path / "checkpoints" / "manifests" / "1.json").is_file()
    with Store(tmp_path / "checkpoints", 2) as store:
        assert store.newest() == 1


def flip_a_byte(folder: Path) -> None:
    largest = files(folder)[-1]
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def truncate(folder: Path) -> None:
    largest = files(folder)[-1]
    largest.write_bytes(largest.read_bytes()[:-1])


DAMAGE = {
    "a flipped bit": flip_a_byte,
    "a truncated file": truncate,
    "an empty file": lambda folder: files(folder)[-1].write_bytes(b""),
    "a missing file": lambda folder: files(folder)[-1].unlink(),
    "a file too many": lambda folder: (folder / "steps/10/arrays/more").write_text("x"),
    "no manifest: killed before it was written": lambda folder: (folder / "manifests/10.json").unlink(),
    "a torn manifest": lambda folder: (folder / "manifests/10.json").write_text('{"a": '),
    "a manifest that is no mapping": lambda folder: (folder / "manifests/10.json").write_text("[]"),
    "a manifest that names nothing": lambda folder: (folder / "manifests/10.json").write_text("{}"),
    "a step whose files are gone": lambda folder: shutil.rmtree(folder / "steps/10"),
    "a newer step of nothing": lambda folder: (
        (folder / "steps/11").mkdir(),
        (folder / "manifests/11.json").write_text("{}"),
    ),
    "a link in the place of a step": lambda folder: (
        shutil.rmtree(folder / "steps/10"),
        (folder / "steps/10").symlink_to(folder / "steps/2"),
    ),
    "a manifest of an odd number": lambda folder: (folder / "manifests/².json").write_text("{}"),
    "a manifest too deep to read": lambda folder: (folder / "manifests/10.json").write_text("[" * 100_000),
    "an empty newer step": lambda folder: (folder / "steps/11").mkdir(),
    "a newer step that was being written": lambda folder: (folder / "steps/11.orbax-checkpoint-tmp-0").mkdir(),
    "a newer step that is half there": lambda folder: shutil.copytree(
        folder / "steps/10/arrays", folder / "steps/11/arrays"
    ),
    "a stray file among the steps": lambda folder: (folder / "steps/notes.txt").write_text("x"),
}
NEWEST_STAYS = {
    "a manifest of an odd number",
    "a newer step of nothing",
    "an empty newer step",
    "a newer step that was being written",
    "a newer step that is half there",
    "a stray file among the steps",
}
NEVER_WHOLE = {"no manifest: killed before it was written"}


def listing(folder: Path) -> list[tuple[str, bytes]]:
    return sorted((str(f.relative_to(folder)), f.read_bytes() if f.is_file() else b"") for f in folder.rglob("*"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_read_only_store_finds_the_same_and_changes_nothing(copied, damage):
    DAMAGE[damage](copied)
    before = listing(copied)
    with Store(copied, read_only=True) as store:
        expected = 10 if damage in NEWEST_STAYS else 2
        assert store.newest() == expected
        assert bits(store.restore_host(expected)) == bits(arrays(expected))
    assert listing(copied) == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_that_verifies_is_restored_and_saving_goes_on(copied, damage, caplog):
    DAMAGE[damage](copied)
    expected = 10 if damage in NEWEST_STAYS else 2
    with caplog.at_level(logging.WARNING, "tlt_jax"), Store(copied, None) as store:
        assert store.newest() == expected
        assert bits(store.restore(expected, arrays())) == bits(arrays(expected))
        store.save(11, arrays(11), {})
    if expected == 2:
        assert "checkpoint 10 does not verify" in caplog.text
        assert (copied / "damaged" / "10").is_dir() or damage == "a step whose files are gone"
        assert not (copied / "steps" / "10").exists()
    with Store(copied, None) as store:
        assert store.newest() == 11
        assert bits(store.restore(11, arrays())) == bits(arrays(11))


def test_links_and_files_among_what_is_set_aside_are_removed_in_their_turn(copied):
    for step in range(11, 17):
        link = folder_of(copied, step)
        link.symlink_to(copied / "nowhere") if step % 2 else link.write_text("x")
    with Store(copied, None) as store:
        assert store.newest() == 10
    assert len(list((copied / "damaged").iterdir())) == 3
    assert sorted(path.name for path in (copied / "steps").iterdir()) == ["10", "2"]


def folder_of(folder: Path, step: int) -> Path:
    return folder / "steps" / str(step)


def test_a_damaged_file_is_named(copied, caplog):
    flip_a_byte(copied)
    name = str(files(copied)[-1].relative_to(copied / "steps/10"))
    with caplog.at_level(logging.WARNING, "tlt_jax"), Store(copied, None) as store:
        store.newest()
    assert name in caplog.text


def test_where_all_are_damaged_nothing_is_begun_anew(copied):
    flip_a_byte(copied)
    (copied / "manifests/2.json").unlink()
    before = listing(copied)
    for _ in range(2):
        with Store(copied, None) as store, pytest.raises(ConfigError, match=r"none of the checkpoints .* verifies"):
            store.newest()
    assert listing(copied) == before


def test_where_the_manifests_are_gone_nothing_is_begun_anew(copied):
    shutil.rmtree(copied / "manifests")
    with Store(copied, None) as store, pytest.raises(ConfigError, match=r"none of the checkpoints .* verifies"):
        store.newest()
    assert (copied / "steps/2").is_dir() and (copied / "steps/10").is_dir()


def test_where_the_first_save_was_interrupted_a_run_begins(copied):
    shutil.rmtree(copied / "manifests")
    shutil.rmtree(copied / "steps/2")
    with Store(copied, None) as store:
        assert store.newest() is None
        store.save(1, arrays(1), {})
    with Store(copied, None) as store:
        assert store.newest() == 1


def changed(path: str, array) -> dict:
    return arrays() | {path: jax.device_put(array, arrays()["train/step"].sharding)}


DIFFERENCES = {
    "another shape": (lambda: changed("special", np.zeros(7, np.float32)), ["special", "(6,)", "(7,)"]),
    "another type": (lambda: changed("special", np.zeros(6, np.int32)), ["special", "float32", "int32"]),
    "one that was not saved": (lambda: changed("extra", np.zeros(1, np.float32)), ["extra is not in the checkpoint"]),
    "one that is not wanted": (
        lambda: {p: a for p, a in arrays().items() if p != "keys"},
        ["keys is in the checkpoint alone"],
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_state_that_does_not_fit_is_an_error_that_names_the_path(saved, case):
    make, parts = DIFFERENCES[case]
    with Store(saved, None) as store, pytest.raises(ConfigError) as caught:
        store.restore(10, make())
    assert all(part in str(caught.value) for part in [*parts, "checkpoint 10"]), caught.value


def test_many_differences_are_counted(saved):
    with Store(saved, None) as store, pytest.raises(ConfigError, match="and 5 more"):
        store.restore(10, {f"other/{path}": a for path, a in arrays().items()})


@pytest.mark.parametrize(
    "wait", [lambda store: store.wait(), lambda store: store.close(), lambda store: store.save(5, arrays(), {})]
)
def test_a_save_that_fails_says_so_later(tmp_path, wait):
    store = Store(tmp_path / "checkpoints", 2)
    shutil.rmtree(tmp_path / "checkpoints/manifests")  # what it will want to write to
    store.save(4, arrays(), {})
    with pytest.raises(FileNotFoundError):
        wait(store)
    store.close()  # said once, and it closes


def test_a_save_that_fails_at_once_is_not_waited_for(tmp_path, monkeypatch):
    """Its threads would wait five minutes for each other."""
    store, closed = Store(filled(tmp_path / "checkpoints", (1,))), []

    def fail(*_, **__):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(store._manager, "save", fail)
        patch.setattr(store._manager, "close", lambda: closed.append(True))
        with pytest.raises(OSError, match="no room"), store:
            store.save(2, arrays(2), {})
    assert not closed
    store._manager.close()
    with Store(tmp_path / "checkpoints") as store:
        assert store.newest() == 1


def test_what_a_save_that_failed_leaves_is_removed(tmp_path, monkeypatch):
    """On a full disk the rest of the run's end needs the room."""
    store = Store(filled(tmp_path / "checkpoints", (1,)))

    def fail():
        (store.folder / "steps/2.orbax-checkpoint-tmp").mkdir()
        raise OSError("no room")

    store.save(2, arrays(2), {})
    store.wait()
    monkeypatch.setattr(store._manager, "wait_until_finished", fail)
    store._seal(3)
    monkeypatch.undo()
    with pytest.raises(OSError, match="no room"):
        store.close()
    assert sorted(path.name for path in (store.folder / "steps").iterdir()) == ["1", "2"]


def test_the_older_one_stays_until_the_newer_one_is_sealed(tmp_path, monkeypatch):
    folder = filled(tmp_path / "checkpoints", (1,), keep=1)

    def fail(_):
        raise OSError("the power fails between the save and its manifest")

    monkeypatch.setattr("tlt_jax.checkpoint.store._digests", fail)
    store = Store(folder, 1)
    store.save(2, arrays(2), {})
    with pytest.raises(OSError, match="the power fails"):
        store.close()
    monkeypatch.undo()
    with Store(folder, 1) as store:
        assert store.newest() == 1
        assert bits(store.restore(1, arrays())) == bits(arrays(1))


def test_a_disk_without_room_is_told_before_it_is_filled(tmp_path, monkeypatch):
    folder = filled(tmp_path / "checkpoints", (1,))
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with Store(folder) as store, pytest.raises(ConfigError, match=r"has 1.0 MiB free, and a checkpoint takes 1.0 MiB"):
        store.save(2, arrays(2), {})
    with Store(folder) as store:
        assert store.newest() == 1
