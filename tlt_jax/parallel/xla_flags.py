"""XLA's flags: presets by platform, of which only those are set that the XLA at hand knows.

A name in XLA_FLAGS that XLA does not know ends the process before Python can say why. So flags are tried in another
process first; what came of it is kept beside the compiled programs, by jaxlib's version.
"""

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tlt_jax.config import ConfigError
from tlt_jax.config.device_sections import DeviceConfig

log = logging.getLogger("tlt_jax")

# For GPUs: communication beside computation, in large pieces, after NVIDIA's "Tips for High-Performance LLMs with JAX
# and XLA".
PRESETS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "gpu": (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_all_gather_combine_threshold_bytes=536870912",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=536870912",
    ),
    "tpu": (),  # its own flags go through LIBTPU_INIT_ARGS, and their defaults are those for training
}
TRIAL = "import jax; jax.devices()"
UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: *(.*)")


def set_flags(config: DeviceConfig) -> None:
    """Adds to the variable XLA_FLAGS what `device.xla_flags` asks for; what stands there already wins.

    "auto" is the platform's preset, as far as XLA knows it. Raises ConfigError for a flag of the user's, there or in
    the config, that XLA does not know. Call it before anything touches a device.
    """
    given = os.environ.get("XLA_FLAGS", "")
    mine = () if config.xla_flags == "auto" else tuple(config.xla_flags.split())
    folder = Path(config.compilation_cache).expanduser() if config.compilation_cache else None
    if given.strip():
        _refuse_unknown("the variable XLA_FLAGS", given, unknown(tuple(given.split()), folder))
    if mine:
        _refuse_unknown("`device.xla_flags`", config.xla_flags, unknown(mine, folder))
    preset = PRESETS[platform_of(config)] if config.xla_flags == "auto" else ()
    strange = unknown(preset, folder)
    if strange:
        log.warning("XLA flags of the preset that this jaxlib does not know, left out: %s", " ".join(sorted(strange)))
    there = {_name(flag) for flag in given.split()}
    added = [flag for flag in (*preset, *mine) if flag not in strange and _name(flag) not in there]
    if added:
        os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])


def platform_of(config: DeviceConfig) -> str:
    """The platform that JAX will choose, as far as that can be told before it does: "cpu", "gpu" or "tpu"."""
    if config.platform != "auto":
        return config.platform
    chosen = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        return {"cuda": "gpu", "rocm": "gpu"}.get(chosen, chosen if chosen in PRESETS else "cpu")
    if find_spec("libtpu") is not None and Path("/dev/accel0").exists():
        return "tpu"
    return "gpu" if Path("/dev/nvidiactl").exists() and _has_cuda() else "cpu"


def unknown(flags: tuple[str, ...], folder: Path | None = None) -> set[str]:
    """Those of `flags` that XLA does not know. What is found is kept in `folder`."""
    if not flags:
        return set()
    key = hashlib.sha256(json.dumps([sorted(flags), version("jaxlib")]).encode()).hexdigest()[:16]
    kept = None if folder is None else folder / f"xla_flags_{key}.json"
    try:
        if kept is not None and kept.is_file():
            return set(json.loads(kept.read_text())["unknown"]) & set(flags)
    except (OSError, ValueError, LookupError, TypeError):  # somebody's file: found anew
        log.debug("%s cannot be read", kept)
    found = _try(flags)
    if kept is not None:
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept.write_text(json.dumps({"unknown": sorted(found)}))
        except OSError as error:
            log.debug("%s cannot be written: %s", kept, error)
    return found


def _try(flags: tuple[str, ...]) -> set[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", TRIAL]
    tried = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = UNKNOWN.search(tried.stderr)
    return {flag for flag in flags if flag in said[1].split()} if said else set()


def _refuse_unknown(where: str, flags: str, strange: set[str]) -> None:
    if strange:
        raise ConfigError(
            f"{where} is {flags!r}; expected flags of this JAX's XLA (unknown: {' '.join(sorted(strange))})"
        )


def _name(flag: str) -> str:
    return flag.split("=")[0]


def _has_cuda() -> bool:
    return any(find_spec(name) is not None for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
