// The transcript: one article per turn. Text from the server or the user is only set as text, never as HTML.

const view = document.getElementById("transcript");

export function clear(section) {
  section.replaceChildren();
}

export function addPrompt(section, title, text) {
  addArticle(section, title, addText("prompt", text));
}

export class Turn {
  // `given` is the text that the answer continues, if any.
  constructor(section, title, given) {
    this.content = "";
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.finishReason = null;
    const thoughts = addText("reasoning", "");
    this.reasoning = thoughts.appendChild(new Text());
    const answer = addText("answer", "");
    if (given) {
      const prompt = document.createElement("span");
      prompt.className = "given";
      prompt.textContent = given;
      answer.append(prompt);
    }
    this.text = answer.appendChild(new Text());
    this.article = addArticle(section, title, thoughts, answer);
    this.article.classList.add("streaming");
  }

  take(event) {
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices) {
      const delta = choice.delta ?? choice;
      this.finishReason = choice.finish_reason ?? this.finishReason;
      this.show(this.reasoning, delta.reasoning_content);
      const text = delta.content ?? choice.text ?? "";
      this.content += text;
      this.show(this.text, text);
    }
  }

  show(node, text) {
    if (!text) {
      return;
    }
    this.last = performance.now();
    this.first ??= this.last;
    stayAtEnd(() => node.appendData(text));
  }

  // Ends the turn: shows its figures, and the whole error if there is one.
  end(how, error) {
    this.article.classList.remove("streaming");
    if (error) {
      const details = Object.entries(error.details ?? {}).filter(([, value]) => value !== null && value !== undefined);
      const list = details.map(([name, value]) => `${name}: ${value}`).join(", ");
      const box = addText("error", list ? `${error.message}\n${list}` : error.message);
      box.setAttribute("role", "alert");
      stayAtEnd(() => this.article.append(box));
    }
    stayAtEnd(() => this.article.append(addText("measures", this.measures(how))));
  }

  measures(how) {
    const parts = [];
    if (this.usage) {
      parts.push(`${this.usage.prompt_tokens} tokens in, ${this.usage.completion_tokens} out`);
    }
    if (this.first !== null) {
      parts.push(`TTFT ${Math.round(this.first - this.started)} ms`);
      const rest = (this.usage?.completion_tokens ?? 0) - 1;
      if (rest > 0 && this.last > this.first) {
        parts.push(`${((1000 * rest) / (this.last - this.first)).toFixed(1)} tokens/s`);
      }
    }
    parts.push(how ?? `ended by ${this.finishReason}`);
    return parts.join(" \u00b7 ");
  }
}

function addText(kind, text) {
  const paragraph = document.createElement("p");
  paragraph.className = kind;
  paragraph.textContent = text;
  return paragraph;
}

function addArticle(section, title, ...parts) {
  const article = document.createElement("article");
  if (title) {
    const heading = document.createElement("h2");
    heading.textContent = title;
    article.append(heading);
  }
  article.append(...parts);
  section.append(article);
  view.scrollTop = view.scrollHeight;
  return article;
}

// Scrolls to new text, unless the user has scrolled up.
function stayAtEnd(change) {
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 48;
  change();
  if (atEnd) {
    view.scrollTop = view.scrollHeight;
  }
}
