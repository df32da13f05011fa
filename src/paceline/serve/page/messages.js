// One message on the page: its text, growing while it streams, what it cost, and what can be done with it.
"use strict";

/** Appends text between two offsets of a message, drafted stretches in elements of their own. */
function writeText(message, parent, start, end) {
  if (start >= end) return;
  const ranges = message.drafted ?? [];
  let at = start;
  for (let index = firstAfter(ranges, start); index < ranges.length && ranges[index] < end; index += 2) {
    const from = Math.max(ranges[index], at);
    const to = Math.min(ranges[index + 1], end);
    if (from > at) parent.append(message.text.slice(at, from));
    parent.append(make("span", { className: "drafted" }, message.text.slice(from, to)));
    at = to;
  }
  if (at < end) parent.append(message.text.slice(at, end));
}

/** The index of the first range that ends after an offset. */
function firstAfter(ranges, offset) {
  let low = 0;
  let high = ranges.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ranges[2 * middle + 1] <= offset) low = middle + 1;
    else high = middle;
  }
  return 2 * low;
}

/** Adds text to a message that grows; neighbouring drafted pieces become one range. */
function grow(message, text, isDrafted) {
  const start = message.text.length;
  message.text += text;
  if (!isDrafted || !text) return;
  if (message.drafted.at(-1) === start) message.drafted.pop();
  else message.drafted.push(start);
  message.drafted.push(message.text.length);
}

/**
 * Markdown that grows at its end. Blocks that no later text can change are drawn once; those of the last two lines, by
 * which the next ones may still turn into something else, again with each call.
 */
class GrowingMarkdown {
  #element;
  #message;
  #from = 0;
  #loose = [];
  #written = 0;

  constructor(element, message) {
    this.#element = element;
    this.#message = message;
  }

  /** Draws what has come. */
  draw() {
    const { text } = this.#message;
    const blocks = blocksOf(text, linesOf(text, this.#from));
    if (!blocks.length) return;
    const painter = new MarkdownPainter(text, (...range) => writeText(this.#message, ...range));
    const grown = this.#growCode(text, blocks[0]) ? this.#loose.slice(0, 1) : [];
    for (const element of this.#loose.slice(grown.length)) element.remove();
    const drawn = blocks.slice(grown.length).map((block) => painter.paint(block));
    this.#element.append(...drawn);
    const lastLines = text.lastIndexOf("\n", text.lastIndexOf("\n") - 1);
    const settled = Math.max(0, blocks.findLastIndex(({ start }) => start <= lastLines));
    this.#loose = [...grown, ...drawn].slice(settled);
    this.#from = blocks[settled].start;
    this.#written = blocks[settled].kind === "code" ? codeRange(text, blocks[settled]).end : 0;
  }

  /** A long code block is only added to. False where that is not enough. */
  #growCode(text, block) {
    const isSame = this.#written > 0 && block.kind === "code" && block.start === this.#from;
    const { lines, end } = isSame ? codeRange(text, block) : { lines: [], end: 0 };
    if (!lines.length || end < this.#written || lines[0].start > this.#written || /^\s/.test(block.first)) return false;
    writeText(this.#message, this.#loose[0].querySelector("code"), this.#written, end);
    return true;
  }
}

/** A message as an element. `actions`: {copy, retry, edit, delete} -> what to do, those that make sense here. */
class MessageView {
  #markdown;
  #frame = 0;

  constructor(message, actions) {
    this.message = message;
    this.body = make("div", { className: "body" });
    this.foot = make("div", { className: "foot" });
    this.element = make("article", { className: `message ${message.role}` }, this.body, this.foot);
    label(this.element, message.role === "user" ? "you" : "assistant");
    this.#markdown = new GrowingMarkdown(this.body, message);
    if (message.role === "user") this.body.append(message.text);
    else this.#markdown.draw();
    this.finish(actions);
  }

  /** Shows that an answer is under way. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.foot.replaceChildren();
    this.body.replaceChildren(say(make("span", { className: "waiting" }), "waiting"));
  }

  /** Draws what has been added, with the next frame; then calls `drawn`. */
  refresh(drawn) {
    this.#frame ||= requestAnimationFrame(() => {
      this.flush();
      drawn();
    });
  }

  /** Draws what has been added, now. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.body.querySelector(":scope > .waiting")?.remove();
    this.#markdown.draw();
  }

  /** Shows figures and actions of a message that is whole. */
  finish(actions) {
    this.element.removeAttribute("aria-busy");
    const buttons = Object.entries(actions).map(([name, run]) => {
      const button = iconButton(name === "answerThis" ? "retry" : name, name, () => run(button));
      return button;
    });
    this.foot.replaceChildren(figuresOf(this.message), make("div", { className: "actions" }, ...buttons));
  }
}

/** What an answer cost, as a row of short texts. */
function figuresOf({ figures, ending }) {
  const row = make("div", { className: "figures" });
  const add = (key, values = {}) => {
    const element = say(make("span"), key, values);
    if (`${key}Hint` in TEXTS.en) hint(element, `${key}Hint`);
    row.append(element);
  };
  if (figures?.speed) add("speed", { value: rounded(figures.speed) });
  if (figures?.ttft_s !== undefined) add("ttft", { value: seconds(figures.ttft_s) });
  if (figures?.tokens !== undefined) add("tokens", { count: figures.tokens });
  if (figures?.prompt) add("cached", { count: figures.cached, total: figures.prompt });
  if (figures?.drafted) add("accepted", { count: figures.accepted, total: figures.drafted });
  if (ending) add(ending);
  return row;
}

/** Three digits are enough to read. */
function rounded(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

function seconds(value) {
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

/** The figures in the last chunk of a stream; `ttftS` as measured here, where the server tells none. */
function readFigures({ usage, timings }, ttftS) {
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } =
    usage?.completion_tokens_details ?? {};
  return {
    tokens: usage?.completion_tokens,
    prompt: usage?.prompt_tokens,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    accepted,
    drafted: accepted + rejected,
    ttft_s: timings?.ttft_s ?? ttftS,
    speed: timings?.decode_tokens_per_s,
  };
}
