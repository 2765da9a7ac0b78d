"""Reading a Hugging Face directory: config.json, and safetensors whole or in shards. Whatever the model would need
that we do not implement is an error, never ignored.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the type bfloat16, which safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open

from tlt_jax.config import ConfigError
from tlt_jax.config.base import LARGEST_INT
from tlt_jax.models.hf.names import (
    DRAFTER,
    INDEX,
    WEIGHTS,
    Tensor,
    drafter_specs,
    in_file,
    tensors,
    to_ours,
    transformer_specs,
)
from tlt_jax.models.transformer import ModelShape

ARCHITECTURE = "LlamaForCausalLM"
FLOATS = ("F32", "BF16", "F16")
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
LARGEST_NUMBER, MOST_LAYERS = 1e30, 4096
SHOWN = 8  # lines of a list in an error message


def read_shape(folder: str | Path, exit_layer: int, exit_rank: int) -> ModelShape:
    """The shape that a directory's config.json describes, with our shallow drafter's exit (0: none, as a draft model).

    Raises ConfigError, naming file, key, value and what was expected, for a file that cannot be read, an architecture
    other than Llama's, and whatever of it we do not implement: a scaled rotary embedding, biases, another activation.
    """
    path = Path(folder).expanduser() / "config.json"
    config = _read_json(path)
    _supported(path, config)
    width, heads = _integer(path, config, "hidden_size"), _integer(path, config, "num_attention_heads")
    kv_heads = _integer(path, config, "num_key_value_heads", heads)
    head_dim = _integer(path, config, "head_dim", width // heads)
    layers = _integer(path, config, "num_hidden_layers")
    if heads % kv_heads:
        raise _wrong(path, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if head_dim < 2 or head_dim % 2:
        raise _wrong(path, "head_dim", head_dim, "an even number, 2 or more")
    if layers > MOST_LAYERS:
        raise _wrong(path, "num_hidden_layers", layers, f"at most {MOST_LAYERS}")
    if exit_layer >= layers:
        raise ConfigError(
            f"`model.exit_layer` is {exit_layer}; expected 1 to {layers - 1}, as {str(path)!r} has {layers} layers"
        )
    return ModelShape(
        vocab=_integer(path, config, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=_integer(path, config, "intermediate_size"),
        exit_layer=exit_layer,
        exit_rank=exit_rank,
        rope_theta=_rope_theta(path, config),
        norm_eps=_number(path, config, "rms_norm_eps", 1e-6),
        tied=_boolean(path, config, "tie_word_embeddings", False),
    )


def read_weights(folder: str | Path, shape: ModelShape) -> dict[str, np.ndarray]:
    """{our path: float32 array} of the Transformer of `shape`, from model.safetensors or from the shards of its index.

    Raises ConfigError for a file that is absent, damaged or no safetensors, and for tensors that are missing,
    unexpected, or of another shape or type. With a tied embedding a `lm_head.weight` is accepted if it equals the
    embedding; the buffers of rotary frequencies that old checkpoints hold are passed over.
    """
    folder = Path(folder).expanduser()
    specs = transformer_specs(shape)
    wanted = {tensor.name: tensor for tensor in tensors(specs)}
    with ExitStack() as stack:
        where = _open_weights(folder, stack)
        head = where.pop("lm_head.weight", None) if shape.tied else None
        where = {name: file for name, file in where.items() if not name.endswith("rotary_emb.inv_freq")}
        _check(folder, where, wanted)
        weights = {path: np.empty(spec.shape, np.float32) for path, spec in specs.items()}
        for name, tensor in wanted.items():
            array = to_ours(_get(where[name], name), tensor.spec)
            weights[tensor.spec.path][() if tensor.layer is None else tensor.layer] = array
        if head is not None and not np.array_equal(_get(head, "lm_head.weight"), weights["embedding"]):
            raise ConfigError(
                f"{str(folder)!r}: `tie_word_embeddings` in config.json is true, but lm_head.weight is not the"
                " embedding; expected false, or no lm_head.weight"
            )
    return weights


def read_exit(folder: str | Path) -> tuple[int, int] | None:
    """(exit_layer, exit_rank) of the drafter that the directory holds, for `read_shape`; None without a drafter.

    Raises ConfigError where the file does not say so.
    """
    path = Path(folder).expanduser() / DRAFTER
    if not path.is_file():
        return None
    with ExitStack() as stack:
        metadata = _open(path, stack).metadata() or {}
    sizes = []
    for key in ("exit_layer", "exit_rank"):
        value = metadata.get(key, "")
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"file {str(path)!r}: `{key}` in its metadata is {value!r}; expected a positive integer")
        sizes.append(int(value))
    return sizes[0], sizes[1]


def read_drafters(folder: str | Path, shape: ModelShape) -> dict[str, dict[str, np.ndarray]]:
    """{drafter: {our path: float32 array}} from drafter.safetensors: "exit", and "eagle" where it holds one; empty
    without the file.

    Raises ConfigError if the file is damaged, or holds a drafter of another exit or width.
    """
    folder = Path(folder).expanduser()
    found = read_exit(folder)
    if found is None:
        return {}
    if found != (shape.exit_layer, shape.exit_rank):
        raise ConfigError(
            f"`model.exit_layer` and `model.exit_rank` are {shape.exit_layer} and {shape.exit_rank};"
            f" expected {found[0]} and {found[1]}, those of the drafter in {str(folder / DRAFTER)!r}"
        )
    with ExitStack() as stack:
        file = _open(folder / DRAFTER, stack)
        where = dict.fromkeys(file.keys(), file)
        with_eagle = any(name.startswith(in_file("eagle", "")) for name in where)
        specs = {name: specs for name, specs in drafter_specs(shape).items() if name == "exit" or with_eagle}
        named = {in_file(drafter, path): spec for drafter in specs for path, spec in specs[drafter].items()}
        _check(folder / DRAFTER, where, {name: Tensor(name, spec.shape, spec, None) for name, spec in named.items()})
        return {drafter: {path: _get(file, in_file(drafter, path)) for path in specs[drafter]} for drafter in specs}


def _supported(path: Path, config: dict[str, Any]) -> None:
    """Raises ConfigError for what changes the arithmetic in a way that we do not implement."""
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise _wrong(path, "architectures", architectures, f"[{ARCHITECTURE!r}], the one architecture supported")
    for key in ("attention_bias", "mlp_bias"):
        if _boolean(path, config, key, False):
            raise _wrong(path, key, True, "false: biases are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise _wrong(path, "hidden_act", config["hidden_act"], "'silu', the one activation supported")
    if config.get("quantization_config") is not None:
        raise _wrong(path, "quantization_config", config["quantization_config"], "none: quantised weights are not read")


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    """The rotary embedding's base: from `rope_parameters` (transformers 5), or the older `rope_theta`."""
    key = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    rope = config.get(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise _wrong(path, key, rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _wrong(path, key, rope, "the type 'default': a scaled rotary embedding is not supported")
    unknown = sorted(rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown:
        raise _wrong(path, key, rope, f"`rope_type` and `rope_theta` alone, not {', '.join(unknown)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _wrong(path, "partial_rotary_factor", partial, "1: heads are rotated whole")
    return _number(path, rope if rope.get("rope_theta") is not None else config, "rope_theta", 10_000.0)


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """{tensor's name: the open file that holds it}; an index has to list exactly what its shards hold."""
    if (folder / WEIGHTS).is_file():
        file = _open(folder / WEIGHTS, stack)
        return dict.fromkeys(file.keys(), file)
    if not (folder / INDEX).is_file():
        others = sorted(p.name for p in folder.glob("*") if p.suffix in OTHER_FORMATS)
        found = f" (found {', '.join(others)}: only safetensors are read)" if others else ""
        raise ConfigError(f"folder {str(folder)!r} holds no weights{found}; expected {WEIGHTS} or {INDEX}")
    listed = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise _wrong(folder / INDEX, "weight_map", listed, "an object from tensors' names to files' names")
    where: dict[str, Any] = {}
    for shard in sorted(set(listed.values())):
        if Path(shard).name != shard or "\\" in shard:
            raise _wrong(folder / INDEX, "weight_map", shard, "the name of a file in the same folder")
        file = _open(folder / shard, stack)
        held = {name for name, at in listed.items() if at == shard}
        _same(folder / shard, held, set(file.keys()), "the index says")
        where |= dict.fromkeys(held, file)
    return where


def _open(path: Path, stack: ExitStack) -> Any:
    """The safetensors file, open until `stack` closes."""
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"file {str(path)!r} cannot be read as safetensors: {error}") from None


def _get(file: Any, name: str) -> np.ndarray:
    return file.get_tensor(name).astype(np.float32, copy=False)


def _check(at: Path, where: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Raises ConfigError unless the files hold the wanted tensors, each of its shape, and nothing else."""
    _same(at, set(wanted), set(where), "the config describes")
    faults = []
    for name, tensor in wanted.items():
        part = where[name].get_slice(name)
        if tuple(part.get_shape()) != tensor.shape:
            faults.append(f"{name} is {part.get_shape()}, expected {list(tensor.shape)}")
        elif part.get_dtype() not in FLOATS:
            faults.append(f"{name} is of type {part.get_dtype()}, expected one of {', '.join(FLOATS)}")
    if faults:
        raise ConfigError(f"the weights in {str(at)!r} do not fit: {_listed(faults)}")


def _same(at: Path, wanted: set[str], found: set[str], source: str) -> None:
    faults = [f"{name} is missing" for name in sorted(wanted - found)]
    faults += [f"{name} is unexpected" for name in sorted(found - wanted)]
    if faults:
        raise ConfigError(f"the weights in {str(at)!r} are not those that {source}: {_listed(faults)}")


def _listed(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"file {str(path)!r} does not exist; expected a Hugging Face directory's {path.name}")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"file {str(path)!r} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"file {str(path)!r} holds a {type(tree).__name__}; expected a JSON object")
    return tree


def _wrong(path: Path, key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"file {str(path)!r}: `{key}` is {value!r}; expected {expected}")


def _integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_INT:
        raise _wrong(path, key, value, f"a positive integer up to {LARGEST_INT}")
    return value


def _number(path: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST_NUMBER:
        raise _wrong(path, key, value, "a positive number")
    return float(value)


def _boolean(path: Path, config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise _wrong(path, key, value, "true or false")
    return value
