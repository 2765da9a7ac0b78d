"""Choosing devices and building the mesh."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from tlt_jax.config import ConfigError
from tlt_jax.config.device_sections import DeviceConfig, MeshConfig
from tlt_jax.parallel.xla_flags import refuse_late, set_flags

MESH_AXES = ("data", "fsdp", "tensor")


def set_up_devices(config: DeviceConfig) -> None:
    """Tells JAX which platform, how many simulated CPU devices and which compilation cache to use.

    Call it before anything touches a device, and before other processes are joined. Raises ConfigError if devices
    exist already in another number or without the config's flags, or XLA does not take the flags it is given.
    """
    if jax.config.read("jax_enable_x64"):
        raise ConfigError("JAX_ENABLE_X64, or `jax_enable_x64`, is set; expected it off: the types here are 32-bit")
    if config.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    try:
        for count in (config.cpu_devices + 1, config.cpu_devices):  # JAX looks at a number that changes alone
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX runs already: fine, if with as many
        if jax.default_backend() == "cpu" and jax.local_device_count() != config.cpu_devices:
            raise ConfigError(
                f"`device.cpu_devices` is {config.cpu_devices}; expected {jax.local_device_count()}, with which JAX"
                " already runs in this process"
            ) from None
        refuse_late(config)
    else:
        set_flags(config)
    if config.compilation_cache:
        folder = Path(config.compilation_cache).expanduser()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"`device.compilation_cache` is {config.compilation_cache!r}; expected a folder ({error})"
            ) from None
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_devices(config: DeviceConfig) -> None:
    """Raises ConfigError if the platform has no device."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or "JAX finds no such device").splitlines()[0]
        raise ConfigError(f"`device.platform` is {config.platform!r}; expected one that is there ({reason})") from None


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Axis sizes (data, fsdp, tensor), -1 resolved. Raises ConfigError if their product is not `devices`."""
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if math.prod(sizes) != devices:
        wanted = " x ".join(f"{axis} {getattr(config, axis)}" for axis in MESH_AXES)
        raise ConfigError(f"`device.mesh` is {wanted}; expected a product of {devices}, the number of devices")
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (None: all), axes in Auto mode (the compiler propagates shardings from our constraints).

    Raises ConfigError where the config's sizes do not fit them.
    """
    arranged = arrange(config, jax.devices() if devices is None else devices)
    return Mesh(arranged, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def arrange(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of the mesh's shape, neighbours near each other.

    Where they are joined by two kinds of network, the fast one within a host or slice and the slow one between them,
    the outer axes run over the slow one: `data` first, then `fsdp`; `tensor` only where these do not suffice.
    """
    shape, groups = mesh_shape(config, len(devices)), fast_groups(devices)
    if groups == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    slow = slow_shape(shape, groups)
    fast = tuple(size // across for size, across in zip(shape, slow, strict=True))
    by_process = len({_slice(device) for device in devices}) == 1
    return mesh_utils.create_hybrid_device_mesh(
        fast, slow, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )


def fast_groups(devices: Sequence[Any]) -> int:
    """How many groups of devices are joined by a slow network: TPU slices, hosts of GPUs or of CPU processes.

    JAX numbers slices of TPUs, and hosts of GPUs, as slices; within a TPU slice all hosts are on the fast network.
    """
    slices = {_slice(device) for device in devices}
    if len(slices) > 1 or devices[0].platform == "tpu":
        return len(slices)
    return len({device.process_index for device in devices})


def slow_shape(shape: Sequence[int], groups: int) -> tuple[int, ...]:
    """How many parts of each axis lie in different groups: as many of the outer axes' as can."""
    across = []
    for size in shape:
        across.append(math.gcd(size, groups))
        groups //= across[-1]
    assert groups == 1, "groups of equal size divide the product of the axes"
    return tuple(across)


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def compute_dtype(config: DeviceConfig) -> np.dtype:
    """The type of activations: float32 on CPU unless asked otherwise (bfloat16 with few rows is slow there)."""
    name = config.compute_dtype
    if name == "auto":
        whole = config.precision == "O0" or (config.precision == "auto" and jax.default_backend() == "cpu")
        name = "float32" if whole else "bfloat16"
    return jax.numpy.dtype(name)
