"""The tokenizer: a byte-level BPE that we train, or any Hugging Face tokenizer.json.

Special tokens enter sequences as ids alone, put there by whoever builds the sequence. Text never turns into one, not
even the text "<|end|>", and no template adds one behind the caller's back: so there is exactly one BOS and one EOS.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tlt_jax.config import ConfigError

BOS, EOS = "<|begin|>", "<|end|>"

ANY_TEXT = (
    "A text: \u00e4\u00f6\u00fc \u4e2d\U0001f600\n\t{}"  # of every kind of character that an encoder may stumble over
)
# Training takes time by the square of a word's length, and cannot be interrupted: a million letters take hours.
LONGEST_WORD = 1000  # characters without a space, or of spaces alone, that training sees as one word
_LONG = re.compile(rf"\S{{{LONGEST_WORD + 1},}}|\s{{{LONGEST_WORD + 1},}}")
MOST_GAPS = 4  # ids per entry that a vocabulary may take up

# Tried in this order when no file beside a tokenizer.json says which token begins or ends a text.
KNOWN_BOS = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|bos|>", "<|startoftext|>")
KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<|eos|>", "<|im_end|>", "<|eot_id|>")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. `backend` encodes plainly (no template, truncation, padding or dropout); `json` is the
    whole file.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int
    json: str

    @property
    def vocabulary(self) -> dict[str, int]:
        """{name: id} of every token, added ones included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included: the rows an embedding needs."""
        return max(self.vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; never a special token, whatever the text holds."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, and for each the (start, end) of the characters it stands for, whitespace included."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_many_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """`encode_with_offsets` of each text, in parallel."""
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_after(self, prompt: Iterable[int], ids: Iterable[int]) -> str:
        """The text that `ids` add to that of `prompt`: some decoders drop a space at the start of what they are given.

        Where the prompt's end and `ids` share a character, the text of `ids` alone.
        """
        before, whole = self.decode(prompt), self.decode([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    def token(self, token_id: int) -> str | None:
        """The name of one token, as the vocabulary spells it."""
        return self.backend.id_to_token(token_id)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json into `folder`, as transformers' PreTrainedTokenizerFast reads
        them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.json, encoding="utf-8")
        bos = None if self.bos_id is None else self.token(self.bos_id)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": self.token(self.eos_id),
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts`, with `<|begin|>` as BOS (id 0) and `<|end|>` as EOS (id 1). Deterministic.

    Every byte is in the vocabulary, so that every text can be encoded and comes back unchanged. Texts too few for
    `vocab_size` merges give a smaller vocabulary. A word of more than LONGEST_WORD characters is learnt from in parts
    of that length; the tokenizer itself cuts nothing. Raises ConfigError if `vocab_size` is below 258 (256 bytes and 2
    special).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        raise ConfigError(f"data.tokenizer.vocab_size is {vocab_size}; expected at least {len(alphabet) + 2}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_with_short_words(texts), trainer)
    # For readers of the exported file: `tokenizer(text)` of transformers begins as our training texts do.
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    bos_id, eos_id = backend.token_to_id(BOS), backend.token_to_id(EOS)
    assert bos_id is not None and eos_id is not None
    return from_json(backend.to_str(), bos_id, eos_id)


def _with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts; one with longer words than LONGEST_WORD as several, cut inside these."""
    for text in texts:
        start = 0
        for long in _LONG.finditer(text):
            for end in range(long.start() + LONGEST_WORD, long.end(), LONGEST_WORD):
                yield text[start:end]
                start = end
        yield text[start:]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face tokenizer.json, given as the file or the folder that holds it.

    BOS and EOS come from tokenizer_config.json, special_tokens_map.json, generation_config.json or config.json beside
    it, else from well-known names in the vocabulary. Raises ConfigError if the file cannot be read, has no EOS, or
    makes EOS out of text.
    """
    path = Path(path).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"tokenizer file {str(path)!r} does not exist; expected a Hugging Face tokenizer.json")
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer file {str(path)!r} is not a Hugging Face tokenizer.json: {error}") from None
    ids = backend.get_vocab(with_added_tokens=True).values()
    if max(ids, default=0) >= MOST_GAPS * len(ids) + 1:
        raise ConfigError(
            f"tokenizer file {str(path)!r} has {len(ids)} entries, but an id of {max(ids)}; expected ids without large"
            " gaps, for an embedding has a row for each"
        )
    bos_id = _special_id(backend, path.parent, "bos", KNOWN_BOS)
    eos_id = _special_id(backend, path.parent, "eos", KNOWN_EOS)
    if eos_id is None:
        raise ConfigError(
            f"tokenizer file {str(path)!r} has no end-of-sequence token; expected `eos_token` in a"
            f" tokenizer_config.json beside it, or one of {', '.join(KNOWN_EOS)} in its vocabulary"
        )
    tokenizer = from_json(text, bos_id, eos_id)
    try:
        tokenizer.encode(ANY_TEXT)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer file {str(path)!r} cannot encode every text: {error}") from None
    eos = tokenizer.token(eos_id)
    if eos is None or eos_id in tokenizer.encode(eos):
        raise ConfigError(
            f"tokenizer file {str(path)!r}: its end-of-sequence token {eos!r} (id {eos_id}) is unknown or comes out of"
            " plain text; expected a special token that no text turns into"
        )
    return tokenizer


def from_json(text: str, bos_id: int | None, eos_id: int) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text, with its special ids known."""
    whole = tokenizers.Tokenizer.from_str(text)
    whole.no_truncation()  # a length limit left in the file would cut texts silently
    whole.no_padding()
    tree = json.loads(whole.to_str())
    # The post-processor goes: it may trim whitespace off the offsets, which hides that a token straddles a boundary.
    tree["post_processor"] = None
    if "dropout" in tree["model"]:
        tree["model"]["dropout"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(tree))
    backend.encode_special_tokens = True  # "<|end|>" in a text is text; this is not kept in the file
    return Tokenizer(backend, bos_id, eos_id, whole.to_str())


def _special_id(backend: tokenizers.Tokenizer, folder: Path, which: str, known: tuple[str, ...]) -> int | None:
    """The id of the `which` ("bos" or "eos") token: by name, else by id, from the files beside; else a known name."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        tree = _read_json(folder / file)
        if f"{which}_token" in tree:
            value = tree[f"{which}_token"]
            if value is None and which == "bos":
                return None  # said outright: this model has no BOS
            name = value.get("content") if isinstance(value, dict) else value
            found = backend.token_to_id(name) if isinstance(name, str) else None
            if found is not None:
                return found
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get(f"{which}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ConfigError(f"file {str(folder / file)!r}: `{which}_token_id` is {value!r}; expected a token's id")
        if value is not None and 0 <= value < 2**31 and backend.id_to_token(value) is not None:
            return value
    return next((found for name in known if (found := backend.token_to_id(name)) is not None), None)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"file {str(path)!r}, beside the tokenizer, is not JSON: {error}") from None
    return tree if isinstance(tree, dict) else {}
