"""Tests of the oracle itself: /usr/bin/python3 tests/oracle/test_oracle.py

Where the shared folder lies beside the repository, its float64 forward in plain Python - which agreed with llama.cpp
on every logit - must give the same logits as the PyTorch oracle on the same weights.
"""
import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import gguf_io  # noqa: E402
import make_fixtures  # noqa: E402
import safetensors_io  # noqa: E402
from torch_model import Oracle, load_model, random_weights, tensor_shapes  # noqa: E402

PEER = os.path.join(HERE, "..", "..", "..", "shared", "oracle", "forward.py")
PEER_L2_EPS = 1e-6


def run_peer(kind):
    """Runs the peer's script in a temporary folder; returns its globals: model m, tokens toks, logits o."""
    saved, here = sys.argv, os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = [PEER, kind, str(PEER_L2_EPS)]
        os.chdir(folder)
        try:
            return runpy.run_path(os.path.join(here, PEER), run_name="peer")
        finally:
            os.chdir(here)
            sys.argv = saved


def peer_config(m):
    pattern = make_fixtures.layers("".join(m.pattern))
    keys = {
        "hidden_size": m.D, "vocab_size": m.V, "num_hidden_layers": len(m.pattern), "num_attention_heads": m.H,
        "rms_norm_eps": m.eps, "mla_latent_norm_eps": m.eps, "intermediate_size": m.ff, "first_k_dense_replace": 1,
        "hidden_act": "situ" if m.k3 else "silu", "num_experts": m.E, "num_experts_per_token": m.topk,
        "num_shared_experts": m.sh, "moe_intermediate_size": m.ffe, "routed_scaling_factor": m.rs,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "q_lora_rank": m.qlora or None,
        "kv_lora_rank": m.lora, "qk_nope_head_dim": m.nope, "qk_rope_head_dim": m.rope, "v_head_dim": m.vd,
        "linear_attn_config": {"head_dim": m.K, "num_heads": m.H, "short_conv_kernel_size": 4, **pattern},
    }  # fmt: skip
    if m.k3:
        keys.update({"activation_situ_beta": m.b, "activation_situ_linear_beta": m.lb2, "mla_use_output_gate": True})
        keys.update({"attn_res_block_size": m.blk, "routed_expert_hidden_size": m.lat, "latent_moe_use_norm": True})
        keys["linear_attn_config"].update({"use_full_rank_gate": True, "gate_lower_bound": m.lb})
    return keys


PLAIN_NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attention_res_proj.weight": "attn_res_score.weight", "mlp_res_proj.weight": "ffn_res_score.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.q_conv1d.weight": "ssm_conv1d_q.weight",
    "self_attn.k_conv1d.weight": "ssm_conv1d_k.weight", "self_attn.v_conv1d.weight": "ssm_conv1d_v.weight",
    "self_attn.f_a_proj.weight": "ssm_f_a.weight", "self_attn.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight", "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight", "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight", "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight", "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "block_sparse_moe.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "block_sparse_moe.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "block_sparse_moe.routed_expert_up_proj.weight": "ffn_routed_up.weight",
    "block_sparse_moe.routed_expert_norm.weight": "ffn_routed_norm.weight",
}  # fmt: skip
MODEL_NAMES = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
    "output_attn_res_proj.weight": "output_res_score.weight", "lm_head.weight": "output.weight",
}  # fmt: skip


def peer_tensor(m, name, shape):
    """The peer keeps GGUF's names and orders: stacked experts, key and value up-projections apart, -exp(A_log)."""
    array = lambda key: np.array(m.W[key], dtype=np.float64)
    name = name.replace("language_model.", "").replace("model.", "", 1)
    if name.endswith("res_norm.weight"):
        return np.ones(shape)  # the peer stores the product of norm and score
    if not name.startswith("layers."):
        return array(MODEL_NAMES[name]).reshape(shape)
    _, layer, rest = name.split(".", 2)
    block, parts = f"blk.{layer}.", rest.split(".")
    if rest == "self_attn.A_log":
        return np.log(-array(block + "ssm_a")).reshape(shape)
    if rest == "self_attn.g_proj.weight":
        return array(block + ("ssm_g.weight" if m.pattern[int(layer)] == "k" else "attn_gate.weight")).reshape(shape)
    if rest == "self_attn.kv_b_proj.weight":
        keys = array(block + "attn_k_b.weight").reshape(m.H, m.lora, m.nope).transpose(0, 2, 1)
        values = array(block + "attn_v_b.weight").reshape(m.H, m.vd, m.lora)
        return np.concatenate([keys, values], 1).reshape(shape)
    if parts[1] == "experts":
        stack = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}[parts[3]]
        return array(f"{block}{stack}.weight").reshape(m.E, *shape)[int(parts[2])]
    return array(block + PLAIN_NAMES[rest]).reshape(shape)


def peer_difference(peer, change=lambda weights: None):
    keys, m = peer_config(peer["m"]), peer["m"]
    weights = {name: peer_tensor(m, name, shape) for name, shape in tensor_shapes(keys).items()}
    change(weights)
    with torch.no_grad():
        logits = Oracle(keys, weights, l2_eps=PEER_L2_EPS).forward(peer["toks"]).numpy()
    return make_fixtures.relative(logits, np.array(peer["o"]))


if os.path.exists(PEER):

    class AgainstPlainPython(unittest.TestCase):
        def check(self, kind):
            peer = run_peer(kind)
            self.assertLess(peer_difference(peer), 1e-9)

            def flip_taps(weights):
                name = next(n for n in weights if n.endswith("k_conv1d.weight"))
                weights[name] = weights[name][..., ::-1]

            self.assertGreater(peer_difference(peer, flip_taps), 1e-4)

        def test_linear(self):
            self.check("linear")

        def test_k3(self):
            self.check("k3")


class Fixtures(unittest.TestCase):
    """The committed files are what the committed oracle says. Bytes may differ between BLAS libraries, values not."""

    def test_regenerate(self):
        committed = os.path.join(HERE, "fixtures")
        self.assertEqual(sorted(os.listdir(committed)), sorted(make_fixtures.CASES))
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            for case in make_fixtures.CASES:
                make_fixtures.write_case(case, out)
                self.compare(os.path.join(out, case), os.path.join(committed, case))

    def compare(self, new, old):
        files = lambda top: sorted(os.path.relpath(os.path.join(d, f), top) for d, _, fs in os.walk(top) for f in fs)
        self.assertEqual(files(new), files(old))
        for name in files(new):
            a, b = os.path.join(new, name), os.path.join(old, name)
            if name.endswith(".npy"):
                self.assertLess(make_fixtures.relative(np.load(a), np.load(b)), 1e-6, b)
            elif name.endswith(".safetensors"):
                x, y = safetensors_io.load(a), safetensors_io.load(b)
                self.assertEqual(x.keys(), y.keys())
                for key in x:
                    self.assertLessEqual(make_fixtures.relative(x[key], y[key]), 1e-6, f"{b}: {key}")
            elif name != "meta.json":
                with open(a, "rb") as left, open(b, "rb") as right:
                    self.assertEqual(left.read(), right.read(), b)


class Meaning(unittest.TestCase):
    def load(self, case):
        folder = os.path.join(HERE, "fixtures", case)
        with open(os.path.join(folder, "tokens.txt"), encoding="utf-8") as file:
            tokens = [int(t) for t in file.read().split()]
        return (*load_model(folder), tokens)

    def logits(self, keys, weights, tokens):
        with torch.no_grad():
            return Oracle(keys, weights).forward(tokens).numpy()

    def test_wide_selection_is_dense(self):
        keys, weights, tokens = self.load("k31_wide")
        sparse = self.logits(keys, weights, tokens)
        del keys["dsa_config"]
        dense = self.logits(keys, {n: w for n, w in weights.items() if ".indexer." not in n}, tokens)
        self.assertEqual(make_fixtures.relative(sparse, dense), 0)

    def test_narrow_selection_is_not(self):
        keys, weights, tokens = self.load("k31")
        topk = keys["dsa_config"]["index_topk"]
        sparse = self.logits(keys, weights, tokens)
        del keys["dsa_config"]
        dense = self.logits(keys, {n: w for n, w in weights.items() if ".indexer." not in n}, tokens)
        self.assertLess(make_fixtures.relative(sparse[:topk], dense[:topk]), 1e-12)
        self.assertGreater(make_fixtures.relative(sparse[topk:], dense[topk:]), 1e-2)

    def test_tie_rules_matter(self):
        """The case with tied experts changes when the higher index wins."""
        keys, weights, tokens = self.load("k3")
        expected = self.logits(keys, weights, tokens)
        for name in list(weights):
            if ".experts.1." in name:
                other = name.replace(".experts.1.", ".experts.4.")
                weights[name], weights[other] = weights[other], weights[name]
        self.assertGreater(make_fixtures.relative(self.logits(keys, weights, tokens), expected), 1e-2)

    def test_causal(self):
        for case in make_fixtures.CASES:
            keys, weights, tokens = self.load(case)
            full, part = self.logits(keys, weights, tokens), self.logits(keys, weights, tokens[:21])
            self.assertLess(make_fixtures.relative(part, full[:21]), 1e-12)


def gguf_keys(name):
    """A fixture's config as GGUF can say it: as many KDA as MLA heads, one epsilon."""
    keys = dict(make_fixtures.CASES[name]["config"])
    keys["num_attention_heads"] = keys["linear_attn_config"]["num_heads"]
    keys["mla_latent_norm_eps"] = keys["rms_norm_eps"]
    return keys


class GgufFiles(unittest.TestCase):
    """What `tidelock logits` says about a GGUF file is what the oracle says about its weights."""

    TOKENS = [(7 * i * i + 3 * i + 5) % 53 for i in range(40)]

    def logits(self, path):
        with tempfile.TemporaryDirectory() as folder:
            tokens, out = os.path.join(folder, "tokens"), os.path.join(folder, "out.npy")
            with open(tokens, "w", encoding="utf-8") as file:
                file.write(" ".join(map(str, self.TOKENS)))
            command = [os.environ["TIDELOCK_BINARY"], "logits", path, "--tokens", tokens, "--out", out]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            return np.load(out).astype(np.float64)

    def difference(self, keys, weights, path):
        with torch.no_grad():
            expected = Oracle(keys, weights, l2_eps=keys["rms_norm_eps"]).forward(self.TOKENS).numpy()
        got = self.logits(path)
        return float(np.sqrt(((got - expected) ** 2).sum() / (expected**2).sum()))

    def test_float32(self):
        for case in ("linear", "k3", "k31", "k31_wide"):
            keys, path = gguf_keys(case), os.path.join(tempfile.mkdtemp(), "x.gguf")
            weights = random_weights(keys, 5)
            gguf_io.write(path, keys, weights)
            self.assertLess(self.difference(keys, weights, path), 1e-5, case)
            # The twin: two experts of a stack change places, and the difference is seen.
            last = max(i for i in range(keys["num_hidden_layers"]))
            one, other = (f".{last}.block_sparse_moe.experts.{i}.w2.weight" for i in (0, 1))
            names = {n: n.replace(one, other) if one in n else n.replace(other, one) for n in weights}
            gguf_io.write(path, keys, {n: weights[names[n]] for n in weights})
            self.assertGreater(self.difference(keys, weights, path), 1e-4, case)

    def test_halves_widen_exactly(self):
        keys, path = gguf_keys("k31"), os.path.join(tempfile.mkdtemp(), "x.gguf")
        weights = random_weights(keys, 6)
        matrices = ("proj.weight", "mqa.weight", "wq_b.weight", "wk.weight", "w1.weight", "w2.weight", "w3.weight", "lm_head.weight")
        matrix = lambda name: name.endswith(matrices) and "res_proj" not in name
        narrow = {n: np.float32(np.float16(w)) if matrix(n) else w for n, w in weights.items()}
        kept = ("token_embd.weight", "gate_inp.weight", "ssm_a", "conv1d_q.weight", "conv1d_k.weight", "conv1d_v.weight")
        gguf_io.write(path, keys, weights, half=lambda name: not name.endswith(kept))
        self.assertLess(self.difference(keys, narrow, path), 1e-5)
        self.assertGreater(self.difference(keys, weights, path), 1e-5)


class BenchmarkPeer(unittest.TestCase):
    """bench/torch_train_step.py is only worth racing against if it computes the model; it shares no layer code with it."""

    def test_agrees(self):
        script = os.path.join(HERE, "..", "..", "bench", "torch_train_step.py")
        for case in ("linear", "k3", "k31", "k31_wide"):
            command = [sys.executable, script, "--check", os.path.join(HERE, "fixtures", case)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)


class Format(unittest.TestCase):
    def test_bf16_rounds_to_even(self):
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 3.0e-39], np.float32)
        back = safetensors_io.bf16_values(safetensors_io.bf16_bits(values))
        self.assertEqual(back[:4].tolist(), [1.0, 1.0, 1 + 2**-6, -(1 + 2**-7)])

    def test_round_trip(self):
        tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float32([[0.5]])}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.safetensors")
            safetensors_io.save(path, tensors, lambda name: name == "b")
            back = safetensors_io.load(path)
            with open(path, "rb") as file:
                header = json.loads(file.read()[8:].split(b"}}")[0] + b"}}")
        self.assertEqual(header["b"]["dtype"], "BF16")
        for name, value in tensors.items():
            np.testing.assert_array_equal(back[name], value)


if __name__ == "__main__":
    unittest.main(verbosity=2)
