// What a program that uses the official JavaScript client does, against the server at OPENAI_BASE_URL.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(new URL("../../build/clients/node/", import.meta.url));
const OpenAI = require("openai");
const client = new OpenAI();
const question = [{ role: "user", content: "12*34?" }];
const tools = [{ type: "function", function: { name: "shell", parameters: { type: "object", properties: { command: { type: "string" } } } } }];
const base = { model: "nano", messages: question, max_tokens: 64, temperature: 0 };

async function agent(create) {
  const messages = [...question];
  for (let turn = 0; turn < 4; ++turn) {
    const message = await create(messages);
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      assert.equal(call.function.name, "shell");
      assert.deepEqual(JSON.parse(call.function.arguments), { command: "echo $((12*34))" });
      messages.push({ role: "tool", tool_call_id: call.id, content: "408" });
    }
  }
  assert.fail("no answer");
}

const whole = async (messages) => (await client.chat.completions.create({ ...base, messages, tools })).choices[0].message;
// The client's own helper puts the stream together and checks it on the way.
const streamed = async (messages) => (await client.chat.completions.stream({ ...base, messages, tools }).finalChatCompletion()).choices[0].message;

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ["nano"]);
assert.match(await agent(whole), /408/);
assert.match(await agent(streamed), /408/);

const stream = await client.chat.completions.create({ ...base, n: 2, stream: true, stream_options: { include_usage: true } });
let usage = null;
const finished = [];
for await (const chunk of stream) {
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) if (choice.finish_reason) finished.push(choice.index);
}
assert.deepEqual(finished.sort(), [0, 1]);
assert.ok(usage.completion_tokens > 0);

const schema = { type: "object", properties: { even: { type: "boolean" }, size: { enum: [1, 2] } }, required: ["even", "size"], additionalProperties: false };
const held = await client.chat.completions.parse({ ...base, temperature: 2, response_format: { type: "json_schema", json_schema: { name: "n", strict: true, schema } } });
assert.equal(typeof held.choices[0].message.parsed.even, "boolean");
assert.ok([1, 2].includes(held.choices[0].message.parsed.size));

const strict = { type: "function", function: { name: "size", strict: true, parameters: schema } };
const called = await client.chat.completions.parse({ ...base, max_tokens: 400, temperature: 2, tools: [strict], tool_choice: { type: "function", function: { name: "size" } }, parallel_tool_calls: false });
const calls = called.choices[0].message.tool_calls;
assert.equal(calls.length, 1);
assert.ok([1, 2].includes(calls[0].function.parsed_arguments.size));
assert.equal(typeof calls[0].function.parsed_arguments.even, "boolean");

const completion = await client.completions.create({ model: "nano", prompt: "1+1", max_tokens: 8, seed: 1, logprobs: 1 });
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);
await assert.rejects(client.chat.completions.create({ ...base, presence_penalty: 1 }), (error) => error.status === 400 && error.param === "presence_penalty");
await assert.rejects(client.chat.completions.create({ ...base, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(new OpenAI({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
const aborted = await client.chat.completions.create({ ...base, max_tokens: 2000, temperature: 1, stream: true });
for await (const _ of aborted) {
  aborted.controller.abort();
  break;
}
console.log("all passed");
