"""The example programs: the model against golden logits, generation, evaluation, and the programs themselves."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES, GOLDEN = ROOT / "examples", ROOT / "tests" / "data" / "models" / "qwen3_moe"
sys.path.insert(0, str(EXAMPLES))

import custom_layer  # noqa: E402
import evaluate  # noqa: E402
import one_token  # noqa: E402
import qwen3_moe  # noqa: E402
import text  # noqa: E402
from flax import nnx  # noqa: E402

from jmoe import compat  # noqa: E402
from jmoe.config import QuantConfig  # noqa: E402


def make_mesh(ranks):
    devices = jax.devices()[:ranks]
    return jax.make_mesh((ranks,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


@functools.cache
def golden():
    with np.load(GOLDEN / "golden.npz") as arrays:
        return jnp.asarray(arrays["input_ids"], jnp.int32), arrays["logits"]


@functools.cache
def one_rank():
    return qwen3_moe.stack_layers(qwen3_moe.load(GOLDEN, dtype="float32"))


def relative_error(y, reference):
    return np.linalg.norm(np.asarray(y) - reference) / np.linalg.norm(reference)


def test_logits_equal_the_golden_ones_in_float32_on_one_rank():
    ids, logits = golden()
    plain = qwen3_moe.load(GOLDEN, dtype="float32")
    assert len(qwen3_moe.blocks(plain)) == 2 and len(qwen3_moe.blocks(one_rank())) == 1
    assert relative_error(jax.jit(lambda m, i: m(i))(plain, ids), logits) <= 2e-5


def test_logits_equal_the_golden_ones_in_float32_on_eight_ranks():
    ids, logits = golden()
    model = qwen3_moe.stack_layers(qwen3_moe.load(GOLDEN, mesh=make_mesh(8), dtype="float32"))
    assert relative_error(jax.jit(lambda m, i: m(i))(model, ids), logits) <= 2e-5


PROMPTS = [list(range(5, 17)), [40, 41, 42], [9] * 7]


def write(model, *, side="left", key=0, **options):
    ids, valid = qwen3_moe.pad_prompts(PROMPTS, side=side)
    logits, cache = qwen3_moe.prefill(model, ids, valid, size=24, side=side)
    out, steps = qwen3_moe.decode(model, logits, cache, jax.random.key(key), steps=12, **options)
    return np.asarray(out), int(steps)


def test_padding_on_either_side_and_the_cache_change_nothing():
    model = one_rank()
    left, steps = write(model)
    assert steps == 12
    np.testing.assert_array_equal(left, write(model, side="right")[0])
    # Each token is what the whole model, without a cache, finds likeliest after everything before it.
    whole = [prompt + list(tokens) for prompt, tokens in zip(PROMPTS, left, strict=True)]
    ids, valid = qwen3_moe.pad_prompts(whole, side="right")
    likeliest = np.asarray(jax.jit(lambda m, i, v: m(i, valid=v).argmax(-1))(model, ids, valid))
    for row, prompt, tokens in zip(likeliest, PROMPTS, left, strict=True):
        np.testing.assert_array_equal(row[len(prompt) - 1 : len(prompt) + 11], tokens)


def test_drawing_is_a_function_of_the_key():
    a, b, c = (write(one_rank(), key=key, temperature=1.0)[0] for key in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).mean() > 0.5


def test_a_sequence_stops_at_its_end_token_and_the_loop_after_the_last_one():
    free, _ = write(one_rank())
    end = int(free[0, 3])
    out, steps = write(one_rank(), end=end)
    for tokens, unstopped in zip(out, free, strict=True):
        stop = list(unstopped).index(end) if end in unstopped else 12
        np.testing.assert_array_equal(tokens[:stop], unstopped[:stop])
        assert (tokens[stop:] == end).all()
    assert steps == (12 if any(end not in row for row in free) else max(list(row).index(end) for row in free) + 1)


@pytest.fixture
def promotion():
    """Flax's norms of bfloat16 rely on promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("weights", "direct"), [(None, True), ("mxfp8", True), ("mxfp8", False)])
def test_a_step_of_one_sequence_is_the_models(weights, direct, promotion, monkeypatch):
    """The step in few kernels, here by their plain forms, against the model's own: logits, and what it caches.

    direct: whether the experts' matmuls are kernels for one token, too.
    """
    if not direct:
        monkeypatch.setattr(one_token.decode, "experts_obstacle", lambda *_, **__: "not these weights")
    hf = json.loads((GOLDEN / "config.json").read_text()) | {"hidden_size": 256, "tie_word_embeddings": False}
    sizes = {"head_dim": 128, "vocab_size": 300, "moe_intermediate_size": 256}
    config = qwen3_moe.Config.from_hf(hf | sizes, dtype="bfloat16", quant=QuantConfig(weights=weights))
    model = qwen3_moe.random_model(config, key=jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (1, 12), 0, 300)
    real = jnp.ones(ids.shape, bool).at[0, :3].set(False)
    _, cache = qwen3_moe.prefill(model, ids, real, size=14)
    token, valid = ids[:, :1], jnp.ones((1, 1), bool)
    logits, written = jax.jit(one_token.read)(model, token, valid, cache)
    hidden, expected, _ = jax.jit(lambda m, c: m.hidden(token, valid=valid, cache=c))(model, cache)
    assert relative_error(logits, np.asarray(model.logits(hidden[:, 0]))) < 0.03
    assert int(written.used) == int(expected.used) == 13
    np.testing.assert_array_equal(written.valid, expected.valid)
    for a, b in zip(jax.tree.leaves(written.kv), jax.tree.leaves(expected.kv), strict=True):
        assert relative_error(a.astype(jnp.float32), np.asarray(b, np.float32)) < 0.02
    row = jnp.zeros((1, 256), jnp.bfloat16)
    assert one_token.direct(model.layers[0].mlp, row) == (direct and compat.KERNELS_SUPPORTED)
    assert one_token.why_not(model, 1) and "one sequence" in one_token.why_not(model, 2)


def test_formats_of_activations_can_be_exchanged():
    hf = json.loads((GOLDEN / "config.json").read_text())
    plain = qwen3_moe.random_model(qwen3_moe.Config.from_hf(hf, dtype="float32"), key=jax.random.key(0))
    other = qwen3_moe.with_quant(plain, QuantConfig(activations="mxfp8"))
    assert other.layers[0].mlp.gate_up[...] is plain.layers[0].mlp.gate_up[...]
    ids = jnp.arange(6)[None]
    a, b = (jax.jit(lambda m: m(ids))(m) for m in (plain, other))
    assert 1e-3 < relative_error(b, np.asarray(a)) < 0.2
    assert plain.config.moe.quant.activations is None


def test_configurations_that_the_model_does_not_have_are_refused():
    hf = qwen3_moe.Checkpoint(GOLDEN).config
    with pytest.raises(ValueError, match="'yarn' rotary embeddings; this example has the default kind only"):
        qwen3_moe.Config.from_hf(hf | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(ValueError, match="use_sliding_window=false"):
        qwen3_moe.Config.from_hf(hf | {"use_sliding_window": True})


def test_saving_gives_the_file_that_was_loaded(tmp_path):
    original = qwen3_moe.Checkpoint(GOLDEN)
    qwen3_moe.save(one_rank(), original.config, tmp_path)
    saved = qwen3_moe.Checkpoint(tmp_path)
    assert saved.config == original.config and saved.tensors.keys() == original.tensors.keys()
    for key in original.tensors:
        np.testing.assert_array_equal(saved.read(key), original.read(key), err_msg=key)


def test_layers_without_experts_and_attention_biases_survive_saving_and_loading(tmp_path):
    hf = qwen3_moe.Checkpoint(GOLDEN).config | {"mlp_only_layers": [0], "attention_bias": True, "dtype": "float32"}
    config = qwen3_moe.Config.from_hf(hf, dtype="float32")
    assert config.dense_layers == (0,) and config.attention_bias and not config.tie_embeddings
    model = qwen3_moe.Qwen3Moe(config, rngs=nnx.Rngs(0))
    qwen3_moe.save(model, hf, tmp_path, dtype=jnp.float32)
    loaded = qwen3_moe.load(tmp_path, dtype="float32")
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, loaded)), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))
    assert np.isfinite(np.asarray(jax.jit(lambda m, i: m(i))(loaded, golden()[0][:, :4]))).all()


# --- text and evaluation


def test_bytes_survive_the_tokenizer_and_start_a_document():
    tokenizer = text.ByteTokenizer()
    ids = tokenizer.encode("naïve → 数")
    assert ids[0] == text.END and tokenizer.decode([*ids, text.PAD]) == "naïve → 数"
    assert isinstance(text.load_tokenizer(GOLDEN), text.ByteTokenizer)


def test_a_large_vocabulary_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    with pytest.raises(ValueError, match="151936 tokens and no tokenizer.json"):
        text.load_tokenizer(tmp_path)


def test_held_out_modules_are_never_trained_on(tmp_path):
    for name in (*text.HELD_OUT, "other", "test_csv"):
        (tmp_path / f"{name}.py").write_text(f"# {name} module\n" * 3)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "theirs.py").write_text("import theirs")
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe\x00")
    train = text.ByteTokenizer().decode(text.training_text(tmp_path))
    assert train == "# other module\n" * 3
    assert (text.held_out_text(tmp_path) == text.END).sum() == len(text.HELD_OUT)
    (tmp_path / "csv.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks csv\.py.*full standard library"):
        text.held_out_text(tmp_path)


def test_windows_score_each_byte_once():
    tokens = np.arange(200, dtype=np.int32)
    tokens[[0, 90]] = text.END
    inputs, scored = text.windows(tokens, 16)
    assert inputs.shape == (23, 17) and scored.shape == (23, 16)
    targets = inputs[:, 1:][scored]
    expected = [t for t in tokens[1 : 16 + 22 * 8 + 1] if t < 256]
    np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
    assert text.windows(tokens, 16, limit=5)[0].shape == (5, 17)


def test_the_report_counts_rows_and_sees_what_the_wire_did():
    """On the golden text over eight ranks: a bfloat16 wire moves logits by its rounding, NVFP4 by more."""
    ids, logits = golden()
    inputs, scored = np.asarray(ids), np.ones((2, 23), bool)
    scored[1, 6:] = False
    expected = logits[:, :-1][scored]
    expected = expected - expected.mean(axis=-1, keepdims=True)
    reference, reports = [], []
    for quant in (QuantConfig(wire="bfloat16"), QuantConfig(activations="nvfp4_token")):
        model = qwen3_moe.stack_layers(qwen3_moe.load(GOLDEN, mesh=make_mesh(8), quant=quant, dtype="float32"))
        reports.append(evaluate.compare(evaluate.count_ranks(model), reference, inputs, scored, batch=2))
    plain, quantised = reports
    assert 1e-5 < relative_error(reference[0], expected) < 5e-3  # the experts' input has 8 significant bits
    assert plain.snr == np.inf and 12 < quantised.snr < 40
    assert plain.other_ranks.shape == (2,) and (plain.other_ranks > 2).all() and (plain.other_ranks <= 4).all()
    for report in reports:
        log_p = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
        bits = -np.take_along_axis(log_p, inputs[:, 1:, None], -1)[..., 0] / np.log(2)
        assert report.bits_per_byte == pytest.approx(bits[scored].mean(), rel=0.03)


# --- the programs


def test_outputs_and_gradients_over_eight_ranks_equal_a_dense_layers_and_nvfp4_changes_what_it_must(capsys):
    errors = custom_layer.main([])
    assert max(errors[name] for name in ("logits", "d down", "d router")) < 1e-5
    assert 0.02 < errors["nvfp4 logits"] < 0.2  # 14 to 34 dB
    assert "travels as nvfp4_token, quantised by sender" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    import train

    out = tmp_path_factory.mktemp("model")
    sizes = "--hidden-size 64 --num-hidden-layers 1 --num-attention-heads 2 --moe-intermediate-size 32"
    steps = "--steps 30 --batch 8 --context 32 --lr 1e-2 --eval-every 15 --eval-windows 4 --final-windows 8"
    with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
        return out, train.main(["--out", str(out), *sizes.split(), *steps.split()])


def test_training_over_eight_ranks_with_an_nvfp4_dispatch_learns(trained):
    folder, result = trained
    losses = [h["train"] for h in result["history"]]
    assert losses[0] > 7.5 and np.mean(losses[-3:]) < 5.2  # 8 bits are a guess; byte frequencies alone give about 5
    assert result["history"][-1]["held_out"] < 5.5
    assert (folder / "loss.png").stat().st_size > 10_000


def test_generate_writes_text_and_says_what_it_cost(trained):
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--model", str(trained[0]), "--devices", "2"]
    command += ["--max-tokens", "5", "--prompt", "def f", "--prompt", "class", "--windows", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for expected in ("def f", "2 x 5 tokens in", "tokens/s", "on 2 x cpu", "nvfp4_token, 80 bytes a row", "because"):
        assert expected in done.stdout


def test_generate_measures_a_model_of_random_weights(monkeypatch, capsys):
    import generate
    import random_checkpoint

    from jmoe.bench.model import TINY

    monkeypatch.setattr(random_checkpoint, "QWEN3_30B_A3B", random_checkpoint.QWEN3_30B_A3B | TINY)
    sizes = "--layers 2 --batch 2 --prompt-length 8 --max-tokens 3 --devices 2 --weights nvfp4"
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms rely on promotion
        generate.main(["--random", *sizes.split()])
    said = " ".join(capsys.readouterr().out.split())
    for expected in ("2 layers, experts in nvfp4, on 2 x cpu", "prefill, 2 prompts", "decode, batch 2", "GB a step"):
        assert expected in said


def test_several_wire_formats_are_trained_on_the_same_batches_and_drawn_together(tmp_path):
    import train

    sizes = "--hidden-size 32 --num-hidden-layers 1 --num-attention-heads 2 --moe-intermediate-size 32 --num-experts 4"
    steps = "--steps 4 --batch 4 --context 16 --eval-windows 4 --final-windows 4 --devices 2 --quant none mxfp8"
    with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
        result = train.main(["--out", str(tmp_path), *sizes.split(), *steps.split()])
    plain, quantised = ([h["train"] for h in result["runs"][q]] for q in ("none", "mxfp8"))
    assert plain[0] == pytest.approx(quantised[0], abs=0.01) and plain != quantised
    assert result["tokens_per_second"] > 0 and result["mfu"] is None  # a CPU has no datasheet here
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_the_shipped_model_beats_gzip():
    folder = EXAMPLES / "tiny_model"
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 6_000_000
    held_out = text.held_out_text()
    inputs, scored = text.windows(held_out, 512, limit=8)
    model = qwen3_moe.stack_layers(qwen3_moe.load(folder, dtype="float32"))
    assert evaluate.bits_per_byte(model, inputs, scored, batch=8) < 1.6 < 1.9 < text.gzip_bits_per_byte(held_out)
