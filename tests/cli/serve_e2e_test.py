#!/usr/bin/env python3
"""`tidelock serve` from outside: HTTP by hand, hostile clients, and the official OpenAI clients. Needs TIDELOCK_BINARY."""

import hashlib
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import unittest

import jsonschema

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import NANO, ROOT, VOCAB  # noqa: E402
from serve_harness import QUESTION, ServeCase, events  # noqa: E402


def random_schema(depth):
    kinds = ["integer", "string", "enum", "boolean", "null", "pattern"] + (["array", "object", "object", "anyOf"] if depth else [])
    kind = random.choice(kinds)
    low = random.randint(-50, 50)
    short = {"type": "string", "minLength": random.randint(0, 2), "maxLength": random.randint(2, 6)}
    if kind == "array":
        return {"type": "array", "items": random_schema(depth - 1), "minItems": random.randint(0, 2), "maxItems": random.randint(2, 3)}
    if kind == "object":
        names = random.sample(["a", "long name", "z", "\u00e9", 'q"uote', "n/p"], random.randint(1, 4))
        return {"type": "object", "properties": {name: random_schema(depth - 1) for name in names}, "additionalProperties": False,
                "required": random.sample(names, random.randint(0, len(names)))}  # fmt: skip
    return {"integer": {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 500)}, "string": short,
            "enum": {"enum": random.sample([1, -2.5, "x", "\u00fc\n", None, True, [1], {"k": "v"}], 3)}, "boolean": {"type": "boolean"},
            "null": {"type": "null"}, "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}(x|yz)?$"},
            "anyOf": {"anyOf": [random_schema(depth - 1) if depth else short, {"type": "null"}]}}[kind]  # fmt: skip


class Api(ServeCase):
    def test_chat_calls_a_tool_and_answers_with_its_result(self):
        server = self.serve()
        response, first = server.chat(temperature=0)
        self.assertEqual(response.status, 200, first)
        choice = first["choices"][0]
        self.assertEqual(choice["finish_reason"], "tool_calls")
        call = choice["message"]["tool_calls"][0]
        self.assertEqual((call["type"], call["function"]["name"]), ("function", "shell"))
        self.assertEqual(json.loads(call["function"]["arguments"]), {"command": "echo $((12*34))"})
        messages = [*QUESTION, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "408"}]
        _, second = server.chat(messages=messages, temperature=0)
        self.assertEqual(second["choices"][0]["message"]["content"], "408")
        self.assertEqual(second["choices"][0]["finish_reason"], "stop")
        for body in (first, second):
            usage = body["usage"]
            self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
            self.assertEqual((body["object"], body["model"]), ("chat.completion", "nano"))

    def test_a_stream_is_the_answer_in_pieces(self):
        server = self.serve()
        for seed in range(4):
            fields = {"seed": seed, "n": 2, "logprobs": True, "return_token_ids": True}
            whole = server.chat(**fields)[1]
            response, text = server.chat(**fields, stream=True, stream_options={"include_usage": True})
            self.assertTrue(response.getheader("Content-Type").startswith("text/event-stream"))
            chunks = events(text)
            self.assertEqual(chunks[-1]["choices"], [])
            self.assertEqual({**chunks[-1]["usage"], "prompt_tokens_details": None}, {**whole["usage"], "prompt_tokens_details": None})
            for i, choice in enumerate(whole["choices"]):
                mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == i]
                deltas = [c["delta"] for c in mine]
                self.assertEqual("".join(d.get("content") or "" for d in deltas), choice["message"]["content"] or "")
                self.assertEqual([t for c in mine for t in c.get("token_ids", [])], choice["token_ids"])
                self.assertEqual([c["finish_reason"] for c in mine if c["finish_reason"]], [choice["finish_reason"]])
                calls = [call for d in deltas for call in d.get("tool_calls", [])]
                self.assertEqual([c["function"] for c in calls],
                                 [c["function"] for c in choice["message"].get("tool_calls", [])])  # fmt: skip
                logprobs = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
                self.assertEqual(logprobs, choice["logprobs"]["content"])

    def test_a_seed_gives_one_text_whatever_else_runs(self):
        server = self.serve()
        alone = [server.complete(seed=seed)[1]["choices"] for seed in range(6)]
        self.assertEqual(alone, [server.complete(seed=seed)[1]["choices"] for seed in range(6)])
        together = [None] * 6
        def one(seed):
            together[seed] = server.complete(seed=seed)[1]["choices"]
        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(together, alone)
        self.assertGreater(len({json.dumps(c) for c in alone}), 1)
        # As the command line says it.
        said = self.tidelock("generate", NANO, "--prompt", "1+1", "--max-tokens", "16", "--seed", "3").out
        self.assertEqual(alone[3][0]["text"], said.removesuffix("\n"))

    def test_a_gguf_file_says_what_its_folder_says(self):
        gguf = self.folder / "nano.gguf"
        self.tidelock("convert", NANO, gguf, "--to", "gguf")
        fields = {"seed": 5, "n": 2, "logprobs": True, "return_token_ids": True}
        answers = [self.serve(model=model).chat(**fields)[1] for model in (NANO, gguf)]
        for key in ("prompt_token_ids", "usage"):
            self.assertEqual(answers[0][key], answers[1][key])
        for one, other in zip(answers[0]["choices"], answers[1]["choices"]):
            self.assertEqual(one["token_ids"], other["token_ids"])
            self.assertEqual(one["logprobs"], other["logprobs"])
            self.assertEqual(one["message"]["content"], other["message"]["content"])

    def test_ids_in_and_out(self):
        server = self.serve()
        ids = server.ask("POST", "/tokenize", {"prompt": "1+1"})[1]
        self.assertEqual(server.ask("POST", "/detokenize", {"tokens": ids["tokens"]})[1], {"prompt": "1+1"})
        text, by_ids = server.complete(), server.complete(prompt=ids["tokens"], return_token_ids=True)
        self.assertEqual(by_ids[1]["choices"][0]["text"], text[1]["choices"][0]["text"])
        self.assertEqual(by_ids[1]["prompt_token_ids"], ids["tokens"])
        out = by_ids[1]["choices"][0]["token_ids"]
        self.assertEqual(len(out), by_ids[1]["usage"]["completion_tokens"])
        stopped = server.complete(stop_token_ids=[out[3]], return_token_ids=True)[1]["choices"][0]
        self.assertEqual(stopped["token_ids"], out[: out.index(out[3]) + 1])
        self.assertEqual(stopped["finish_reason"], "stop")

    def test_stop_strings_end_the_answer_and_free_the_sequence(self):
        server = self.serve()
        text = server.complete(max_tokens=64)[1]["choices"][0]["text"]
        stop = text[5:7]
        for stream in (False, True):
            answer = server.complete(max_tokens=64, stop=[stop, "never"], stream=stream)[1]
            said = "".join(c["choices"][0]["text"] for c in events(answer)) if stream else answer["choices"][0]["text"]
            self.assertEqual(said, text[: text.index(stop)])
        self.eventually(lambda: server.metric("tidelock_sequences_running") != 0, "a stopped sequence still runs")

    def test_answers_are_held_to_a_schema(self):
        """Random schemas; the judge is Debian's python3-jsonschema, which knows nothing of how they are made into grammars."""
        server = self.serve()
        random.seed(5)
        held = free = 0
        for seed in range(60):
            schema = random_schema(3)
            form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
            fields = {"seed": seed, "temperature": 1.5, "max_tokens": 2000, "reasoning_effort": ["none", "low"][seed % 2]}
            _, body = server.chat(**fields, response_format=form)
            self.assertIn("choices", body, body)
            if body["choices"][0]["finish_reason"] != "stop":
                continue  # it went on for too long
            self.assertNotIn("malformed", body["choices"][0])
            jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), schema)
            held += 1
            content = server.chat(**fields)[1]["choices"][0]["message"]["content"]
            try:
                jsonschema.validate(json.loads(content or ""), schema)
                free += 1
            except (ValueError, jsonschema.ValidationError):
                pass
        self.assertGreater(held, 45)
        self.assertLess(free, 10)  # else the schemas ask for nothing

    def test_a_schema_in_a_stream_and_beside_other_answers(self):
        server = self.serve()
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 100, "maximum": 999}}}
        plain = server.chat(seed=3, return_token_ids=True)[1]["choices"][0]["token_ids"]
        _, whole = server.chat(seed=3, n=4, response_format=form)
        for choice in whole["choices"]:
            self.assertRegex(choice["message"]["content"], r"\A[1-9][0-9][0-9]\Z")
        _, text = server.chat(seed=3, n=4, response_format=form, stream=True)
        for i in range(4):
            mine = [c["choices"][0]["delta"].get("content") or "" for c in events(text) if c["choices"][0]["index"] == i]
            self.assertEqual("".join(mine), whole["choices"][i]["message"]["content"])
        self.assertEqual(server.chat(seed=3, return_token_ids=True)[1]["choices"][0]["token_ids"], plain)

    def test_schemas_that_would_take_for_ever_are_refused_or_take_no_time(self):
        server = self.serve()
        deep = {}
        for _ in range(200):
            deep = {"type": "array", "items": deep}
        wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 4096} for i in range(300)}}
        hostile = [deep, wide, {"type": "string", "pattern": "(((a*)*)*)*b"}, {"type": "string", "pattern": "(a|aa|aaa){300}x{300}"},
                   {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "[\u0000-\U0010ffff]{900}"}, {"type": "string", "pattern": "(" * 250},
                   {"type": "array", "items": {"type": "array", "items": {"type": "string", "maxLength": 4096}, "maxItems": 4096}, "maxItems": 4096},
                   {"anyOf": [{"const": "x" * i} for i in range(300)]}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
                   {"type": "integer", "minimum": -(10**18), "maximum": 10**18}]  # fmt: skip
        for schema in hostile:
            start = time.monotonic()
            response, body = server.chat(max_tokens=8, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
            self.assertIn(response.status, (200, 400), body)
            self.assertLess(time.monotonic() - start, 30, str(schema)[:200])
        self.assertEqual(server.chat()[0].status, 200)

    def test_errors_are_in_openais_form(self):
        server = self.serve()
        self.assertIn("penalties", self.check_error(server.chat(frequency_penalty=1), 400, "frequency_penalty"))
        self.check_error(server.chat(anything=1), 400, "anything")
        self.check_error(server.chat(model="gpt-5"), 404, "model")
        self.check_error(server.chat(messages=[{"role": "user"}]), 400, "messages[0].content")
        self.check_error(server.chat(max_tokens=100000), 400, "max_tokens")
        self.check_error(server.complete(prompt=[VOCAB]), 400, "prompt")
        self.check_error(server.ask("POST", "/v1/completions", "{"), 400)
        self.check_error(server.ask("POST", "/v1/completions", "{}", {"Content-Type": "text/plain"}), 415)
        self.assertIn("/v1/chat/completions", self.check_error(server.ask("GET", "/v2"), 404))
        wrong = server.ask("GET", "/v1/chat/completions")
        self.check_error(wrong, 405)
        self.assertEqual(wrong[0].getheader("Allow"), "POST")
        self.check_error(server.ask("GET", "/v1/models/other"), 404, "model")
        # A refusal leaves the connection usable.
        connection = server.connect()
        for _ in range(3):
            self.check_error(server.ask("POST", "/v1/completions", "{", connection=connection), 400)
        self.assertEqual(server.ask("GET", "/health", connection=connection)[1], {"status": "ok"})

    def test_models_and_metrics(self):
        server = self.serve()
        listed = server.ask("GET", "/v1/models")[1]
        self.assertEqual([m["id"] for m in listed["data"]], ["nano"])
        self.assertEqual(server.ask("GET", "/v1/models/nano")[1], listed["data"][0])
        made = server.complete()[1]["usage"]
        response, text = server.ask("GET", "/metrics")
        self.assertTrue(response.getheader("Content-Type").startswith("text/plain; version=0.0.4"))
        for line in text.splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? -?[\d.e+-]+)$')
        self.assertEqual(server.metric("tidelock_generated_tokens_total"), made["completion_tokens"])
        self.assertEqual(server.metric("tidelock_prompt_tokens_total"), made["prompt_tokens"])
        self.assertEqual(server.metric('tidelock_responses_total{path="/v1/completions",status="200"}'), 1)
        self.assertEqual(server.metric("tidelock_request_seconds_count"), 1)


class Hostile(ServeCase):
    ENDLESS = {"model": "nano", "prompt": "x", "max_tokens": 4000, "temperature": 0}

    def serve(self, *arguments):
        """A model that goes on for ever: its end token is one that it never says."""
        model = self.folder / "endless"
        if not model.exists():
            shutil.copytree(NANO, model)
            config = (model / "config.json").read_text()
            self.assertIn('"eos_token_id": 450', config)
            (model / "config.json").write_text(config.replace('"eos_token_id": 450', '"eos_token_id": 454'))
        return super().serve(*arguments, model=model)

    def post(self, body, path="/v1/completions"):
        raw = json.dumps(body).encode()
        return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw

    def test_a_client_that_goes_away_frees_its_sequence(self):
        server = self.serve("--threads", 1)
        for stream in (True, False):
            before = server.metric("tidelock_requests_cancelled_total")
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            s.sendall(self.post({**self.ENDLESS, "stream": stream, "n": 2}))
            self.eventually(lambda: server.metric("tidelock_sequences_running") != 2, "it does not run")
            s.close()
            self.eventually(lambda: server.metric("tidelock_sequences_running") != 0, "it runs on without its client", 20)
            self.assertEqual(server.metric("tidelock_requests_cancelled_total"), before + 1)
            steps = server.metric("tidelock_engine_steps_total")
            time.sleep(0.2)
            self.assertEqual(server.metric("tidelock_engine_steps_total"), steps)

    def test_limits(self):
        server = self.serve("--max-body", 2000, "--patience", 1, "--idle", 1, "--connections", 8)
        def status(raw):
            line = server.raw(raw).split(b"\r\n")[0]
            return int(line.split()[1]) if line else None
        self.assertEqual(status(self.post({"model": "nano", "prompt": "x" * 3000})), 413)
        self.assertEqual(status(b"GET / HTTP/1.1\r\nX: " + b"y" * 20000 + b"\r\n\r\n"), 431)
        self.assertEqual(status(b"rubbish\r\n\r\n"), 400)
        self.assertEqual(status(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"), 400)
        begin = time.monotonic()
        # What is never finished, and nothing at all: closed without a word.
        for raw in (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc", b"GET /health HT", b""):
            self.assertEqual(server.raw(raw), b"")
        self.assertLess(time.monotonic() - begin, 30)
        # A header that drips is cut off as a whole.
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
            try:
                for _ in range(100):
                    s.sendall(b"X")
                    time.sleep(0.05)
                self.fail("a header may drip for ever")
            except OSError:
                pass
        self.assertEqual(server.ask("GET", "/health")[0].status, 200)
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(8)]
        self.assertEqual(status(b"GET /health HTTP/1.1\r\n\r\n"), 503)
        for s in held:
            s.close()
        self.eventually(lambda: status(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n") != 200, "the places are not free again")

    def test_a_full_queue_turns_away(self):
        server = self.serve("--sequences", 1, "--queue", 1)
        sockets = []
        for _ in range(2):
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            s.sendall(self.post(self.ENDLESS))
            sockets.append(s)
            self.eventually(lambda: server.metric("tidelock_sequences_running") != 1, "it does not run")
        self.eventually(lambda: server.metric("tidelock_requests_waiting") != 1, "it does not wait")
        answer = server.complete()
        self.check_error(answer, 429)
        self.assertEqual(answer[0].getheader("Retry-After"), "1")
        sockets[1].close()  # the one that waits
        self.eventually(lambda: server.metric("tidelock_requests_waiting") != 0, "it still waits")
        sockets[0].close()
        self.assertEqual(server.complete()[0].status, 200)

    def test_keys(self):
        keys = self.write("keys", f"{hashlib.sha256(b'secret').hexdigest()} ann 1\n")
        server = self.serve("--api-keys", keys)
        self.assertEqual(server.ask("GET", "/health")[0].status, 200)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                self.check_error(server.ask(method, path, {} if method == "POST" else None, headers), 401)
        good = {"Authorization": "Bearer secret"}
        self.assertEqual(server.ask("GET", "/v1/models", headers=good)[0].status, 200)
        raw = self.post(self.ENDLESS).replace(b"Host: x", b"Authorization: Bearer secret")
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
            s.sendall(raw)
            time.sleep(0.5)
            again = {"model": "nano", "prompt": "x", "max_tokens": 2}
            self.check_error(server.ask("POST", "/v1/completions", again, good), 429)
        self.eventually(lambda: server.ask("POST", "/v1/completions", again, good)[0].status != 200, "the place is not free")

    def test_stopping_with_requests_under_way(self):
        server = self.serve()
        sockets = []
        for stream in (True, False):
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            s.sendall(self.post({**self.ENDLESS, "stream": stream}))
            sockets.append(s)
        self.eventually(lambda: server.metric("tidelock_sequences_running") != 2, "they do not run")
        begin = time.monotonic()
        server.close()
        self.assertLess(time.monotonic() - begin, 20)
        for s in sockets:
            s.close()

    def test_the_schedulers_decisions_are_told_and_decided_again(self):
        log = self.folder / "events"
        server = self.serve("--event-log", log, "--sequences", 2, "--first-token-limit", 60)
        threads = [threading.Thread(target=server.chat, kwargs={"seed": i}) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
        shown = self.tidelock("events", log)
        self.assertRegex(shown.out, r"(?m)^start +6$")
        self.assertRegex(shown.out, r"(?m)^[1-9]\d+ decided again as they were, 0 not$")
        log.write_text(log.read_text().replace('"chosen":0', '"chosen":1', 1))
        shown = self.tidelock("events", log, code=3)
        self.assertRegex(shown.out, r"(?m)^line \d+: admit: chosen was 1, is 0$")
        self.refused("events", self.folder / "absent", says=["absent"])
        self.refused("serve", NANO, "--event-log", self.folder / "nowhere/events", says=["nowhere"])

    def test_command_line(self):
        self.refused("serve", self.folder / "nope", says=["nope", "does not exist"])
        self.refused("serve", NANO, "--host", "nowhere.example", says=["IP address"])
        self.refused("serve", NANO, "--port", "70000", says=["--port"])
        self.refused("serve", NANO, "--api-keys", self.write("keys", "secret me\n"), code=1, says=["line 1", "sha256sum"])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            self.refused("serve", NANO, "--port", taken.getsockname()[1], code=1, says=["cannot listen"])


class Clients(ServeCase):
    """The official clients at the versions of tests/clients, from build/clients (tools/clients.sh)."""

    def run_client(self, server, *command):
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "secret"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("all passed", done.stdout)

    def keyed(self):
        return self.serve("--api-keys", self.write("keys", f"{hashlib.sha256(b'secret').hexdigest()} ann\n"))

    def test_python(self):
        self.run_client(self.keyed(), "build/clients/python/bin/python", "tests/clients/openai_client.py")

    def test_javascript(self):
        self.run_client(self.keyed(), "node", "tests/clients/openai_client.mjs")


if __name__ == "__main__":
    unittest.main()
