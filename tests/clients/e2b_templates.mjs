// What a program that builds templates with E2B's JavaScript client does, against the server at E2B_API_URL and
// E2B_SANDBOX_URL.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(new URL("../../build/clients/node/", import.meta.url));
const { Sandbox, Template, waitForFile, BuildError } = require("e2b");

const template = Template()
  .fromImage("busybox")
  .runCmd("mkdir /root/work")
  .setWorkdir("/root/work")
  .setEnvs({ MARK: "from js" })
  .runCmd("echo $MARK >marker; pwd")
  .setStartCmd("touch /tmp/up; exec sleep 8765", waitForFile("/tmp/up"));
const said = [];
const built = await Template.build(template, "js-made", { cpuCount: 1, memoryMB: 128, skipCache: true, onBuildLogs: (one) => said.push(one.message) });
assert.ok(built.templateId && built.buildId && built.name === "js-made", JSON.stringify(built));
assert.ok(said.includes("/root/work"), said.join("\n"));
assert.equal(await Template.exists("js-made"), true);
const box = await Sandbox.create("js-made", { metadata: { made: "js" }, timeoutMs: 90_000, secure: true });
try {
  assert.ok((await Sandbox.list({ limit: 20 }).nextItems()).some((one) => one.sandboxId === box.sandboxId));
  const done = await box.commands.run("cat marker; pwd; echo $MARK; ps | grep -q '[s]leep 8765' && echo alive", { timeoutMs: 30_000 });
  assert.equal(done.stdout, "from js\n/root/work\nfrom js\nalive\n");
  await Sandbox.pause(box.sandboxId);
  const same = await Sandbox.connect(box.sandboxId);
  assert.equal((await same.commands.run("printf resumed")).stdout, "resumed");
} finally {
  assert.equal(await box.kill(), true);
}
await assert.rejects(Template.build(Template().fromTemplate("js-made").runCmd("exit 5"), "js-failed"), BuildError);
assert.equal(await Template.exists("js-failed"), false);
assert.equal(await Sandbox.deleteSnapshot(built.templateId), true);
console.log("all passed");
