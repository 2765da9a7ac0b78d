"""The map between our arrays and a Hugging Face checkpoint's tensors, derived from the declarations alone.

An array that is declared `transposed` stands for a matrix [outputs, inputs] there, and each layer of a stacked array
is a tensor of its own.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tlt_jax.models.declare import ParamSpec, table
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer

WEIGHTS, INDEX, DRAFTER = "model.safetensors", "model.safetensors.index.json", "drafter.safetensors"
DRAFT_MODEL = "draft_model"  # a folder within: the draft model, a Hugging Face directory of its own


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: its name and shape there, and the array (`layer` of it, if stacked) it is with us."""

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    layer: int | None


def transformer_specs(shape: ModelShape) -> dict[str, ParamSpec]:
    """{our path: declaration} of the transformer."""
    return table(lambda declare: Transformer(shape, declare))


def drafter_specs(shape: ModelShape) -> dict[str, dict[str, ParamSpec]]:
    """{drafter: {our path: declaration}} of the drafters' own parameters."""
    builds: dict[str, Any] = {"exit": ShallowExit, "eagle": Eagle}
    return {name: table(partial(build, shape)) for name, build in builds.items()}


def in_file(drafter: str, path: str) -> str:
    """The name of a drafter's array in its file: the exit's is its path."""
    return path if drafter == "exit" else f"{drafter}/{path}"


def tensors(specs: dict[str, ParamSpec]) -> list[Tensor]:
    """Every tensor that the checkpoint holds for `specs`: what belongs to no layer, then layer by layer."""
    found = []
    for spec in specs.values():
        assert spec.hf is not None, f"{spec.path} has no name in a Hugging Face checkpoint"
        for layer in range(spec.shape[0]) if spec.stacked else [None]:
            found.append(Tensor(spec.hf.format(layer=layer), theirs_shape(spec), spec, layer))
    return sorted(found, key=lambda tensor: -1 if tensor.layer is None else tensor.layer)


def theirs_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape that the tensor (of one layer) has there."""
    if not spec.transposed:
        return ours_shape(spec)
    inputs = _inputs(spec)
    return math.prod(ours_shape(spec)) // inputs, inputs


def ours_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape that the array (of one layer) has with us."""
    return spec.shape[1:] if spec.stacked else spec.shape


def to_theirs(array: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The array of one layer, [*ours_shape], as the tensor there, [*theirs_shape]."""
    return array.reshape(_inputs(spec), -1).T if spec.transposed else array


def to_ours(tensor: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The tensor there, [*theirs_shape], as the array of one layer, [*ours_shape]."""
    return tensor.T.reshape(ours_shape(spec)) if spec.transposed else tensor


def _inputs(spec: ParamSpec) -> int:
    """The inputs of a matrix. Its model width is one whole side: the first axis, the rest then being outputs, or the
    last, the rest then being inputs.
    """
    axes, shape = spec.axes[1:] if spec.stacked else spec.axes, ours_shape(spec)
    assert "embed" in (axes[0], axes[-1]), f"{spec.path}: neither the first nor the last axis is the model's width"
    return shape[0] if axes[0] == "embed" else math.prod(shape[:-1])
