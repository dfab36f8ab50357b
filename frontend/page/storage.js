// Conversations and settings in this browser. All access to localStorage is here; it may be absent, full or changed by
// another tab, and none of that may end an answer.

const CHAT = "tandem.chat.";
const SETTINGS = "tandem.settings";
const CURRENT = "tandem.current";

export const MAX_CHATS = 50;
export const MAX_CHARACTERS = 2_000_000;

// Returns the kept conversations, newest first.
export function chats() {
  return chatKeys().map((key) => parse(read("localStorage", key))).filter(isChat).sort((a, b) => b.updated - a.updated);
}

export function chat(id) {
  const found = parse(read("localStorage", CHAT + id));
  return isChat(found) ? found : null;
}

// Keeps a conversation, at the expense of those that are older. Returns false if there is no room for it.
export function keep(chat) {
  const text = JSON.stringify(chat);
  const others = chats().filter((other) => other.id !== chat.id);
  let size = others.reduce((sum, other) => sum + JSON.stringify(other).length, text.length);
  while (others.length > 0 && (others.length >= MAX_CHATS || size > MAX_CHARACTERS)) {
    size -= drop(others.pop());
  }
  if (text.length > MAX_CHARACTERS) {
    return false;
  }
  while (!write("localStorage", CHAT + chat.id, text)) {
    if (others.length === 0) {
      return false;
    }
    drop(others.pop());
  }
  return true;
}

export function forget(id) {
  attempt(() => localStorage.removeItem(CHAT + id));
}

export function forgetAll() {
  chatKeys().forEach((key) => attempt(() => localStorage.removeItem(key)));
}

export function onChatsChanged(listener) {
  window.addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(CHAT)) {
      listener();
    }
  });
}

// The conversation of this tab, for when it is loaded again.
export const currentId = () => read("sessionStorage", CURRENT);
export const setCurrentId = (id) => write("sessionStorage", CURRENT, id);

export function settings() {
  const found = parse(read("localStorage", SETTINGS));
  return found !== null && typeof found === "object" ? found : {};
}

export const keepSettings = (values) => write("localStorage", SETTINGS, JSON.stringify(values));

function drop(chat) {
  forget(chat.id);
  return JSON.stringify(chat).length;
}

function chatKeys() {
  return attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(CHAT))) ?? [];
}

function isChat(value) {
  return (
    typeof value?.id === "string" &&
    typeof value.title === "string" &&
    typeof value.updated === "number" &&
    Array.isArray(value.messages) &&
    value.messages.every((one) => ["user", "assistant"].includes(one?.role) && typeof one.content === "string")
  );
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function read(store, key) {
  return attempt(() => window[store].getItem(key)) ?? null;
}

function write(store, key, text) {
  return attempt(() => (window[store].setItem(key, text), true)) ?? false;
}

function attempt(action) {
  try {
    return action();
  } catch {
    return undefined;
  }
}
