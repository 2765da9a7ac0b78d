"""Our import, export and decoding against transformers: logits, keys, tokenizers and greedy completions."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `parity` (torch, transformers) is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` (torch, transformers) is not installed")

from tlt_jax.decode.admission import Request  # noqa: E402
from tlt_jax.decode.controller import Fixed  # noqa: E402
from tlt_jax.decode.engine import Engine  # noqa: E402
from tlt_jax.decode.propose import OFF, Choice  # noqa: E402
from tlt_jax.models.heads import ShallowExit  # noqa: E402
from tlt_jax.models.hf import DRAFT_MODEL, export, read_shape, read_weights  # noqa: E402
from tlt_jax.models.transformer import ModelShape  # noqa: E402
from tlt_jax.text import load_tokenizer, train_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i, 'é 日本')\n"] * 20
NEW = 32
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. One day,"
    ' they saw a big red ball under a tree. "Look, a ball!" said Lily. The dog ran and ran, and then it sat down. '
)


def shape_of(name, vocab):
    """Odd sizes; `grouped` and `wide` (heads wider than width // heads), tied and untied."""
    return {
        "grouped tied": ModelShape(vocab, 48, 3, 6, 2, 8, 77, 1, 4, 50_000.0, 1e-6, True),
        "wide untied": ModelShape(vocab, 36, 2, 4, 4, 14, 51, 1, 4, 1_234.5, 1e-5, False),
        "one kv head untied": ModelShape(vocab, 40, 4, 5, 1, 8, 33, 2, 4, 10_000.0, 1e-5, False),
    }[name]


NAMES = ["grouped tied", "wide untied", "one kv head untied"]


def their_model(folder):
    """The model as transformers loads it, with every key accounted for."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def record_difference(record_property, found, expected, tolerance):
    difference = float(np.abs(found - expected).max())
    record_property("largest difference", difference)
    print(f"largest difference {difference:.2e}")
    assert difference < tolerance


@pytest.fixture(params=NAMES)
def exported(request, tmp_path, random_arrays):
    """(folder, shape, weights, tokenizer, drafter) of a model that we exported, in shards."""
    tokenizer = train_tokenizer(TEXTS, 300)
    s = shape_of(request.param, tokenizer.vocab_size + 3)
    weights, drafter = random_arrays(s), random_arrays(s, ShallowExit, 1)
    export(tmp_path / "m", s, weights, {"exit": drafter}, tokenizer, 256, max_shard_bytes=40_000)
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    return tmp_path / "m", s, weights, tokenizer, drafter


def test_logits_of_a_real_model(stories, as_module, our_logits, record_property):
    s = read_shape(stories, 2, 8)
    ours, theirs, tokenizer = as_module(s, read_weights(stories, s)), their_model(stories), load_tokenizer(stories)
    assert tokenizer.bos_id is not None
    for text in ("Once", "Once upon a time", "The cat sat on the mat because", STORY * 3):
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        record_difference(record_property, our_logits(ours, ids), their_logits(theirs, ids), 1e-4)
    assert len(ids) > 200


def test_an_exported_model_gives_the_same_logits(exported, as_module, our_logits, record_property):
    folder, s, weights, _, _ = exported
    theirs = their_model(folder)
    assert theirs.config.rope_parameters["rope_theta"] == s.rope_theta
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == s.tied
    ids = np.random.default_rng(0).integers(0, s.vocab, 100).tolist()
    record_difference(record_property, our_logits(as_module(s, weights), ids), their_logits(theirs, ids), 1e-4)


def test_an_exported_draft_model_assists_in_transformers(exported, random_arrays, as_module, our_logits):
    """Its logits are ours, and their assisted greedy decoding with it gives the tokens of their plain one."""
    folder, s, weights, tokenizer, _ = exported
    draft = replace(s, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=24, exit_layer=0, exit_rank=0)
    arrays = random_arrays(draft, seed=2)
    export(folder, s, weights, {}, tokenizer, 256, draft_model=(draft, arrays))
    theirs, assistant = their_model(folder), their_model(folder / DRAFT_MODEL)
    ids = np.random.default_rng(0).integers(0, s.vocab, 100).tolist()
    np.testing.assert_allclose(our_logits(as_module(draft, arrays), ids), their_logits(assistant, ids), atol=1e-4)
    prompt = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXTS[0])]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": NEW}
    plain = theirs.generate(prompt, **options)
    np.testing.assert_array_equal(theirs.generate(prompt, assistant_model=assistant, **options), plain)


def test_what_transformers_saves_comes_back(exported, tmp_path):
    folder, s, weights, _, _ = exported
    their_model(folder).save_pretrained(tmp_path / "theirs")
    assert read_shape(tmp_path / "theirs", s.exit_layer, s.exit_rank) == s
    read = read_weights(tmp_path / "theirs", s)
    assert all(np.array_equal(read[path], array) for path, array in weights.items())


def test_old_readers_find_the_base_of_the_rotary_embedding(exported, tmp_path):
    folder, s, _, _, _ = exported
    tree = json.loads((folder / "config.json").read_text())
    del tree["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(tree))
    assert transformers.AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == s.rope_theta


def test_the_tokenizer_gives_the_same_ids(exported):
    folder, _, _, tokenizer, _ = exported
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    for text in [*TEXTS[:2], " leading", "tab\tand  spaces \n\n", "日本 \U0001f600"]:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.encode(text) == [tokenizer.bos_id, *ids]
        assert theirs.decode(ids) == tokenizer.decode(ids) == text


def greedy_of_theirs(theirs, ids):
    """(completion, margin between the two likeliest tokens at each of its steps)."""
    prompt = torch.tensor([ids])
    out = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values
    return out.sequences[0, len(ids) :].numpy(), (best[:, 0] - best[:, 1]).numpy()


def assert_greedy_is_equal(s, model, exit, theirs, prompts, eos, mesh, draft):
    """Equal up to the first step where rounding decides (both of the likeliest tokens within 1e-4)."""
    engine = Engine(
        s,
        mesh,
        slots=2,
        max_prompt=max(map(len, prompts)),
        max_new=NEW,
        eos=[eos],
        controller=Fixed(draft),
        dtype=jnp.float32,
    )
    requests = [Request(np.array(ids, np.int32), NEW, seed, temperature=0.0) for seed, ids in enumerate(prompts)]
    rollout = engine.run(engine.view(model, exit), requests)
    compared = 0
    for ids, row, length in zip(prompts, rollout.tokens_BT, rollout.length_B, strict=True):
        expected, margin = greedy_of_theirs(theirs, ids)
        close = np.flatnonzero(margin < 1e-4)
        count = int(close[0]) if len(close) else len(expected)
        found = row[len(ids) : length]
        np.testing.assert_array_equal(found[:count], expected[:count])
        assert len(close) or len(found) == len(expected)
        compared += count
    assert compared > 0.7 * NEW * len(prompts)
    return rollout


DRAFTS = [OFF, Choice("shallow", 4)]


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda d: d.drafter)
def test_greedy_completions_are_equal(exported, as_module, mesh, draft):
    folder, s, weights, tokenizer, drafter = exported
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in (TEXTS[0], TEXTS[1], "x")]
    assert_greedy_is_equal(
        s,
        as_module(s, weights),
        as_module(s, drafter, ShallowExit),
        their_model(folder),
        prompts,
        tokenizer.eos_id,
        mesh,
        draft,
    )


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda d: d.drafter)
def test_greedy_completions_of_a_real_model_are_equal(stories, random_arrays, as_module, mesh, draft):
    s = read_shape(stories, 3, 8)
    tokenizer = load_tokenizer(stories)
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in ("Once upon a time", "Tom had a", STORY)]
    rollout = assert_greedy_is_equal(
        s,
        as_module(s, read_weights(stories, s)),
        as_module(s, random_arrays(s, ShallowExit, 1), ShallowExit),
        their_model(stories),
        prompts,
        tokenizer.eos_id,
        mesh,
        draft,
    )
    assert draft.drafter == "off" or rollout.drafted_B.sum() > 0
