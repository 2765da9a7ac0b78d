"""What flows from stage to stage: the policy and its drafters' own weights."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import ConfigError
from tlt_jax.config.schema import Config, ModelConfig
from tlt_jax.models.declare import abstract_module, flatten, initialise, shardings, table, unflatten
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ScalarHead, ShallowExit
from tlt_jax.models.hf import DRAFT_MODEL, read_drafters, read_exit, read_shape, read_weights
from tlt_jax.models.transformer import ModelShape, Transformer
from tlt_jax.parallel.hosts import put, to_host
from tlt_jax.parallel.mesh import compute_dtype
from tlt_jax.stages.memory import check_memory, memory
from tlt_jax.train.state import Build

SIZES = "width", "layers", "heads", "kv_heads", "head_dim", "hidden"  # keys of a model's own shape, a draft model's too


@dataclass(frozen=True)
class Models:
    """The policy, the shallow drafter's exit, and eagle and draft model where the config drafts with them, on the
    mesh."""

    policy: Transformer
    exit: ShallowExit
    eagle: Eagle | None = None
    draft_model: Transformer | None = None


def by_role(models: Models) -> dict[str, Any]:
    """The models by role."""
    found = {field.name: getattr(models, field.name) for field in fields(models)}
    return {name: module for name, module in found.items() if module is not None}


def untrained(models: Models, roles: dict[str, Any]) -> dict[str, Any]:
    """The models that a phase does not train, which its checkpoints keep beside what it does."""
    return {name: module for name, module in by_role(models).items() if name not in roles}


def transformer(shape: ModelShape) -> Build:
    """Builds the policy's module, or the draft model's."""
    return lambda declare: Transformer(shape, declare)


def shallow_exit(shape: ModelShape) -> Build:
    """Builds the shallow drafter's module."""
    return lambda declare: ShallowExit(shape, declare)


def eagle(shape: ModelShape) -> Build:
    """Builds the eagle drafter's module."""
    return lambda declare: Eagle(shape, declare)


def scalar_head(shape: ModelShape) -> Build:
    """Builds the module of values and rewards."""
    return lambda declare: ScalarHead(shape, declare)


def model_shape(config: ModelConfig, vocab: int) -> ModelShape:
    """The shape that the config asks for, or that of `init_from`."""
    source = _source(config)
    if source is None:
        names = *SIZES, "exit_layer", "exit_rank", "rope_theta", "norm_eps", "tied"
        return ModelShape(vocab=vocab, **{name: getattr(config, name) for name in names})
    if (source / "config.json").is_file():
        return read_shape(source, *(read_exit(source) or (config.exit_layer, config.exit_rank)))
    with Store(source / "checkpoints", read_only=True) as store:
        return ModelShape(**store.document(_newest(source, store))["shape"])


def draft_shape(config: Config, shape: ModelShape) -> ModelShape | None:
    """The shape of the draft model for a model of `shape`: of `speculation.draft_model.init_from`, of the one that
    `model.init_from` holds, or as the config asks. None where no draft model may draft. Raises ConfigError where it has
    another vocabulary."""
    if not config.speculation.with_draft_model:
        return None
    found = _found_draft_shape(config)
    if found is None:
        sizes = {name: getattr(config.speculation.draft_model, name) for name in SIZES}
        return replace(shape, **sizes, exit_layer=0, exit_rank=0)
    if found.vocab != shape.vocab:
        raise ConfigError(
            f"`speculation.draft_model` has a vocabulary of {found.vocab}; expected the model's, of {shape.vocab}"
        )
    return found


def _found_draft_shape(config: Config) -> ModelShape | None:
    folder = _draft_folder(config)
    if folder is not None:
        return read_shape(folder, 0, 0)
    source = _source(config.model)
    if source is None or (source / "config.json").is_file():
        return None
    with Store(source / "checkpoints", read_only=True) as store:
        sizes = store.document(_newest(source, store)).get("draft_shape")
    return ModelShape(**sizes) if sizes else None


def _draft_folder(config: Config) -> Path | None:
    """The Hugging Face directory to take the draft model from: its own, or within that of `model.init_from`."""
    own = config.speculation.draft_model.init_from
    if own is not None:
        return Path(own).expanduser()
    source = _source(config.model)
    found = None if source is None else source / DRAFT_MODEL
    return found if found is not None and found.is_dir() else None


def tokenizer_path(config: ModelConfig) -> str | None:
    """The tokenizer of `init_from`, or None."""
    source = _source(config)
    return None if source is None else str(source / "tokenizer.json")


def checked_shape(config: Config, vocab: int, mesh: jax.sharding.Mesh) -> ModelShape:
    """The model's shape. Raises ConfigError if it has too few words for the tokenizer, or does not fit the devices."""
    shape = model_shape(config.model, vocab)
    if shape.vocab < vocab:
        raise ConfigError(f"`model.init_from` has a vocabulary of {shape.vocab}, its tokenizer one of {vocab}")
    check_memory(memory(config, shape, mesh, compute_dtype(config.device), draft_shape(config, shape)))
    return shape


def abstract_models(
    shape: ModelShape, mesh: jax.sharding.Mesh, with_eagle: bool, draft: ModelShape | None = None
) -> Models:
    """The models' shapes, types and shardings; `draft` is the draft model's shape."""
    builds = {"policy": transformer(shape), "exit": shallow_exit(shape)}
    builds |= {"eagle": eagle(shape)} if with_eagle else {}
    builds |= {"draft_model": transformer(draft)} if draft else {}
    return Models(**{name: abstract_module(build, mesh) for name, build in builds.items()})


def initial_models(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Models:
    """Fresh models from the seed, or those of `model.init_from`, whose shape this is. Raises ConfigError if they are
    not whole."""
    models, folder, draft = _first_models(config, shape, mesh), _draft_folder(config), draft_shape(config, shape)
    if draft is not None and folder is not None:
        models = replace(models, draft_model=place(read_weights(folder, draft), transformer(draft), mesh))
    return with_drafters(config, models, mesh)


def with_drafters(config: Config, models: Models, mesh: jax.sharding.Mesh) -> Models:
    """The models with an eagle and a draft model if the config drafts with them, fresh ones where they have none; else
    without."""
    shape, key = models.policy.shape, jax.random.key(config.run.seed)
    eagle_now, draft_now, draft = models.eagle, models.draft_model, draft_shape(config, shape)
    if eagle_now is None and config.speculation.with_eagle:
        eagle_now = initialise(eagle(shape), mesh, jax.random.fold_in(key, 2))
    if draft_now is None and draft is not None:
        draft_now = initialise(transformer(draft), mesh, jax.random.fold_in(key, 3))
    if draft_now is not None and draft not in (None, draft_now.shape):
        raise ConfigError(
            f"`speculation.draft_model` asks for {draft}; expected the shape of the one that is there,"
            f" {draft_now.shape}"
        )
    return replace(
        models,
        eagle=eagle_now if config.speculation.with_eagle else None,
        draft_model=None if draft is None else draft_now,
    )


def _first_models(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Models:
    keys = jax.random.split(jax.random.key(config.run.seed), 2)
    source = _source(config.model)
    if source is None:
        return Models(initialise(transformer(shape), mesh, keys[0]), initialise(shallow_exit(shape), mesh, keys[1]))
    if not (source / "config.json").is_file():
        return saved_models(source, mesh)
    policy, drafters = place(read_weights(source, shape), transformer(shape), mesh), read_drafters(source, shape)
    builds = {"exit": shallow_exit(shape), "eagle": eagle(shape)}
    found = {name: place(arrays, builds[name], mesh) for name, arrays in drafters.items()}
    return Models(policy, **{"exit": found.get("exit") or initialise(builds["exit"], mesh, keys[1]), **found})


def saved_models(folder: Path, mesh: jax.sharding.Mesh) -> Models:
    """The models in the newest checkpoint of a run directory. Raises ConfigError if it holds none."""
    with Store(folder / "checkpoints", read_only=True) as store:
        step = _newest(folder, store)
        document, arrays = store.document(step), store.restore_host(step)
    shape, draft = ModelShape(**document["shape"]), document.get("draft_shape")
    builds = {"policy": transformer(shape), "exit": shallow_exit(shape), "eagle": eagle(shape)}
    builds |= {"draft_model": transformer(ModelShape(**draft))} if draft else {}
    parts = {name: _part(arrays, name) for name in builds}
    return Models(**{name: place(part, builds[name], mesh) for name, part in parts.items() if part is not None})


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


def _part(arrays: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The arrays of one model; a phase keeps it either among what it trains or beside it. None where there is none."""
    prefixes = f"train/params/{name}/", f"{name}/"
    prefix = next((p for p in prefixes if any(path.startswith(p) for path in arrays)), None)
    if prefix is None:
        return None
    return {path.removeprefix(prefix): array for path, array in arrays.items() if path.startswith(prefix)}
