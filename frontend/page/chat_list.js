// The list of conversations kept in this browser.

import { chats, forget, forgetAll, onChatsChanged } from "./storage.js";

const list = document.getElementById("chat_list");
const none = document.getElementById("no_chats");
const removeAll = document.getElementById("delete_all");

// `open` gets the id of a conversation to show, `gone` is called when the current one was deleted here.
export class ChatList {
  constructor({ current, open, gone }) {
    this.current = current;
    this.open = open;
    this.gone = gone;
    onChatsChanged(() => this.show());
    removeAll.addEventListener("click", () => {
      if (window.confirm("Delete all conversations that are kept in this browser?")) {
        forgetAll();
        this.gone();
      }
    });
  }

  show() {
    const kept = chats();
    list.replaceChildren(...kept.map((chat) => this.entry(chat)));
    none.hidden = kept.length > 0;
    removeAll.hidden = kept.length < 2;
  }

  entry(chat) {
    const row = document.createElement("li");
    const name = button(chat.title, "chat", () => this.open(chat.id));
    name.title = chat.title;
    if (chat.id === this.current()) {
      name.setAttribute("aria-current", "true");
    }
    const remove = button("\u00d7", "delete", () => {
      forget(chat.id);
      if (chat.id === this.current()) {
        this.gone();
      } else {
        this.show();
      }
    });
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    row.append(name, remove);
    return row;
  }
}

function button(text, kind, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = kind;
  made.textContent = text;
  made.addEventListener("click", onClick);
  return made;
}
