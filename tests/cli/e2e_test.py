#!/usr/bin/env python3
"""The verbs but rl and eval, from outside: help, errors, `train`, `generate`, `logits`. Needs TIDELOCK_BINARY."""

import json
import pathlib
import re
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import NANO, VOCAB, Case, npy_shape, safetensors_header  # noqa: E402

K2_SPECIALS = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
               "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
               "<|tool_call_argument_begin|>", "<|tool_call_end|>"]  # fmt: skip
VERBS = ("rl", "train", "eval", "generate", "serve", "logits", "info", "convert", "plan", "bench", "sandbox")


class Help(Case):
    def test_every_verb_has_help(self):
        text = self.tidelock("--help").out
        for verb in VERBS:
            self.assertRegex(text, rf"(?m)^  {verb} +\S")
            own = self.tidelock(verb, "--help").out
            self.assertIn("Usage", own)
            self.assertIn("--help", own)
        self.assertNotIn("sandbox-helper", text)  # a hidden verb

    def test_keys_are_documented(self):
        for verb, keys in (("rl", ("rl.steps", "rl.loss", "tasks.mixture", "rollout.tool_enabled", "checkpoint.every")),
                           ("train", ("train.steps", "train.stop_after", "skill.use_tool", "tasks.mixture"))):  # fmt: skip
            text = self.tidelock(verb, "--keys").out
            for key in keys:
                self.assertIn(key, text)
            for line in text.splitlines():
                self.assertGreaterEqual(len(line.split()), 3, f"a key without a meaning: {line}")

    def test_usage_errors(self):
        self.refused("nonsense", says=["--help"])
        self.refused(says=["--help"])
        for verb in VERBS:
            self.refused(verb, "--nonsense", says=["--help"])
        self.refused("rl", says=["recipe", "--resume", "tidelock rl recipes/quickstart.toml"])
        self.refused("train", says=["recipe", "tidelock train recipes/nano.toml"])
        self.refused("eval", says=["recipe"])
        self.refused("logits", NANO, says=["--tokens"])
        self.refused("generate", NANO, "--prompt", "x", "--threads", "-1", says=["--threads"])
        self.refused("generate", NANO, "--prompt", "x", env={"TIDELOCK_ISA": "sse9"}, says=["TIDELOCK_ISA", "sse9"])

    def test_recipe_errors_name_the_key(self):
        for verb, recipe, key in (("rl", "quickstart", "rl"), ("eval", "quickstart", "rl"), ("train", "nano", "train")):
            out = () if verb == "eval" else ("--out", self.folder / "out")
            def refused(setting, *says):
                self.refused(verb, f"recipes/{recipe}.toml", *out, "--set", setting, says=[setting, *says])
            refused(f"{key}.stepz=3", f"{key}.stepz", f"did you mean {key}.steps?")
            refused(f"{key}.steps=x", "expected integer")
            refused(f"{key}.steps=0", "expected integer in 1..")
            refused(f"{key}.steps", "KEY=VALUE")
        self.refused("rl", "nope.toml", "--out", self.folder / "out", says=["nope.toml", "No such file"])
        self.refused("rl", self.write("broken.toml", "[rl\n"), "--out", self.folder / "out", says=["broken.toml", "1"])
        self.refused("rl", self.write("empty.toml", ""), "--out", self.folder / "out", says=["model.path"])
        no_tasks = self.write("no_tasks.toml", f'[model]\npath = "{NANO}"\n')
        self.refused("rl", no_tasks, "--out", self.folder / "out", says=["tasks", "tasks.dir", "tasks.mixture"])
        self.refused("rl", "recipes/quickstart.toml", "--out", self.folder / "out", "--set", "rl.loss=ppo",
                     says=["ppo", "grpo", "dr_grpo", "dapo"])  # fmt: skip
        self.refused("rl", "recipes/quickstart.toml", "--out", self.folder / "out", "--set", "model.path=nope",
                     says=["nope does not exist"])  # fmt: skip
        self.assertFalse((self.folder / "out/metrics.jsonl").exists())


class Train(Case):
    def steps(self, *arguments, env=None):
        text = self.tidelock("train", "recipes/nano.toml", "--set", "train.stop_after=3", "--set", "train.log_every=1",
                             *arguments, env=env).out  # fmt: skip
        return re.findall(r"(?m)^step +(\d+)/\d+ .* sha256 ([0-9a-f]+)$", text)

    def test_first_steps_of_nano_have_the_committed_bits(self):
        committed = [tuple(line.split()) for line in (NANO / "first_steps.txt").read_text().splitlines()
                     if line.strip() and not line.startswith("#")]  # fmt: skip
        self.assertEqual([step for step, _ in committed], ["1", "2", "3"])
        for arguments, env in (((), None), (("--threads", "1"), None), ((), {"TIDELOCK_ISA": "avx2"})):
            got = self.steps(*arguments, env=env)
            self.assertEqual(len(got), 3)
            for (step, sha), (want_step, want_sha) in zip(got, committed):
                self.assertGreaterEqual(len(want_sha), 12)
                self.assertEqual((step, sha[: len(want_sha)]), (want_step, want_sha[: len(sha)]), (arguments, env))
        other = self.steps("--set", "train.seed=2", "--set", "train.batch_tokens=512")
        self.assertNotEqual(other[0][1], committed[0][1][: len(other[0][1])])

    def test_writes_a_model_that_generates(self):
        out = self.folder / "model"
        self.refused("train", "recipes/nano.toml", says=["--out"])
        self.tidelock("train", "recipes/nano.toml", "--out", out, "--set", "train.steps=2", "--set",
                      "train.batch_tokens=512", "--set", "train.recompute=true")  # fmt: skip
        self.assertEqual(sorted(p.name for p in out.iterdir()),
                         ["config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"])  # fmt: skip
        self.tidelock("generate", out, "--prompt", "1+1", "--max-tokens", "4")
        again = self.folder / "again"
        self.tidelock("train", "recipes/nano.toml", "--out", again, "--set", "train.steps=2", "--set",
                      "train.batch_tokens=512", "--threads", "1")  # fmt: skip
        for name in ("config.json", "model.safetensors"):
            self.assertEqual((out / name).read_bytes(), (again / name).read_bytes(), name)

    def test_bad_input(self):
        out = self.folder / "model"
        self.refused("train", "recipes/nano.toml", "--out", out, "--set", "model.config=nope.json", says=["nope.json"])
        config = (NANO / "config.json").read_text()
        for find, replace, says in (('"hidden_size"', '"hidden_sise"', "hidden_si"),
                                    (f'"vocab_size": {VOCAB}', '"vocab_size": 100', "vocab"),
                                    ('"num_hidden_layers": 8', '"num_hidden_layers": 9', "layers")):  # fmt: skip
            self.assertIn(find, config)
            path = self.write("config.json", config.replace(find, replace))
            self.refused("train", "recipes/nano.toml", "--out", out, "--set", f'model.config="{path}"', says=[says])
        self.assertFalse(out.exists())


class Generate(Case):
    def say(self, *arguments, **more):
        return self.tidelock("generate", NANO, "--max-tokens", "48", *arguments, **more).out

    def test_prompt_and_chat(self):
        self.assertTrue(self.say("--prompt", "12*34?", "--temperature", "0").strip())
        stats = self.tidelock("generate", NANO, "--chat", "12*34?", "--max-tokens", "64", "--stats")
        self.assertTrue(stats.out.strip())
        self.assertRegex(stats.err, r"\d+ prompt tokens, \d+ sampled")
        self.say("--chat", "12*34?", "--system", "Be brief.")

    def test_a_seed_gives_one_text(self):
        def many(*more):
            return [self.say("--chat", "hidden?", "--seed", seed, *more) for seed in range(6)]
        texts = many()
        self.assertEqual(texts, many("--threads", "1"))
        self.assertEqual(texts[0], self.say("--chat", "hidden?", "--seed", 0, env={"TIDELOCK_ISA": "avx2"}))
        self.assertGreater(len(set(texts)), 1)
        greedy = {self.say("--chat", "hidden?", "--seed", seed, "--temperature", "0") for seed in range(3)}
        self.assertEqual(len(greedy), 1)

    def with_specials(self, folder, names):
        """The nano model with other special tokens: the last base tokens make room for them."""
        model = self.folder / folder
        shutil.copytree(NANO, model)
        base = VOCAB - len(names)
        lines = (NANO / "tiktoken.model").read_bytes().splitlines(keepends=True)
        (model / "tiktoken.model").write_bytes(b"".join(lines[:base]))
        added = {str(base + i): {"content": name} for i, name in enumerate(names)}
        (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        return model

    def test_chat_speaks_the_protocol_of_the_vocabulary(self):
        tools = self.write("tools.json", '{"type": "function", "function": {"name": "f"}}')
        k2 = self.with_specials("k2", K2_SPECIALS)
        def chat(model, *more):
            return self.tidelock("generate", model, "--chat", "12*34?", "--max-tokens", "16", "--stats", "--temperature", "0", *more)
        result = chat(k2)
        # <|im_user|>user<|im_middle|>12*34?<|im_end|><|im_assistant|>assistant<|im_middle|> with one or more text tokens each
        self.assertRegex(result.err, r"\b1\d prompt tokens, \d+ sampled")
        declared = chat(k2, "--tools", tools, "--system", "Be brief.")
        self.assertNotEqual(declared.err.splitlines()[-1], result.err.splitlines()[-1])
        self.refused("generate", k2, "--chat", "x", "--thinking", says=["<think>", "thinking"])
        thinker = self.with_specials("thinker", [*K2_SPECIALS, "<think>", "</think>"])
        chat(thinker, "--thinking")
        both = self.with_specials("both", [*K2_SPECIALS, "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"])
        neither = self.with_specials("neither", [f"<|{i}|>" for i in range(7)])
        self.refused("generate", both, "--chat", "x", says=["10 of the 10", "4 of the 4", "none of the other"])
        self.refused("generate", neither, "--chat", "x", says=["no chat protocol", "<|im_end|>", "<|end_of_msg|>"])
        for model in (both, neither):  # text goes on without a protocol
            self.tidelock("generate", model, "--prompt", "1+1", "--max-tokens", "4")

    def test_errors(self):
        self.refused("generate", NANO, says=["--prompt", "--chat"])
        self.refused("generate", NANO, "--prompt", "a", "--chat", "b", says=["--prompt", "--chat"])
        self.refused("generate", NANO, "--prompt", "a", "--system", "b", says=["--system"])
        self.refused("generate", self.folder / "nope", "--prompt", "a", says=["nope does not exist"])
        self.refused("generate", NANO, "--prompt", "a", "--adapter", "nope", says=["nope/adapter_config.json"])
        self.refused("generate", NANO, "--prompt", "a", "--temperature", "-1", says=["temperature"])
        self.refused("generate", NANO, "--prompt", "a", "--top-p", "0", says=["top_p"])
        self.refused("generate", NANO, "--prompt", "a", "--max-tokens", "0", says=["max_tokens"])
        bad = self.write("adapter/adapter_config.json", "{").parent
        self.refused("generate", NANO, "--prompt", "a", "--adapter", bad, code=1, says=["adapter_config.json"])


class Checkpoints(Case):
    """One checkpoint in every form it can be kept and run in."""

    def logits(self, model, *options):
        out = self.folder / "out.npy"
        tokens = self.write("tokens.txt", " ".join(str(i * 37 % VOCAB) for i in range(40)))
        self.tidelock("logits", model, "--tokens", tokens, "--out", out, *options)
        return out.read_bytes()

    def test_a_gguf_copy_says_the_same(self):
        gguf, back = self.folder / "nano.gguf", self.folder / "back"
        self.tidelock("convert", NANO, gguf, "--to", "gguf")
        self.assertIn("GGUF v3, kimi-k3", self.tidelock("info", gguf).out)
        self.assertEqual(self.logits(gguf), self.logits(NANO))
        self.tidelock("convert", gguf, back, "--to", "safetensors")
        self.assertEqual(self.logits(back), self.logits(NANO))

    def test_packed_weights(self):
        packed, expected = self.folder / "packed", self.logits(NANO)
        first = self.tidelock("generate", NANO, "--prompt", "a", "--max-tokens", 4, "--packed", packed, "--weights", "mmap")
        made = packed.stat()
        for place in ("memory", "mmap"):
            self.assertEqual(self.logits(NANO, "--packed", packed, "--weights", place), expected)
        again = self.tidelock("generate", NANO, "--prompt", "a", "--max-tokens", 4)
        self.assertEqual(first.out, again.out)
        self.assertEqual((packed.stat().st_ino, packed.stat().st_mtime_ns), (made.st_ino, made.st_mtime_ns))
        self.refused("generate", NANO, "--prompt", "a", "--weights", "mmap", says=["--packed FILE"])
        other = self.write("precious.txt", "not weights")
        self.refused("generate", NANO, "--prompt", "a", "--packed", other, says=["is not a file of packed weights"])
        self.assertEqual(other.read_text(), "not weights")
        rows = json.loads(self.tidelock("bench", "model", NANO, "-p", 16, "-n", 2, "-r", 2, "--json", "--packed", packed).out)
        self.assertEqual([(r["n_prompt"], r["n_gen"]) for r in rows], [(16, 0), (0, 2)])
        self.assertTrue(all(s > 0 for r in rows for s in r["samples_ns"]))

    def test_plan_and_info_agree_on_the_weights(self):
        plan = json.loads(self.tidelock("plan", NANO, "--memory", "1M", "--bandwidth", "10GB/s", "--nvme", "1GB/s", "--json").out)
        self.assertFalse(plan["fits"])
        self.assertGreater(plan["streamed_bytes"], 0)
        packed = self.folder / "packed"
        self.logits(NANO, "--packed", packed)
        self.assertLess(abs(packed.stat().st_size / plan["weight_bytes"] - 1), 0.05)  # vectors out, a header in


class Logits(Case):
    def tokens(self, text="5 6 7 8 9 300 301 302 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27"):
        return self.write("tokens.txt", text)

    def test_bits_do_not_depend_on_threads_or_instruction_set(self):
        tokens, out = self.tokens(" ".join(str(i * 37 % VOCAB) for i in range(150))), []
        for i, (threads, isa) in enumerate(((1, None), (2, None), (2, "avx2"), (2, "scalar"))):
            path = self.folder / f"{i}.npy"
            self.tidelock("logits", NANO, "--tokens", tokens, "--out", path, "--threads", threads,
                          env={"TIDELOCK_ISA": isa} if isa else None)  # fmt: skip
            self.assertEqual(npy_shape(path), (150, VOCAB))
            out.append(path.read_bytes())
        self.assertTrue(all(o == out[0] for o in out[1:]))
        # Changing the last token leaves all earlier rows as they are, and changes the last one.
        path = self.folder / "last.npy"
        tokens = self.tokens(" ".join(str(i * 37 % VOCAB) for i in range(149)) + " 7")
        self.tidelock("logits", NANO, "--tokens", tokens, "--out", path)
        row = VOCAB * 4
        self.assertEqual(path.read_bytes()[:-row], out[0][:-row])
        self.assertNotEqual(path.read_bytes()[-row:], out[0][-row:])

    def test_bad_tokens(self):
        out = self.folder / "x.npy"
        for text, code, says in ((f"1 2 {VOCAB}", 2, str(VOCAB)), ("1 -2", 1, "-2"), ("one", 1, "tokens.txt"), ("", 2, "no tokens"),
                                 ("99999999999999999999", 1, "tokens.txt")):  # fmt: skip
            self.refused("logits", NANO, "--tokens", self.tokens(text), "--out", out, code=code, says=[says])
        self.refused("logits", NANO, "--tokens", self.folder / "nope.txt", "--out", out, says=["nope.txt"])
        self.refused("logits", NANO, "--tokens", self.tokens(), "--out", self.folder / "no/x.npy", says=["no/x.npy"])
        self.assertFalse(out.exists())

    def test_bad_weights(self):
        model, out = self.folder / "model", self.folder / "x.npy"
        shutil.copytree(NANO, model)
        whole = (NANO / "model.safetensors").read_bytes()
        header, start = safetensors_header(whole)
        name = next(n for n in header if n.endswith("up_proj.weight"))
        at = start + header[name]["data_offsets"][0]
        self.assertEqual(header[name]["dtype"], "BF16")
        cases = {
            "truncated": (whole[:100000], "model.safetensors"),
            "cut in the header": (whole[:50], "model.safetensors"),
            "empty": (b"", "model.safetensors"),
            "a header of 2^60 bytes": ((1 << 60).to_bytes(8, "little") + whole[8:], "model.safetensors"),
            "NaN": (whole[:at] + b"\xc0\x7f" + whole[at + 2 :], name),
            "infinity": (whole[:at] + b"\x80\x7f" + whole[at + 2 :], name),
            "another dtype": (whole.replace(b'"dtype":"BF16"', b'"dtype":"I16" ', 1), "I16"),
        }
        for what, (raw, says) in cases.items():
            (model / "model.safetensors").write_bytes(raw)
            with self.subTest(what):
                result = self.tidelock("logits", model, "--tokens", self.tokens(), "--out", out, code=None)
                self.assertIn(result.code, (1, 2))
                self.assertIn(says, result.err)
        (model / "model.safetensors").write_bytes(whole)
        self.tidelock("logits", model, "--tokens", self.tokens(), "--out", out)
        (model / "model.safetensors").unlink()
        self.refused("logits", model, "--tokens", self.tokens(), "--out", out, says=["safetensors"])
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 96'))
        shutil.copy(NANO / "model.safetensors", model)
        result = self.tidelock("logits", model, "--tokens", self.tokens(), "--out", out, code=None)
        self.assertIn(result.code, (1, 2))
        self.assertIn("96", result.err)


if __name__ == "__main__":
    unittest.main()
