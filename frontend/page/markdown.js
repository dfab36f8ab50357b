// Shows the Markdown of a model as DOM nodes. The vendored lexer finds the blocks and spans; every text becomes a text
// node, so HTML in an answer is shown, never parsed. Images are not loaded, and only web and mail links can be clicked.

import { FormulaLexer } from "./formulas.js";

// Bounds, in characters, cells and levels. What is beyond them is shown as plain text: a hostile answer could keep
// the lexer busy for minutes.
const MAX_BLOCK = 32768;
const MAX_SPANS = 4096;
const MAX_CELLS = 5000;
const MAX_DEPTH = 24;
const WHOLE_STEP = 8192;

const LINK_PROTOCOLS = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const FENCE = /^ {0,3}(?:`{3,}|~{3,})[^\n]*\n/;
const FENCE_CHARACTERS = /[`~]/;

// Rendering takes at most one part in this many of the time, however long the open block grows.
const IDLE_SHARE = 8;

export function renderMarkdown(root, text) {
  const view = new MarkdownView(root);
  view.append(text.replace(/\r/g, ""));
  view.end();
}

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.scheduled = false;
    this.notBefore = 0;
    // Link definitions that are known, whether they are to be collected, and whether there were any.
    this.links = Object.create(null);
    this.collects = false;
    this.found = false;
    // Characters given to the lexer so far, for tests.
    this.lexed = 0;
    // Where the blocks begin that later text may still change, and their nodes.
    this.start = 0;
    this.open = [];
    // How much of the text is shown.
    this.drawn = 0;
    // The text node of an unclosed code block at the end.
    this.code = null;
    // The text node of everything after a block that is beyond the bounds.
    this.plain = null;
  }

  push(text) {
    this.text += text.replace(/\r/g, "");
    if (this.scheduled) {
      return;
    }
    this.scheduled = true;
    const draw = () => requestAnimationFrame(() => this.scheduled && this.render());
    const wait = this.notBefore - performance.now();
    if (wait > 16) {
      setTimeout(draw, wait);
    } else {
      draw();
    }
  }

  // Shows all of the text, in its final form.
  end() {
    this.close();
    if (this.found) {
      // The definition of a link may follow it.
      const first = new MarkdownView(element("div"));
      first.collects = true;
      first.append(this.text);
      const again = new MarkdownView(this.root);
      again.links = first.links;
      this.root.replaceChildren();
      again.append(this.text);
    }
  }

  // Shows a whole text, in pieces of whole lines so that none is beyond the bounds.
  append(text) {
    for (let start = 0; start < text.length; ) {
      const line = text.indexOf("\n", start + WHOLE_STEP);
      const end = line < 0 || line > start + 2 * WHOLE_STEP ? start + 2 * WHOLE_STEP : line + 1;
      this.text += text.slice(start, end);
      this.render();
      start = end;
    }
    this.close();
  }

  // Draws the open blocks again, which an unclosed code block has left behind its text.
  close() {
    this.code = null;
    if (this.plain === null) {
      this.drawn = this.start;
    }
    this.render();
  }

  render() {
    this.scheduled = false;
    const began = performance.now();
    const added = this.text.slice(this.drawn);
    this.drawn = this.text.length;
    if (this.plain !== null) {
      this.plain.appendData(added);
    } else if (this.code !== null && !FENCE_CHARACTERS.test(added)) {
      this.code.appendData(added);
    } else {
      this.renderOpen();
    }
    const ended = performance.now();
    this.notBefore = ended + IDLE_SHARE * (ended - began);
  }

  renderOpen() {
    const source = this.text.slice(this.start);
    this.open.forEach((node) => node.remove());
    this.open = [];
    this.code = null;
    const blocks = this.lex(source);
    if (blocks === null) {
      const paragraph = element("p", "plain");
      this.plain = paragraph.appendChild(new Text(source));
      this.root.append(paragraph);
      return;
    }
    const [closed, length] = closedPart(blocks, source);
    appendBlocks(this.root, blocks.slice(0, closed), 0);
    const rest = document.createDocumentFragment();
    appendBlocks(rest, blocks.slice(closed), 0);
    this.open = [...rest.childNodes];
    this.root.append(rest);
    this.start += length;
    this.code = unclosedCode(blocks.at(-1), this.root);
  }

  // Returns the blocks of a text, or null if it is beyond the bounds.
  lex(source) {
    if (source.length > MAX_BLOCK && !FENCE.test(source)) {
      return null;
    }
    this.lexed += source.length;
    try {
      const lexer = new FormulaLexer();
      Object.assign(lexer.tokens.links, this.links);
      const blocks = lexer.blockTokens(source);
      // The queue grows while it is worked off.
      for (let index = 0; index < lexer.inlineQueue.length; index++) {
        const { src, tokens } = lexer.inlineQueue[index];
        if (src.length > MAX_SPANS) {
          tokens.push({ type: "text", text: src });
        } else {
          lexer.inlineTokens(src, tokens);
        }
      }
      this.found ||= Object.keys(lexer.tokens.links).length > 0;
      if (this.collects) {
        Object.assign(this.links, lexer.tokens.links);
      }
      return blocks;
    } catch (error) {
      if (error instanceof RangeError || error.message?.startsWith("Infinite loop")) {
        return null;
      }
      throw error;
    }
  }
}

// Returns how many leading blocks later text cannot change, and their length. A block ends those before it if a blank line
// is between and its own first line is whole.
function closedPart(blocks, source) {
  let end = blocks.reduce((sum, block) => sum + block.raw.length, 0);
  for (let count = blocks.length - 1; count > 0; count--) {
    end -= blocks[count].raw.length;
    const before = source.slice(0, end);
    if (blocks[count].type !== "space" && /\n[ \t]*\n$/.test(before) && source.includes("\n", end)) {
      const raw = blocks.slice(0, count).map((block) => block.raw).join("");
      return raw === before ? [count, end] : [0, 0];
    }
  }
  return [0, 0];
}

function unclosedCode(block, root) {
  const opening = block?.type === "code" ? FENCE.exec(block.raw) : null;
  if (opening === null || opening[0].startsWith(" ")) {
    return null;
  }
  const content = block.raw.slice(opening[0].length);
  if (FENCE_CHARACTERS.test(content)) {
    return null;
  }
  const node = root.lastChild.querySelector("code").firstChild;
  node.data = content;
  return node;
}

function appendBlocks(parent, blocks, depth) {
  for (const block of blocks) {
    if (depth > MAX_DEPTH) {
      parent.append(block.raw);
    } else {
      BLOCKS[block.type]?.(parent, block, depth + 1);
    }
  }
}

const BLOCKS = {
  heading(parent, block, depth) {
    appendSpans(add(parent, `h${Math.min(block.depth + 2, 6)}`), block.tokens, depth);
  },
  paragraph(parent, block, depth) {
    appendSpans(add(parent, "p"), block.tokens, depth);
  },
  text(parent, block, depth) {
    appendSpans(parent, block.tokens ?? [block], depth);
  },
  checkbox(parent, block) {
    const box = add(parent, "input");
    Object.assign(box, { type: "checkbox", checked: block.checked, disabled: true });
    box.setAttribute("aria-label", block.checked ? "done" : "open");
  },
  code(parent, block) {
    const box = add(parent, "div", "code-block");
    const head = add(box, "div", "code-head");
    add(head, "span").textContent = (block.lang ?? "").split(/\s/)[0].slice(0, 40);
    const button = add(head, "button", "copy-code");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy code");
    const pre = add(box, "pre");
    pre.tabIndex = 0;
    add(pre, "code").append(new Text(block.text.replace(/\n$/, "")));
  },
  blockquote(parent, block, depth) {
    appendBlocks(add(parent, "blockquote"), block.tokens, depth);
  },
  list(parent, block, depth) {
    const list = add(parent, block.ordered ? "ol" : "ul");
    if (block.ordered && Number.isSafeInteger(block.start) && block.start < 2 ** 31) {
      list.start = block.start;
    }
    for (const item of block.items) {
      appendBlocks(add(list, "li"), item.tokens, depth);
    }
  },
  table(parent, block, depth) {
    if ((block.rows.length + 1) * block.header.length > MAX_CELLS) {
      add(parent, "p", "plain").textContent = block.raw;
      return;
    }
    const box = add(parent, "div", "table");
    box.tabIndex = 0;
    const table = add(box, "table");
    appendRow(add(table, "thead"), "th", block.header, depth);
    const body = add(table, "tbody");
    block.rows.forEach((row) => appendRow(body, "td", row, depth));
  },
  hr(parent) {
    add(parent, "hr");
  },
  html(parent, block) {
    add(parent, "p", "plain").textContent = block.raw.trimEnd();
  },
  display(parent, block) {
    add(parent, "p", "plain").textContent = block.raw.trim();
  },
};

function appendRow(parent, tag, cells, depth) {
  const row = add(parent, "tr");
  for (const cell of cells) {
    appendSpans(add(row, tag, cell.align ?? ""), cell.tokens, depth);
  }
}

function appendSpans(parent, spans, depth) {
  for (const span of spans) {
    if (depth > MAX_DEPTH) {
      parent.append(span.raw);
    } else if (span.type in SPAN_TAGS) {
      appendSpans(add(parent, SPAN_TAGS[span.type]), span.tokens, depth + 1);
    } else if (span.type in SPANS) {
      SPANS[span.type](parent, span, depth + 1);
    } else {
      parent.append(span.raw);
    }
  }
}

const SPAN_TAGS = { strong: "strong", em: "em", del: "del" };

const SPANS = {
  text(parent, span, depth) {
    if (span.tokens) {
      appendSpans(parent, span.tokens, depth);
    } else {
      parent.append(decodeEntities(span.text));
    }
  },
  // Brackets keep their backslash: more often than not it is TeX, and its other half may not have come yet.
  escape(parent, span) {
    parent.append("()[]".includes(span.text) ? span.raw : span.text);
  },
  html(parent, span) {
    if (/^<br\s*\/?>$/i.test(span.raw)) {
      add(parent, "br");
    } else {
      parent.append(span.raw);
    }
  },
  codespan(parent, span) {
    add(parent, "code").textContent = span.text;
  },
  br(parent) {
    add(parent, "br");
  },
  checkbox: BLOCKS.checkbox,
  link(parent, span, depth) {
    const link = linkTo(span.href);
    if (link === null) {
      parent.append(span.raw);
      return;
    }
    parent.append(link);
    appendSpans(link, span.tokens, depth);
  },
  image(parent, span) {
    const link = linkTo(span.href);
    if (link === null) {
      parent.append(span.raw);
      return;
    }
    link.textContent = `image: ${span.text || span.href}`;
    parent.append(link);
  },
};

// Returns an empty link, or null unless the address is an absolute one of the web or of mail.
function linkTo(href) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (url === null || !LINK_PROTOCOLS.includes(url.protocol)) {
    return null;
  }
  const link = element("a");
  Object.assign(link, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return link;
}

function decodeEntities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]+));/gi, (whole, decimal, hex, name) => {
    if (name) {
      return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    }
    const code = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

function element(tag, kind = "") {
  const made = document.createElement(tag);
  if (kind) {
    made.className = kind;
  }
  return made;
}

function add(parent, tag, kind) {
  return parent.appendChild(element(tag, kind));
}
