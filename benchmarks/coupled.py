"""The output as a function of the seed alone: coupled verification with every drafter, draft length and batch size.

    python benchmarks/coupled.py [--run DIR] [--prompts 256] [--batch 1 16] [--quick] [--json FILE]

Held-out prompts are completed at temperature 1. A token is argmax(log p + g), with noise g of the seed and the position
alone, so every variant must give the tokens of plain decoding; a sum in another order may change them only where the
token comes within 1e-4 of the largest, and the script fails if any part elsewhere.
"""

import argparse
import platform
from functools import partial
from itertools import product
from pathlib import Path

import code_model
import jax
import jax.numpy as jnp
from divergence import CLOSE, parted
from results import report

from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Fixed
from tlt_jax.decode.propose import OFF, Choice

NEW = 64


def main() -> None:
    options = _options()
    config, models, corpus = code_model.load(Path(options.run))
    prompts = code_model.prompts(corpus, options.prompts)
    drafting = [name for name in code_model.drafters_of(models) if name != "off"]
    choices = [OFF, *(Choice(*pair) for pair in product(drafting, options.lengths))]
    requests = [Request(prompt, NEW, seed) for seed, prompt in enumerate(prompts)]
    noise = partial(_noise, models.policy.shape.vocab)
    plain, values = None, {}
    for batch, choice in product(options.batch, choices):
        engine = code_model.engine(config, models, Fixed(choice), batch, NEW, "coupled", "sampled")
        found = engine.run(engine.view(models.policy, models.exit, models.eagle, models.draft_model), requests)
        plain = plain or found
        name = f"{choice.drafter} {choice.draft_length or ''}".strip() + f", batch {batch}"
        values[name] = parted(models.policy, plain, found, noise)
        calls = found.target_calls_B.sum() / found.completion_length_B.sum()
        values[name]["target_calls_per_token"] = float(calls)
        print(f"{name:24}{calls:7.3f} calls a token; {values[name]['divergences']} of {len(prompts)} part", flush=True)
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("coupled", machine, ("jax", "jaxlib", "flax", "numpy"), values, {}, options.json)
    wrong = [name for name, row in values.items() if row["largest_gap"] > CLOSE]
    if wrong:
        raise SystemExit(f"parted where the two best are not close: {', '.join(wrong)}")


def _noise(vocab: int, seed: int, position: int) -> jax.Array:
    """The Gumbel noise [V] of a request's position."""
    key = jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), position), (vocab,))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/code_2m", help="run directory of the model; trained if it is not there")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="sequences decoded together")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(range(1, 8)), help="draft lengths")
    parser.add_argument("--quick", action="store_true", help="16 prompts, draft lengths 1 and 5")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.lengths = 16, [1, 5]
    return options


if __name__ == "__main__":
    main()
