"""What flows from stage to stage: the policy and its drafter's exit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import ConfigError
from tlt_jax.config.schema import Config, ModelConfig
from tlt_jax.models.declare import abstract_module, flatten, initialise, shardings, table, unflatten
from tlt_jax.models.heads import ScalarHead, ShallowExit
from tlt_jax.models.hf import read_drafter, read_exit, read_shape, read_weights
from tlt_jax.models.transformer import ModelShape, Transformer
from tlt_jax.parallel.hosts import put, to_host
from tlt_jax.parallel.mesh import compute_dtype
from tlt_jax.stages.memory import check_memory, memory
from tlt_jax.train.state import Build


@dataclass(frozen=True)
class Models:
    """The policy and the shallow drafter's exit, on the mesh."""

    policy: Transformer
    exit: ShallowExit


def by_role(models: Models) -> dict[str, Any]:
    """The models by role."""
    return {"policy": models.policy, "exit": models.exit}


def untrained(models: Models, roles: dict[str, Any]) -> dict[str, Any]:
    """The models that a phase does not train, which its checkpoints keep beside what it does."""
    return {name: module for name, module in by_role(models).items() if name not in roles}


def transformer(shape: ModelShape) -> Build:
    """Builds the policy's module."""
    return lambda declare: Transformer(shape, declare)


def shallow_exit(shape: ModelShape) -> Build:
    """Builds the shallow drafter's module."""
    return lambda declare: ShallowExit(shape, declare)


def scalar_head(shape: ModelShape) -> Build:
    """Builds the module of values and rewards."""
    return lambda declare: ScalarHead(shape, declare)


def model_shape(config: ModelConfig, vocab: int) -> ModelShape:
    """The shape that the config asks for, or that of `init_from`."""
    source = _source(config)
    if source is None:
        names = (
            "width",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "hidden",
            "exit_layer",
            "exit_rank",
            "rope_theta",
            "norm_eps",
            "tied",
        )
        return ModelShape(vocab=vocab, **{name: getattr(config, name) for name in names})
    if (source / "config.json").is_file():
        return read_shape(source, *(read_exit(source) or (config.exit_layer, config.exit_rank)))
    with Store(source / "checkpoints", read_only=True) as store:
        return ModelShape(**store.document(_newest(source, store))["shape"])


def tokenizer_path(config: ModelConfig) -> str | None:
    """The tokenizer of `init_from`, or None."""
    source = _source(config)
    return None if source is None else str(source / "tokenizer.json")


def checked_shape(config: Config, vocab: int, mesh: jax.sharding.Mesh) -> ModelShape:
    """The model's shape. Raises ConfigError if it has too few words for the tokenizer, or does not fit the devices."""
    shape = model_shape(config.model, vocab)
    if shape.vocab < vocab:
        raise ConfigError(f"`model.init_from` has a vocabulary of {shape.vocab}, its tokenizer one of {vocab}")
    check_memory(memory(config, shape, mesh, compute_dtype(config.device)))
    return shape


def abstract_models(shape: ModelShape, mesh: jax.sharding.Mesh) -> Models:
    """The models' shapes, types and shardings."""
    return Models(abstract_module(transformer(shape), mesh), abstract_module(shallow_exit(shape), mesh))


def initial_models(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Models:
    """Fresh models from the seed, or those of `model.init_from`, whose shape this is. Raises ConfigError if they are
    not whole."""
    keys = jax.random.split(jax.random.key(config.run.seed), 2)
    exit = initialise(shallow_exit(shape), mesh, keys[1])
    source = _source(config.model)
    if source is None:
        return Models(initialise(transformer(shape), mesh, keys[0]), exit)
    if not (source / "config.json").is_file():
        return saved_models(source, mesh)
    weights, drafter = read_weights(source, shape), read_drafter(source, shape)
    policy = place(weights, transformer(shape), mesh)
    return Models(policy, place(drafter, shallow_exit(shape), mesh) if drafter else exit)


def saved_models(folder: Path, mesh: jax.sharding.Mesh) -> Models:
    """The models in the newest checkpoint of a run directory. Raises ConfigError if it holds none."""
    with Store(folder / "checkpoints", read_only=True) as store:
        step = _newest(folder, store)
        shape, arrays = ModelShape(**store.document(step)["shape"]), store.restore_host(step)
    builds = {"policy": transformer(shape), "exit": shallow_exit(shape)}
    return Models(**{name: place(_part(arrays, name), build, mesh) for name, build in builds.items()})


def place(flat: dict[str, Any], build: Build, mesh: jax.sharding.Mesh) -> Any:
    """The module of host arrays {path: array}, laid out on the mesh. Raises ConfigError where they do not fit it."""
    for path, spec in table(build).items():
        if path not in flat or flat[path].shape != spec.shape:
            found = flat[path].shape if path in flat else "missing"
            raise ConfigError(f"`model`: the array {path} is {found}; expected {spec.shape}")
    wanted = shardings(build, mesh)
    return put(unflatten(wanted, flat), wanted)


def host_copy(module: Any) -> dict[str, Any]:
    """{path: numpy array} of a module."""
    return to_host(flatten(module))


def _source(config: ModelConfig) -> Path | None:
    if config.init_from is None:
        return None
    path = Path(config.init_from).expanduser()
    if (path / "config.json").is_file() or (path / "config.yaml").is_file():
        return path
    raise ConfigError(
        f"`model.init_from` is {config.init_from!r}; expected a Hugging Face directory (config.json) or a run directory"
        " (config.yaml)"
    )


def _newest(folder: Path, store: Store) -> int:
    step = store.newest()
    if step is None:
        raise ConfigError(f"run directory {str(folder)!r} holds no whole checkpoint")
    return step


def _part(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    """The arrays of one model; a phase keeps it either among what it trains or beside it."""
    prefix = next(p for p in (f"train/params/{name}/", f"{name}/") if any(path.startswith(p) for path in arrays))
    return {path.removeprefix(prefix): array for path, array in arrays.items() if path.startswith(prefix)}
