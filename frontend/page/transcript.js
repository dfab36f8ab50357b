// The transcript: one article for each question and answer. Text from the server or the user is only set as text.

import { EndFollower } from "./end_follower.js";
import { MarkdownView, renderMarkdown } from "./markdown.js";

const view = document.getElementById("transcript");
const follower = new EndFollower(view);
follower.start();

// Adds a question. `onEdit`, if given, gets its new text.
export function addQuestion(section, text, onEdit) {
  const prompt = addText("prompt", text);
  const tools = element("p", "tools");
  const article = addArticle(section, "question", heading("You"), prompt, tools);
  tools.append(copyButton("Copy question", () => text));
  if (onEdit) {
    tools.append(button("Edit", "edit", "Edit question", () => editQuestion(article, prompt, text, onEdit)));
  }
}

export class Answer {
  // `given` is the text that a completion continues; without it the answer is Markdown.
  constructor(section, { given, onRetry }) {
    this.content = "";
    this.thoughts = "";
    this.title = "";
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.counts = null;
    this.finishReason = null;
    this.onRetry = onRetry;
    this.reasoning = addText("reasoning", "");
    this.answer = element(given === undefined ? "div" : "p", "answer");
    if (given !== undefined) {
      const prompt = element("span", "given");
      prompt.textContent = given;
      this.answer.append(prompt);
    }
    this.markdown = given === undefined ? new MarkdownView(this.answer) : null;
    this.article = addArticle(section, "reply", this.reasoning, this.answer);
    this.article.classList.add("streaming");
  }

  // Shows an answer of a kept conversation.
  static restore(section, message, onRetry) {
    const answer = new Answer(section, { onRetry });
    answer.setTitle(message.model ?? "");
    answer.content = message.content;
    answer.reasoning.textContent = message.reasoning ?? "";
    answer.markdown = null;
    renderMarkdown(answer.answer, message.content);
    answer.close(message.measures ?? "", message.error);
  }

  // Names the model above its answer.
  setTitle(title) {
    this.title = title;
    if (title) {
      this.article.prepend(heading(title));
    }
  }

  take(event) {
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices) {
      this.count(choice);
      const delta = choice.delta ?? choice;
      this.finishReason = choice.finish_reason ?? this.finishReason;
      if (delta.reasoning_content) {
        this.thoughts += delta.reasoning_content;
        this.clock();
        this.reasoning.append(delta.reasoning_content);
      }
      const text = delta.content ?? choice.text ?? "";
      if (text) {
        this.content += text;
        this.clock();
        if (this.markdown) {
          this.markdown.push(text);
        } else {
          this.answer.append(text);
        }
      }
    }
  }

  // Counts tokens by their ids: the usage comes at the end, which an answer that is stopped never sees.
  count({ prompt_token_ids: prompt, token_ids: output }) {
    if (prompt) {
      this.counts = { prompt_tokens: prompt.length, completion_tokens: 0 };
    }
    if (output && this.counts) {
      this.counts.completion_tokens += output.length;
    }
  }

  // Notes that text has arrived.
  clock() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  // Ends the turn: shows its figures, and the whole error if there is one.
  end(how, error) {
    this.markdown?.end();
    this.error = error ? errorText(error) : undefined;
    this.measured = this.measures(how);
    this.close(this.measured, this.error);
  }

  close(measures, error) {
    this.article.classList.remove("streaming");
    const tools = element("p", "tools");
    if (this.content) {
      tools.append(copyButton("Copy answer", () => this.content));
    }
    if (this.onRetry) {
      tools.append(button("Retry", "retry", "Ask again", this.onRetry));
    }
    if (error) {
      const box = addText("error", error);
      box.setAttribute("role", "alert");
      this.article.append(box);
    }
    if (measures) {
      this.article.append(addText("measures", measures));
    }
    this.article.append(tools);
  }

  // The answer as a message of a conversation, with what is shown beside it.
  message() {
    const shown = { model: this.title, reasoning: this.thoughts, measures: this.measured, error: this.error };
    const kept = Object.entries(shown).filter(([, value]) => value);
    return { role: "assistant", content: this.content, ...Object.fromEntries(kept) };
  }

  measures(how) {
    const parts = [];
    const usage = this.usage ?? this.counts;
    if (usage) {
      parts.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`);
    }
    if (this.first !== null) {
      parts.push(`TTFT ${Math.round(this.first - this.started)} ms`);
      const rest = (usage?.completion_tokens ?? 0) - 1;
      if (rest > 0 && this.last > this.first) {
        parts.push(`${((1000 * rest) / (this.last - this.first)).toFixed(1)} tokens/s`);
      }
    }
    parts.push(how ?? this.ending(usage));
    return parts.join(" \u00b7 ");
  }

  ending(usage) {
    if (this.finishReason !== "length") {
      return `ended by ${this.finishReason}`;
    }
    return `cut at max_tokens (${usage?.completion_tokens ?? "its limit"}); raise Max tokens for more`;
  }
}

// Copies text. Browsers offer the clipboard's own interface only over HTTPS and on the same machine.
export async function copyText(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = document.createElement("textarea");
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    from.focus();
  }
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = "Copy"), 1500);
}

// Shows the code's own button at work: it is part of the Markdown, which has no listeners.
view.addEventListener("click", ({ target }) => {
  if (target.matches(".copy-code")) {
    copyText(target.closest(".code-block").querySelector("code").textContent, target);
  }
});

function editQuestion(article, prompt, text, onEdit) {
  if (article.querySelector("form")) {
    return;
  }
  const form = element("form", "edit-box");
  const box = form.appendChild(element("textarea"));
  box.value = text;
  box.rows = Math.min(10, text.split("\n").length + 1);
  box.setAttribute("aria-label", "Question");
  const close = () => {
    form.replaceWith(prompt);
    article.querySelector(".edit").focus();
  };
  const send = () => box.value.trim() !== "" && onEdit(box.value);
  const save = button("Send again", "primary", "", send);
  const hint = element("span", "hint");
  hint.textContent = "What followed is removed.";
  const row = form.appendChild(element("div", "actions"));
  row.append(hint, button("Cancel", "", "", close), save);
  form.addEventListener("submit", (event) => event.preventDefault());
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (isSendKey(event)) {
      event.preventDefault();
      event.stopPropagation();
      send();
    }
  });
  follower.release();
  prompt.replaceWith(form);
  box.focus();
  form.scrollIntoView({ block: "nearest" });
}

// Enter sends, unless it is a new line (Shift) or ends a word of an input method.
export const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function errorText(error) {
  if (error.unauthorized) {
    return "The server needs an API key. Enter it above, then press Retry.";
  }
  const details = Object.entries(error.details ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const list = details.map(([name, value]) => `${name}: ${value}`).join(", ");
  return list ? `${error.message}\n${list}` : error.message;
}

function copyButton(label, text) {
  const made = button("Copy", "copy", label, () => copyText(text(), made));
  return made;
}

function button(text, kind, label, onClick) {
  const made = element("button", kind);
  made.type = "button";
  made.textContent = text;
  if (label) {
    made.setAttribute("aria-label", label);
  }
  made.addEventListener("click", onClick);
  return made;
}

function addText(kind, text) {
  const paragraph = element("p", kind);
  paragraph.textContent = text;
  return paragraph;
}

function heading(title) {
  const made = element("h2");
  made.textContent = title;
  return made;
}

function addArticle(section, kind, ...parts) {
  const article = element("article", kind);
  article.append(...parts);
  section.append(article);
  follower.follow();
  return article;
}

function element(tag, kind) {
  const made = document.createElement(tag);
  made.className = kind ?? "";
  return made;
}
