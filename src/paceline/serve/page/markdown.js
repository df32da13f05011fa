// Markdown as elements. Works on offsets of the source, so that what was drafted stays marked, and never on HTML.
"use strict";

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /\\[!-/:-@[-`{-~]|`+|\*\*?|__?|\[|https?:\/\/[^\s<>]+/g;
const LINK = /\[([^[\]\n]*)\]\((https?:\/\/[^\s()]+(?:\([^\s()]*\)[^\s()]*)*)\)/y;
const DEEPEST = 8;

/** The lines from an offset on, as half-open ranges without their line ends. */
function linesOf(source, from) {
  const lines = [];
  for (let start = from; start < source.length; ) {
    const newline = source.indexOf("\n", start);
    const end = newline < 0 ? source.length : newline;
    lines.push({ start, end });
    start = end + 1;
  }
  return lines;
}

/** The blocks that lines make up; each has a kind, the offset where it starts, and its lines. */
function blocksOf(source, lines) {
  const blocks = [];
  const textAt = (index) => (index < lines.length ? source.slice(lines[index].start, lines[index].end) : "");
  for (let index = 0; index < lines.length; ) {
    if (!textAt(index).trim()) {
      index += 1;
      continue;
    }
    const kind = kindAt(textAt(index), textAt(index + 1));
    const block = { kind, start: lines[index].start, first: textAt(index) };
    const end = END_OF[kind](textAt, index, lines.length);
    block.lines = lines.slice(index, end);
    blocks.push(block);
    index = end;
  }
  return blocks;
}

function kindAt(text, next) {
  if (FENCE.test(text)) return "code";
  if (HEADING.test(text)) return "heading";
  if (RULE.test(text)) return "rule";
  if (QUOTE.test(text)) return "quote";
  if (ITEM.test(text)) return "list";
  if (text.includes("|") && next.includes("-") && TABLE_RULE.test(next)) return "table";
  return "paragraph";
}

/** The end of a run of lines that go on as they are asked. */
function runWhile(isIn) {
  return (textAt, index, count) => {
    let end = index + 1;
    while (end < count && isIn(textAt, end)) end += 1;
    return end;
  };
}

/** Where a block of a kind ends that begins at a line: the index after its last. */
const END_OF = {
  heading: (_, index) => index + 1,
  rule: (_, index) => index + 1,
  quote: runWhile((textAt, end) => QUOTE.test(textAt(end))),
  table: runWhile((textAt, end) => textAt(end).includes("|")),
  paragraph: runWhile((textAt, end) => textAt(end).trim() && kindAt(textAt(end), textAt(end + 1)) === "paragraph"),
  list(textAt, index, count) {
    const isMore = (text) => isMoreOfList(text, textAt(index));
    const goesOn = runWhile((_, end) => {
      const text = textAt(end);
      if (!text.trim()) return isMore(textAt(end + 1));
      return isMore(text) || (kindAt(text, "") === "paragraph" && textAt(end - 1).trim());
    });
    return goesOn(textAt, index, count);
  },
  code(textAt, index, count) {
    const [, , fence] = FENCE.exec(textAt(index));
    let end = index + 1;
    while (end < count && !isClosing(textAt(end), fence)) end += 1;
    return Math.min(end + 1, count);
  },
};

/** Whether a line belongs to a list that began with another line: an item of its kind, or something further in. */
function isMoreOfList(text, first) {
  const kind = kindAt(text, "");
  if (kind === "paragraph") return /^\s+\S/.test(text);
  const [, indent, mark] = ITEM.exec(first);
  return kind === "list" && (isNumber(mark) === isNumber(ITEM.exec(text)[2]) || ITEM.exec(text)[1].length > indent.length);
}

function isNumber(mark) {
  return /\d/.test(mark);
}

function isClosing(text, fence) {
  const line = text.trim();
  return line.length >= fence.length && line === fence[0].repeat(line.length);
}

/** Draws blocks of one source. `write(parent, start, end)` appends the source's text between two offsets. */
class MarkdownPainter {
  constructor(source, write) {
    this.source = source;
    this.write = write;
    this.quotes = 0;
  }

  /** The element of a block. */
  paint(block) {
    return this[block.kind](block);
  }

  heading({ first, lines: [line] }) {
    const [prefix, marks] = HEADING.exec(first);
    const element = make(`h${Math.min(marks.length + 2, 6)}`);
    this.inline(element, line.start + prefix.length, line.end);
    return element;
  }

  rule() {
    return make("hr");
  }

  paragraph({ lines }) {
    const element = make("p");
    this.flow(element, lines);
    return element;
  }

  quote({ lines }) {
    const inner = lines.map(({ start, end }) => {
      const [prefix] = QUOTE.exec(this.source.slice(start, end));
      return { start: start + prefix.length, end };
    });
    const element = make("blockquote");
    this.quotes += 1;
    if (this.quotes > DEEPEST) this.flow(element, inner);
    else element.append(...blocksOf(this.source, inner).map((block) => this.paint(block)));
    this.quotes -= 1;
    return element;
  }

  code(block) {
    const [, indent, , name] = FENCE.exec(block.first);
    const code = make("code");
    const range = codeRange(this.source, block);
    for (const line of range.lines) {
      const text = this.source.slice(line.start, line.end);
      const skipped = Math.min(indent.length, text.length - text.trimStart().length);
      this.write(code, line.start + skipped, Math.min(line.end + 1, range.end));
    }
    const button = iconButton("copy", "copyCode", () => copyFrom(button, code.textContent));
    const head = make("div", { className: "code-head" }, make("span", {}, name), button);
    return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
  }

  list({ lines }) {
    const open = [];
    let outermost = null;
    for (const item of itemsOf(this.source, lines)) {
      while (open.length > 1 && open.at(-1).indent > item.indent) open.pop();
      const level = open.at(-1);
      let list = level?.list;
      if (!level || item.indent > level.indent + 1) {
        list = make(item.number === null ? "ul" : "ol");
        if (item.number !== null && item.number !== 1) list.start = item.number;
        open.push({ list, indent: item.indent });
        if (level) level.list.lastChild.append(list);
      }
      outermost ??= list;
      const element = make("li");
      this.flow(element, item.lines);
      list.append(element);
    }
    return outermost;
  }

  table({ lines }) {
    const [head, , ...body] = lines;
    const row = (line, tag) => {
      const element = make("tr");
      for (const [start, end] of cellsOf(this.source, line)) {
        const cell = make(tag);
        this.inline(cell, start, end);
        element.append(cell);
      }
      return element;
    };
    const table = make("table", {}, make("thead", {}, row(head, "th")), make("tbody"));
    table.lastChild.append(...body.map((line) => row(line, "td")));
    return make("div", { className: "table", tabIndex: 0 }, table);
  }

  /** Lines of running text, without their indents. */
  flow(parent, lines) {
    let previous = null;
    for (const line of lines) {
      const text = this.source.slice(line.start, line.end);
      const start = line.start + text.length - text.trimStart().length;
      if (previous) parent.append("\n");
      this.inline(parent, start, line.end);
      previous = line;
    }
  }

  /** Text with emphasis, code and links. */
  inline(parent, start, end, depth = 0) {
    const missing = new Set();
    let plain = start;
    INLINE.lastIndex = start;
    for (let found; (found = INLINE.exec(this.source)) && found.index < end; ) {
      const at = found.index;
      const next = this.mark(found[0], at, end, missing);
      if (!next || depth > DEEPEST) {
        INLINE.lastIndex = at + found[0].length;
        continue;
      }
      this.write(parent, plain, at);
      next.draw(parent, depth + 1);
      plain = next.end;
      INLINE.lastIndex = plain;
    }
    this.write(parent, plain, end);
  }

  /** What a mark at an offset begins: how to draw it and where it ends; null for a mark that is only text. */
  mark(mark, at, end, missing) {
    if (mark[0] === "\\") return at + 2 > end ? null : { end: at + 2, draw: (parent) => this.write(parent, at + 1, at + 2) };
    if (mark[0] === "[") return this.link(at, end);
    if (mark[0] === "h") return this.address(mark, at, end);
    const body = at + mark.length;
    const close = missing.has(mark) ? -1 : this.closing(mark, body, end);
    if (close < 0) {
      missing.add(mark); // not before the end of this range: later ones need not look again
      return null;
    }
    if (close === body || !this.mayFlank(mark, at, close)) return null;
    const tag = mark[0] === "`" ? "code" : mark.length === 2 ? "strong" : "em";
    const draw = (parent, depth) => {
      const element = make(tag);
      if (tag === "code") this.write(element, body, close);
      else this.inline(element, body, close, depth);
      parent.append(element);
    };
    return { end: close + mark.length, draw };
  }

  /** Where the text between a mark and its counterpart ends; -1 without one. */
  closing(mark, from, end) {
    const sign = mark[0];
    for (let at = from; ; ) {
      at = this.source.indexOf(sign, at);
      if (at < 0 || at >= end) return -1;
      const start = at;
      while (at < end && this.source[at] === sign) at += 1;
      const length = at - start;
      if (length === mark.length) return start;
      if (sign !== "`" && length === 3) return mark.length === 1 ? start : at - 2; // one closes inside of the other
    }
  }

  /** Emphasis hugs its words; `_` does not begin or end inside one, so that snake_case stays as it is. */
  mayFlank(mark, at, close) {
    if (mark[0] === "`") return true;
    const { source } = this;
    if (/\s/.test(source[at + mark.length]) || /\s/.test(source[close - 1])) return false;
    if (mark[0] === "*") return true;
    return !/[\p{L}\p{N}]/u.test(source[at - 1] ?? " ") && !/[\p{L}\p{N}]/u.test(source[close + mark.length] ?? " ");
  }

  link(at, end) {
    LINK.lastIndex = at;
    const found = LINK.exec(this.source);
    if (!found || LINK.lastIndex > end) return null;
    const draw = (parent, depth) => {
      const element = outsideLink(found[2]);
      this.inline(element, at + 1, at + 1 + found[1].length, depth);
      parent.append(element);
    };
    return { end: LINK.lastIndex, draw };
  }

  address(text, at, end) {
    const address = text.slice(0, end - at).replace(/[.,;:!?'"*_)\]]+$/, "");
    const draw = (parent) => {
      const element = outsideLink(address);
      this.write(element, at, at + address.length);
      parent.append(element);
    };
    return { end: at + address.length, draw };
  }
}

function outsideLink(href) {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" });
}

/** The lines of a code block between its fences, and the offset where its text ends. */
function codeRange(source, block) {
  const [, , fence] = FENCE.exec(block.first);
  const last = block.lines.at(-1);
  const isClosed = block.lines.length > 1 && isClosing(source.slice(last.start, last.end), fence);
  const lines = block.lines.slice(1, isClosed ? -1 : undefined);
  return { lines, end: lines.length ? lines.at(-1).end : block.lines[0].end };
}

function itemsOf(source, lines) {
  const items = [];
  for (const { start, end } of lines) {
    const text = source.slice(start, end);
    const found = ITEM.exec(text);
    if (!found && text.trim()) items.at(-1).lines.push({ start, end });
    if (!found) continue;
    const number = isNumber(found[2]) ? parseInt(found[2], 10) : null;
    items.push({ indent: found[1].length, number, lines: [{ start: start + found[0].length, end }] });
  }
  return items;
}

function cellsOf(source, { start, end }) {
  const text = source.slice(start, end);
  const cells = [];
  for (const found of text.matchAll(/(?:\\\||[^|])+/g)) {
    const cell = found[0];
    const isEdge = !cell.trim() && (found.index === 0 || found.index + cell.length === text.length);
    if (isEdge) continue;
    const from = start + found.index + cell.length - cell.trimStart().length;
    cells.push([from, Math.max(from, start + found.index + cell.trimEnd().length)]);
  }
  return cells;
}
