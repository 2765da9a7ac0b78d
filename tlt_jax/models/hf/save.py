"""Writing a Hugging Face directory that transformers, and whoever reads its format, loads as a Llama.

The whole directory is written beside its place and renamed into it, so that nobody ever sees half of one.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tlt_jax.config import ConfigError
from tlt_jax.models.hf import names
from tlt_jax.models.hf.load import ARCHITECTURE
from tlt_jax.models.hf.names import DRAFT_MODEL, DRAFTER, INDEX, WEIGHTS, Tensor
from tlt_jax.models.transformer import ModelShape

log = logging.getLogger("tlt_jax")
Arrays = dict[str, np.ndarray]
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
WRITTEN = {
    WEIGHTS,
    INDEX,
    DRAFTER,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class SavesItself(Protocol):
    """What an export needs of a tokenizer (`text.Tokenizer` is one)."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def save(self, folder: Path) -> None: ...


def export(
    folder: str | Path,
    shape: ModelShape,
    weights: Arrays,
    drafters: dict[str, Arrays],
    tokenizer: SavesItself | None,
    context_length: int,
    dtype: str = "float32",
    max_shard_bytes: float = 5e9,
    draft_model: tuple[ModelShape, Arrays] | None = None,
) -> None:
    """Writes the Transformer `weights` of `shape` ({our path: array}) as a Hugging Face directory.

    It holds config.json, generation_config.json, model.safetensors in `dtype` (shards of at most `max_shard_bytes`
    and an index, where one file would be larger), the tokenizer's files, and drafter.safetensors: the own arrays of the
    `drafters` ("exit", "eagle"), float32, with the exit in the file's metadata; none are no file. A tied embedding is
    written once. `context_length` becomes max_position_embeddings. A `draft_model`, (its shape, its weights), is such a
    directory of its own within, draft_model.

    A former export at `folder` is replaced as a whole. Raises ConfigError for a `dtype` that is not offered, a
    tokenizer with more ids than the embedding has rows, values that float16 cannot hold, and a folder that holds
    anything else than an export.
    """
    folder = Path(folder).expanduser().resolve()
    if dtype not in DTYPES:
        raise ConfigError(f"export: the type {dtype!r} is not offered; expected one of {', '.join(DTYPES)}")
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab:
        raise ConfigError(
            f"export: the tokenizer has ids up to {tokenizer.vocab_size - 1}; expected at most {shape.vocab - 1}, as"
            f" the embedding has {shape.vocab} rows"
        )
    models = [(shape, weights, "."), *([(*draft_model, DRAFT_MODEL)] if draft_model else [])]
    for s, _, _ in models:
        if s.width % s.heads:
            log.warning(
                "export: transformers refuses a Llama whose width (%d) its heads (%d) do not divide; what is"
                " written to %s loads here alone",
                s.width,
                s.heads,
                folder,
            )
    _refuse_foreign(folder)

    def write(into: Path) -> None:
        for s, arrays, name in models:
            within = into / name
            within.mkdir(exist_ok=True)
            _write_json(within / "config.json", _config(s, tokenizer, context_length, dtype))
            _write_json(within / "generation_config.json", _special_ids(tokenizer))
            _write_weights(within, s, arrays, DTYPES[dtype], max_shard_bytes)
            if tokenizer is not None:
                tokenizer.save(within)
        if drafters:
            _write_drafters(into / DRAFTER, shape, drafters)

    _replace(folder, write)


def _config(s: ModelShape, tokenizer: SavesItself | None, context_length: int, dtype: str) -> dict[str, Any]:
    """config.json. What older readers look for stands beside what transformers 5 does: rope_theta, torch_dtype."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.width,
        "intermediate_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": s.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
        "rope_theta": s.rope_theta,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": s.tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **_special_ids(tokenizer),
    }


def _special_ids(tokenizer: SavesItself | None) -> dict[str, Any]:
    """Written even where there are none: a key that is absent would be filled in with Llama's own ids."""
    return {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": None if tokenizer is None else tokenizer.eos_id,
        "pad_token_id": None,
    }


def _write_weights(folder: Path, shape: ModelShape, weights: Arrays, dtype: np.dtype, limit: float) -> None:
    """One file, or shards and their index. No more than one shard is held converted at a time."""
    specs = names.transformer_specs(shape)
    _check_arrays("weights", weights, {path: spec.shape for path, spec in specs.items()})
    shards = list(_shards(names.tensors(specs), dtype.itemsize, limit))
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for file, shard in zip(files, shards, strict=True):
        _save({t.name: _converted(t, weights[t.spec.path], dtype) for t in shard}, folder / file, {"format": "pt"})
    if len(shards) > 1:
        total = sum(_size(tensor) for shard in shards for tensor in shard)
        where = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        metadata = {"total_parameters": total, "total_size": total * dtype.itemsize}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(where.items()))})


def _shards(wanted: list[Tensor], itemsize: int, limit: float) -> Iterator[list[Tensor]]:
    """The tensors in runs of at most `limit` bytes; one that is larger has a run of its own."""
    run: list[Tensor] = []
    used = 0
    for tensor in wanted:
        size = _size(tensor) * itemsize
        if run and used + size > limit:
            yield run
            run, used = [], 0
        run.append(tensor)
        used += size
    yield run


def _size(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape))


def _converted(tensor: Tensor, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    ours = np.asarray(array if tensor.layer is None else array[tensor.layer])
    with np.errstate(over="ignore"):  # checked below, by name
        theirs = np.ascontiguousarray(names.to_theirs(ours, tensor.spec), dtype=dtype)
    if dtype == np.float16 and not np.array_equal(np.isfinite(theirs), np.isfinite(names.to_theirs(ours, tensor.spec))):
        raise ConfigError(
            f"export: {tensor.name} has values up to {np.nanmax(np.abs(ours)):.3g}, beyond float16;"
            " expected the type bfloat16 or float32"
        )
    return theirs


def _write_drafters(path: Path, shape: ModelShape, drafters: dict[str, Arrays]) -> None:
    arrays, specs = {}, names.drafter_specs(shape)
    for drafter, own in drafters.items():
        _check_arrays(drafter, own, {name: spec.shape for name, spec in specs[drafter].items()})
        for name, array in own.items():
            arrays[names.in_file(drafter, name)] = np.ascontiguousarray(array, dtype=np.float32)
    _save(arrays, path, {"format": "pt", "exit_layer": str(shape.exit_layer), "exit_rank": str(shape.exit_rank)})


def _check_arrays(what: str, arrays: Arrays, wanted: dict[str, tuple[int, ...]]) -> None:
    found = {name: tuple(array.shape) for name, array in arrays.items()}
    assert found == wanted, f"{what}: {sorted(found.items() ^ wanted.items())} are not in both"


def _save(arrays: Arrays, path: Path, metadata: dict[str, str]) -> None:
    path.touch()  # with the permissions of any new file: safetensors makes files that only their owner can read
    mode = path.stat().st_mode
    save_file(arrays, path, metadata=metadata)
    path.chmod(mode)


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _refuse_foreign(folder: Path) -> None:
    """Raises ConfigError if replacing `folder` would destroy anything that no export wrote."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"export: {str(folder)!r} is a file; expected a folder, or nothing there")
    within = folder / DRAFT_MODEL
    held = [p for p in (*folder.iterdir(), *(within.iterdir() if within.is_dir() else ())) if p != within]
    foreign = sorted(
        str(p.relative_to(folder)) for p in held if p.is_dir() or not (p.name in WRITTEN or SHARD.fullmatch(p.name))
    )
    if foreign:
        raise ConfigError(
            f"export: folder {str(folder)!r} holds {', '.join(foreign[:5])}, which no export writes and which replacing"
            " it would delete; expected a new or empty folder, or a former export"
        )


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Has `write` fill a folder beside, then renames it to `folder`.

    A process that dies in between leaves the former folder in place or, for an instant, beside it as `.NAME.former`;
    what an earlier death left is cleared away first.
    """
    beside, former = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.former")
    if former.exists() and not folder.exists():
        former.rename(folder)
    for leftover in (beside, former):
        if leftover.exists():
            shutil.rmtree(leftover)
    beside.mkdir(parents=True)
    try:
        write(beside)
        for path in [*beside.rglob("*"), beside]:
            _sync(path)
    except BaseException:
        shutil.rmtree(beside)
        raise
    if folder.exists():
        folder.rename(former)
    beside.rename(folder)
    _sync(folder.parent)
    if former.exists():
        shutil.rmtree(former)


def _sync(path: Path) -> None:
    """Has the system put a file, or a folder's list of names, on the disk (where it lets folders be opened)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
