"""Prompt and completion pairs, as tokens, for the stages that train on completions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_jax.config.data_sections import DataConfig
from tlt_jax.data.functions import extract_functions
from tlt_jax.data.sources import Document, read_records
from tlt_jax.data.split import held_out_names
from tlt_jax.text import Tokenizer

Pair = tuple[str, str]
Progress = Callable[[float], None]
CHUNK = 256  # texts encoded between two reports of progress


@dataclass(frozen=True, eq=False)
class Tasks:
    """`prompts[i]` (int32, BOS first if the tokenizer has one) goes with `completions[i]` (int32, exactly one EOS,
    last).
    """

    prompts: list[np.ndarray] = field(default_factory=list)
    completions: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)


def read_pairs(
    train: Sequence[Document], held_out: Sequence[Document], config: DataConfig, seed: int, on_progress: Progress
) -> tuple[list[Pair], list[Pair], dict[str, int]]:
    """Train pairs, held-out pairs and counts; a pair that has been seen before, on either side, is left out.

    python_functions: the functions of each side's documents. jsonl: the file's lines, split by a hash of the prompt,
    so that no prompt is on both sides. Raises ConfigError for a bad line (unless source.on_bad_line is "skip") or
    fewer than 2 prompts.
    """
    if config.tasks.kind == "jsonl":
        train_pairs, held_out_pairs, counts = _pairs_of_file(config, seed)
    else:
        documents = [*train, *held_out]
        pairs_of: list[list[Pair]] = []
        for index, document in enumerate(documents):
            pairs_of.append(extract_functions(document.text))
            on_progress((index + 1) / len(documents))
        train_pairs = [pair for pairs in pairs_of[: len(train)] for pair in pairs]
        held_out_pairs = [pair for pairs in pairs_of[len(train) :] for pair in pairs]
        counts = {}
    found = len(train_pairs) + len(held_out_pairs)
    train_pairs = list(dict.fromkeys(train_pairs))
    seen = frozenset(train_pairs)
    held_out_pairs = [pair for pair in dict.fromkeys(held_out_pairs) if pair not in seen]
    kept = len(train_pairs) + len(held_out_pairs)
    return train_pairs, held_out_pairs, {**counts, "task_pairs": found, "task_duplicates": found - kept}


def _pairs_of_file(config: DataConfig, seed: int) -> tuple[list[Pair], list[Pair], dict[str, int]]:
    tasks = config.tasks
    fields = {"data.tasks.prompt_field": tasks.prompt_field, "data.tasks.completion_field": tasks.completion_field}
    records, bad = read_records(tasks.path or "", fields, config.source.on_bad_line, "data.tasks.path")
    pairs = [(texts[0], texts[1]) for _, texts in records if texts[0] and texts[1]]
    held_out = held_out_names([prompt for prompt, _ in pairs], config.held_out_fraction, seed, "task prompts")
    counts = {"task_bad_lines": bad, "task_empty": len(records) - len(pairs)}
    return [p for p in pairs if p[0] not in held_out], [p for p in pairs if p[0] in held_out], counts


def tokenize_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, max_prompt: int, max_completion: int, on_progress: Progress
) -> tuple[Tasks, dict[str, int]]:
    """Pairs as `Tasks`, each tokenised as one text and then split where its prompt ends; a straddling token is the
    completion's.

    A prompt of more than `max_prompt` tokens (BOS included) or a completion of more than `max_completion` (EOS
    included) is dropped, never cut, and counted.
    """
    prompts, completions, dropped = [], [], Counter(dropped_long_prompts=0, dropped_long_completions=0)
    for start in range(0, len(pairs), CHUNK):
        chunk = pairs[start : start + CHUNK]
        encoded = tokenizer.encode_many_with_offsets([prompt + completion for prompt, completion in chunk])
        for (prompt_text, _), (ids, offsets) in zip(chunk, encoded, strict=True):
            prompt, completion = split_tokens(ids, offsets, len(prompt_text), tokenizer)
            if len(prompt) > max_prompt or not len(prompt):
                dropped["dropped_long_prompts" if len(prompt) else "dropped_empty_prompts"] += 1
            elif len(completion) > max_completion:
                dropped["dropped_long_completions"] += 1
            else:
                prompts.append(prompt)
                completions.append(completion)
        on_progress(min(1.0, (start + CHUNK) / len(pairs)))
    return Tasks(prompts, completions), dict(dropped)


def split_tokens(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], boundary: int, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """([bos] + tokens that end by character `boundary`, the rest + [eos]), both int32."""
    cut = next((index for index, (_, end) in enumerate(offsets) if end > boundary), len(ids))
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return np.array([*bos, *ids[:cut]], np.int32), np.array([*ids[cut:], tokenizer.eos_id], np.int32)
