// TeX formulas in Markdown: \(...\), \[...\], $$...$$ and $...$. They are shown as written, because Markdown would take
// backslashes, stars and line breaks within them for its own.

import { Lexer } from "./vendor/marked/marked.esm.js";

const CLOSING = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };
const OPENING = /^(?:\\[([]|\$\$)/;
const DISPLAY = /^ {0,3}(?:\\\[|\$\$)/;
const LATER_DISPLAY = /\n(?= {0,3}(?:\\\[|\$\$))/g;
const LATER_SPAN = /\\[([]|\$/;
const BLANK_LINE = /\n[ \t]*\n/;
const LINE_END = /^[ \t]*(?:\n|$)/;
// As in Pandoc: no space within its ends and no digit behind it, so that prices are no formulas.
const DOLLARS = /^\$(?![\s$])(?:\\.|[^\\$`\n])+(?<!\s)\$(?!\d)/;

// Characters. A longer one is no formula: what has no end would be searched for it again and again.
const MAX_FORMULA = 4096;

// Adds tokens of the types `formula` (a span) and `display` (a block) to those of Markdown. They have nothing but `raw`.
export class FormulaLexer extends Lexer {
  constructor() {
    super({
      gfm: true,
      extensions: {
        inline: [(source) => token("formula", source, spanLength(source))],
        startInline: [(source) => source.search(LATER_SPAN)],
        block: [(source) => token("display", source, displayLength(source))],
        startBlock: [(source) => laterDisplay(source, source.length)],
      },
      // The lexer looks for emphasis in a copy of the text with everything masked that is none.
      hooks: { emStrongMask: (masked) => maskFormulas(masked, this.spans) },
    });
    this.spans = "";
    // Lines of a formula that has only "=" or "-" in one of them are no heading with the text before it.
    const { lheading } = this.tokenizer;
    this.tokenizer.lheading = (source) => {
      const heading = lheading.call(this.tokenizer, source);
      return heading && laterDisplay(source, heading.raw.length) > 0 ? undefined : heading;
    };
  }

  inlineTokens(source, tokens) {
    this.spans = source;
    return super.inlineTokens(source, tokens);
  }
}

function token(type, source, length) {
  return length > 0 ? { type, raw: source.slice(0, length) } : undefined;
}

// Returns the length of the formula that a text starts with, or 0.
function spanLength(source) {
  const opening = OPENING.exec(source)?.[0];
  return opening ? enclosedLength(source, opening, opening.length) : (DOLLARS.exec(source)?.[0].length ?? 0);
}

// Returns the length of the formula that has whole lines of its own at the start of a text, or 0.
function displayLength(source) {
  const start = DISPLAY.exec(source)?.[0];
  const length = start ? enclosedLength(source, start.trimStart(), start.length) : 0;
  const end = length > 0 ? LINE_END.exec(source.slice(length)) : null;
  return end ? length + end[0].length : 0;
}

// Returns where in the first paragraph of a text, and before `end`, a formula with lines of its own begins, or -1.
function laterDisplay(source, end) {
  const [paragraph] = source.slice(0, end).split(BLANK_LINE, 1);
  for (const { index } of paragraph.matchAll(LATER_DISPLAY)) {
    if (displayLength(source.slice(index + 1)) > 0) {
      return index + 1;
    }
  }
  return -1;
}

function enclosedLength(source, opening, start) {
  const end = source.slice(0, start + MAX_FORMULA).indexOf(CLOSING[opening], start);
  const body = end < 0 ? "" : source.slice(start, end);
  return body.trim() === "" || body.includes("`") || BLANK_LINE.test(body) ? 0 : end + CLOSING[opening].length;
}

// `masked` has a plus for each character of an escape, and no dollar within code and links.
function maskFormulas(masked, source) {
  const parts = [];
  let done = 0;
  const candidates = /\\[^]|\$/g;
  for (let found = candidates.exec(source); found !== null; found = candidates.exec(source)) {
    const start = found.index;
    const length = "+$".includes(masked[start]) ? spanLength(source.slice(start)) : 0;
    if (length > 0) {
      parts.push(masked.slice(done, start), "a".repeat(length));
      done = start + length;
      candidates.lastIndex = done;
    }
  }
  return parts.join("") + masked.slice(done);
}
