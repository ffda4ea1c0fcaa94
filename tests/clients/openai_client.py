"""What a program that uses the official Python client does, against the server at OPENAI_BASE_URL."""

import asyncio
import json
import typing

import openai
import pydantic

TOOLS = [{"type": "function", "function": {"name": "shell", "description": "Run a command.",
                                           "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]  # fmt: skip
QUESTION = [{"role": "user", "content": "12*34?"}]
client = openai.OpenAI()


def agent(create):
    """Asks, runs the tool that is called, and returns the answer."""
    messages = list(QUESTION)
    for _ in range(4):
        message = create(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "shell", call
            assert json.loads(call["function"]["arguments"]) == {"command": "echo $((12*34))"}, call
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "408"})
    raise AssertionError(messages)


def whole(messages):
    made = client.chat.completions.create(model="nano", messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=64, temperature=0)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.choices[0].finish_reason == ("tool_calls" if made.choices[0].message.tool_calls else "stop")
    return made.choices[0].message.to_dict()


def streamed(messages):
    content, calls, usage = "", {}, None
    with client.chat.completions.create(model="nano", messages=messages, tools=TOOLS, max_tokens=64, temperature=0,
                                        stream=True, stream_options={"include_usage": True}) as stream:  # fmt: skip
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    one = calls.setdefault(call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
                    one["function"]["name"] += call.function.name or ""
                    one["function"]["arguments"] += call.function.arguments or ""
    assert usage.completion_tokens > 0
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls.values())} if calls else message


class Weight(pydantic.BaseModel):
    kilograms: float


class Measure(pydantic.BaseModel):
    amount: int
    unit: typing.Literal["m", "km"]
    exact: bool | None


def parsed():
    made = client.chat.completions.parse(model="nano", messages=QUESTION, response_format=Measure, max_tokens=200, seed=4)
    assert isinstance(made.choices[0].message.parsed, Measure), made


def called():
    """Strict tools, as the client makes them of a class; a call that must come, and one alone."""
    made = client.chat.completions.parse(model="nano", messages=QUESTION, tools=[openai.pydantic_function_tool(kind) for kind in (Measure, Weight)],
                                         tool_choice={"type": "function", "function": {"name": "Measure"}}, parallel_tool_calls=False,
                                         max_tokens=200, temperature=2, seed=4)  # fmt: skip
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Measure), made
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("tool_calls", None), made


def raises(kind, param, **fields):
    try:
        client.chat.completions.create(**{"model": "nano", "messages": QUESTION, **fields})
    except kind as error:
        assert error.param == param, error
        return
    raise AssertionError(f"{fields} was accepted")


async def in_parallel():
    async with openai.AsyncOpenAI() as many:
        async def one(seed):
            made = await many.completions.create(model="nano", prompt="1+1", max_tokens=12, seed=seed, logprobs=2)
            assert len(made.choices[0].logprobs.tokens) == made.usage.completion_tokens
            return made.choices[0].text
        first = await asyncio.gather(*(one(seed) for seed in range(8)))
        assert first == await asyncio.gather(*(one(seed) for seed in range(8)))
        # A client that loses interest.
        stream = await many.chat.completions.create(model="nano", messages=QUESTION, max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()


assert [m.id for m in client.models.list()] == ["nano"]
assert client.models.retrieve("nano").id == "nano"
assert "408" in agent(whole)
assert "408" in agent(streamed)
parsed()
called()
made = client.chat.completions.create(model="nano", messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=3, n=2, seed=3,
                                      extra_body={"return_token_ids": True})  # fmt: skip
for choice in made.choices:
    assert len(choice.logprobs.content) == len(choice.token_ids) > 0
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.logprob for t in choice.logprobs.content)
raises(openai.BadRequestError, "frequency_penalty", frequency_penalty=1)
raises(openai.BadRequestError, "store", store=True)
raises(openai.BadRequestError, "tools[0].function.parameters",
       tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}])
raises(openai.NotFoundError, "model", model="other")
try:
    openai.OpenAI(api_key="wrong").models.list()
    raise AssertionError("a wrong key was let in")
except openai.AuthenticationError:
    pass
asyncio.run(in_parallel())
print("all passed")
