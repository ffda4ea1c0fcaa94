// What a program that uses E2B's JavaScript client does, against the server at E2B_API_URL and E2B_SANDBOX_URL.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(new URL("../../build/clients/node/", import.meta.url));
const { Sandbox, CommandExitError, NotFoundError, AuthenticationError } = require("e2b");

const counter = "i=0; while :; do i=$((i+1)); echo $i >/root/count; sleep 0.1; done";
const box = await Sandbox.create({ timeoutMs: 120_000, metadata: { from: "js & more" }, envs: { OF: "sandbox" } });
try {
  const done = await box.commands.run("echo $OF; echo err >&2", { cwd: "/tmp" });
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ["sandbox\n", "err\n", 0]);
  await assert.rejects(box.commands.run("exit 3"), (error) => error instanceof CommandExitError && error.exitCode === 3);
  assert.equal((await box.commands.run("id -un", { user: "root" })).stdout, "root\n");

  await box.files.write("/root/a/b.txt", "from js\n");
  assert.equal(await box.files.read("/root/a/b.txt"), "from js\n");
  const bytes = new Uint8Array(300_000).map((_, i) => i % 251);
  await box.files.write("/root/a/bytes", new Blob([bytes]));
  assert.deepEqual(await box.files.read("/root/a/bytes", { format: "bytes" }), bytes);
  assert.deepEqual((await box.files.list("/root/a")).map((e) => [e.name, e.size]), [["b.txt", 8], ["bytes", 300_000]]);
  assert.equal(await box.files.makeDir("/root/a"), false);
  assert.equal(await box.files.exists("/root/none"), false);
  await assert.rejects(box.files.read("/root/none"), NotFoundError);

  const running = await box.commands.run(counter, { background: true, timeoutMs: 0 });
  const count = async (from) => {
    const look = async () => Number((await from.files.exists("/root/count")) ? await from.files.read("/root/count") : 0);
    const first = await look();
    for (let i = 0; i < 200; ++i) {
      const now = await look();
      if (now > first) return now;
      await new Promise((wake) => setTimeout(wake, 100));
    }
    assert.fail("it stands still");
  };
  const reached = await count(box);
  const cat = await box.commands.run("cat", { background: true, stdin: true });
  await box.commands.sendStdin(cat.pid, "typed\n");
  await box.commands.closeStdin(cat.pid);
  assert.equal((await cat.wait()).stdout, "typed\n");

  const events = [];
  const stopped = new Promise((told) => events.push(told));
  const exit = events.pop();
  const watch = await box.files.watchDir("/root/a", (event) => events.push(event), { recursive: true, includeEntry: true, onExit: exit });
  await box.files.makeDir("/root/a/inner");
  await box.files.write("/root/a/inner/new.txt", "123");
  for (let i = 0; i < 100 && !events.some((e) => e.name === "inner/new.txt" && e.entry?.size === 3); ++i)
    await new Promise((wake) => setTimeout(wake, 100));
  assert.deepEqual(events[0].type + " " + events[0].name, "create inner");
  assert.ok(events.some((e) => e.name === "inner/new.txt" && e.entry?.size === 3), JSON.stringify(events));
  await watch.stop();
  await stopped;
  await assert.rejects(box.files.watchDir("/root/none", () => {}), NotFoundError);

  let shown = "";
  const until = async (wanted) => {
    for (let i = 0; i < 300 && !shown.includes(wanted); ++i) await new Promise((wake) => setTimeout(wake, 100));
    assert.ok(shown.includes(wanted), shown);
  };
  const shell = await box.pty.create({ rows: 33, cols: 99, timeoutMs: 0, onData: (bytes) => (shown += Buffer.from(bytes)) });
  await box.pty.sendInput(shell.pid, new TextEncoder().encode("echo $((6*7)) $(stty size) $OF\n"));
  await until("42 33 99 sandbox");
  await box.pty.resize(shell.pid, { rows: 20, cols: 50 });
  await box.pty.sendInput(shell.pid, new TextEncoder().encode("stty size; exit 4\n"));
  await assert.rejects(shell.wait(), (error) => error instanceof CommandExitError && error.exitCode === 4);
  await until("20 50");
  assert.equal(await box.pty.kill(shell.pid), false);

  const found = await Sandbox.list({ query: { metadata: { from: "js & more" } } }).nextItems();
  assert.deepEqual(found.map((s) => s.sandboxId), [box.sandboxId]);
  const lost = running.wait().then(() => assert.fail("no end was to come"), () => {});
  assert.equal(await Sandbox.pause(box.sandboxId), true);
  await lost;
  assert.equal(await Sandbox.pause(box.sandboxId), false);
  assert.equal(await box.isRunning(), false);
  const same = await Sandbox.connect(box.sandboxId, { timeoutMs: 60_000 });
  assert.ok((await count(same)) > reached);
  assert.equal(await same.commands.kill(running.pid), true);
  for (let i = 0; i < 100 && (await same.commands.list()).length > 0; ++i) await new Promise((wake) => setTimeout(wake, 100));
  assert.equal(await same.commands.kill(running.pid), false);
} finally {
  assert.equal(await box.kill(), true);
}
assert.equal(await Sandbox.kill(box.sandboxId), false);
await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError);
await assert.rejects(Sandbox.create({ apiKey: "e2b_00" }), AuthenticationError);
console.log("all passed");
