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
from tlt_jax.config.device_sections import DeviceConfig, flag_words

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
LOGGED = re.compile(r"^[EF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ")  # how a line begins in which XLA tells of an error
UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: *(.*)")


def set_flags(config: DeviceConfig) -> None:
    """Adds to the variable XLA_FLAGS what `device.xla_flags` asks for; what stands there already wins.

    "auto" is the platform's preset, as far as XLA takes it. Raises ConfigError for flags of the user's, there or in
    the config, that XLA does not take. Call it before anything touches a device.
    """
    given, mine = os.environ.get("XLA_FLAGS", "").strip(), _asked_for(config)
    folder = Path(config.compilation_cache).expanduser() if config.compilation_cache else None
    _refuse_strange("the variable XLA_FLAGS", given, folder)
    _refuse_strange("`device.xla_flags`", " ".join(mine), folder)
    added = mine or _known_preset(platform_of(config) if config.xla_flags == "auto" else "cpu", folder)
    if added and given and not given.startswith("-"):
        if mine:
            raise ConfigError(
                f"`device.xla_flags` is {config.xla_flags!r}; expected 'auto' or '' where the variable XLA_FLAGS names"
                f" a file of flags ({given!r})"
            )
        log.warning("the variable XLA_FLAGS names a file of flags: the preset is left out")
        return
    there = {_name(flag) for flag in flag_words(given)}
    added = [flag for flag in added if _name(flag) not in there]
    if added:
        os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


def refuse_late(config: DeviceConfig) -> None:
    """Where JAX already runs, XLA reads no flags any more: raises ConfigError for those of the config that are not in
    the variable XLA_FLAGS."""
    there = {_name(flag) for flag in flag_words(os.environ.get("XLA_FLAGS", ""))}
    missing = [flag for flag in _asked_for(config) if _name(flag) not in there]
    if missing:
        raise ConfigError(
            f"`device.xla_flags` is {config.xla_flags!r}; expected 'auto', or flags that stood in the variable"
            f" XLA_FLAGS before JAX began to run in this process (not there: {' '.join(missing)})"
        )


def _asked_for(config: DeviceConfig) -> list[str]:
    return [] if config.xla_flags == "auto" else flag_words(config.xla_flags)


def _known_preset(platform: str, folder: Path | None) -> list[str]:
    preset = PRESETS[platform]
    try:
        strange = unknown(preset, folder)
    except ValueError as error:
        log.warning("XLA flags of the preset, left out: this jaxlib does not take them (%s)", error)
        return []
    if strange:
        log.warning("XLA flags of the preset that this jaxlib does not know, left out: %s", " ".join(sorted(strange)))
    return [flag for flag in preset if flag not in strange]


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
    """Those of `flags` that XLA does not know. What is found is kept in `folder`. Raises ValueError where it knows them
    and refuses them."""
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
    """Those that XLA does not know. Raises ValueError, with what XLA says, where it refuses them for something else."""
    tried = _trial(flags)
    said = UNKNOWN.search(tried.stderr)
    if said:
        return {flag for flag in flags if flag in said[1].split()}
    if tried.returncode and not _trial(()).returncode:  # else it is not the flags
        lines = tried.stderr.strip().splitlines()
        of_xla = [line for line in lines if LOGGED.match(line)]
        why = LOGGED.sub("", of_xla[0]) if of_xla else lines[-1] if lines else f"a trial ends with {tried.returncode}"
        raise ValueError(why[:300])
    return set()


def _trial(flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return subprocess.run([sys.executable, "-c", TRIAL], env=environment, capture_output=True, text=True, check=False)


def _refuse_strange(where: str, flags: str, folder: Path | None) -> None:
    """Raises ConfigError for flags of the user's that XLA does not take: what they are is tried."""
    try:
        strange = unknown(tuple(flag_words(flags)), folder)
        why = f"unknown: {' '.join(sorted(strange))}"
    except ValueError as error:
        strange, why = {flags}, str(error)
    if strange:
        raise ConfigError(f"{where} is {flags!r}; expected flags of this JAX's XLA ({why})")


def _name(flag: str) -> str:
    return flag.split("=")[0]


def _has_cuda() -> bool:
    return any(find_spec(name) is not None for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
