// The chat that is open: what stands in it, the answer under way, and what the reader does with its messages.
"use strict";

const NEAR_END_PX = 40;

class Conversation {
  #log = byId("log");
  #views = [];
  #running = null;
  #problem = null;
  #follows = true;
  #lastTop = 0;

  /** `onchange()` is called after the chat or its state has changed. */
  constructor({ store, settings, onchange }) {
    this.store = store;
    this.settings = settings;
    this.onchange = onchange;
    this.chat = newChat();
    this.#log.onscroll = () => this.#scrolled();
    byId("to-end").onclick = () => this.#toEnd();
    new ResizeObserver(() => this.#follow()).observe(this.#log);
  }

  get isAnswering() {
    return this.#running !== null;
  }

  /** Whether there is a message of the reader's that can be edited. */
  get lastQuestion() {
    return this.chat.messages.findLast(({ role }) => role === "user") ?? null;
  }

  /** Shows another chat; an answer under way is stopped. */
  open(chat) {
    this.stop();
    this.chat = chat;
    this.#draw();
    this.#toEnd();
  }

  /** Asks: a new message, or the last one in other words. */
  send(text, isEdit = false) {
    if (isEdit) this.#cut(this.chat.messages.lastIndexOf(this.lastQuestion));
    this.chat.messages.push({ role: "user", text });
    this.#keep();
    this.#draw();
    this.#toEnd();
    return this.answer();
  }

  /** Ends the answer under way; what has come of it stays. */
  stop() {
    this.#running?.controller.abort();
    this.#endAnswer("stopped");
  }

  /** Answers the last question, in place of the answer it has. */
  retry() {
    this.stop();
    this.#cut(this.chat.messages.indexOf(this.lastQuestion) + 1);
    this.#draw();
    return this.answer();
  }

  /** Has the model continue after the last message. */
  async answer() {
    this.stop();
    this.#problem?.dispose();
    this.#problem = null;
    const message = { role: "assistant", text: "", drafted: [] };
    const request = this.#request();
    const view = this.#append(message);
    const running = { message, view, controller: new AbortController(), started: performance.now() };
    this.#running = running;
    view.begin();
    this.#markLast();
    if (document.activeElement === document.body) focusBox(); // the button that was pressed is gone
    this.#toEnd();
    this.onchange();
    try {
      await this.#stream(request, running);
      this.#endAnswer(message.ending);
    } catch (error) {
      if (this.#running !== running) return; // it was stopped
      this.#endAnswer("interrupted");
      this.#showProblem(error instanceof Problem ? error : new Problem("server", String(error)));
    }
  }

  async #stream(request, running) {
    const { message, view, controller } = running;
    const options = { signal: controller.signal, key: PASSING.getItem(KEY) };
    for await (const chunk of chunksOf(request, options)) {
      const [choice] = chunk.choices;
      if (choice?.delta.content) {
        message.figures ??= { ttft_s: (performance.now() - running.started) / 1000 };
        this.#add(message, choice);
        view.refresh(() => this.#follow());
      }
      if (choice?.finish_reason === "length") message.ending = "cut";
      if (chunk.usage) message.figures = readFigures(chunk, message.figures?.ttft_s);
    }
  }

  #add(message, { delta, drafted = [] }) {
    const isWhole = drafted.map(([text]) => text).join("") === delta.content;
    const pieces = isWhole ? drafted : [[delta.content, false]];
    for (const [text, isDrafted] of pieces) grow(message, text, isDrafted);
  }

  #request() {
    const { sampling, system } = this.settings.values;
    const messages = this.chat.messages.slice(this.chat.skipped).map(({ role, text }) => ({ role, content: text }));
    if (system.trim()) messages.unshift({ role: "system", content: system });
    return { messages, ...sampling };
  }

  /** Keeps what came of the answer under way. An answer without text is no message. */
  #endAnswer(ending) {
    const running = this.#running;
    if (!running) return;
    this.#running = null;
    const { message, view } = running;
    message.ending = ending;
    if (message.text || message.figures) {
      view.flush();
      this.chat.messages.push(message);
    } else {
      view.element.remove();
      this.#views.pop();
    }
    this.#keep();
    this.#markLast();
    this.#follow();
    this.onchange();
  }

  #showProblem(problem) {
    const retry = () => this.retry();
    const questions = this.chat.messages.slice(this.chat.skipped).filter(({ role }) => role === "user").length;
    const dropOldest = questions > 1 ? () => this.#dropOldest() : null;
    this.#problem = new ProblemView(problem, { retry, dropOldest });
    this.#log.append(this.#problem.element);
    this.#toEnd();
  }

  /** Sends the later half of the turns from now on. */
  #dropOldest() {
    const { messages, skipped } = this.chat;
    const starts = messages.flatMap(({ role }, index) => (role === "user" && index >= skipped ? [index] : []));
    this.chat.skipped = starts[Math.ceil(starts.length / 2)];
    return this.retry();
  }

  #remove(message) {
    this.stop();
    const { messages } = this.chat;
    const index = messages.indexOf(message);
    const count = message.role === "user" && messages[index + 1]?.role === "assistant" ? 2 : 1;
    messages.splice(index, count);
    if (index < this.chat.skipped) this.chat.skipped -= count;
    this.#keep();
    this.#draw();
    this.onchange();
  }

  #cut(index) {
    this.chat.messages.length = index;
    this.chat.skipped = Math.min(this.chat.skipped, Math.max(0, index - 1));
  }

  #keep() {
    this.chat.updated = Date.now();
    if (!this.store.save(this.chat)) notify("storageFull");
    this.onchange();
  }

  #draw() {
    this.#problem?.dispose();
    this.#problem = null;
    this.#views = [];
    this.#log.replaceChildren();
    if (!this.chat.messages.length) this.#log.append(welcome());
    this.chat.messages.forEach((message, index) => {
      if (index > 0 && index === this.chat.skipped) this.#log.append(say(make("p", { className: "divider" }), "notSent"));
      this.#append(message);
    });
    this.#markLast();
  }

  #append(message) {
    this.#log.querySelector(".welcome")?.remove();
    const view = new MessageView(message, this.#actions(message));
    this.#views.push(view);
    this.#log.append(view.element);
    return view;
  }

  /** What only the last messages offer moves on when another becomes the last. */
  #markLast() {
    for (const view of this.#views.slice(-3)) {
      if (view !== this.#running?.view) view.finish(this.#actions(view.message));
    }
  }

  #actions(message) {
    const actions = { copy: (button) => copyFrom(button, message.text) };
    const isLast = message === this.chat.messages.at(-1);
    if (isLast && !this.isAnswering) actions[message.role === "user" ? "answerThis" : "retry"] = () => this.retry();
    if (message === this.lastQuestion) actions.edit = () => this.onedit(message.text);
    actions.delete = () => this.#remove(message);
    return actions;
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  #scrolled() {
    const { scrollTop } = this.#log;
    if (this.#isAtEnd()) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false; // upwards: the reader, not the growing text
    this.#lastTop = scrollTop;
    byId("to-end").hidden = this.#isAtEnd();
  }

  #follow() {
    if (this.#follows) this.#log.scrollTop = this.#log.scrollHeight;
    byId("to-end").hidden = this.#isAtEnd();
  }

  #toEnd() {
    this.#follows = true;
    this.#follow();
  }
}

function welcome() {
  const model = byId("model").textContent;
  const line = model ? say(make("p"), "welcomeHint", { model }) : say(make("p"), "welcomeHintPlain");
  return make("div", { className: "welcome" }, say(make("h2"), "welcome"), line);
}
