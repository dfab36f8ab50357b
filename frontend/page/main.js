// Wires the form, the keyboard and the transcript together.

import { answer, models } from "./api.js";
import { apiKey, mode, parseSchema, requestFields, showModels, systemPrompt } from "./settings.js";
import { Turn, addPrompt, clear } from "./transcript.js";

const RETRY_MILLISECONDS = 2000;

const [status, prompt, send, stop, settings] = ["status", "prompt", "send", "stop", "settings"].map((id) =>
  document.getElementById(id),
);
const sections = { chat: document.getElementById("chat"), completion: document.getElementById("completion") };

let messages = [];
let running = null;
let retry = null;

async function loadModels() {
  clearTimeout(retry);
  try {
    const names = await models(apiKey());
    showModels(names);
    say(names.join(", "), false);
  } catch (error) {
    say(error.message, true);
    if (error.details?.status === 401) {
      settings.open = true;
    } else {
      retry = setTimeout(loadModels, RETRY_MILLISECONDS);
    }
  }
}

function say(text, bad) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

function setRunning(controller) {
  running = controller;
  send.disabled = controller !== null;
  stop.hidden = controller === null;
}

async function ask() {
  const text = prompt.value;
  if (running !== null || text.trim() === "") {
    return;
  }
  const fields = requestFields();
  if (fields === undefined) {
    settings.open = true;
    document.getElementById("schema").focus();
    return;
  }
  await (mode() === "chat" ? askChat(text, fields) : askCompletion(text, fields));
}

async function askChat(text, fields) {
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  const question = { role: "user", content: text };
  const history = messages;
  addPrompt(sections.chat, "You", text);
  prompt.value = "";
  const body = { ...fields, messages: [...system, ...history, question] };
  const turn = await follow(new Turn(sections.chat, fields.model), "v1/chat/completions", body);
  if (turn.content !== "" && history === messages) {
    messages.push(question, { role: "assistant", content: turn.content });
  } else if (turn.content === "" && prompt.value === "") {
    prompt.value = text;
  }
}

async function askCompletion(text, fields) {
  await follow(new Turn(sections.completion, "", text), "v1/completions", { ...fields, prompt: text });
}

// Streams an answer into a turn. Never throws.
async function follow(turn, path, body) {
  const controller = new AbortController();
  setRunning(controller);
  let how = null;
  let failure = null;
  try {
    const request = { ...body, stream: true, stream_options: { include_usage: true } };
    for await (const event of answer(path, request, apiKey(), controller.signal)) {
      turn.take(event);
    }
  } catch (error) {
    how = controller.signal.aborted ? "stopped" : "failed";
    failure = controller.signal.aborted ? null : error;
  }
  setRunning(null);
  turn.end(how, failure);
  return turn;
}

function showMode() {
  const chat = mode() === "chat";
  sections.chat.hidden = !chat;
  sections.completion.hidden = chat;
  document.getElementById("system_field").hidden = !chat;
  prompt.placeholder = chat ? "Type a message" : "Type a text to continue";
}

document.getElementById("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
document.getElementById("fields").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("modes").addEventListener("change", showMode);
document.getElementById("schema").addEventListener("change", parseSchema);
document.getElementById("api_key").addEventListener("change", loadModels);
document.getElementById("clear").addEventListener("click", () => {
  running?.abort();
  if (mode() === "chat") {
    messages = [];
  }
  clear(sections[mode()]);
  prompt.focus();
});
stop.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask();
  } else if (event.key === "Escape") {
    running?.abort();
  }
});

settings.open = !window.matchMedia("(max-width: 52rem)").matches;
showMode();
loadModels();
