"""Peer of the trainer: one float32 training step (forward, backward, AdamW) of a whole model in PyTorch on the CPU.

    /usr/bin/python3 bench/torch_train_step.py [--config config.json] --batch 8 --tokens 256 --threads 2
    /usr/bin/python3 bench/torch_train_step.py --check tests/oracle/fixtures/k3      # against the oracle's gradients

Prints one JSON line {name, value, unit} on stdout: tokens per second at the median step. It is written to be fast, since our
numbers are stated against it: KDA in chunks with a hand-written backward of the scan over chunks, projections of one
input fused into one product, experts grouped, all parameters in one flat buffer with one AdamW call.
PyTorch's matrix products go through libblas.so.3. The reference BLAS that Debian installs by default is 20 to 40 times
slower than OpenBLAS (package libopenblas0-pthread), so the script refuses to measure on it.
With 2 threads or more, measure on an idle machine: OpenMP's threads spin, and on a busy one that made a step 18 times
slower than with OMP_WAIT_POLICY=passive.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description="tokens per second of a PyTorch training step")
    parser.add_argument("--config", help="config.json; default: a built-in K3.1 config of about 4 M parameters")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7, help="measured steps, after two that are not")
    parser.add_argument("--chunk", type=int, help="KDA chunk; default: the faster of 16 and 32 where 32 is safe")
    parser.add_argument("--index-loss", action="store_true", help="also train the indexers towards the attention")
    parser.add_argument("--allow-slow-blas", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the time per operator on stderr")
    parser.add_argument("--check", metavar="DIR", help="compare loss and gradients with an oracle fixture, and exit")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read once, when the libraries load
        os.environ[variable] = str(ARGUMENTS.threads)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "oracle"))
import safetensors_io  # noqa: E402
from torch_model import Config, L2_EPS, load_model, policy_loss, random_weights  # noqa: E402

SLOW_BLAS = 15e9  # FLOP/s of one core; the reference BLAS reaches 2 to 4, OpenBLAS 70 and more


def nano_config():
    """hidden 128, 3 KDA : 1 MLA, 4 heads of 32, 16 experts top-2 over a latent of 64."""
    layers, full = 8, [4, 8]
    return {
        "hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 1024,
        "intermediate_size": 384, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_experts": 16,
        "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 64, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "routed_scaling_factor": 1.0, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_output_gate": True,
        "attn_res_block_size": 4,
        "linear_attn_config": {
            "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0, "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        },
        "dsa_config": {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64, "layers": full},
    }  # fmt: skip


class RmsNorm(torch.autograd.Function):
    """x * rsqrt(mean x^2 + eps) * weight, with the closed form of its derivative instead of autograd's nine nodes."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, scale, weight = ctx.saved_tensors
        along = grad * unit
        grad_weight = along.reshape(-1, along.shape[-1]).sum(0)
        inner = along @ weight / unit.shape[-1]
        return torch.addcmul(grad * weight, unit, inner[..., None], value=-1).mul_(scale), grad_weight, None


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [X, C, C], C a power of two: (I - L)(I + L^2)(I + L^4)..., exact."""

    @staticmethod
    def forward(ctx, lower):
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
        inverse, power, degree = eye - lower, lower, 1
        while 2 * degree < lower.shape[-1]:
            power, degree = torch.bmm(power, power), 2 * degree
            inverse = torch.baddbmm(inverse, inverse, power)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        transposed = ctx.saved_tensors[0].transpose(1, 2)
        return -torch.bmm(torch.bmm(transposed, grad), transposed)


class ChunkScan(torch.autograd.Function):
    """The recurrence between chunks: v'_n = u_n - w_n S_n;  S_{n+1} = Diag(decay_n) S_n + key_n^T v'_n.

    u [N, X, C, d], w and key alike, decay [N, X, d]; returns the entry states S [N, X, d, d] and v' [N, X, C, d].
    """

    @staticmethod
    def forward(ctx, u, w, key, decay):
        chunks, rows, _, dim = u.shape
        states, writes = u.new_zeros(chunks, rows, dim, dim), torch.empty_like(u)
        for n in range(chunks):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=writes[n])
            if n + 1 < chunks:
                torch.mul(states[n], decay[n, :, :, None], out=states[n + 1])
                states[n + 1].baddbmm_(key[n].transpose(1, 2), writes[n])
        ctx.save_for_backward(states, writes, w, key, decay)
        return states, writes

    @staticmethod
    def backward(ctx, grad_states, grad_writes):
        states, writes, w, key, decay = ctx.saved_tensors
        # after[n] is the gradient of the state that chunk n leaves; nothing reads the last one.
        after, total = torch.empty_like(states), grad_writes.clone()
        after[-1].zero_()
        for n in range(len(states) - 1, -1, -1):
            total[n].baddbmm_(key[n], after[n])
            if n:
                torch.addcmul(grad_states[n], after[n], decay[n, :, :, None], out=after[n - 1])
                after[n - 1].baddbmm_(w[n].transpose(1, 2), total[n], alpha=-1)
        return total, -(total @ states.transpose(2, 3)), writes @ after.transpose(2, 3), (after * states).sum(-1)


class GroupRows(torch.autograd.Function):
    """Copies row order[i] // copies of x to row i; `inverse` undoes order. Backward gathers, where autograd scatters."""

    @staticmethod
    def forward(ctx, x, order, inverse, copies):
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, torch.div(order, copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).view(-1, ctx.copies, grad.shape[1]).sum(1), None, None, None


def kda_chunks(q, k, v, g, beta, chunk, bounded):
    """q, k, v, g [B, T, H, d], beta [B, T, H]; T a multiple of chunk. Returns o [B, T, H, d]."""
    batch, tokens, heads, dim = q.shape
    count, rows = tokens // chunk, batch * heads

    def cut(x):  # [N, B*H, C, d]: chunk-major, so that the scan reads contiguous slices
        x = x.reshape(batch, count, chunk, heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(count, rows, chunk, -1)

    flat = lambda x: x.reshape(count * rows, *x.shape[2:])
    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta[..., None])
    total = cut(g).cumsum(2)
    if bounded:
        # Both factors stay finite: a half chunk times the bound is at most 16 * 5 = 80 < log(float max).
        middle = total[:, :, chunk // 2 - 1 : chunk // 2]
        rise = (total - middle).exp()
        # k / rise would be one exp less, but its derivative divides twice and overflows.
        k_up, k_down, q_up = k * rise, k * (middle - total).exp(), q * rise
        pairs = flat(torch.cat([q_up, k_up], 2)) @ flat(k_down).transpose(1, 2)
        from_start = middle.exp()
        k_start, q_start = k_up * from_start, q_up * from_start
        k_rest = k_down * rise[:, :, -1:]
    else:
        # The gate has no bound: only differences that are never positive may meet exp.
        gap = total[:, :, :, None] - total[:, :, None]
        causal = torch.ones(chunk, chunk, dtype=torch.bool).tril()[..., None]
        weighted = gap.masked_fill(~causal, -math.inf).exp() * k[:, :, None]  # [N, X, i, j, d]
        pairs = torch.cat([(weighted @ x[..., None])[..., 0] for x in (q, k)], 2).reshape(count * rows, 2 * chunk, chunk)
        from_start = total.exp()
        k_start, q_start = k * from_start, q * from_start
        k_rest = k * (total[:, :, -1:] - total).exp()
    # Above the diagonal a pair may be infinite: cut it off before any product, whose derivative would meet 0 * inf.
    inside, lower = pairs[:, :chunk].tril(), pairs[:, chunk:].tril(-1)
    inverse = UnitLowerInverse.apply(lower * flat(beta)) * flat(beta).transpose(1, 2)
    solved = (inverse @ flat(torch.cat([v, k_start], 3))).view(count, rows, chunk, 2 * dim)
    u, w = solved.split(dim, 3)
    states, writes = ChunkScan.apply(u, w, k_rest, total[:, :, -1].exp())
    o = torch.baddbmm(inside @ flat(writes), flat(q_start), flat(states))
    return o.view(count, batch, heads, chunk, dim).permute(1, 0, 3, 2, 4).reshape(batch, tokens, heads, dim)


class Peer:
    """The whole family in batched float32. Parameters are views of one flat buffer, fused where they share an input."""

    def __init__(self, keys, weights, chunk):
        c = self.config = Config(keys)
        self.chunk, self.groups, self.params, pieces, offset = chunk, {}, {}, [], 0
        for fused, names in self.fused_names(weights):
            parts = [np.asarray(weights[n], np.float32) for n in names]
            stack = fused.endswith(("experts.w13", "experts.w2"))
            if fused.endswith("experts.w13"):
                parts = [np.concatenate(parts[i : i + 2]) for i in range(0, len(parts), 2)]
            value = np.stack(parts) if stack else np.concatenate(parts)
            self.groups[fused] = (names, offset, value.shape)
            pieces.append(value.ravel())
            offset += value.size
        self.flat = torch.from_numpy(np.concatenate(pieces))
        self.flat.grad = torch.zeros_like(self.flat)
        for fused, (_, begin, shape) in self.groups.items():
            cut = slice(begin, begin + math.prod(shape))
            self.params[fused] = self.flat.detach()[cut].view(shape).requires_grad_()
            self.params[fused].grad = self.flat.grad[cut].view(shape)  # autograd adds into it in place
        self.causal = None
        assert len(self.groups) and sum(len(n) for n, _, _ in self.groups.values()) == len(weights), c.prefix

    def fused_names(self, weights):
        """(name of the fused tensor, tensors concatenated along the rows), every tensor exactly once."""
        c, out, used = self.config, [], set()

        def fuse(name, parts):
            parts = [p for p in parts if p in weights]
            if parts:
                out.append((name, parts))
                used.update(parts)

        for layer in range(c.layers):
            p = c.layer_name(layer)
            a, i, moe = p + "self_attn.", p + "self_attn.indexer.", p + "block_sparse_moe."
            kda = [f"{a}{x}_proj.weight" for x in ("q", "k", "v", "g", "g_a", "f_a", "b")]
            mla = [f"{a}{x}.weight" for x in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj")]
            fuse(a + "in", kda if c.is_kda(layer) else mla)
            fuse(a + "conv", [f"{a}{x}_conv1d.weight" for x in "qkv"])
            fuse(i + "in", [i + "wk.weight", i + "weights_proj.weight"])
            for mlp in (p + "mlp.", moe + "shared_experts."):
                fuse(mlp + "in", [mlp + "gate_proj.weight", mlp + "up_proj.weight"])
            experts = range(c.experts)
            fuse(moe + "experts.w13", [f"{moe}experts.{e}.{w}.weight" for e in experts for w in ("w1", "w3")])
            fuse(moe + "experts.w2", [f"{moe}experts.{e}.w2.weight" for e in experts])
            fuse(moe + "in", [moe + "gate.weight", moe + "routed_expert_down_proj.weight"])
        return out + [(n, [n]) for n in weights if n not in used]

    def gated(self, gate_up):
        c = self.config
        gate, up = gate_up.chunk(2, -1)
        if c.act == "silu":
            return F.silu(gate) * up
        gate = torch.tanh(gate * (1 / c.situ_beta)) * torch.sigmoid(gate)
        return gate * torch.tanh(up * (1 / c.situ_linear_beta)) * (c.situ_beta * c.situ_linear_beta)

    def norm(self, x, name, eps=None):
        return RmsNorm.apply(x, self.params[name], eps or self.config.eps)

    def mlp(self, p, x):
        return F.linear(self.gated(F.linear(x, self.params[p + "in"])), self.params[p + "down_proj.weight"])

    def kda(self, p, x):
        c, w = self.config, self.params
        batch, tokens, _ = x.shape
        wide, rank = c.kda_heads * c.kda_dim, c.kda_dim
        sizes = [3 * wide, wide if c.full_rank_gate else rank, rank, c.kda_heads]
        qkv, gate, decay, beta = F.linear(x, w[p + "in"]).split(sizes, -1)
        conv = w[p + "conv"][:, 0]
        padded = F.pad(qkv, (0, 0, c.conv - 1, 0))
        mixed = padded[:, :tokens] * conv[:, 0]
        for j in range(1, c.conv):
            mixed = torch.addcmul(mixed, padded[:, j : j + tokens], conv[:, j])
        q, k, v = F.silu(mixed).view(batch, tokens, 3, c.kda_heads, c.kda_dim).unbind(2)
        # RMS norm with eps / d is the L2 norm times sqrt(d): q needs 1/sqrt(d) twice, k once.
        scale = torch.full((c.kda_dim,), c.kda_dim**-0.5)
        q = RmsNorm.apply(q, scale * c.kda_dim**-0.5, L2_EPS / c.kda_dim)
        k = RmsNorm.apply(k, scale, L2_EPS / c.kda_dim)
        raw = F.linear(decay, w[p + "f_b_proj.weight"], w[p + "dt_bias"]).view(q.shape)
        speed = w[p + "A_log"].view(-1)[: c.kda_heads].exp()[:, None]
        bounded = c.gate_bound is not None
        g = torch.sigmoid(raw * speed) * c.gate_bound if bounded else -speed * F.softplus(raw)
        beta = torch.sigmoid(beta)
        pad = -tokens % self.chunk
        if pad:  # zero keys, values and gates leave the state as it is
            q, k, v, g = (F.pad(z, (0, 0, 0, 0, 0, pad)) for z in (q, k, v, g))
            beta = F.pad(beta, (0, 0, 0, pad))
        o = kda_chunks(q, k, v, g, beta, self.chunk, bounded)[:, :tokens]
        if not c.full_rank_gate:
            gate = F.linear(gate, w[p + "g_b_proj.weight"])
        o = self.norm(o, p + "o_norm.weight").reshape(batch, tokens, wide) * torch.sigmoid(gate)
        return F.linear(o, w[p + "o_proj.weight"])

    def select(self, p, x, latent):
        """(index scores [B, T, T] with the future at -inf, boolean mask of the chosen keys)."""
        c, w, (batch, tokens, _) = self.config, self.params, x.shape
        k, heads = F.linear(x, w[p + "in"]).split([c.index_dim, c.index_heads], -1)
        k = F.layer_norm(k, (c.index_dim,), w[p + "k_norm.weight"], w[p + "k_norm.bias"], c.eps)
        q = F.linear(latent, w[p + "wq_b.weight"]).view(batch, tokens * c.index_heads, c.index_dim)
        products = torch.relu_(q @ k.transpose(1, 2)).view(batch * tokens, c.index_heads, tokens)
        heads = (heads * (c.index_heads * c.index_dim) ** -0.5).reshape(batch * tokens, 1, c.index_heads)
        scores = (heads @ products).view(batch, tokens, tokens).masked_fill(~self.causal, -math.inf)
        if tokens <= c.index_topk:
            return scores, self.causal
        # Keys whose ReLUs are all off score exactly 0; the newer one wins, and topk alone has no such rule.
        ranked = scores.detach() + torch.arange(tokens) * 1e-7
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, ranked.topk(c.index_topk, -1).indices, True)
        return scores, chosen & self.causal

    def mla(self, p, x, layer):
        c, w, (batch, tokens, _) = self.config, self.params, x.shape
        query, wide = c.heads * (c.nope + c.rope), c.heads * c.v_dim
        sizes = [c.q_rank or query, c.kv_rank, c.rope] + ([wide] if c.mla_gate else [])
        q, kv, shared, *gate = F.linear(x, w[p + "in"]).split(sizes, -1)
        if c.q_rank:
            latent = self.norm(q, p + "q_a_layernorm.weight", c.latent_eps)
            q = F.linear(latent, w[p + "q_b_proj.weight"])
        kv = F.linear(self.norm(kv, p + "kv_a_layernorm.weight", c.latent_eps), w[p + "kv_b_proj.weight"])
        k, v = kv.view(batch, tokens, c.heads, -1).split([c.nope, c.v_dim], -1)
        k = torch.cat([k, shared[:, :, None].expand(batch, tokens, c.heads, c.rope)], -1)
        by_head = lambda z: z.view(batch, tokens, c.heads, -1).transpose(1, 2)
        q, k, v = by_head(q * (c.nope + c.rope) ** -0.5), by_head(k), by_head(v.contiguous())
        visible = self.causal
        if layer in c.dsa_layers:
            with torch.set_grad_enabled(self.index_loss is not None):
                index, visible = self.select(p + "indexer.", x.detach(), latent.detach())
        probs = (q @ k.transpose(2, 3)).masked_fill_(~visible.view(-1, 1, tokens, tokens), -math.inf).softmax(-1)
        if layer in c.dsa_layers and self.index_loss is not None:
            target = probs.detach().mean(1)
            log_q = index.masked_fill(~visible, -math.inf).log_softmax(-1).masked_fill(~visible, 0)
            self.index_loss = self.index_loss + (torch.xlogy(target, target) - target * log_q).sum()
        o = (probs @ v).transpose(1, 2).reshape(batch, tokens, wide)
        return F.linear(o * torch.sigmoid(gate[0]) if gate else o, w[p + "o_proj.weight"])

    def moe(self, p, x):
        c, w = self.config, self.params
        rows = x.reshape(-1, c.hidden)
        z = rows
        if c.latent:
            logits, z = F.linear(rows, w[p + "in"]).split([c.experts, c.latent], -1)
        else:
            logits = F.linear(rows, w[p + "in"])
        scores = torch.sigmoid(logits)
        chosen = (scores.detach() + w[p + "gate.e_score_correction_bias"].detach()).topk(c.experts_per_token, -1).indices
        weight = scores.gather(1, chosen)
        if c.renormalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        order = chosen.view(-1).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(chosen.view(-1), minlength=c.experts).tolist()
        grouped = GroupRows.apply(z, order, inverse, c.experts_per_token)
        for name, act in ((p + "experts.w13", self.gated), (p + "experts.w2", None)):
            parts = zip(grouped.split(counts), w[name].unbind(0))
            grouped = torch.cat([part @ matrix.T for part, matrix in parts])
            grouped = act(grouped) if act else grouped
        y = GroupRows.apply(grouped, inverse, order, 1).view(len(rows), c.experts_per_token, -1)
        y = torch.bmm((weight * c.routed_scale)[:, None], y)[:, 0]
        if c.latent:
            y = self.norm(y, p + "routed_expert_norm.weight") if c.latent_norm else y
            y = F.linear(y, w[p + "routed_expert_up_proj.weight"])
        return y.view(x.shape) + self.mlp(p + "shared_experts.", x)

    def mix(self, blocks, prefix, name):
        """blocks: (values, rsqrt of their mean square), kept since every later layer scores them again."""
        score = self.params[name + "_norm.weight"] * self.params[name + "_proj.weight"][0]
        sources = blocks + [(prefix, self.scale(prefix))]
        p = torch.stack([(v @ score) * r for v, r in sources], -1).softmax(-1).unbind(-1)
        out = sources[0][0] * p[0][..., None]
        for (v, _), share in zip(sources[1:], p[1:]):
            out = torch.addcmul(out, v, share[..., None])
        return out

    def scale(self, x):
        return torch.rsqrt(x.square().mean(-1) + self.config.eps)

    def attention(self, layer, x):
        p = self.config.layer_name(layer)
        x = self.norm(x, p + "input_layernorm.weight")
        return self.kda(p + "self_attn.", x) if self.config.is_kda(layer) else self.mla(p + "self_attn.", x, layer)

    def feed_forward(self, layer, x):
        p = self.config.layer_name(layer)
        x = self.norm(x, p + "post_attention_layernorm.weight")
        return self.mlp(p + "mlp.", x) if layer < self.config.dense_layers else self.moe(p + "block_sparse_moe.", x)

    def forward(self, ids, index_loss=False):
        """ids [B, T] -> logits [B, T, V]."""
        c, blocks = self.config, []
        self.causal = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        self.index_loss = torch.zeros(()) if index_loss else None
        h = F.embedding(ids, self.params[c.prefix + "model.embed_tokens.weight"])
        for layer in range(c.layers):
            if not c.block:
                h = h + self.attention(layer, h)
                h = h + self.feed_forward(layer, h)
                continue
            p = c.layer_name(layer)
            a = self.attention(layer, self.mix(blocks, h, p + "self_attention_res") if blocks else h)
            if layer % c.block == 0:
                blocks, h = blocks + [(h, self.scale(h))], a
            else:
                h = h + a
            h = h + self.feed_forward(layer, self.mix(blocks, h, p + "mlp_res"))
        if c.block:
            h = self.mix(blocks, h, c.prefix + "model.output_attn_res")
        return F.linear(self.norm(h, c.prefix + "model.norm.weight"), self.params[c.prefix + "lm_head.weight"])


def step(peer, optimizer, ids, index_loss):
    peer.flat.grad.zero_()
    logits = peer.forward(ids[:, :-1], index_loss)
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    (loss + peer.index_loss / ids.numel() if index_loss else loss).backward()
    optimizer.step()
    return loss.item()


def blas_speed():
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    spent = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        spent.append(time.perf_counter() - begin)
    return 2 * 512**3 / min(spent)


def measure(arguments, keys, weights, chunk, steps):
    """Seconds per step, and the last loss."""
    ids = torch.from_numpy(np.random.RandomState(7).randint(0, keys["vocab_size"], (arguments.batch, arguments.tokens + 1)))
    peer, spent = Peer(keys, weights, chunk), []
    optimizer = torch.optim.AdamW([peer.flat], lr=1e-4)
    for i in range(steps + 2):
        begin = time.perf_counter()
        loss = step(peer, optimizer, ids, arguments.index_loss)
        spent.append(time.perf_counter() - begin)
        if not math.isfinite(loss):
            sys.exit(f"torch_train_step: loss is {loss} at step {i}")
    if arguments.profile:
        with torch.profiler.profile() as profile:
            step(peer, optimizer, ids, arguments.index_loss)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)
    return statistics.median(spent[2:]), loss


def gradient_error(peer, grads):
    """The largest error of a fused tensor's gradient, relative to that tensor's largest value."""
    worst = 0.0
    for fused, (names, _, _) in peer.groups.items():
        want = np.concatenate([grads[n].ravel() for n in names]) if names[0] in grads else np.zeros(1)
        if want.any():
            worst = max(worst, np.abs(peer.params[fused].grad.numpy().ravel() - want).max() / np.abs(want).max())
    return worst


def check(folder):
    """The peer must compute the same thing as the oracle, or its speed means nothing."""
    path = lambda name: os.path.join(folder, name)
    keys, weights = load_model(folder)
    with open(path("tokens.txt"), encoding="utf-8") as file:
        tokens = [int(t) for t in file.read().split()]
    coeffs, expected = np.load(path("coeffs.npy")), np.load(path("logits.npy"))
    for name in (n for n in weights if n.endswith("e_score_correction_bias")):
        # topk has no rule for equal scores; far below the fixtures' margins, this makes the lower index win.
        weights[name] = weights[name] - 1e-6 * np.arange(len(weights[name]), dtype=np.float32)
    for chunk in (16, 32) if Config(keys).gate_bound is not None else (16,):
        peer = Peer(keys, weights, chunk)
        logits = peer.forward(torch.tensor([tokens, tokens[::-1]]))[0]  # a second row, to show that rows do not mix
        policy_loss(logits, tokens, coeffs).backward()
        errors = {"logits": np.abs(logits.detach().numpy() - expected).max() / np.abs(expected).max()}
        errors["gradients"] = gradient_error(peer, safetensors_io.load(path("grads.safetensors")))
        if os.path.exists(path("index_grads.safetensors")):
            peer.flat.grad.zero_()
            peer.forward(torch.tensor([tokens]), True)
            peer.index_loss.backward()
            errors["indexer gradients"] = gradient_error(peer, safetensors_io.load(path("index_grads.safetensors")))
        print(f"{folder}: chunk {chunk}: {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}", file=sys.stderr)
        if not max(errors.values()) < 1e-3:
            sys.exit("torch_train_step: the peer disagrees with the oracle")


def main(arguments):
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    if arguments.check:
        return check(arguments.check)
    speed = blas_speed()
    if speed < SLOW_BLAS and not arguments.allow_slow_blas:
        sys.exit(
            f"torch_train_step: PyTorch's matrix product runs at {speed / 1e9:.1f} GFLOP/s, as with the reference BLAS; the comparison "
            "would be unfair. Install libopenblas0-pthread (or put its folder first in LD_LIBRARY_PATH), or pass --allow-slow-blas."
        )
    keys = nano_config()
    if arguments.config:
        with open(arguments.config, encoding="utf-8") as file:
            keys = json.load(file)
    weights = random_weights(keys, 1)
    bounded = Config(keys).gate_bound is not None
    choices = [arguments.chunk] if arguments.chunk else [16, 32] if bounded else [16]
    results = {chunk: measure(arguments, keys, weights, chunk, arguments.steps) for chunk in choices}
    chunk = min(results, key=lambda n: results[n][0])
    count = sum(w.size for w in weights.values())
    detail = {n: f"{r[0] * 1e3:.1f} ms" for n, r in results.items()}
    print(f"{count} parameters, BLAS {speed / 1e9:.0f} GFLOP/s, step by chunk {detail}, loss {results[chunk][1]:.4f}", file=sys.stderr)
    value = arguments.batch * arguments.tokens / results[chunk][0]
    name = f"torch_train_step_b{arguments.batch}_t{arguments.tokens}_threads{arguments.threads}"
    print(json.dumps({"name": name, "value": round(value, 1), "unit": "tokens/s"}))
    return None


if __name__ == "__main__":
    main(ARGUMENTS)
