// Vercel's AI SDK: the Responses API (its default for OpenAI), chat completions, and the provider for compatible servers.

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, isStepCount, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const MODEL = 'tandem-default';
const QUESTION = 'What does textwrap.dedent do?';
const NEXT_QUESTION = 'How do I join two paths?';
const ANSWER = 'leading whitespace';
const baseURL = process.argv[2] + '/v1';
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({
  name: 'tandem', baseURL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true,
});
const models = {
  responses: openai.responses(MODEL), chat: openai.chat(MODEL), compatible: compatible.chatModel(MODEL),
};
const atMost = isStepCount ?? stepCountIs;
const short = { maxOutputTokens: 512, temperature: 0, maxRetries: 0 };
const forecast = z.object({ unit: z.enum(['celsius', 'kelvin']), days: z.number().int().min(1).max(2) });
const tools = {
  forecast: tool({
    description: 'The weather.', inputSchema: forecast, execute: async ({ unit, days }) => `${unit} ${days}`,
  }),
};

function expect(condition, what) {
  if (!condition) throw new Error(`not as expected: ${JSON.stringify(what)}`.slice(0, 500));
}

async function firstTurn(model) {
  const reply = await generateText({ model, prompt: QUESTION, ...short });
  expect(reply.text.includes(ANSWER) && reply.usage.totalTokens > 0, reply.text);
}

async function secondTurn(model) {
  const first = await generateText({ model, prompt: QUESTION, ...short });
  const messages = [
    { role: 'user', content: QUESTION }, ...first.response.messages, { role: 'user', content: NEXT_QUESTION },
  ];
  const second = await generateText({ model, messages, ...short });
  expect(second.text && second.usage.inputTokens > first.usage.inputTokens, second.text);
}

async function previousResponseId() {
  const first = await generateText({ model: models.responses, prompt: QUESTION, ...short });
  const providerOptions = { openai: { previousResponseId: first.providerMetadata.openai.responseId } };
  const second = await generateText({ model: models.responses, prompt: NEXT_QUESTION, providerOptions, ...short });
  expect(second.text && second.usage.inputTokens > first.usage.inputTokens, second.text);
}

async function notStored() {
  const providerOptions = { openai: { store: false } };
  const reply = await generateText({ model: models.responses, prompt: QUESTION, providerOptions, ...short });
  expect(reply.text.includes(ANSWER), reply.text);
}

const named = { type: 'tool', toolName: 'forecast' };
// The first step has to call the tool, the second to answer.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? named : 'none' });

async function toolCall(model) {
  const reply = await generateText({ model, prompt: QUESTION, tools, prepareStep, stopWhen: atMost(2), ...short });
  expect(reply.steps.length === 2, reply.steps.map((step) => [step.finishReason, step.content]));
  expect(/^(celsius|kelvin) [12]$/.test(reply.steps[0].toolResults[0].output), reply.steps[0].toolResults);
  expect(reply.text, reply.steps[1].content);
}

async function toolBesideText(model) {
  const reply = await generateText({ model, prompt: QUESTION, tools, stopWhen: atMost(2), ...short });
  expect(reply.text || reply.toolCalls.length, reply.content);
}

async function stream(model) {
  const reply = streamText({ model, prompt: QUESTION, ...short, onError: () => {} });
  const parts = [];
  for await (const part of reply.textStream) parts.push(part);
  expect(parts.length > 3 && parts.join('').includes(ANSWER), parts);
  expect((await reply.usage).outputTokens > 0, await reply.usage);
}

async function streamedToolCall(model) {
  const reply = streamText({ model, prompt: QUESTION, tools, toolChoice: named, ...short, onError: () => {} });
  const calls = await reply.toolCalls;
  expect(calls.length > 0 && ['celsius', 'kelvin'].includes(calls[0].input.unit), calls);
}

async function structured(model) {
  const reply = await generateText({ model, prompt: QUESTION, output: Output.object({ schema: forecast }), ...short });
  expect(forecast.safeParse(reply.output).success, reply.output);
}

async function report(column, check, run) {
  const began = Date.now();
  let detail = '';
  try {
    await run();
  } catch (error) {
    console.error(error);
    detail = `${error.name}: ${error.message} ${error.responseBody ?? ''}`.slice(0, 500);
  }
  const seconds = (Date.now() - began) / 1000;
  // The table's reader knows a result by its first key.
  console.log(JSON.stringify({ column, check, ok: !detail, detail, seconds }));
}

const everywhere = [
  ['first turn', firstTurn], ['second turn', secondTurn], ['tool', toolCall], ['tool', toolBesideText],
  ['streaming', stream], ['streaming', streamedToolCall], ['structured', structured],
];
for (const [column, check] of everywhere) {
  for (const [name, model] of Object.entries(models)) await report(column, `${check.name} of ${name}`, () => check(model));
}
await report('second turn', 'previousResponseId', previousResponseId);
await report('more', 'notStored', notStored);
