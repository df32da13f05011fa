// What went wrong, told where the answer would be, with what can be done about it.
"use strict";

const KEY = "paceline.key";
const POLL_MS = 1000;
const PROBLEM_TEXTS = {
  key: "problemKey",
  busy: "problemBusy",
  loading: "problemLoading",
  offline: "problemOffline",
  context: "problemContext",
  refused: "problemRefused",
  server: "problemServer",
};

/** A problem as an element. `retry()` asks again; `dropOldest()` does so with less, null where nothing can be left out. */
class ProblemView {
  #timer = 0;

  constructor(problem, { retry, dropOldest }) {
    this.retry = retry;
    this.text = say(make("p"), PROBLEM_TEXTS[problem.kind], { seconds: problem.waitS });
    this.actions = make("div", { className: "problem-actions" });
    this.element = make("div", { className: "problem" }, this.text, this.actions);
    this.element.setAttribute("role", "alert");
    const isDetailed = problem.message && ["refused", "server", "context"].includes(problem.kind);
    if (isDetailed) this.text.after(make("p", { className: "detail", lang: "en" }, problem.message));
    const offer = { key: this.#askKey, busy: this.#countDown, loading: this.#pollReady, context: this.#offerLess };
    (offer[problem.kind] ?? this.#offerRetry).call(this, { problem, dropOldest });
  }

  /** Ends what waits. */
  dispose() {
    clearTimeout(this.#timer);
    this.element.remove();
  }

  #offerRetry() {
    this.actions.append(textButton("tryAgain", this.retry, "primary"));
  }

  #offerLess({ dropOldest }) {
    if (dropOldest) this.actions.append(textButton("dropOldest", dropOldest, "primary"));
    else say(this.text, "problemContextOne");
  }

  #countDown({ problem }) {
    const until = performance.now() + 1000 * problem.waitS;
    const tick = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      if (left <= 0) return this.retry();
      say(this.text, "problemBusy", { seconds: left });
      this.#timer = setTimeout(tick, 250);
    };
    tick();
    this.text.setAttribute("aria-live", "off"); // said once, not every second
    this.actions.append(textButton("tryNow", this.retry), textButton("cancel", () => this.dispose()));
  }

  #pollReady() {
    const poll = async () => {
      if (await isReady()) this.element.isConnected && this.retry();
      else this.#timer = setTimeout(poll, POLL_MS);
    };
    this.#timer = setTimeout(poll, POLL_MS);
    this.actions.append(textButton("tryNow", this.retry), textButton("cancel", () => this.dispose()));
  }

  #askKey() {
    if (PASSING.getItem(KEY)) say(this.text, "problemKeyWrong");
    const input = label(make("input", { type: "password", required: true, autocomplete: "off" }), "keyLabel");
    show("placeholder", input, "keyLabel");
    const button = say(make("button", { className: "primary" }), "useKey");
    const form = make("form", { className: "key" }, input, button, say(make("small"), "keyHint"));
    form.onsubmit = (event) => {
      event.preventDefault();
      PASSING.setItem(KEY, input.value.trim());
      this.retry();
    };
    this.actions.append(form);
    queueMicrotask(() => input.focus());
  }
}
