"""DeepSeek-V3 in NumPy float64, from the papers, with loops where they are clearer.

DeepSeek-V2 (2024) section 2.1 for MLA, DeepSeek-V3 (2024) sections 2.1.2 and 2.2 for the router and
MTP, Peng et al. (2023) for YaRN, Shazeer (2020) for SwiGLU. Nothing of octablox is called; its
parameters come as a tree of arrays, its sizes as its config objects.
"""

import math

import numpy as np


def f64(a):
    return np.asarray(a, np.float64)


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * f64(scale)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(gate_up, down, x):
    """x [D]; gate_up [D, 2, F], down [F, D]."""
    gate, up = f64(gate_up)[:, 0], f64(gate_up)[:, 1]
    return (silu(x @ gate) * (x @ up)) @ f64(down)


def route(h, gate, bias, moe):
    """Chosen experts, best first, and their weights, of one token h [D]."""
    logits = h @ f64(gate)
    scores = 1 / (1 + np.exp(-logits))
    if moe.routed_score_func == "softmax":
        scores = np.exp(logits) / np.sum(np.exp(logits))
    biased = scores + f64(bias)
    per_group = moe.num_experts // moe.n_routing_groups
    groups = biased.reshape(moe.n_routing_groups, per_group)
    group_scores = [sum(sorted(group)[-2:]) for group in groups]
    kept = np.argsort(group_scores)[::-1][: moe.topk_routing_group]
    allowed = [e for e in range(moe.num_experts) if e // per_group in kept]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: moe.num_experts_per_tok]
    weights = scores[chosen]
    if moe.norm_topk_prob:
        weights = weights / (sum(weights) + 1e-20)
    return np.array(chosen), weights * moe.routed_scaling_factor


def moe_block(params, x, model, moe):
    """The residual branch's update [S, D] of one sequence x [S, D]."""
    out = np.zeros_like(x)
    hidden = rms_norm(x, params["router"]["norm"], model.normalization_layer_epsilon)
    for t, h in enumerate(hidden):
        chosen, weights = route(h, params["router"]["gate"], params["router"]["bias"], moe)
        for e, weight in zip(chosen, weights, strict=True):
            expert = params["experts"]
            out[t] += weight * swiglu(expert["gate_up"][e], expert["down"][e], h)
        if moe.shared_experts:
            out[t] += swiglu(params["shared"]["gate_up"], params["shared"]["down"], h)
    return out


def frequencies(model):
    """Radians a position of each rotated pair."""
    dim, base = model.qk_rope_head_dim, model.rope_max_timescale
    found = []
    for i in range(dim // 2):
        theta = base ** (-2 * i / dim)
        if model.rope_factor != 1:
            theta = _yarn(theta, i, model)
        found.append(theta)
    return np.array(found)


def _yarn(theta, i, model):
    dim, base = model.qk_rope_head_dim, model.rope_max_timescale
    length = model.original_max_position_embeddings

    def pair_that_turns(times):  # 2*pi*times = length * base^(-2i/dim), solved for i
        return dim / 2 * math.log(length / (2 * math.pi * times)) / math.log(base)

    first = max(math.floor(pair_that_turns(model.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(model.beta_slow)), dim - 1)
    stretched = min(max((i - first) / max(last - first, 0.001), 0), 1)
    return theta * (1 - stretched) + theta / model.rope_factor * stretched


def rotate(x, positions, model):
    """x [S, rope]: pairs (2i, 2i+1) as complex numbers, turned by position * frequency."""
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * np.outer(positions, frequencies(model)))
    out = np.empty_like(x)
    out[:, 0::2], out[:, 1::2] = turned.real, turned.imag
    return out


def attention(params, x, positions, segment_ids, model):
    """The residual branch's update [S, D] of one sequence x [S, D]."""
    eps = model.normalization_layer_epsilon
    nope, rope, v_dim = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    w = {name: f64(value) for name, value in params.items()}
    h = rms_norm(x, w["norm"], eps)
    low_rank = model.q_lora_rank > 0
    q = rms_norm(h @ w["q_a"], w["q_norm"], 1e-6) @ w["q_b"] if low_rank else h @ w["q"]
    compressed = h @ w["kv_a"]
    latent, shared_key = compressed[:, : model.kv_lora_rank], compressed[:, model.kv_lora_rank :]
    kv = rms_norm(latent, w["kv_norm"], 1e-6) @ w["kv_b"]
    shared_key = rotate(shared_key, positions, model)
    mscale = 0.1 * model.mscale * math.log(model.rope_factor) + 1
    outputs = []
    for head in range(model.base_num_query_heads):
        q_head = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
        kv_head = kv[:, head * (nope + v_dim) : (head + 1) * (nope + v_dim)]
        queries = np.hstack([q_head[:, :nope], rotate(q_head[:, nope:], positions, model)])
        keys = np.hstack([kv_head[:, :nope], shared_key])
        mixed = np.zeros((len(x), v_dim))
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if segment_ids[s] == segment_ids[t]]
            logits = keys[seen] @ queries[t] * mscale**2 / math.sqrt(nope + rope)
            weights = np.exp(logits - logits.max())
            mixed[t] = weights / weights.sum() @ kv_head[seen, nope:]
        outputs.append(mixed)
    return np.hstack(outputs) @ w["out"]


def layer_of(stacked, n):
    """Layer n of parameters stacked layers first."""
    if isinstance(stacked, dict):
        return {name: layer_of(value, n) for name, value in stacked.items()}
    return np.asarray(stacked)[n]


def layer(params, x, positions, segment_ids, model, moe):
    """A layer, dense or MoE by its parameters: [S, D] -> [S, D]."""
    x = x + attention(params["attention"], x, positions, segment_ids, model)
    if "mlp" in params:
        h = rms_norm(x, params["mlp"]["norm"], model.normalization_layer_epsilon)
        return x + swiglu(params["mlp"]["gate_up"], params["mlp"]["down"], h)
    return x + moe_block(params, x, model, moe)


def surprise(params, norm, x, targets, model):
    """-log p(target) of each position [S]."""
    logits = rms_norm(x, norm, model.normalization_layer_epsilon) @ f64(params["head"])
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(len(targets)), targets]


def loss(params, batch, model, moe):
    """loss and mtp_loss of a batch, nats a counted token."""
    sums = np.zeros(2)
    for b in range(len(batch["tokens"])):
        row = {name: np.asarray(values)[b] for name, values in batch.items()}
        sums += _row_loss(params, row, model, moe)
    return sums / max(float(np.sum(batch["weights"])), 1)


def _row_loss(params, row, model, moe):
    where = row["positions"], row["segment_ids"]
    x = f64(params["embedding"])[row["tokens"]]
    for kind in ("dense_layers", "moe_layers"):
        for n in range(len(params[kind]["attention"]["norm"]) if kind in params else 0):
            x = layer(layer_of(params[kind], n), x, *where, model, moe)
    main = surprise(params, params["final_norm"], x, row["targets"], model) @ row["weights"]
    return np.array([main, _row_mtp(params, x, row, model, moe) if "mtp" in params else 0])


def _row_mtp(params, x, row, model, moe):
    """Position t, which saw token t and is told token t+1, is asked for token t+2."""
    mtp, eps = params["mtp"], model.normalization_layer_epsilon
    told = rms_norm(f64(params["embedding"])[row["targets"]], mtp["embedding_norm"], eps)
    hidden = rms_norm(rms_norm(x, params["final_norm"], eps), mtp["hidden_norm"], eps)
    x = np.hstack([told, hidden]) @ f64(mtp["projection"])
    x = layer(layer_of(mtp["layers"], 0), x, row["positions"], row["segment_ids"], model, moe)
    asked = np.append(row["targets"][1:], 0)
    nats, total = surprise(params, mtp["final_norm"], x, asked, model), 0.0
    for t in range(len(x) - 1):
        # Token t+2 exists where t and t+1 both have a next token in one document.
        same = row["segment_ids"][t] == row["segment_ids"][t + 1]
        if row["weights"][t] and row["weights"][t + 1] and same:
            total += nats[t]
    return total
