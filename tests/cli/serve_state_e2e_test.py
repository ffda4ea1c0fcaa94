#!/usr/bin/env python3
"""`tidelock serve` from outside: state that is reused, in memory and on disk; administration. Needs TIDELOCK_BINARY."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import NANO  # noqa: E402
from serve_harness import QUESTION, ServeCase  # noqa: E402


class Lateness(ServeCase):
    def test_who_would_wait_too_long_is_told_at_once(self):
        server = self.serve("--first-token-limit", "0.2", "--no-prefix-reuse", "--threads", "1")
        prompt = lambda i: [(i * 131 + j * j) % 400 + 7 for j in range(3500)]  # noqa: E731
        self.assertEqual(server.complete(prompt=prompt(0), max_tokens=1)[0].status, 200)  # long, but nobody is before it
        answers = {}

        def ask(i):
            response, body = server.complete(prompt=prompt(i), max_tokens=1, stream=i % 2 == 0)
            answers[i] = (response.status, response.getheader("Retry-After"), body)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(1, 11)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        refused = [a for a in answers.values() if a[0] == 429]
        self.assertEqual({a[0] for a in answers.values()}, {200, 429}, answers)
        for _, after, body in refused:
            self.assertGreaterEqual(int(after), 1)
            self.assertIn("first token", body["error"]["message"])
        self.assertEqual(server.metric("tidelock_requests_refused_total"), len(refused))
        self.assertEqual(server.complete()[0].status, 200)


class Administration(ServeCase):
    ADMIN = {"Authorization": "Bearer root"}

    def setUp(self):
        super().setUp()
        self.keys = self.write("admin", f"{hashlib.sha256(b'root').hexdigest()} root\n")
        self.adapters = pathlib.Path(self.folder) / "adapters"
        self.adapters.mkdir()

    def adapter(self, name, seed):
        """An adapter that one step of training made: its values differ by seed."""
        out = pathlib.Path(self.folder) / f"run-{name}"
        self.tidelock("rl", "recipes/quickstart.toml", "--out", out, "--set", f"rl.seed={seed}", "--set", "rl.steps=1", "--set", "rl.groups=2",
                    "--set", "rl.group_size=4", "--set", "eval.tasks=2", "--set", "eval.samples=1", "--set", "rl.learning_rate=0.05")  # fmt: skip
        shutil.copytree(out / "adapter", self.adapters / name)

    def admin(self, server, path, body=None, headers=None, method="POST"):
        return server.ask(method, path, body, self.ADMIN if headers is None else headers)

    def answer(self, server, model):
        response, body = server.complete(model=model, temperature=0, logprobs=1, prompt="12*34?", max_tokens=8)
        self.assertEqual(response.status, 200, body)
        return body["choices"][0]["logprobs"]["token_logprobs"], body["weight_version"], body["model"]

    def test_adapters_come_and_go_while_the_server_runs(self):
        self.adapter("one", 1)
        self.adapter("two", 2)
        server = self.serve("--admin-keys", self.keys, "--adapters", self.adapters)
        base = self.answer(server, "nano")
        self.assertEqual(base[1:], (0, "nano"))
        self.check_error(server.complete(model="policy"), 404, "model")
        response, loaded = self.admin(server, "/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "one"})
        self.assertEqual((response.status, loaded["id"], loaded["weight_version"]), (200, "policy", 1), loaded)
        first = self.answer(server, "policy")
        self.assertEqual(first[1:], (1, "policy"))
        self.assertNotEqual(first[0], base[0])
        alone = self.serve("--adapter", self.adapters / "one")
        self.assertEqual(self.answer(alone, "nano")[0], first[0])
        # The next weights under the same name: no state of the last ones is used.
        _, second = self.admin(server, "/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "two"})
        self.assertEqual(second["weight_version"], 2)
        self.assertNotEqual(second["sha256"], loaded["sha256"])
        newer = self.answer(server, "policy")
        self.assertEqual(newer[1], 2)
        self.assertNotEqual(newer[0], first[0])
        self.assertEqual(self.answer(server, "nano"), base)
        models = server.ask("GET", "/v1/models")[1]["data"]
        self.assertEqual([(m["id"], m.get("parent"), m["weight_version"]) for m in models], [("nano", None, 0), ("policy", "nano", 2)])
        self.assertEqual(self.admin(server, "/v1/unload_lora_adapter", {"lora_name": "policy"})[0].status, 200)
        self.check_error(server.complete(model="policy"), 404, "model")
        self.assertEqual(self.admin(server, "/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "one"})[1]["weight_version"], 3)

    def test_only_what_is_meant_can_be_loaded(self):
        (self.adapters / "broken").mkdir()
        (self.adapters / "broken" / "adapter_config.json").write_text("{}")
        (self.adapters / "link").symlink_to("/")
        server = self.serve("--admin-keys", self.keys, "--adapters", self.adapters)
        load = "/v1/load_lora_adapter"
        for path in ("nothing", "..", "../adapters/../run", "/etc", "link", "link/etc"):
            self.check_error(self.admin(server, load, {"lora_name": "a", "lora_path": path}), 404, "lora_path")
        self.check_error(self.admin(server, load, {"lora_name": "a", "lora_path": "broken"}), 400, "lora_path")
        for name in ("", "a b", "nano", "../x", "x" * 129):
            self.check_error(self.admin(server, load, {"lora_name": name, "lora_path": "broken"}), 400, "lora_name")
        self.check_error(self.admin(server, load, {"lora_name": "a", "lora_pth": "x"}), 400, "lora_pth")
        self.check_error(self.admin(server, "/v1/unload_lora_adapter", {"lora_name": "nano"}), 404, "lora_name")
        self.check_error(self.admin(server, load, "no json"), 400)
        self.check_error(self.admin(server, load, {"lora_name": "a"}, {}), 401)
        self.check_error(self.admin(server, load, {"lora_name": "a"}, {"Authorization": "Bearer guess"}), 401)
        off = self.serve()
        self.check_error(self.admin(off, load, {"lora_name": "a"}), 403)
        none = self.serve("--admin-keys", self.keys)
        self.check_error(self.admin(none, load, {"lora_name": "a"}), 403)

    def test_pause_and_a_clean_slate(self):
        server = self.serve("--admin-keys", self.keys)
        server.complete(prompt="1+1=2, 2+2=4, " * 20)
        self.assertGreater(server.metric("tidelock_kept_states"), 0)
        self.assertEqual(self.admin(server, "/reset_prefix_cache")[0].status, 200)
        self.assertEqual(server.complete(prompt="1+1=2, 2+2=4, " * 20)[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(self.admin(server, "/pause", {"mode": "wait"})[1], {"paused": True, "running": 0, "waiting": 0})
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.complete()))
        thread.start()
        time.sleep(0.3)
        self.assertEqual((answers, self.admin(server, "/pause", method="GET")[1]["waiting"]), ([], 1))
        self.assertEqual(self.admin(server, "/resume")[1]["paused"], False)
        thread.join()
        self.assertEqual(answers[0][0].status, 200)
        self.check_error(self.admin(server, "/pause", {"mode": "never"}), 400, "mode")


    def test_a_server_that_sleeps_holds_no_state(self):
        for more, known in (((), 0), (("--state-dir", pathlib.Path(self.folder) / "states"), 320)):
            server = self.serve("--admin-keys", self.keys, *more)
            prompt = list(range(7, 327))
            first = server.complete(prompt=prompt, temperature=0)[1]
            self.assertGreater(server.metric("tidelock_state_bytes"), 0)
            answers = []
            stream = threading.Thread(target=lambda: answers.append(server.complete(prompt=[9] * 3500, max_tokens=2)))
            stream.start()
            while server.metric("tidelock_sequences_running") == 0 and not answers:
                time.sleep(0.01)
            self.admin(server, "/sleep", {"mode": "wait"})
            end = time.monotonic() + 60
            while not self.admin(server, "/is_sleeping", method="GET")[1]["is_sleeping"]:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.01)
            stream.join()
            self.assertEqual(answers[0][0].status, 200)  # what ran was run to its end
            self.assertEqual((server.metric("tidelock_state_bytes"), server.metric("tidelock_kept_states")), (0, 0))
            waiting = threading.Thread(target=lambda: answers.append(server.complete(prompt=prompt, temperature=0)))
            waiting.start()
            time.sleep(0.3)
            self.assertEqual(len(answers), 1)
            self.assertEqual(self.admin(server, "/wake_up")[1]["paused"], False)
            waiting.join()
            body = answers[1][1]
            self.assertEqual(body["choices"], first["choices"])
            # From disk, where there is one: at the answer's end, or at the last whole block before the prompt's.
            self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 64, True)
            self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, known > 0)
            self.assertEqual(self.admin(server, "/is_sleeping", method="GET")[1]["is_sleeping"], False)
            self.admin(server, "/sleep", {"mode": "abort"})
            self.admin(server, "/wake_up")  # at once
            self.assertEqual(server.complete(prompt=prompt, temperature=0)[1]["choices"], first["choices"])
            self.check_error(self.admin(server, "/sleep", {"mode": "keep"}), 400, "mode")
            server.close()


class Reuse(ServeCase):
    PROMPT = [7 + i * i % 400 for i in range(300)]

    def cached(self, server, prompt, headers=None, **fields):
        response, body = server.ask("POST", "/v1/completions", {"model": "nano", "prompt": prompt, "max_tokens": 20, "temperature": 0,
                                    "return_token_ids": True, **fields}, headers)  # fmt: skip
        self.assertEqual(response.status, 200, body)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["token_ids"]

    def test_a_conversation_goes_on_where_it_ended(self):
        warm, cold = self.serve(), self.serve("--no-prefix-reuse")
        prompt = list(self.PROMPT)
        for turn in range(4):
            known, answer = self.cached(warm, prompt)
            nothing, expected = self.cached(cold, prompt)
            self.assertEqual((nothing, answer), (0, expected))
            # All but the last answer's last token, which was never computed, and the five new ones.
            self.assertEqual(known, len(prompt) - 1 - 5 if turn else 0)
            prompt += [*answer, *self.PROMPT[:5]]
        self.assertEqual(warm.metric("tidelock_prefix_hits_total"), 3)
        self.assertGreater(warm.metric("tidelock_prefix_hit_tokens_total"), 900)
        self.assertGreater(warm.metric("tidelock_kept_states"), 3)
        self.assertEqual(cold.metric("tidelock_kept_states"), 0)
        # Chats, too, whose template writes the last answer in another way than it was asked for.
        messages = [{"role": "system", "content": "You count. " * 60}, *QUESTION]
        first = warm.chat(messages=messages, temperature=0)[1]
        again = [*messages, first["choices"][0]["message"], {"role": "user", "content": "and 3*5?"}]
        usage = warm.chat(messages=again, temperature=0)[1]["usage"]
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], first["usage"]["prompt_tokens"] - 64)

    def test_tenants_and_salts_stay_apart(self):
        lines = [f"{hashlib.sha256(name.encode()).hexdigest()} {name}\n" for name in ("ann", "bob")]
        server = self.serve("--api-keys", self.write("keys", "".join(lines)))
        key = lambda name: {"Authorization": f"Bearer {name}"}  # noqa: E731
        for name, salt, expected in (("ann", "", 0), ("ann", "", 256), ("bob", "", 0), ("ann", "s", 0), ("ann", "s", 256)):
            fields = {"cache_salt": salt} if salt else {}
            self.assertEqual(self.cached(server, self.PROMPT, key(name), **fields)[0], expected, (name, salt))
        self.check_error(server.ask("POST", "/v1/completions", {"model": "nano", "prompt": "x", "cache_salt": "x" * 257}, key("ann")), 400, "cache_salt")

    def test_memory_for_state_is_a_limit(self):
        limit = 3 << 20
        wide, tight = self.serve(), self.serve("--state-memory", "3M")
        prompts = [[(i * 31 + j * 7) % 400 + 7 for j in range(100 + 40 * i)] for i in range(8)]
        expected = [self.cached(wide, prompt, max_tokens=150)[1] for prompt in prompts]
        answers, high = {}, 0

        def ask(i):
            answers[i] = self.cached(tight, prompts[i], max_tokens=150)[1]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            high = max(high, tight.metric("tidelock_state_used_bytes"))
            time.sleep(0.01)
        self.assertEqual([answers[i] for i in range(8)], expected)
        self.assertLessEqual(high, limit)
        self.assertLessEqual(tight.metric("tidelock_state_bytes"), limit)
        self.assertGreater(tight.metric("tidelock_states_evicted_total"), 0)
        self.refused("serve", NANO, "--port", "0", "--state-memory", "10K", says=["holds no sequence"])
        self.refused("serve", NANO, "--port", "0", "--state-memory", "much", says=["--state-memory"])

    def states(self, text=None):
        folder = pathlib.Path(self.folder) / "states"
        if text is not None:
            folder.write_text(text)
        return str(folder)

    def test_states_outlive_the_server(self):
        folder = self.states()
        cold, warm = self.serve("--no-prefix-reuse"), self.serve("--state-dir", folder, "--state-disk", "200M")
        prompt, known = list(self.PROMPT), 0
        for life in range(4):
            cached, answer = self.cached(warm, prompt)
            nothing, expected = self.cached(cold, prompt)
            self.assertEqual((cached, nothing, answer), (known, 0, expected), life)
            if life:
                self.assertEqual(warm.metric("tidelock_disk_loads_total"), 1)
                self.assertGreater(warm.metric("tidelock_disk_found_states"), 0)
            prompt += [*answer, *self.PROMPT[:5]]
            known = len(prompt) - 1 - 5
            warm.close()
            warm = self.serve("--state-dir", folder, "--state-disk", "200M")
        # Another server cannot have the folder, and this one goes on after a kill with what was written before it.
        self.refused("serve", NANO, "--port", "0", "--state-dir", folder, says=["is in use by process"])
        self.assertEqual(self.cached(warm, prompt)[0], known)
        warm.process.kill()
        warm.process.wait()
        warm.process.stdout.close()
        warm.process.stderr.close()
        again = self.serve("--state-dir", folder)
        self.assertEqual(self.cached(again, prompt)[0], known)

    def test_a_hint_brings_states_up_before_they_are_asked_for(self):
        folder = self.states()
        first = self.serve("--state-dir", folder)
        expected = self.cached(first, self.PROMPT)[1]
        first.close()
        again = self.serve("--state-dir", folder)
        coming = {"model": "nano", "prompt": self.PROMPT, "max_tokens": 4}
        response, hint = again.ask("POST", "/v1/prefetch", coming)
        self.assertEqual((response.status, hint), (200, {"object": "prefetch", "prompt_tokens": len(self.PROMPT),
                                                         "ready_tokens": 0, "coming_tokens": 256}))  # fmt: skip
        self.eventually(lambda: again.ask("POST", "/v1/prefetch", coming)[1]["ready_tokens"] != 256, "it does not come")
        self.assertEqual(self.cached(again, self.PROMPT), (256, expected))
        self.assertEqual(again.metric("tidelock_disk_loads_total"), 1)
        self.assertEqual(again.metric("tidelock_prefetches_total"), 1)
        self.assertEqual(again.metric("tidelock_prefetched_tokens_total"), 256)
        chat = {"model": "nano", "messages": [{"role": "user", "content": "x"}]}
        self.assertEqual(again.ask("POST", "/v1/prefetch", chat)[1]["coming_tokens"], 0)
        self.assertEqual(again.ask("POST", "/v1/prefetch", {**coming, "model": "other"})[0].status, 404)
        self.assertEqual(again.ask("POST", "/v1/prefetch", {"model": "nano"})[0].status, 400)
        self.assertEqual(again.ask("GET", "/v1/prefetch")[0].status, 405)

    def test_spoilt_states_are_misses(self):
        folder = self.states()
        first = self.serve("--state-dir", folder)
        expected = self.cached(first, self.PROMPT)[1]
        first.close()
        for segment in pathlib.Path(folder).glob("segment-*"):
            content = bytearray(segment.read_bytes())
            for at in range(1000, len(content), 4096):
                content[at] ^= 4
            segment.write_bytes(content)
        again = self.serve("--state-dir", folder)
        self.assertEqual(self.cached(again, self.PROMPT), (0, expected))
        self.assertGreater(again.metric("tidelock_disk_loads_corrupt_total"), 0)
        self.assertEqual(self.cached(again, self.PROMPT), (256, expected))

    def test_little_memory_goes_on_from_disk(self):
        wide = self.serve("--no-prefix-reuse")
        tight = self.serve("--state-memory", "4M", "--state-dir", self.states(), "--state-disk", "100M")
        prompts = [[(i * 31 + j * 7) % 400 + 7 for j in range(300)] for i in range(12)]
        expected = [self.cached(wide, prompt)[1] for prompt in prompts]
        for turn in range(3):
            for prompt, answer in zip(prompts, expected):
                cached, tokens = self.cached(tight, prompt)
                self.assertEqual(tokens, answer)
                self.assertIn(cached, (0, 256))
        self.assertGreater(tight.metric("tidelock_disk_loads_total"), 8)
        self.assertLessEqual(tight.metric("tidelock_state_bytes"), 4 << 20)

    @unittest.skipUnless(os.geteuid() == 0, "mounts a small file system")
    def test_a_full_disk_is_survived(self):
        small = pathlib.Path(self.folder) / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
        self.addCleanup(subprocess.run, ["umount", small], check=True)
        wide = self.serve("--no-prefix-reuse")
        tight = self.serve("--state-memory", "4M", "--state-dir", small / "states", "--state-disk", "100M")
        for i in range(20):
            prompt = [(i * 31 + j * 7) % 400 + 7 for j in range(300)]
            self.assertEqual(self.cached(tight, prompt)[1], self.cached(wide, prompt)[1])
        self.assertGreater(tight.metric("tidelock_disk_store_failures_total"), 0)
        tight.close()  # an orderly end, whatever could not be written
        again = self.serve("--state-dir", small / "states", "--state-disk", "100M")
        self.assertGreater(again.metric("tidelock_disk_found_states"), 0)

    def test_a_folder_for_states_must_be_its_own(self):
        self.refused("serve", NANO, "--port", "0", "--state-dir", self.states("text"), code=1, says=["cannot make the folder"])
        self.write("thesis", "mine")
        self.refused("serve", NANO, "--port", "0", "--state-dir", self.folder, says=["is none of ours", "empty"])
        self.refused("serve", NANO, "--port", "0", "--state-disk", "1G", says=["--state-dir"])
        self.refused("serve", NANO, "--port", "0", "--state-dir", "x", "--no-prefix-reuse", says=["--state-dir"])


if __name__ == "__main__":
    unittest.main()
