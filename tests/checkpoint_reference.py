"""For the checkpoint tests: a Mixture-of-Experts block in float64 numpy, written from the models' definitions, and
folders to break.

The block is independent of jmoe's layer: weights come in jmoe's layout, gate_up [E, 2, F, D] and down [E, D, F].
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from jmoe.checkpoint import SafetensorsFile, write_safetensors

MODELS = Path(__file__).parent / "data" / "models"


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top(values, k):
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def routing(x, params, config):
    """(ids [T, K], weights [T, K])."""
    r = config.router
    logits = x @ params["router"].T
    if params.get("router_bias") is not None:
        logits = logits + params["router_bias"]
    if r.order == "topk_then_softmax":
        ids = top(logits, config.num_experts_per_tok)
        return ids, softmax(np.take_along_axis(logits, ids, -1))
    scores = sigmoid(logits) if r.score == "sigmoid" else softmax(logits)
    choice = scores + (params["correction_bias"] if r.use_correction_bias else 0)
    if r.num_groups:
        groups = choice.reshape(len(x), r.num_groups, -1)
        best = np.sort(groups, -1)[..., -2:].sum(-1) if r.group_score == "top2sum" else groups.max(-1)
        keep = np.zeros_like(best, bool)
        np.put_along_axis(keep, top(best, r.group_topk), True, -1)
        choice = np.where(np.repeat(keep, groups.shape[-1], -1), choice, -np.inf)
    ids = top(choice, config.num_experts_per_tok)
    weights = np.take_along_axis(scores, ids, -1)
    if r.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights * r.scaling


def gated(gate, up, config):
    if config.activation == "swiglu_oai":
        gate, up = np.minimum(gate, config.swiglu_limit), np.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return gate * sigmoid(config.swiglu_alpha * gate) * (up + 1)
    assert config.activation == "silu"
    return gate * sigmoid(gate) * up


def moe(x, params, config):
    """x [T, D] -> [T, D]; params: dict of float arrays (router, gate_up, down and the optional parts)."""
    x = np.asarray(x, np.float64)
    params = {k: None if v is None else np.asarray(v, np.float64) for k, v in params.items()}
    ids, weights = routing(x, params, config)
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up = params["gate_up"][e] @ x[t]
            if params.get("gate_up_bias") is not None:
                gate, up = gate + params["gate_up_bias"][e, 0], up + params["gate_up_bias"][e, 1]
            y = params["down"][e] @ gated(gate, up, config)
            if params.get("down_bias") is not None:
                y = y + params["down_bias"][e]
            out[t] += w * y
    if params.get("shared_gate_up") is not None:
        gate, up = (x @ w.T for w in params["shared_gate_up"])
        out += gated(gate, up, config) @ params["shared_down"].T
    return out


def as_dict(p):
    """MoEParams -> the dictionary that `moe` takes; QTensors must have been dequantised."""
    out = {"router": p.router, "gate_up": p.experts.gate_up, "down": p.experts.down}
    out |= {"gate_up_bias": p.experts.gate_up_bias, "down_bias": p.experts.down_bias}
    out |= {k: getattr(p, k) for k in ("router_bias", "correction_bias", "shared_gate_up", "shared_down")}
    return {k: None if v is None else np.asarray(v).astype(np.float64) for k, v in out.items()}


def golden(folder, layer):
    """(input [T, D], output [T, D]) of one MoE block, from the reference implementation."""
    arrays = np.load(Path(folder) / "golden.npz")
    x, y = (arrays[f"model.layers.{layer}.mlp.{end}"] for end in ("in", "out"))
    return x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])


def relative(a, b):
    """Relative Frobenius error of a against b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# --- folders to break


def clone(name, target):
    """A copy of one of the checked-in folders (without its golden file) at `target`."""
    shutil.copytree(MODELS / name, target, ignore=shutil.ignore_patterns("golden.npz"))
    return Path(target)


def read_tensors(folder):
    """{name: array as it is stored} of a single-file folder."""
    with SafetensorsFile(Path(folder) / "model.safetensors") as file:
        return {key: file.read(key) for key in file}


def rewrite(folder, change):
    """change(tensors) edits the folder's tensors in place."""
    tensors = read_tensors(folder)
    change(tensors)
    write_safetensors(Path(folder) / "model.safetensors", tensors)
    return Path(folder)


def reconfigure(folder, change):
    """change(config) edits config.json in place."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return Path(folder)


def bits(tree):
    """Every leaf's type, shape and bytes, to compare trees bit for bit."""
    return [(str(a.dtype), a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def tiny(rng, *, d=32, f=32, experts=4, layers=1, dtype=np.float32, scale=0.1):
    """(config, tensors) of a small Qwen3-MoE model in memory."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": d,
        "moe_intermediate_size": f,
        "intermediate_size": f,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 16,
    }
    shapes = {"model.embed_tokens.weight": (16, d), "lm_head.weight": (16, d), "model.norm.weight": (d,)}
    for i in range(layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.q_proj.weight": (16, d), f"{at}.k_proj.weight": (8, d), f"{at}.v_proj.weight": (8, d)}
        shapes |= {f"{at}.o_proj.weight": (d, 16), f"{at}.q_norm.weight": (8,), f"{at}.k_norm.weight": (8,)}
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        shapes[f"{mlp}.gate.weight"] = (experts, d)
        for e in range(experts):
            shapes |= {f"{mlp}.experts.{e}.{n}_proj.weight": (f, d) for n in ("gate", "up")}
            shapes[f"{mlp}.experts.{e}.down_proj.weight"] = (d, f)
    return config, {k: (rng.standard_normal(s) * scale).astype(dtype) for k, s in shapes.items()}
