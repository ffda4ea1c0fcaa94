"""Logits of `tidelock logits` against llama.cpp's on the same GGUF files: /usr/bin/python3 tests/oracle/test_llama.py

Float32 files must agree with llama.cpp; of coarser ones both are compared with the float64 oracle on the values that
ggml itself reads out of the file, and our error must be what the formats' rounding of the inputs alone explains, and
not more than llama.cpp's. Needs build/llama/llama_peer (tools/fetch_llama.sh) and TIDELOCK_BINARY.
"""
import os
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
from torch_model import Oracle, random_weights, tensor_shapes  # noqa: E402

ROOT = os.path.join(HERE, "..", "..")
PEER, BACKENDS = os.path.join(ROOT, "build/llama/llama_peer"), os.path.join(ROOT, "build/llama/backends")
VOCABULARY = 53


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {result.returncode}\n{result.stderr}")
    return result.stdout


def model_keys(kind, pattern, heads=2, q_lora=None, experts=(6, 2), wide=False):
    """A config that GGUF can say: as many KDA as MLA heads, one epsilon. wide: rows that K-quants can have."""
    keys = dict(make_fixtures.linear_config() if kind == "linear" else make_fixtures.k3_config())
    linear = dict(keys["linear_attn_config"], num_heads=heads, head_dim=32)
    linear.update(make_fixtures.layers(pattern))
    keys.update({"linear_attn_config": linear, "num_hidden_layers": len(pattern), "num_attention_heads": heads})
    keys.update({"num_key_value_heads": heads, "vocab_size": VOCABULARY, "q_lora_rank": q_lora})
    keys.update({"num_experts": experts[0], "num_experts_per_token": experts[1], "mla_latent_norm_eps": keys["rms_norm_eps"]})
    if wide:
        keys.update({"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "kv_lora_rank": 256})
        keys.update({"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64})
        if kind == "k3":
            keys.update({"routed_expert_hidden_size": 256, "q_lora_rank": 256})
    return keys


def some_tokens(count, seed):
    return np.random.RandomState(seed).randint(0, VOCABULARY, count).tolist()


def relative(got, expected):
    return float(np.sqrt(((got - expected) ** 2).sum() / (expected**2).sum()))


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.gguf = self.path("x.gguf")

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write_tokens(self, tokens):
        with open(self.path("tokens"), "w", encoding="utf-8") as file:
            file.write(" ".join(map(str, tokens)))

    def ours(self, file, *options):
        run(os.environ["TIDELOCK_BINARY"], "logits", file, "--tokens", self.path("tokens"), "--out", self.path("a.npy"), *options)
        return np.load(self.path("a.npy")).astype(np.float64)

    def theirs(self, file):
        run(PEER, "logits", BACKENDS, file, self.path("tokens"), self.path("b"))
        return np.fromfile(self.path("b"), "<f4").reshape(-1, VOCABULARY).astype(np.float64)


class Float32(Case):
    """The same mathematics: logits agree to the rounding of float32, and the likeliest token is the same everywhere."""

    # Heads are few or odd in number, one to three MLA layers follow each other, one to all experts are chosen. llama.cpp takes
    # q-LoRA in K3 only, and always there.
    SHAPES = {
        "linear": [("kkmk", 3, (6, 2)), ("kmmmk", 2, (16, 16)), ("mk", 1, (5, 1)), ("kkmmkm", 5, (12, 9))],
        "k3": [("kkmkm", 3, (6, 2)), ("kmmmkk", 2, (16, 16)), ("kmk", 5, (7, 1)), ("mmkk", 1, (12, 9))],
    }

    def check(self, kind):
        for pattern, heads, experts in self.SHAPES[kind]:
            keys = model_keys(kind, pattern, heads, 18 if kind == "k3" else None, experts)
            weights = random_weights(keys, 3)
            gguf_io.write(self.gguf, keys, weights)
            for count in (37, 300, 2100):
                self.write_tokens(some_tokens(count, count))
                got, expected = self.ours(self.gguf), self.theirs(self.gguf)
                with self.subTest(pattern=pattern, heads=heads, experts=experts, tokens=count):
                    self.assertEqual(got.shape, (count, VOCABULARY))
                    self.assertLess(relative(got, expected), 1e-5)
                    np.testing.assert_array_equal(got.argmax(1), expected.argmax(1))
            # The twin: a decay that is wrong by a thousandth in one head of one layer is seen.
            name = next(n for n in weights if n.endswith("A_log"))
            weights[name].reshape(-1)[0] += 1e-3
            gguf_io.write(self.gguf, keys, weights)
            self.assertGreater(relative(self.ours(self.gguf), expected), 1e-5)

    def test_linear(self):
        self.check("linear")

    def test_k3(self):
        self.check("k3")


class Rounded(Oracle):
    """The float64 oracle whose matrices meet inputs that are rounded as their format asks: an error that cannot be avoided."""

    def __init__(self, *arguments, types, **options):
        super().__init__(*arguments, **options)
        self.types = types  # {HF name of a matrix: its type in the file}

    def linear(self, module, x):
        kind = self.types[module + ".weight"]
        if kind != "f32":
            x = x.to(torch.bfloat16).to(torch.float64)
        if kind not in ("f32", "bf16"):
            blocks = x.reshape(*x.shape[:-1], -1, 32)
            step = blocks.abs().amax(-1, keepdim=True) / 127
            x = (torch.round(blocks / step.clamp(min=1e-300)) * step).reshape(x.shape)
        return super().linear(module, x)


class Quantised(Case):
    """Against float64: what the rounding of the inputs explains, and no more than llama.cpp's own distance."""

    TYPES = ("BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")

    def write(self, kind):
        keys = model_keys(kind, "kkmk" if kind == "linear" else "kkmkm", 3, None if kind == "linear" else 256, (9, 8), wide=True)
        weights = random_weights(keys, 3)
        for name in weights:  # which experts are chosen must not hang on a rounding: eight of them always are
            if name.endswith("e_score_correction_bias"):
                weights[name][8] = -10
        gguf_io.write(self.path("wide.gguf"), keys, weights)
        return keys

    def read(self, keys):
        """The file's values as ggml reads them, and the type of each matrix, by HF names."""
        entries = [line.split() for line in run(PEER, "values", self.gguf, self.path("values")).splitlines()]
        flat = np.fromfile(self.path("values"), "<f4")
        ends = np.cumsum([int(count) for _, count, _ in entries])
        shapes = tensor_shapes(keys)
        tensors = {name: part for (name, _, _), part in zip(entries, np.split(flat, ends[:-1]))}
        marks = {name: np.full(int(count), index, np.float64) for index, (name, count, _) in enumerate(entries)}
        for name in marks:  # restore() takes the logarithm of the decay
            if name.endswith("ssm_a"):
                marks[name] = -np.exp(marks[name])
        types = {name: entries[round(float(mark.reshape(-1)[0]))][2] for name, mark in gguf_io.restore(keys, shapes, marks).items()}
        return gguf_io.restore(keys, shapes, tensors), types

    def check(self, kind):
        keys, tokens = self.write(kind), some_tokens(60, 1)
        self.write_tokens(tokens)
        for quantised in self.TYPES:
            run(PEER, "quantize", self.path("wide.gguf"), self.gguf, quantised)
            weights, types = self.read(keys)
            options = {"l2_eps": keys["rms_norm_eps"]}
            with torch.no_grad():
                exact = Oracle(keys, weights, **options).forward(tokens).numpy()
                explained = relative(Rounded(keys, weights, types=types, **options).forward(tokens).numpy(), exact)
            ours, theirs = relative(self.ours(self.gguf), exact), relative(self.theirs(self.gguf), exact)
            print(f"{kind} {quantised}: ours {ours:.2e}, llama.cpp {theirs:.2e} ({ours / theirs:.2f}), inputs alone {explained:.2e}")
            with self.subTest(type=quantised):
                self.assertLess(ours, 1.1 * theirs)
                self.assertLess(ours, 1.25 * explained)
        # The twin: one expert of many twice as strong is seen in the coarsest format.
        name = next(n for n in weights if n.endswith("experts.0.w2.weight"))
        with torch.no_grad():
            other = Oracle(keys, {**weights, name: 2 * weights[name]}, **options).forward(tokens).numpy()
        self.assertGreater(relative(self.ours(self.gguf), other), 1.25 * explained)

    def test_linear(self):
        self.check("linear")

    def test_k3(self):
        self.check("k3")


if __name__ == "__main__":
    unittest.main(verbosity=2)
