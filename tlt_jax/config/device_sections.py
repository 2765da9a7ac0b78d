"""The sections on devices and processes: where the run computes, in which type, and with whom."""

import re
from typing import Literal

from pydantic import Field, model_validator

from tlt_jax.config.base import LARGEST_INT, PathOrNone, PositiveFloat, PositiveInt, PrecisionLevel, Section


def flag_words(flags: str) -> list[str]:
    """The flags of a text as in the variable XLA_FLAGS: separated by space outside of quotes."""
    return re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", flags)


class MeshConfig(Section):
    """Sizes of the mesh axes; the product is the number of devices. -1 takes what is left (one axis at most)."""

    data: int = Field(-1, le=LARGEST_INT, description="replicas that split the batch")
    fsdp: int = Field(1, le=LARGEST_INT, description="devices that split the batch and the weights")
    tensor: int = Field(1, le=LARGEST_INT, description="devices that split heads, hidden units and vocabulary")

    @model_validator(mode="after")
    def _sizes(self):
        sizes = [self.data, self.fsdp, self.tensor]
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"sizes are {sizes}; expected positive ones, with -1 (what is left) on one axis at most")
        return self


class DeviceConfig(Section):
    """Where the run computes, and in which type."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = Field("auto", description="where to run")
    cpu_devices: int = Field(
        1, ge=1, le=1024, description="simulated devices on the CPU; 2 use two cores better than one does"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of activations and matrix products; auto: what precision asks for (O0: float32, O1 and O2:"
        " bfloat16), else float32 on CPU and bfloat16 elsewhere. float16 trains with dynamic loss scaling",
    )
    precision: PrecisionLevel = Field(
        "auto",
        description="O0: float32 everywhere; O1: compute_dtype for activations and products, weights and gradients in"
        " float32; O2: matrices and their gradients in compute_dtype too, with float32 masters; auto: O0 or O1",
    )
    xla_flags: str = Field(
        "auto",
        description="auto: the platform's preset (tlt_jax/parallel/xla_flags.py), as far as this XLA knows it; else"
        " flags as in the variable XLA_FLAGS, which wins; '' for none",
    )
    compilation_cache: PathOrNone = Field(
        "~/.cache/tlt_jax/compiled", description="folder of the persistent compilation cache; '' for none"
    )
    mesh: MeshConfig = MeshConfig()
    coordinator: str | None = Field(
        None,
        description="several processes: host:port of process 0; the port after it is used too. The same in all",
    )
    processes: PositiveInt = Field(1, description="how many processes the run has; the same in all")
    process: int | None = Field(None, ge=0, le=LARGEST_INT, description="which of them this is, from 0")
    join_seconds: PositiveFloat = Field(
        60.0, le=86400.0, description="how long the processes wait for each other at the start"
    )

    @model_validator(mode="after")
    def _flags(self):
        strange = [word for word in flag_words(self.xla_flags) if not word.startswith("--")]
        if strange and self.xla_flags != "auto":
            raise ValueError(f"xla_flags has {strange[0]!r}; expected 'auto', or words that begin with '--'")
        return self

    @model_validator(mode="after")
    def _precision(self):
        half = {"O0": False, "O1": True, "O2": True}.get(self.precision)
        if half is not None and self.compute_dtype != "auto" and half != (self.compute_dtype != "float32"):
            expected = "auto, bfloat16 or float16" if half else "auto or float32"
            raise ValueError(
                f"compute_dtype ({self.compute_dtype}) does not fit precision {self.precision}; expected {expected}"
            )
        return self

    @model_validator(mode="after")
    def _processes(self):
        if self.coordinator is None and (self.processes > 1 or self.process is not None):
            raise ValueError("`processes` and `process` need `coordinator`, the host:port of process 0")
        if self.coordinator is not None and (self.process is None or self.process >= self.processes):
            raise ValueError(f"`process` is {self.process}; expected 0 to {self.processes - 1}, below `processes`")
        return self
