"""transformers' `generate` beside ours, in a process of its own: `with_transformers.py FOLDER NEW DTYPE` answers
requests, in JSON lines, with tokens a second."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax.models.hf import DRAFT_MODEL

PLAIN, LOOKUP, ASSISTANT = "transformers", "transformers, prompt lookup", "transformers, assistant"
OPTIONS: dict[str, dict[str, Any]] = {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": 5}, ASSISTANT: {}}


class Transformers:
    """transformers' generate, in a process of its own, with as many threads as are best. A draft model within `folder`
    becomes the assistant."""

    def __init__(self, folder: Path, new: int, dtype: str):
        self._assisted = (folder / DRAFT_MODEL).is_dir()
        command = [sys.executable, __file__, str(folder), str(new), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ways(self, batch: int) -> list[str]:
        """The ways of decoding that it has at this batch size; both of speculation are for one sequence alone."""
        return [PLAIN] + ([LOOKUP] + [ASSISTANT] * self._assisted) * (batch == 1)

    def speed(self, way: str, prompts: list[np.ndarray], batch: int, temperature: float) -> float:
        """Tokens a second of the better of one and two threads."""
        assert self._process.stdin is not None and self._process.stdout is not None
        tokens = [p.tolist() for p in prompts]
        asked = {"prompts": tokens, "batch": batch, "temperature": temperature, "way": way}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(folder: str, new: int, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    helper = Path(folder) / DRAFT_MODEL
    if helper.is_dir():
        assistant = AutoModelForCausalLM.from_pretrained(helper, dtype=getattr(torch, dtype)).eval().to(device)
        OPTIONS[ASSISTANT]["assistant_model"] = assistant
    threads: dict[tuple[int, str], int] = {}

    def run(asked: dict[str, Any], count: int) -> float:
        torch.set_num_threads(count)
        sampled = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0} if asked["temperature"] else {}
        start, made = time.perf_counter(), 0
        with torch.inference_mode():
            for first in range(0, len(asked["prompts"]), asked["batch"]):
                prompts = asked["prompts"][first : first + asked["batch"]]
                longest = max(map(len, prompts))  # shorter ones are filled up on the left
                filled = [(longest - len(prompt), prompt) for prompt in prompts]
                ids = torch.tensor([[0] * missing + prompt for missing, prompt in filled], device=device)
                mask = torch.tensor([[0] * missing + [1] * len(prompt) for missing, prompt in filled], device=device)
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
                    **({"do_sample": False} | sampled), **OPTIONS[asked["way"]],
                )  # fmt: skip
                made += out.shape[0] * (out.shape[1] - ids.shape[1])
        return made / (time.perf_counter() - start)

    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["batch"], asked["way"]
        if key not in threads:
            few = {**asked, "prompts": asked["prompts"][: asked["batch"]]}
            threads[key] = max((1, 2), key=lambda count: run(few, count))
        print(run(asked, threads[key]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
