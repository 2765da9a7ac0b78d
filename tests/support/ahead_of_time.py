"""A program: compiles a config's training and decoding steps for as many simulated devices as it asks for, or for a TPU
topology, from shapes alone; writes what the compiler says of their memory, and where arrays lie, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))

import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config, load_config
from tlt_jax.decode.controller import Fixed
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import Choice
from tlt_jax.models.declare import flatten
from tlt_jax.models.decode_view import decode_view, view_shardings
from tlt_jax.parallel.mesh import compute_dtype, make_mesh
from tlt_jax.parallel.sharding import abstract, batch_sharding
from tlt_jax.stages.memory import memory
from tlt_jax.stages.models import model_shape, shallow_exit, transformer
from tlt_jax.stages.training import Training, group_policy_training, supervised_training
from tlt_jax.train.state import Role


def batch(mesh: Mesh, names: dict[str, Any], shape: tuple[int, int, int]) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = batch_sharding(mesh, leading=1)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in names.items()}


def training(program: Training, rows: dict[str, Any]) -> dict[str, Any]:
    state = program.abstract_state()
    compiled = program.update().lower(state, rows, np.float32(0.5)).compile()
    after = flatten(compiled.output_shardings[0])
    local = {path: list(after[path].shard_shape(array.shape)) for path, array in flatten(state).items()}
    return {**described(compiled), "arrays": local}


def decoding(config: Config, mesh: Mesh, vocab: int) -> dict[str, Any]:
    shape, dtype = model_shape(config.model, vocab), compute_dtype(config.device)
    limits, speculation = config.data.tasks, config.speculation
    engine = Engine(
        shape,
        mesh,
        slots=speculation.slots,
        max_prompt=limits.max_prompt_tokens,
        max_new=limits.max_completion_tokens,
        eos=[0],
        controller=Fixed(Choice(speculation.drafter, speculation.draft_length)),
        dtype=dtype,
        block_verifies=speculation.block_verifies,
    )
    of = config.pretrain.optimizer
    models = (Role(build(shape), of).abstract() for build in (transformer, shallow_exit))
    view = jax.eval_shape(
        lambda model, exit: decode_view(model, exit, None, None, dtype, engine.max_prompt + engine.max_new), *models
    )
    compiled = engine.lower_block(tuple(jax.tree.leaves(abstract(view, view_shardings(shape, mesh))))).compile()
    slots = compiled.input_shardings[0][1]
    global_shape = (
        engine.slots,
        shape.kv_heads,
        limits.max_prompt_tokens + limits.max_completion_tokens,
        shape.head_dim,
    )
    cache = [list(layer.value_BKTN.shard_shape(global_shape)) for layer in slots.cache]
    return {**described(compiled), "cache": cache}


def described(compiled: Any) -> dict[str, Any]:
    found = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "aliased": found.alias_size_in_bytes,
    }


def main(config: Config, devices: Any, vocab: int) -> dict[str, Any]:
    mesh, shape = make_mesh(config.device.mesh, devices), model_shape(config.model, vocab)
    pretrain, policy, limits = config.pretrain, config.finetune.policy, config.data.tasks
    ints = dict.fromkeys(("tokens", "segments", "positions"), np.int32)
    rows = pretrain.accumulation, pretrain.batch_size // pretrain.accumulation, config.data.context_length
    supervised = batch(mesh, ints | {"targets": np.int32, "weights": np.float32}, rows)
    sequences = policy.prompts * policy.group_size // policy.minibatches // policy.accumulation
    floats = dict.fromkeys(("weights", "old_logp", "advantages", "ref_logp"), np.float32)
    whole = limits.max_prompt_tokens + limits.max_completion_tokens
    rollouts = batch(mesh, ints | floats, (policy.accumulation, sequences, whole))
    return {
        "planned": memory(config, shape, mesh, compute_dtype(config.device)),
        "pretrain": training(supervised_training(config, pretrain, shape, mesh), supervised),
        "policy": training(group_policy_training(config, shape, mesh), rollouts),
        "block": decoding(config, mesh, vocab),
    }


if __name__ == "__main__":
    loaded = load_config(Path(sys.argv[1]))
    if len(sys.argv) > 4:
        from jax.experimental import topologies

        described_devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[4]).devices
    else:
        described_devices = jax.devices()
    Path(sys.argv[3]).write_text(json.dumps(main(loaded, described_devices, loaded.data.tokenizer.vocab_size)))
