"""Export and import of Hugging Face directories: bit-equal round trips, indexes, and every error."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tlt_jax.config import ConfigError
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.hf import DRAFT_MODEL, export, read_drafters, read_exit, read_shape, read_weights
from tlt_jax.text import load_tokenizer, train_tokenizer


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == np.float32
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def edit_config(folder, **changes):
    """Changes keys of config.json; None takes one away."""
    path = folder / "config.json"
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


@pytest.fixture
def exported(tmp_path, shape, numpy_weights):
    """make(max_shard_bytes=5e9, **shape changes) -> (folder, shape, weights)."""

    def make(max_shard_bytes=5e9, **changes):
        s, folder = shape(**changes), tmp_path / "model"
        weights = numpy_weights(s)
        export(folder, s, weights, {}, None, 64, max_shard_bytes=max_shard_bytes)
        return folder, s, weights

    return make


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [5e9, 8_000, 1])
def test_round_trip_is_bit_equal(exported, tied, max_shard_bytes):
    folder, s, weights = exported(max_shard_bytes, tied=tied)
    assert read_shape(folder, s.exit_layer, s.exit_rank) == s
    assert_same(read_weights(folder, s), weights)
    assert (folder / "model.safetensors").is_file() == (max_shard_bytes == 5e9)


def test_tensors_are_those_of_the_format(exported):
    folder, s, weights = exported()
    held = load_file(folder / "model.safetensors")
    assert len(held) == 3 + 9 * s.layers
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}."
        # Row h * head_dim + n of q_proj gives output n of head h; column likewise of o_proj takes it.
        query, out = weights["layers/attention/query"][layer], weights["layers/attention/out"][layer]
        np.testing.assert_array_equal(held[prefix + "self_attn.q_proj.weight"][3 * s.head_dim + 4], query[:, 3, 4])
        np.testing.assert_array_equal(held[prefix + "self_attn.o_proj.weight"][:, 3 * s.head_dim + 4], out[3, 4])
        assert held[prefix + "self_attn.k_proj.weight"].shape == (s.kv_heads * s.head_dim, s.width)
        assert held[prefix + "mlp.down_proj.weight"].shape == (s.width, s.hidden)
    assert held["lm_head.weight"].shape == held["model.embed_tokens.weight"].shape == (s.vocab, s.width)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_tied_embedding_is_written_once(exported):
    folder, _, _ = exported(tied=True)
    held = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in held
    assert "model.embed_tokens.weight" in held
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_index_lists_what_the_shards_hold(tmp_path, shape, numpy_weights, dtype):
    s = shape()
    export(tmp_path / "m", s, numpy_weights(s), {}, None, 64, dtype, max_shard_bytes=8_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in (tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    held = {shard: load_file(tmp_path / "m" / shard) for shard in shards}
    assert index["weight_map"] == {name: shard for shard in shards for name in held[shard]}
    size = sum(array.nbytes for arrays in held.values() for array in arrays.values())
    assert index["metadata"]["total_size"] == size
    assert index["metadata"]["total_parameters"] == size // {"float32": 4, "bfloat16": 2}[dtype]
    assert all(sum(a.nbytes for a in arrays.values()) <= 8_000 for arrays in held.values())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_comes_back_as_float32(tmp_path, shape, numpy_weights, dtype):
    s = shape(tied=True)
    weights = numpy_weights(s)
    export(tmp_path / "m", s, weights, {}, None, 64, np.dtype(dtype).name)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == np.dtype(dtype).name
    assert_same(read_weights(tmp_path / "m", s), {p: a.astype(dtype).astype(np.float32) for p, a in weights.items()})


@pytest.mark.parametrize("which", [["exit"], ["exit", "eagle"]])
def test_drafters_round_trip(tmp_path, shape, numpy_weights, which):
    s = shape(tied=True)
    drafters = {name: numpy_weights(s, build, 7) for name, build in (("exit", ShallowExit), ("eagle", Eagle))}
    drafters = {name: drafters[name] for name in which}
    export(tmp_path / "m", s, numpy_weights(s), drafters, None, 64, "bfloat16")
    assert read_exit(tmp_path / "m") == (s.exit_layer, s.exit_rank)
    assert read_shape(tmp_path / "m", *read_exit(tmp_path / "m")) == s
    found = read_drafters(tmp_path / "m", s)
    assert list(found) == which
    for name in which:
        assert_same(found[name], drafters[name])
    with pytest.raises(ConfigError, match=r"`model.exit_layer` and `model.exit_rank` are 1 and 5; expected 2 and 5"):
        read_drafters(tmp_path / "m", shape(exit_layer=1))
    with pytest.raises(ConfigError, match=r"drafter.safetensors.*norm is \[24\], expected \[25\]"):
        read_drafters(tmp_path / "m", shape(width=25))


def test_draft_model_round_trip(tmp_path, shape, numpy_weights):
    """It lies within, a whole directory with the same tokenizer; the next export replaces it, or leaves it out."""
    tokenizer, whole = train_tokenizer(["one two three"] * 5, 258), tmp_path / "m"
    s = shape(vocab=264)
    draft = shape(vocab=264, width=16, layers=1, exit_layer=0, exit_rank=0)
    export(whole, s, numpy_weights(s), {}, tokenizer, 77, draft_model=(draft, numpy_weights(draft, seed=3)))
    assert_same(read_weights(whole, s), numpy_weights(s))
    assert read_shape(whole / DRAFT_MODEL, 0, 0) == draft
    assert_same(read_weights(whole / DRAFT_MODEL, draft), numpy_weights(draft, seed=3))
    assert load_tokenizer(whole / DRAFT_MODEL).encode("two one") == tokenizer.encode("two one")
    (whole / DRAFT_MODEL / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds draft_model/notes.txt, which no export writes"):
        export(whole, s, numpy_weights(s), {}, None, 77)
    (whole / DRAFT_MODEL / "notes.txt").unlink()
    export(whole, s, numpy_weights(s), {}, None, 77)
    assert not (whole / DRAFT_MODEL).exists()


def test_no_drafter(exported):
    folder, s, _ = exported()
    assert read_exit(folder) is None
    assert read_drafters(folder, s) == {}


def test_drafter_without_its_exit(exported, numpy_drafter):
    folder, s, _ = exported()
    save_file(numpy_drafter(s), folder / "drafter.safetensors", metadata={"exit_layer": "two"})
    with pytest.raises(ConfigError, match="`exit_layer` in its metadata is 'two'; expected a positive integer"):
        read_drafters(folder, s)


def test_rope_theta_survives_for_new_and_old_readers(exported):
    folder, _, _ = exported(rope_theta=123_456.5)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 123_456.5}
    assert config["rope_theta"] == 123_456.5
    edit_config(folder, rope_parameters=None)
    assert read_shape(folder, 1, 4).rope_theta == 123_456.5
    edit_config(folder, rope_theta=None)
    assert read_shape(folder, 1, 4).rope_theta == 10_000.0
    edit_config(folder, rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert read_shape(folder, 1, 4).rope_theta == 7.0
    edit_config(folder, rope_parameters=None, rope_scaling={"type": "default"})
    assert read_shape(folder, 1, 4).rope_theta == 5.0


def test_defaults_of_the_format(exported):
    folder, s, _ = exported(width=24, heads=6, kv_heads=6, head_dim=4)
    edit_config(
        folder, head_dim=None, num_key_value_heads=None, tie_word_embeddings=None, rms_norm_eps=None, hidden_act=None
    )
    read = read_shape(folder, s.exit_layer, s.exit_rank)
    assert (read.head_dim, read.kv_heads, read.tied, read.norm_eps) == (4, 6, False, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            r"`architectures` is \['MistralForCausalLM'\]; expected \['LlamaForC",
        ),
        ({"architectures": None}, "`architectures` is None"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            "llama3.*scaled rotary embedding",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "`rope_scaling` is .*linear.*scaled rotary embedding"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "not full_attention"),
        ({"rope_parameters": 7}, "`rope_parameters` is 7; expected an object"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "`rope_theta` is -1.0; expected a positive number"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5; expected 1"),
        ({"attention_bias": True}, "`attention_bias` is True; expected false"),
        ({"mlp_bias": True}, "`mlp_bias` is True; expected false"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; expected 'silu'"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`.*quantised weights"),
        ({"hidden_size": None}, "`hidden_size` is None; expected a positive integer"),
        ({"hidden_size": 10**30}, "`hidden_size` is 1000.*; expected a positive integer up to 2147483647"),
        ({"num_hidden_layers": 10**6}, "`num_hidden_layers` is 1000000; expected at most 4096"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps` is 1000.*; expected a positive number"),
        ({"vocab_size": "61"}, "`vocab_size` is '61'; expected a positive integer"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True; expected a positive integer"),
        ({"num_key_value_heads": 4}, r"`num_key_value_heads` is 4; expected a divisor of num_attention_heads \(6\)"),
        ({"head_dim": 5}, "`head_dim` is 5; expected an even number"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` is 'small'; expected a positive number"),
        ({"tie_word_embeddings": 1}, "`tie_word_embeddings` is 1; expected true or false"),
    ],
)
def test_config_that_is_not_supported(exported, changes, message):
    folder, _, _ = exported()
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        read_shape(folder, 1, 4)
    assert str(folder / "config.json") in str(error.value)


@pytest.mark.parametrize("exit_layer", [3, 4])
def test_exit_beyond_the_layers(exported, exit_layer):
    with pytest.raises(ConfigError, match=f"`model.exit_layer` is {exit_layer}; expected 1 to 2"):
        read_shape(exported()[0], exit_layer, 4)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list"), (None, "does not exist")])
def test_config_that_cannot_be_read(exported, text, message):
    folder, _, _ = exported()
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_shape(folder, 1, 4)


def rewrite(folder, change):
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors(exported):
    folder, s, _ = exported()
    rewrite(folder, lambda a: (a.pop("model.norm.weight"), a.update(surplus=np.zeros(1, np.float32))))
    with pytest.raises(ConfigError, match=r"model.norm.weight is missing; surplus is unexpected"):
        read_weights(folder, s)
    rewrite(folder, lambda a: (a.pop("surplus"), a.update({"model.norm.weight": np.zeros(5, np.float32)})))
    with pytest.raises(ConfigError, match=r"model.norm.weight is \[5\], expected \[24\]"):
        read_weights(folder, s)
    rewrite(folder, lambda a: a.update({"model.norm.weight": np.zeros(24, np.int64)}))
    with pytest.raises(ConfigError, match=r"model.norm.weight is of type I64, expected one of F32, BF16, F16"):
        read_weights(folder, s)


def test_a_long_list_is_cut(exported, shape):
    folder, _, _ = exported()
    with pytest.raises(ConfigError, match=r"are not those that the config describes.*; and 10 more"):
        read_weights(folder, shape(layers=5))


def test_head_beside_a_tied_embedding(exported):
    folder, s, weights = exported(tied=True)
    rewrite(folder, lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"]}))
    assert_same(read_weights(folder, s), weights)
    rewrite(folder, lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ConfigError, match=r"lm_head.weight is not the embedding"):
        read_weights(folder, s)


def test_buffers_of_old_checkpoints_are_passed_over(exported):
    folder, s, weights = exported()
    rewrite(folder, lambda a: a.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}))
    assert_same(read_weights(folder, s), weights)


def test_only_safetensors_are_read(exported):
    folder, s, _ = exported()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds no weights \(found pytorch_model.bin: only safetensors are read\)"):
        read_weights(folder, s)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds no weights; expected model.safetensors or"):
        read_weights(folder, s)


def test_damaged_files(exported):
    folder, s, _ = exported()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model.safetensors' cannot be read as safetensors"):
        read_weights(folder, s)


@pytest.mark.parametrize("fault", ["gone", "outside", "unlisted", "no map"])
def test_faulty_indexes(exported, fault):
    folder, s, _ = exported(8_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = sorted(folder.glob("model-*.safetensors"))[0]
    if fault == "gone":
        first.unlink()
        message = f"{first.name}' cannot be read as safetensors"
    elif fault == "outside":
        index["weight_map"]["model.norm.weight"] = "../" + first.name
        message = "`weight_map` is '../model-.*expected the name of a file in the same folder"
    elif fault == "unlisted":
        del index["weight_map"]["model.norm.weight"]
        message = "not those that the index says: model.norm.weight is unexpected"
    else:
        index["weight_map"] = ["model.norm.weight"]
        message = "`weight_map` is .* expected an object"
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        read_weights(folder, s)


def test_export_replaces_an_export_as_a_whole(exported, shape, numpy_weights):
    folder, _, _ = exported(1)
    s = shape(layers=4, tied=True)
    export(folder, s, numpy_weights(s, seed=3), {}, None, 32)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same(read_weights(folder, s), numpy_weights(s, seed=3))
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    reference = folder.parent / "new file"
    reference.touch()
    assert (folder / "model.safetensors").stat().st_mode == reference.stat().st_mode


def test_export_that_fails_leaves_the_former_one(exported, shape, numpy_weights):
    folder, s, weights = exported()
    broken = numpy_weights(s) | {"final_norm": np.full(s.width, 1e6, np.float32)}
    with pytest.raises(ConfigError, match=r"model.norm.weight has values up to 1e.06, beyond float16"):
        export(folder, s, broken, {}, None, 64, "float16")
    assert_same(read_weights(folder, s), weights)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_export_after_a_death_in_between(exported, shape, numpy_weights):
    folder, s, _ = exported()
    folder.rename(folder.with_name(".model.former"))
    (folder.with_name(".model.partial")).mkdir()
    (folder.with_name(".model.partial") / "config.json").write_text("{")
    export(folder, s, numpy_weights(s, seed=5), {}, None, 64)
    assert_same(read_weights(folder, s), numpy_weights(s, seed=5))
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_export_deletes_nothing_of_anybody_else(exported, tmp_path, shape, numpy_weights):
    folder, s, weights = exported()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes.txt, which no export writes"):
        export(folder, s, weights, {}, None, 64)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"notes.txt' is a file"):
        export(folder / "notes.txt", s, weights, {}, None, 64)
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", s, weights, {}, None, 64)


def test_export_with_tokenizer(tmp_path, shape, numpy_weights):
    tokenizer = train_tokenizer(["one two three"] * 5, 258)
    s = shape(vocab=264)
    export(tmp_path / "m", s, numpy_weights(s), {}, tokenizer, 77)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert config["max_position_embeddings"] == 77
    assert config["vocab_size"] == 264
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)
    read = load_tokenizer(tmp_path / "m")
    assert read.encode("two one") == tokenizer.encode("two one")
    assert read.eos_id == tokenizer.eos_id
    with pytest.raises(ConfigError, match="the tokenizer has ids up to 257; expected at most 60"):
        export(tmp_path / "n", shape(), numpy_weights(shape()), {}, tokenizer, 64)


def test_export_in_another_type(tmp_path, shape, numpy_weights):
    with pytest.raises(ConfigError, match="type 'int8' is not offered; expected one of float32, bfloat16, float16"):
        export(tmp_path / "m", shape(), numpy_weights(shape()), {}, None, 64, "int8")


def test_a_real_model_loads_with_every_tensor(stories):
    s = read_shape(stories, 2, 8)
    assert (s.vocab, s.width, s.layers, s.heads, s.kv_heads, s.head_dim, s.hidden) == (512, 64, 5, 8, 4, 8, 172)
    assert s.tied
    assert s.rope_theta == 10_000.0
    assert s.norm_eps == 1e-5
    weights = read_weights(stories, s)
    held = load_file(stories / "model.safetensors")
    assert sum(a.size for a in weights.values()) == sum(a.size for a in held.values())
    np.testing.assert_array_equal(weights["embedding"], held["model.embed_tokens.weight"])
