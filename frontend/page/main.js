// Wires the form, the keyboard, the transcript and the kept conversations together.

import { answer, models } from "./api.js";
import { apiKey, askForKey, onKey } from "./api_key.js";
import { ChatList } from "./chat_list.js";
import { closeOnNarrow, openSettings, startPanels } from "./panels.js";
import { ServerState } from "./server_state.js";
import {
  chosenModel,
  mode,
  parseSchema,
  requestFields,
  restoreSettings,
  saveSettings,
  showModels,
  showProblem,
  systemPrompt,
} from "./settings.js";
import * as storage from "./storage.js";
import { Answer, addQuestion, isSendKey } from "./transcript.js";

const TITLE_CHARACTERS = 60;

const [prompt, send, stop, clear, examples, announcement, storageNote] = [
  "prompt", "send", "stop", "clear", "examples", "announcement", "storage_note",
].map((id) => document.getElementById(id));
const sections = { chat: document.getElementById("chat"), completion: document.getElementById("completion") };

let chat = newChat();
let running = null;
// Conversations that were deleted, perhaps while an answer arrived.
const discarded = new WeakSet();

const server = new ServerState(showModels);
const list = new ChatList({ current: () => chat.id, open: openChat, gone: discardChat });

function newChat() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
  return { id, title: "", updated: 0, messages: [] };
}

async function ask(text) {
  const fields = text.trim() === "" ? undefined : checkedFields();
  if (fields === undefined) {
    return;
  }
  closeOnNarrow();
  prompt.value = "";
  if (mode() === "completion") {
    await askCompletion(text, fields);
    return;
  }
  showQuestion(text, chat.messages.length);
  chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
  chat.messages.push({ role: "user", content: text });
  save(chat);
  await answerLast(fields);
}

// Returns the request fields, or undefined if nothing can be sent now.
function checkedFields() {
  if (running !== null) {
    return undefined;
  }
  const fields = requestFields();
  if (fields === undefined) {
    openSettings();
    document.getElementById("schema").focus();
    showProblem();
  }
  return fields;
}

// Answers the last question of the conversation.
async function answerLast(fields) {
  const asked = chat;
  showExamples();
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  const messages = [...system, ...answered(asked.messages), asked.messages.at(-1)].map(asSent);
  const shown = new Answer(sections.chat, { onRetry: retry });
  await follow(shown, "v1/chat/completions", { ...fields, messages }, asked);
  asked.messages.push(shown.message());
  save(asked);
}

// What is shown beside a message is not part of it.
const asSent = ({ role, content }) => ({ role, content });

// Returns the messages up to the last question, without questions that got no answer.
function answered(messages) {
  const kept = [];
  for (let index = 0; index + 1 < messages.length; index++) {
    const [question, reply] = [messages[index], messages[index + 1]];
    if (question.role === "user" && reply.role === "assistant" && reply.content !== "") {
      kept.push(question, reply);
    }
  }
  return kept;
}

function retry() {
  const fields = checkedFields();
  if (fields === undefined) {
    return;
  }
  const question = chat.messages.findLastIndex((message) => message.role === "user");
  truncate(question + 1);
  prompt.focus();
  answerLast(fields);
}

function editQuestion(index, text) {
  if (checkedFields() !== undefined) {
    truncate(index);
    prompt.focus();
    ask(text);
  }
}

function truncate(count) {
  chat.messages.length = count;
  while (sections.chat.children.length > count) {
    sections.chat.lastChild.remove();
  }
}

async function askCompletion(text, fields) {
  const again = () => {
    const now = checkedFields();
    if (now !== undefined) {
      shown.article.remove();
      askCompletion(text, now);
    }
  };
  const shown = new Answer(sections.completion, { given: text, onRetry: again });
  await follow(shown, "v1/completions", { ...fields, prompt: text }, null);
}

// Streams an answer into the transcript. Never throws.
async function follow(shown, path, body, asked) {
  const controller = new AbortController();
  setRunning({ controller, shown, asked });
  let how = null;
  let failure = null;
  try {
    const model = body.model || (await learnModel(controller.signal));
    if (asked !== null) {
      shown.setTitle(model);
    }
    const options = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    const request = { ...body, model, ...options };
    for await (const event of answer(path, request, apiKey(), controller.signal)) {
      shown.take(event);
    }
  } catch (error) {
    how = controller.signal.aborted ? "stopped" : "failed";
    failure = controller.signal.aborted ? null : error;
  }
  setRunning(null);
  shown.end(how, failure);
  announcement.textContent = failure ? "The answer failed." : "The answer is complete.";
  if (failure?.unauthorized) {
    askForKey();
  } else if (failure) {
    server.check();
  }
}

// Asks the server for its models: a question may be sent before the header shows them. Throws what `models` throws.
async function learnModel(signal) {
  showModels(await models(apiKey(), signal));
  return chosenModel();
}

function setRunning(now) {
  running = now;
  send.disabled = now !== null;
  stop.hidden = now === null;
  document.getElementById("transcript").classList.toggle("running", now !== null);
  if (now !== null) {
    announcement.textContent = "Answering.";
  }
}

function save(kept) {
  if (discarded.has(kept)) {
    return;
  }
  kept.updated = Date.now();
  storageNote.hidden = storage.keep(kept);
  storage.setCurrentId(chat.id);
  list.show();
}

function showQuestion(text, index) {
  addQuestion(sections.chat, text, (changed) => editQuestion(index, changed));
}

function showChat(next) {
  running?.controller.abort();
  chat = next;
  storage.setCurrentId(chat.id);
  sections.chat.replaceChildren();
  chat.messages.forEach((message, index) => {
    if (message.role === "user") {
      showQuestion(message.content, index);
    } else {
      Answer.restore(sections.chat, message, retry);
    }
  });
  if (chat.messages.at(-1)?.role === "user") {
    Answer.restore(sections.chat, { content: "", error: "This question was not answered." }, retry);
  }
  list.show();
  showExamples();
  closeOnNarrow();
}

function openChat(id) {
  document.querySelector("input[name=mode][value=chat]").checked = true;
  showChat(storage.chat(id) ?? newChat());
  showMode();
  prompt.focus();
}

function startChat() {
  showChat(newChat());
  prompt.focus();
}

function discardChat() {
  discarded.add(chat);
  startChat();
}

function showExamples() {
  examples.hidden = mode() !== "chat" || chat.messages.length > 0;
}

function showMode() {
  const chatting = mode() === "chat";
  sections.chat.hidden = !chatting;
  sections.completion.hidden = chatting;
  document.getElementById("system_field").hidden = !chatting;
  clear.textContent = chatting ? "New chat" : "Clear";
  prompt.placeholder = chatting ? "Ask something" : "Type a text to continue";
  showExamples();
}

document.getElementById("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (isSendKey(event)) {
    event.preventDefault();
    ask(prompt.value);
  }
});
document.getElementById("fields").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("fields").addEventListener("change", saveSettings);
document.getElementById("modes").addEventListener("change", () => {
  showMode();
  saveSettings();
});
document.getElementById("schema").addEventListener("change", () => {
  parseSchema();
  showProblem();
});
onKey(() => server.recheck());
for (const example of examples.querySelectorAll("button")) {
  example.addEventListener("click", () => ask(example.textContent));
}
clear.addEventListener("click", () => {
  if (mode() === "chat") {
    startChat();
  } else {
    running?.controller.abort();
    sections.completion.replaceChildren();
    prompt.focus();
  }
});
stop.addEventListener("click", () => {
  running?.controller.abort();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.controller.abort();
  }
});
window.addEventListener("pagehide", () => {
  if (running?.asked) {
    const { asked, shown } = running;
    shown.measured = shown.measures("left while it was answering");
    storage.keep({ ...asked, messages: [...asked.messages, shown.message()] });
    // The end of the connection is not the end of the answer.
    discarded.add(asked);
  }
});
// A page that the browser has kept shows the conversation as it was saved.
window.addEventListener("pageshow", (event) => event.persisted && window.location.reload());

restoreSettings();
startPanels();
showMode();
showChat(storage.chat(storage.currentId()) ?? chat);
server.start();
