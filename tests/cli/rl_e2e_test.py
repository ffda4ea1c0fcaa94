#!/usr/bin/env python3
"""`tidelock rl` and `tidelock eval` from outside, in real sandboxes. Needs TIDELOCK_BINARY.

Where bytes of adapters are compared, the tasks are a lottery (harness.py): every step changes the adapter, so that two
equal adapters mean equal work.
"""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import BINARY, MIXTURE, NANO, PATIENCE, ROOT, SMALL_RUN, Case, adapter_bytes, rows  # noqa: E402

STEPS = 4
TRAIN_KEYS = """step reward_mean tool_rate compared_tokens mismatch_tokens mismatch_max_abs weight_version adapter_sha256
    rollout_tokens_per_s train_tokens_per_s time_rollout_s time_train_s time_sandbox_s sandbox_wait_fraction""".split()
EVAL_KEYS = "step mean_at_k pass_at_k k n mean_at_k_low mean_at_k_high pass_at_k_low pass_at_k_high".split()


class RlCase(Case):
    def setUp(self):
        super().setUp()
        self.mixture = self.write("mixture.toml", SMALL_RUN.format(model=NANO, steps=2) + MIXTURE)
        self.lottery = self.lottery_recipe(self.folder)

    @staticmethod
    def lottery_recipe(folder):
        tasks = harness.lottery_tasks(folder / "tasks")
        path = folder / "lottery.toml"
        path.write_text(SMALL_RUN.format(model=NANO, steps=STEPS) + f'[tasks]\ndir = "{tasks}"\n')
        return path

    def rl(self, recipe, name, *settings, arguments=(), **more):
        run = self.folder / name
        sets = [part for setting in settings for part in ("--set", setting)]
        result = self.tidelock("rl", recipe, "--out", run, *sets, *arguments, **more)
        return run, result

    def check_steps(self, run, steps, moves=True):
        """Every step compared tokens, all of them equal; the adapter moved at each (or never)."""
        train = [row for row in rows(run) if row["kind"] == "train"]
        self.assertEqual([row["step"] for row in train], list(range(1, steps + 1)))
        for row in train:
            self.assertGreater(row["compared_tokens"], 0)
            self.assertEqual(row["mismatch_tokens"], 0)
            self.assertEqual(row["mismatch_max_abs"], 0)
            self.assertEqual(row["failed"], 0)
        first = next(row for row in rows(run) if row["kind"] == "eval")["adapter_sha256"]
        adapters = [first] + [row["adapter_sha256"] for row in train]
        self.assertEqual(len(set(adapters)), steps + 1 if moves else 1, "adapters of the steps")


class Baseline(RlCase):
    """Tests that compare with one uninterrupted run of the lottery."""

    @classmethod
    def setUpClass(cls):
        cls.base = pathlib.Path(tempfile.mkdtemp(prefix="tidelock-e2e-base-"))
        cls.addClassCleanup(shutil.rmtree, cls.base)
        cls.recipe = cls.lottery_recipe(cls.base)
        cls.whole = cls.base / "whole"
        began = time.monotonic()
        subprocess.run([BINARY, "rl", cls.recipe, "--out", cls.whole], cwd=ROOT, check=True, capture_output=True,
                       env={**os.environ, "TMPDIR": str(cls.base)}, timeout=PATIENCE)  # fmt: skip
        cls.seconds = time.monotonic() - began
        cls.bytes = adapter_bytes(cls.whole)

    def finish(self, run):
        self.tidelock("rl", "--resume", run)
        self.assertEqual(adapter_bytes(run), self.bytes)
        self.check_steps(run, STEPS)

    def test_the_same_bytes_again(self):
        self.check_steps(self.whole, STEPS)
        run, _ = self.rl(self.recipe, "one-thread", arguments=("--threads", "1"))
        self.assertEqual(adapter_bytes(run), self.bytes)
        run, _ = self.rl(self.recipe, "recompute", "rl.recompute=true")
        self.assertEqual(adapter_bytes(run), self.bytes)
        run, _ = self.rl(self.recipe, "avx2", env={"TIDELOCK_ISA": "avx2"})
        self.assertEqual(adapter_bytes(run), self.bytes)
        run, _ = self.rl(self.recipe, "hands", "sandbox.hands=1", "rollout.concurrent=3", "sandbox.freeze=false")
        self.assertEqual(adapter_bytes(run), self.bytes)
        run, _ = self.rl(self.recipe, "other-seed", "rl.seed=2")
        self.assertNotEqual(adapter_bytes(run), self.bytes)

    def test_the_recipe_as_run_runs_again(self):
        run, _ = self.rl(self.whole / "recipe.toml", "again")
        self.assertEqual(adapter_bytes(run), self.bytes)
        self.assertEqual((run / "recipe.toml").read_bytes(), (self.whole / "recipe.toml").read_bytes())

    def test_stop_and_resume(self):
        run, _ = self.rl(self.recipe, "run", arguments=("--stop-after", "2"))
        self.check_steps(run, 2)
        self.refused("rl", "--resume", run, "--set", "rl.steps=9", says=["--set", "--resume"])
        self.refused("rl", self.recipe, "--out", run, says=["holds a run", "--resume"])
        self.refused("rl", self.recipe, "--resume", run, says=["either"])
        self.refused("rl", "--resume", self.folder / "nothing", says=["recipe.toml"])
        self.finish(run)
        before = (run / "metrics.jsonl").read_bytes()
        self.finish(run)  # nothing is left to do
        self.assertEqual((run / "metrics.jsonl").read_bytes(), before)

    def test_one_folder_takes_one_run_at_a_time(self):
        run = self.folder / "run"
        process = self.start("rl", self.recipe, "--out", run)
        try:
            self.eventually(lambda: not (run / "recipe.toml").exists(), "the run did not start")
            self.refused("rl", "--resume", run, says=[str(run), f"in use by process {process.pid}"])
            self.refused("rl", self.recipe, "--out", run, says=[f"in use by process {process.pid}"])
        finally:
            process.kill()
            process.wait()
        mine = self.folder / "mine"
        (mine / "checkpoints").mkdir(parents=True)
        (mine / "checkpoints/notes").write_text("keep me")
        self.refused("rl", self.recipe, "--out", mine, says=["holds a run", "checkpoints"])
        self.assertEqual((mine / "checkpoints/notes").read_text(), "keep me")

    def kill_after(self, run, seconds):
        """Starts or resumes the run and kills it; returns the names of its sandbox runs."""
        process = self.start(*(("rl", "--resume", run) if (run / "recipe.toml").exists() else
                               ("rl", self.recipe, "--out", run)))  # fmt: skip
        seen, end = set(), time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            seen.update(self.sandbox_runs())
            time.sleep(0.005)
        harness.kill(process)
        return seen

    def test_killed_at_random_moments(self):
        run, seen = self.folder / "run", set()
        chance = random.Random(5)
        for _ in range(6):
            seen |= self.kill_after(run, chance.uniform(0.05, 0.7) * self.seconds)
            # Killed before its helper process was up, a run leaves one empty folder, which the next start removes.
            self.eventually(lambda: [t for t in self.traces(seen) if not t.startswith("folder")], "after kill -9")
        self.assertTrue(seen)  # the look at the host had something to look for
        self.finish(run)
        self.eventually(lambda: self.traces(seen), "after the end of the resumed run")

    def test_nothing_stays_when_sandboxes_were_up(self):
        """Traces of every kind are there while a run lives, and none after kill -9 at that very moment."""
        process = self.start("rl", self.recipe, "--out", self.folder / "run")
        kinds, seen = set(), set()
        while process.poll() is None and not {"process", "folder", "cgroup"} <= kinds:
            seen.update(self.sandbox_runs())
            kinds |= {trace.split()[0] for trace in self.traces(seen)}
        harness.kill(process)
        self.assertLessEqual({"process", "folder"}, kinds)
        self.eventually(lambda: self.traces(seen), "left behind after kill -9")

    def test_killed_while_a_checkpoint_is_written(self):
        run = self.folder / "run"
        hits = 0
        for step in range(1, STEPS):
            process = self.start(*(("rl", "--resume", run) if (run / "recipe.toml").exists() else
                                   ("rl", self.recipe, "--out", run)))  # fmt: skip
            temporary = run / f"checkpoints/.step_{step}.tmp"
            while process.poll() is None and not temporary.exists():
                pass
            harness.kill(process)
            hits += temporary.exists()
        self.assertGreater(hits, 0, "no kill fell into a checkpoint")
        self.finish(run)

    def test_what_a_killed_checkpoint_leaves_is_no_checkpoint(self):
        run, _ = self.rl(self.recipe, "run", arguments=("--stop-after", "2"))
        half = run / "checkpoints/.step_3.tmp"
        shutil.copytree(run / "checkpoints/step_2", half)
        (half / "state.json").unlink()
        os.truncate(half / "adapter_model.safetensors", 1000)
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step":3,"kind":"train","rew')
        self.finish(run)
        self.assertFalse(half.exists())

    def test_a_damaged_checkpoint_is_refused(self):
        run, _ = self.rl(self.recipe, "run", arguments=("--stop-after", "2"))
        newest = run / "checkpoints/step_2"
        state = (newest / "state.json").read_text()
        for damage, code, says in ((state[:100], 1, "state.json"),
                                   (state.replace('"contract": "', '"contract": "x'), 3, "contract"),
                                   (state.replace('"adapter_sha256": "', '"adapter_sha256": "0'), 3, "adapter")):
            self.assertNotEqual(damage, state)
            (newest / "state.json").write_text(damage)
            self.refused("rl", "--resume", run, code=code, says=[str(newest), says])
        (newest / "state.json").write_text(state)
        self.finish(run)

    def test_a_full_disk(self):
        checkpoint = sum(p.stat().st_size for p in (self.whole / f"checkpoints/step_{STEPS}").iterdir())
        small, large = int(2.5 * checkpoint), 40 * checkpoint + (64 << 20)
        disk, script = self.folder / "disk", self.folder / "full.sh"
        disk.mkdir()
        # In a mount namespace of its own: the disk goes with the last process, whatever happens.
        script.write_text(f"""set -e
mount -t tmpfs -o size={small} tmpfs {disk}
code=0; {BINARY} rl {self.recipe} --out {disk}/run >{self.folder}/out 2>{self.folder}/err || code=$?
echo $code >{self.folder}/code
ls -A {disk}/run/checkpoints >{self.folder}/checkpoints
mount -o remount,size={large} {disk}
{BINARY} rl --resume {disk}/run >>{self.folder}/out 2>{self.folder}/err2
cp -r {disk}/run {self.folder}/run
""")
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        done = subprocess.run(["unshare", "--mount", *user, "sh", script], cwd=ROOT, env=self.environment(),
                              capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
        errors = "".join(p.read_text() for p in self.folder.glob("err*"))
        self.assertEqual(done.returncode, 0, done.stderr + errors)
        self.assertEqual((self.folder / "code").read_text(), "1\n", errors)
        message = (self.folder / "err").read_text()
        self.assertIn("No space left on device", message)
        self.assertIn(f"{disk}/run/", message)
        self.assertEqual((self.folder / "checkpoints").read_text().split(), ["step_1", "step_2"])
        self.assertEqual(adapter_bytes(self.folder / "run"), self.bytes)
        self.check_steps(self.folder / "run", STEPS)


class Run(RlCase):
    def test_what_a_run_writes(self):
        run, result = self.rl(self.mixture, "run")
        self.check_steps_compare(run)
        # One plain line a step, and the evaluations before and after.
        self.assertNotIn("\x1b", result.out)
        for step in (1, 2):
            self.assertRegex(result.out, rf"(?m)^step {step}/2 +reward \d.* mismatch 0 of [1-9]\d*")
        self.assertRegex(result.out, r"(?m)^step 0/2 .*held-out mean@2")
        self.assertRegex(result.out, r"compared [1-9]\d* sampled tokens by bits: 0 differ")

        recipe = tomllib.loads((run / "recipe.toml").read_text())
        self.assertEqual(recipe["rl"]["groups"], 2)
        self.assertEqual(recipe["rl"]["loss"], "dr_grpo")  # defaults are written out
        self.assertEqual(len(recipe["tasks"]["mixture"]), 3)
        self.assertGreaterEqual(harness.records_of_tensorboard(run / "tensorboard"), 4)
        self.assertEqual(sorted(p.name for p in (run / "checkpoints").iterdir()), ["step_1", "step_2"])
        self.check_trajectories(run)

        config = json.loads((run / "adapter/adapter_config.json").read_text())
        self.assertEqual((config["peft_type"], config["r"]), ("LORA", 2))
        header, _ = harness.safetensors_header(adapter_bytes(run))
        self.assertTrue(any(name.endswith("lora_A.weight") for name in header))
        self.tidelock("generate", NANO, "--chat", "12*34?", "--adapter", run / "adapter", "--max-tokens", "8")
        text = self.tidelock("eval", self.mixture, "--adapter", run / "adapter", "--json").out
        lines = [json.loads(line) for line in text.splitlines()]
        self.assertEqual((lines[0]["family"], lines[0]["k"], lines[0]["n"]), ("all", 2, 2))
        last = [row for row in rows(run) if row["kind"] == "eval"][-1]
        self.assertEqual(lines[0]["mean_at_k"], last["mean_at_k"])  # the run's own evaluation, from outside
        self.refused("eval", self.mixture, "--adapter", self.folder / "nope", says=["nope"])
        self.assertEqual(self.sandbox_runs(), [])

    def check_steps_compare(self, run):
        for row in rows(run):
            for key in TRAIN_KEYS if row["kind"] == "train" else EVAL_KEYS:
                self.assertIn(key, row)
        evaluations = [row for row in rows(run) if row["kind"] == "eval"]
        self.assertEqual([row["step"] for row in evaluations], [0, 2])
        self.assertEqual({(row["k"], row["n"]) for row in evaluations}, {(2, 2)})
        for row in rows(run):
            if row["kind"] == "train":
                self.assertGreater(row["compared_tokens"], 0)
                self.assertEqual(row["mismatch_tokens"], 0)
                self.assertEqual(row["weight_version"], row["step"])
                self.assertEqual(len(row["adapter_sha256"]), 64)
                self.assertTrue(0 <= row["sandbox_wait_fraction"] <= 1)

    def check_trajectories(self, run):
        train = {row["step"]: row for row in rows(run) if row["kind"] == "train"}
        for step in (1, 2):
            lines = (run / f"trajectories/step_{step}.jsonl").read_text().splitlines()
            self.assertEqual(len(lines), 8)
            sampled = 0
            for line in lines:
                document = json.loads(line)
                self.assertTrue(document["schema_version"].startswith("ATIF"))
                for turn in document["steps"]:
                    if turn["source"] != "agent":
                        continue
                    metrics = turn["metrics"]
                    self.assertEqual(len(metrics["completion_token_ids"]), len(metrics["logprobs"]))
                    self.assertTrue(all(p <= 0 for p in metrics["logprobs"]))
                    sampled += len(metrics["logprobs"])
            self.assertEqual(sampled, train[step]["compared_tokens"])

    def test_losses_and_options(self):
        results = {}
        for name, *settings in (("dr_grpo",), ("grpo", "rl.loss=grpo"), ("dapo", "rl.loss=dapo"),
                                ("epochs", "rl.epochs=2"), ("kl", "rl.kl_coefficient=0.1")):  # fmt: skip
            run, _ = self.rl(self.lottery, name, "rl.steps=2", "eval.tasks=1", *settings)
            self.check_steps(run, 2)
            results[name] = adapter_bytes(run)
            if name == "kl":  # at step 1 the adapter is the identity; after it, it is not
                kl = [row["kl_to_base"] for row in rows(run) if row["kind"] == "train"]
                self.assertEqual(kl[0], 0)
                self.assertGreater(kl[1], 0)
        self.assertEqual(len(set(results.values())), len(results), "two options made the same adapter")

    def test_controls(self):
        run, _ = self.rl(self.lottery, "zero", "rl.steps=2", "rl.control=zero_advantage")
        self.check_steps(run, 2, moves=False)
        plain, _ = self.rl(self.lottery, "plain", "rl.steps=2")
        run, _ = self.rl(self.lottery, "shuffled", "rl.steps=2", "rl.control=shuffled_rewards")
        self.check_steps(run, 2)
        self.assertNotEqual(adapter_bytes(run), adapter_bytes(plain))
        run, _ = self.rl(self.mixture, "no-tool", "rollout.tool_enabled=false", "rl.group_size=8", "rl.groups=4")
        text = "".join(p.read_text() for p in (run / "trajectories").iterdir())
        self.assertIn("tool disabled", text)
        self.assertGreater(sum(row.get("tool_rate", 0) for row in rows(run)), 0)

    def test_harbor_tasks(self):
        run, _ = self.rl(self.lottery, "run", "rl.steps=1")
        documents = [json.loads(line) for line in (run / "trajectories/step_1.jsonl").read_text().splitlines()]
        rewards = [document["extra"]["tidelock"]["reward"] for document in documents]
        self.assertGreater(len(set(rewards)), 1)
        self.refused("rl", self.lottery, "--out", self.folder / "no", "--set", "tasks.dir=/nope", says=["/nope"])
        (self.folder / "tasks/product-3/task.toml").write_text('version = "9"\n')
        self.refused("rl", self.lottery, "--out", self.folder / "no", says=["product-3", "version is 9"])


if __name__ == "__main__":
    unittest.main()
