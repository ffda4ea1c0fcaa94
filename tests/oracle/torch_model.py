"""The Kimi-Linear / K3 / K3.1 family in float64 PyTorch: an oracle, written for clarity and for autograd.

Nothing here is chunked, batched, absorbed or fused: one sequence, one token after another where the definition says
so. The C++ forward and backward are compared with this; it shares no code and no algebraic shortcut with them.

Shapes: T tokens, D hidden, H heads, d head size, E experts, V vocabulary. Matrices are [out, in].
"""
import json
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

import safetensors_io

L2_EPS = 1e-6  # inside rsqrt(sum + eps) of the query and key normalisation


class Config:
    """The keys of the published text_config. A missing key means that the structure is absent."""

    def __init__(self, keys):
        self.keys = keys
        get = keys.get
        self.hidden, self.vocab = keys["hidden_size"], keys["vocab_size"]
        self.layers, self.heads = keys["num_hidden_layers"], keys["num_attention_heads"]
        self.eps = keys["rms_norm_eps"]
        # The published modelling code builds the two latent norms with its class default, not with rms_norm_eps.
        self.latent_eps = get("mla_latent_norm_eps", 1e-6)
        self.dense_width, self.dense_layers = keys["intermediate_size"], keys["first_k_dense_replace"]
        self.act = keys["hidden_act"]
        self.situ_beta, self.situ_linear_beta = get("activation_situ_beta"), get("activation_situ_linear_beta")
        self.experts, self.experts_per_token = keys["num_experts"], keys["num_experts_per_token"]
        self.shared_width = keys["num_shared_experts"] * keys["moe_intermediate_size"]
        self.expert_width, self.latent = keys["moe_intermediate_size"], get("routed_expert_hidden_size")
        self.latent_norm = bool(get("latent_moe_use_norm"))
        self.routed_scale, self.renormalize = keys["routed_scaling_factor"], keys["moe_renormalize"]
        self.q_rank, self.kv_rank = get("q_lora_rank"), keys["kv_lora_rank"]
        self.nope, self.rope, self.v_dim = keys["qk_nope_head_dim"], keys["qk_rope_head_dim"], keys["v_head_dim"]
        self.mla_gate = bool(get("mla_use_output_gate"))
        self.block = get("attn_res_block_size")  # None: plain residuals
        linear = keys["linear_attn_config"]
        self.kda_dim, self.kda_heads = linear["head_dim"], linear["num_heads"]
        self.conv = linear["short_conv_kernel_size"]
        self.kda_layers = [i - 1 for i in linear["kda_layers"]]
        self.full_layers = [i - 1 for i in linear["full_attn_layers"]]
        self.full_rank_gate = bool(linear.get("use_full_rank_gate"))
        self.gate_bound = linear.get("gate_lower_bound")  # None: the unbounded softplus gate
        dsa = get("dsa_config")
        self.dsa_layers = [i - 1 for i in dsa["layers"]] if dsa else []
        if dsa:
            self.index_heads, self.index_dim = dsa["index_n_heads"], dsa["index_head_dim"]
            self.index_topk = dsa["index_topk"]
        self.prefix = "language_model." if self.block else ""
        assert self.act in ("silu", "situ") and keys["moe_router_activation_func"] == "sigmoid"
        assert sorted(self.kda_layers + self.full_layers) == list(range(self.layers))
        assert not dsa or (sorted(self.dsa_layers) == sorted(self.full_layers) and self.q_rank)
        assert keys.get("mla_use_nope", True)

    def is_kda(self, layer):
        return layer in self.kda_layers

    def layer_name(self, layer):
        return f"{self.prefix}model.layers.{layer}."


def mlp_shapes(prefix, names, width, inner):
    gate, up, down = names
    return {prefix + gate: (inner, width), prefix + up: (inner, width), prefix + down: (width, inner)}


def attention_shapes(c, layer):
    p, d = c.layer_name(layer) + "self_attn.", c.hidden
    if c.is_kda(layer):
        wide, rank = c.kda_heads * c.kda_dim, c.kda_dim
        shapes = {f"{p}{x}_proj.weight": (wide, d) for x in "qkv"}
        shapes.update({f"{p}{x}_conv1d.weight": (wide, 1, c.conv) for x in "qkv"})
        shapes.update({p + "f_a_proj.weight": (rank, d), p + "f_b_proj.weight": (wide, rank), p + "dt_bias": (wide,)})
        shapes.update({p + "A_log": (c.kda_heads,) if c.block else (1, 1, c.kda_heads, 1)})
        shapes.update({p + "b_proj.weight": (c.kda_heads, d)})
        if c.full_rank_gate:
            shapes[p + "g_proj.weight"] = (wide, d)
        else:
            shapes.update({p + "g_a_proj.weight": (rank, d), p + "g_b_proj.weight": (wide, rank)})
        shapes.update({p + "o_norm.weight": (c.kda_dim,), p + "o_proj.weight": (d, wide)})
        return shapes
    query, wide = c.heads * (c.nope + c.rope), c.heads * c.v_dim
    if c.q_rank:
        shapes = {p + "q_a_proj.weight": (c.q_rank, d), p + "q_a_layernorm.weight": (c.q_rank,)}
        shapes[p + "q_b_proj.weight"] = (query, c.q_rank)
    else:
        shapes = {p + "q_proj.weight": (query, d)}
    shapes[p + "kv_a_proj_with_mqa.weight"] = (c.kv_rank + c.rope, d)
    shapes[p + "kv_a_layernorm.weight"] = (c.kv_rank,)
    shapes[p + "kv_b_proj.weight"] = (c.heads * (c.nope + c.v_dim), c.kv_rank)
    if c.mla_gate:
        shapes[p + "g_proj.weight"] = (wide, d)
    shapes[p + "o_proj.weight"] = (d, wide)
    if layer in c.dsa_layers:
        i = p + "indexer."
        shapes.update({i + "wq_b.weight": (c.index_heads * c.index_dim, c.q_rank), i + "wk.weight": (c.index_dim, d)})
        shapes.update({i + "k_norm.weight": (c.index_dim,), i + "k_norm.bias": (c.index_dim,)})
        shapes[i + "weights_proj.weight"] = (c.index_heads, d)
    return shapes


def feed_forward_shapes(c, layer):
    p, d = c.layer_name(layer), c.hidden
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    if layer < c.dense_layers:
        return mlp_shapes(p + "mlp.", names, d, c.dense_width)
    p += "block_sparse_moe."
    shapes = {p + "gate.weight": (c.experts, d), p + "gate.e_score_correction_bias": (c.experts,)}
    if c.latent:
        shapes.update({p + "routed_expert_down_proj.weight": (c.latent, d)})
        shapes.update({p + "routed_expert_up_proj.weight": (d, c.latent)})
        if c.latent_norm:
            shapes[p + "routed_expert_norm.weight"] = (c.latent,)
    for e in range(c.experts):
        names_e = ("w1.weight", "w3.weight", "w2.weight")
        shapes.update(mlp_shapes(f"{p}experts.{e}.", names_e, c.latent or d, c.expert_width))
    shapes.update(mlp_shapes(p + "shared_experts.", names, d, c.shared_width))
    return shapes


def tensor_shapes(keys):
    """{tensor name: shape} of a whole checkpoint, in a fixed order."""
    c = Config(keys)
    d, m = c.hidden, c.prefix
    shapes = {m + "model.embed_tokens.weight": (c.vocab, d)}
    for layer in range(c.layers):
        p = c.layer_name(layer)
        shapes.update({p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)})
        if c.block:
            for site in ("self_attention_res", "mlp_res"):
                shapes.update({f"{p}{site}_norm.weight": (d,), f"{p}{site}_proj.weight": (1, d)})
        shapes.update(attention_shapes(c, layer))
        shapes.update(feed_forward_shapes(c, layer))
    if c.block:
        shapes.update({m + "model.output_attn_res_norm.weight": (d,), m + "model.output_attn_res_proj.weight": (1, d)})
    shapes.update({m + "model.norm.weight": (d,), m + "lm_head.weight": (c.vocab, d)})
    return shapes


def random_weights(keys, seed):
    """{name: float32 array}: sizes as after some training, so that no gate is shut and no soft-max is flat."""
    c, rng, weights = Config(keys), np.random.RandomState(seed), {}
    for name, shape in tensor_shapes(keys).items():
        leaf = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
        noise = rng.standard_normal(shape)
        if name.endswith("k_norm.bias"):
            value = 0.2 * noise
        elif "norm" in leaf:
            value = 1 + 0.15 * noise
        elif leaf == "A_log":
            low, high = (0.5, 2.0) if c.gate_bound else (1.0, 8.0)
            value = np.log(rng.uniform(low, high, shape))
        elif leaf == "dt_bias":
            # Bounded gate: from nearly shut to mid-range. Unbounded: steps of 0.001 to 0.3 through softplus.
            step = np.exp(rng.uniform(math.log(1e-3), math.log(0.3), shape))
            value = rng.uniform(-4.5, 0.5, shape) if c.gate_bound else np.log(np.expm1(step))
        elif leaf == "e_score_correction_bias":
            value = 0.1 * noise
        elif leaf.endswith("conv1d"):
            value = 0.35 * noise + np.array([0.0] * (c.conv - 1) + [0.7])
        elif leaf == "embed_tokens":
            value = noise
        elif leaf.endswith("res_proj"):
            value = 0.7 * noise / math.sqrt(shape[-1])
        else:
            gain = {"lm_head": 1.6, "gate": 1.5, "f_b_proj": 2.0, "wq_b": 1.5, "q_proj": 1.5, "q_b_proj": 1.8}.get(leaf, 1.0)
            value = gain * noise / math.sqrt(shape[-1])
        weights[name] = value.astype(np.float32)
    return weights


def adapter_targets(keys):
    """Module paths that carry a LoRA pair: every linear map, experts included. Not the embedding, the head and the
    router (they are not replaced by PEFT's all-linear either), not the residual scores, not the frozen indexer."""
    skip = ("embed_tokens", "lm_head", "block_sparse_moe.gate", "res_proj", ".indexer.", "conv1d")
    shapes = tensor_shapes(keys)
    names = [n for n, s in shapes.items() if len(s) == 2 and n.endswith(".weight")]
    return [n[: -len(".weight")] for n in names if not any(word in n for word in skip)]


def random_adapter(keys, rank, seed):
    """{PEFT tensor name: float32 array}, B not zero."""
    shapes, rng, adapter = tensor_shapes(keys), np.random.RandomState(seed), {}
    for module in adapter_targets(keys):
        out_dim, in_dim = shapes[module + ".weight"]
        a = rng.standard_normal((rank, in_dim)) / math.sqrt(in_dim)
        b = 0.3 * rng.standard_normal((out_dim, rank)) / math.sqrt(rank)
        adapter[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        adapter[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    return adapter


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def l2_norm(x, eps):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


class Oracle:
    """weights: {name: array}; every tensor becomes a float64 leaf. adapter: {PEFT name: array} with adapter_scale.

    After forward(), `trace` holds what a test wants to look at: hidden states after each layer, the decision margins
    of routers and selections, and per indexer the KL loss.
    """

    def __init__(self, keys, weights, adapter=None, adapter_scale=1.0, l2_eps=L2_EPS, dtype=torch.float64):
        self.config, self.scale, self.l2_eps = Config(keys), adapter_scale, l2_eps
        leaf = lambda value: torch.tensor(np.array(value), dtype=dtype).requires_grad_()
        self.weights = {name: leaf(value) for name, value in weights.items()}
        self.adapter = {name: leaf(value) for name, value in (adapter or {}).items()}
        want = {name: tuple(shape) for name, shape in tensor_shapes(keys).items()}
        have = {name: tuple(np.shape(value)) for name, value in weights.items()}
        padded = [n for n in have if n.endswith("A_log") and n in want and len(have[n]) == 1 and have[n] >= want[n]]
        have.update({n: want[n] for n in padded})
        assert have == want, f"tensors differ from the config: {sorted(set(have.items()) ^ set(want.items()))[:8]}"

    def linear(self, module, x):
        y = x @ self.weights[module + ".weight"].T
        a = self.adapter.get(f"base_model.model.{module}.lora_A.weight")
        if a is not None:
            y = y + self.scale * ((x @ a.T) @ self.adapter[f"base_model.model.{module}.lora_B.weight"].T)
        return y

    def gated(self, gate, up):
        c = self.config
        if c.act == "silu":
            return F.silu(gate) * up
        squashed = c.situ_beta * torch.tanh(gate / c.situ_beta) * torch.sigmoid(gate)
        return squashed * c.situ_linear_beta * torch.tanh(up / c.situ_linear_beta)

    def mlp(self, prefix, names, x):
        gate, up, down = (prefix + name for name in names)
        return self.linear(down, self.gated(self.linear(gate, x), self.linear(up, x)))

    def short_conv(self, name, z):
        """Causal depthwise convolution; the last tap meets the current token. z [T, C]."""
        w = self.weights[name + ".weight"].reshape(z.shape[1], -1)
        taps = w.shape[1]
        padded = torch.cat([z.new_zeros(taps - 1, z.shape[1]), z])
        return sum(w[:, j] * padded[j : j + len(z)] for j in range(taps))

    def kda_gate(self, p, x):
        """Log decay [T, H, d], never positive."""
        c = self.config
        raw = self.linear(p + "f_b_proj", self.linear(p + "f_a_proj", x)) + self.weights[p + "dt_bias"]
        raw = raw.reshape(len(x), c.kda_heads, c.kda_dim)
        # Published K3 files pad A_log beyond the heads; only the first H entries count.
        speed = self.weights[p + "A_log"].reshape(-1)[: c.kda_heads].exp()[:, None]
        if c.gate_bound is not None:
            return c.gate_bound * torch.sigmoid(speed * raw)
        return -speed * torch.logaddexp(raw, torch.zeros_like(raw))

    def kda(self, p, x):
        c, shape = self.config, (len(x), self.config.kda_heads, self.config.kda_dim)
        q, k, v = (F.silu(self.short_conv(f"{p}{n}_conv1d", self.linear(f"{p}{n}_proj", x))).reshape(shape) for n in "qkv")
        q, k = l2_norm(q, self.l2_eps) * c.kda_dim**-0.5, l2_norm(k, self.l2_eps)
        decay = self.kda_gate(p, x).exp()
        beta = torch.sigmoid(self.linear(p + "b_proj", x))
        state = x.new_zeros(c.kda_heads, c.kda_dim, c.kda_dim)  # [H, key, value]
        rows = []
        for t in range(len(x)):
            state = decay[t][:, :, None] * state
            read = torch.einsum("hkv,hk->hv", state, k[t])
            write = beta[t][:, None] * (v[t] - read)
            state = state + k[t][:, :, None] * write[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
        o = rms_norm(torch.stack(rows), self.weights[p + "o_norm.weight"], c.eps)
        gate = self.linear(p + "g_proj", x) if c.full_rank_gate else self.linear(p + "g_b_proj", self.linear(p + "g_a_proj", x))
        return self.linear(p + "o_proj", (o * torch.sigmoid(gate).reshape(shape)).reshape(len(x), -1))

    def index_scores(self, p, x, q_latent):
        """I(t, s) [T, T] for all pairs; the caller masks the future. The loss must not reach the layer's inputs."""
        c = self.config
        i, x, q_latent = p + "indexer.", x.detach(), q_latent.detach()
        q = self.linear(i + "wq_b", q_latent).reshape(len(x), c.index_heads, c.index_dim)
        k = self.linear(i + "wk", x)
        k = F.layer_norm(k, (c.index_dim,), self.weights[i + "k_norm.weight"], self.weights[i + "k_norm.bias"], c.eps)
        w = self.linear(i + "weights_proj", x) * c.index_heads**-0.5 * c.index_dim**-0.5
        products = torch.einsum("thd,sd->ths", q, k)
        return torch.einsum("th,ths->ts", w, torch.relu(products)), (w[:, :, None] * products).detach().abs()

    def select(self, layer, scores, products):
        """Boolean [T, T]: per row the top-k of s <= t, by score, a newer position first among equals."""
        c, scores = self.config, scores.detach()
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for t in range(len(scores)):
            row = scores[t, : t + 1]
            order = sorted(range(t + 1), key=lambda s: (-row[s].item(), -s))
            chosen[t, order[: c.index_topk]] = True
            if t + 1 > c.index_topk:
                inside, outside = order[c.index_topk - 1], order[c.index_topk]
                gap = (row[inside] - row[outside]).item()
                if gap == 0:  # every ReLU off on both: exact, and safe as far as no product is close to zero
                    assert row[inside] == 0, "equal scores that are not zero"
                    zeros = row == 0
                    gap = products[t][:, : t + 1][:, zeros].min().item()
                    self.trace["zero_ties"] += 1
                self.trace["index_margin"] = min(self.trace["index_margin"], gap)
        return chosen

    def mla(self, p, x, layer):
        c, tokens = self.config, len(x)
        if c.q_rank:
            latent = rms_norm(self.linear(p + "q_a_proj", x), self.weights[p + "q_a_layernorm.weight"], c.latent_eps)
            q = self.linear(p + "q_b_proj", latent)
        else:
            q = self.linear(p + "q_proj", x)
        q = q.reshape(tokens, c.heads, c.nope + c.rope)
        kv = self.linear(p + "kv_a_proj_with_mqa", x)
        shared = kv[:, c.kv_rank :]  # the "rope" part of the key: one for all heads, and not rotated
        kv = rms_norm(kv[:, : c.kv_rank], self.weights[p + "kv_a_layernorm.weight"], c.latent_eps)
        kv = self.linear(p + "kv_b_proj", kv).reshape(tokens, c.heads, c.nope + c.v_dim)
        k = torch.cat([kv[:, :, : c.nope], shared[:, None, :].expand(tokens, c.heads, c.rope)], -1)
        v = kv[:, :, c.nope :]
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if layer in c.dsa_layers:
            index, products = self.index_scores(p, x, latent)
            visible = visible & self.select(layer, index, products)
        scores = torch.einsum("thd,shd->hts", q, k) * (c.nope + c.rope) ** -0.5
        probs = scores.masked_fill(~visible, -math.inf).softmax(-1)
        if layer in c.dsa_layers:
            self.trace["index_losses"].append(self.index_loss(probs, index, visible))
        o = torch.einsum("hts,shd->thd", probs, v).reshape(tokens, -1)
        if c.mla_gate:
            o = o * torch.sigmoid(self.linear(p + "g_proj", x))
        return self.linear(p + "o_proj", o)

    def index_loss(self, probs, index, visible):
        """sum_t KL(head-averaged attention || soft-max of index scores), over the visible set; target detached."""
        target = probs.detach().mean(0)[visible]
        log_q = index.masked_fill(~visible, -math.inf).log_softmax(-1)[visible]
        return (torch.xlogy(target, target) - target * log_q).sum()

    def route(self, p, x):
        """Chosen experts [T, k] and their weights [T, k]. The bias takes part in the choice only."""
        c = self.config
        # A dot product per expert, not a matrix product: equal rows must give equal scores, to test the tie rule.
        scores = torch.sigmoid((x[:, None, :] * self.weights[p + "gate.weight"]).sum(-1))
        ranked = (scores + self.weights[p + "gate.e_score_correction_bias"]).detach()
        value, order = torch.sort(-ranked, dim=-1, stable=True)
        for gap in (value[:, c.experts_per_token] - value[:, c.experts_per_token - 1]).tolist():
            if gap == 0:
                self.trace["router_ties"] += 1
            else:
                self.trace["router_margin"] = min(self.trace["router_margin"], gap)
        chosen = order[:, : c.experts_per_token]
        weight = scores.gather(1, chosen)
        if c.renormalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return chosen, weight * c.routed_scale

    def moe(self, p, x):
        c = self.config
        chosen, weight = self.route(p, x)
        z = self.linear(p + "routed_expert_down_proj", x) if c.latent else x
        rows = []
        for t in range(len(x)):
            experts = zip(chosen[t].tolist(), weight[t])
            rows.append(sum(w * self.mlp(f"{p}experts.{e}.", ("w1", "w3", "w2"), z[t]) for e, w in experts))
        y = torch.stack(rows)
        if c.latent:
            if c.latent_norm:
                y = rms_norm(y, self.weights[p + "routed_expert_norm.weight"], c.eps)
            y = self.linear(p + "routed_expert_up_proj", y)
        return y + self.mlp(p + "shared_experts.", ("gate_proj", "up_proj", "down_proj"), x)

    def mix(self, blocks, prefix, name):
        """Block attention residuals: a soft-max over the banked blocks and the running prefix, per token."""
        score = self.weights[name + "_norm.weight"] * self.weights[name + "_proj.weight"][0]
        sources = torch.stack(blocks + [prefix])  # [sources, T, D]
        p = (rms_norm(sources, 1.0, self.config.eps) @ score).softmax(0)
        return (p[:, :, None] * sources).sum(0)

    def attention(self, layer, x):
        p = self.config.layer_name(layer)
        x = rms_norm(x, self.weights[p + "input_layernorm.weight"], self.config.eps)
        return self.kda(p + "self_attn.", x) if self.config.is_kda(layer) else self.mla(p + "self_attn.", x, layer)

    def feed_forward(self, layer, x):
        p = self.config.layer_name(layer)
        x = rms_norm(x, self.weights[p + "post_attention_layernorm.weight"], self.config.eps)
        if layer < self.config.dense_layers:
            return self.mlp(p + "mlp.", ("gate_proj", "up_proj", "down_proj"), x)
        return self.moe(p + "block_sparse_moe.", x)

    def plain_layers(self, h):
        for layer in range(self.config.layers):
            h = h + self.attention(layer, h)
            h = h + self.feed_forward(layer, h)
            self.trace["hidden"].append(h)
        return h

    def residual_layers(self, prefix):
        c, blocks = self.config, []
        for layer in range(c.layers):
            p = c.layer_name(layer)
            x = self.mix(blocks, prefix, p + "self_attention_res") if blocks else prefix
            if layer % c.block == 0:
                blocks = blocks + [prefix]
                prefix = self.attention(layer, x)
            else:
                prefix = prefix + self.attention(layer, x)
            prefix = prefix + self.feed_forward(layer, self.mix(blocks, prefix, p + "mlp_res"))
            self.trace["hidden"].append(prefix)
        return self.mix(blocks, prefix, c.prefix + "model.output_attn_res")

    def forward(self, tokens):
        """tokens: list of T ids; returns logits [T, V]."""
        c, inf = self.config, math.inf
        self.trace = {"hidden": [], "index_losses": [], "index_margin": inf, "router_margin": inf}
        self.trace.update({"zero_ties": 0, "router_ties": 0})
        h = self.weights[c.prefix + "model.embed_tokens.weight"][torch.tensor(tokens)]
        h = self.residual_layers(h) if c.block else self.plain_layers(h)
        return self.linear(c.prefix + "lm_head", rms_norm(h, self.weights[c.prefix + "model.norm.weight"], c.eps))


def policy_loss(logits, tokens, coeffs):
    """sum over t of coeffs[t] * log p(tokens[t + 1] | tokens[: t + 1])."""
    log_p = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return (torch.tensor(np.asarray(coeffs), dtype=logits.dtype) * log_p).sum()


def gradients(loss, leaves):
    """{name: array}, zeros where the loss does not reach (router bias, unchosen experts, the frozen indexer)."""
    got = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    pairs = zip(leaves.items(), got)
    return {name: (torch.zeros_like(leaf) if grad is None else grad).numpy() for (name, leaf), grad in pairs}


def load_model(folder):
    """(config keys, weights) of a folder with config.json and model.safetensors."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        keys = json.load(file)
    return keys, safetensors_io.load(os.path.join(folder, "model.safetensors"))
