"""What benchmarks of decoding decode: a model with its drafters, and prompts of it."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import code_model
import jax
import numpy as np
from shapes import SIZES

from tlt_jax.config import load_config
from tlt_jax.config.schema import Config
from tlt_jax.models.declare import initialise
from tlt_jax.models.hf import export
from tlt_jax.parallel.mesh import make_mesh, set_up_devices
from tlt_jax.stages.models import Models, host_copy, initial_models, model_shape, shallow_exit, transformer
from tlt_jax.text.tokenizer import load_tokenizer

HUMANEVAL = Path(__file__).parents[2] / "shared/data/humaneval/HumanEval.jsonl.gz"
LONGEST = 128  # tokens of a text's prompt; longer ones are left out
RANDOM_PROMPT = 32


@dataclass(frozen=True)
class Subject:
    """`drafters`: those that it has weights for, and those that need none. `folder`: its Hugging Face directory."""

    config: Config
    models: Models
    prompts: list[np.ndarray]
    drafters: list[str]
    folder: Path

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))


def trained(run: Path, devices: int) -> Subject:
    """The code model of a run directory, trained first if it is not there, on the starts of held-out rows."""
    config, models, corpus = code_model.load(run, devices)
    return Subject(config, models, code_model.prompts(corpus, 512), code_model.drafters_of(models), run / "export")


def from_folder(folder: Path, prompts: Path, devices: int) -> Subject:
    """A Hugging Face directory, on the "prompt" of each line of a file in JSON lines. The shallow drafter and eagle are
    left out where the directory holds none that were trained."""
    own = (folder / "drafter.safetensors").is_file()
    overrides = [f"model.init_from={folder}", f"device.cpu_devices={devices}", "speculation.drafter=auto"]
    config = load_config(None, overrides)
    set_up_devices(config.device)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    models = initial_models(config, model_shape(config.model, tokenizer.vocab_size), make_mesh(config.device.mesh))
    lines = (gzip.open if prompts.suffix == ".gz" else open)(prompts, "rt")
    with lines:
        texts = [np.asarray(tokenizer.encode(json.loads(line)["prompt"]), np.int32) for line in lines]
    drafters = code_model.drafters_of(models) if own else ["ngram", "off"]
    return Subject(config, models, [text for text in texts if len(text) <= LONGEST], drafters, folder)


def random_weights(size: str, dtype: str, folder: Path | None, devices: int) -> Subject:
    """A model of one of `shapes.SIZES`, untrained, on random prompts; written to `folder` where one is given."""
    config = load_config(None, [f"device.cpu_devices={devices}", f"device.compute_dtype={dtype}"])
    set_up_devices(config.device)
    shape, mesh = SIZES[size], make_mesh(config.device.mesh)
    keys = jax.random.split(jax.random.key(0), 2)
    models = Models(initialise(transformer(shape), mesh, keys[0]), initialise(shallow_exit(shape), mesh, keys[1]))
    tokens = np.random.default_rng(0).integers(shape.vocab, size=(512, RANDOM_PROMPT), dtype=np.int32)
    if folder is not None:
        export(folder, shape, host_copy(models.policy), {}, None, context_length=1024)
    return Subject(config, models, list(tokens), ["ngram", "off"], folder or Path())
