// Puts the page together: buttons, keys, the message box.
"use strict";

class MessageBox {
  #box = byId("box");
  #isEdit = false;

  constructor(conversation) {
    this.conversation = conversation;
    conversation.onedit = (text) => this.edit(text);
    this.#box.oninput = () => this.fit();
    this.#box.onkeydown = (event) => this.#key(event);
    byId("cancel-edit").onclick = () => this.clear();
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      this.#send();
    };
  }

  get isEdit() {
    return this.#isEdit;
  }

  /** Takes a message that was sent back into the box. */
  edit(text) {
    this.#isEdit = true;
    this.#fill(text);
    this.#box.focus();
    this.#box.setSelectionRange(text.length, text.length);
  }

  /** Empties the box. */
  clear() {
    this.#isEdit = false;
    this.#fill("");
  }

  /** As high as its text, within what the style allows; and the button as the text allows. */
  fit() {
    this.#box.style.height = "auto";
    this.#box.style.height = `${this.#box.scrollHeight}px`;
    byId("send").disabled = !this.#box.value.trim();
  }

  #fill(text) {
    this.#box.value = text;
    byId("editing").hidden = !this.#isEdit;
    this.fit();
    focusBox();
  }

  #key(event) {
    if (event.isComposing || event.keyCode === 229) return; // an input method is at work: its Enter is not ours
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#send();
    }
    const question = this.conversation.lastQuestion;
    if (event.key === "ArrowUp" && !this.#box.value && question) {
      event.preventDefault();
      this.edit(question.text);
    }
  }

  #send() {
    const text = this.#box.value;
    if (!text.trim() || this.conversation.isAnswering) return;
    const isEdit = this.#isEdit;
    this.clear();
    this.conversation.send(text, isEdit);
  }
}

class Page {
  constructor() {
    this.settings = new Settings(LASTING);
    this.store = new ChatStore(LASTING);
    this.settings.bindDialog();
    this.settings.apply();
    this.live = new LivePanel();
    this.conversation = new Conversation({
      store: this.store,
      settings: this.settings,
      onchange: () => this.refresh(),
    });
    this.history = new HistoryView({
      store: this.store,
      onopen: (chat) => this.open(chat),
      onremove: (id) => id === this.conversation.chat.id && this.open(newChat()),
      ontitle: (id, title) => this.rename(id, title),
    });
    this.box = new MessageBox(this.conversation);
    this.bindButtons();
    this.bindKeys();
    this.live.toggle(this.settings.values.showsLive);
    const chat = this.store.load(location.hash.slice(1));
    this.open(chat ?? newChat());
    this.showModel();
  }

  /** Shows a chat; the address remembers which. */
  open(chat) {
    this.conversation.open(chat);
    this.box.clear();
    this.showHistory(false);
    this.refresh();
  }

  rename(id, title) {
    const { chat } = this.conversation;
    const renamed = id === chat.id ? chat : this.store.load(id);
    renamed.title = title;
    this.store.save(renamed);
    this.refresh();
  }

  /** Brings everything around the conversation up to date with it. */
  refresh() {
    const { chat, isAnswering } = this.conversation;
    const isKept = chat.messages.length > 0;
    history.replaceState(null, "", isKept ? `#${chat.id}` : location.pathname);
    if (isKept) byId("title").replaceChildren(titleOf(chat));
    else say(byId("title"), "newChat");
    if (isKept) delete byId("title").dataset.text;
    this.history.draw(chat.id);
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
  }

  async showModel() {
    const key = PASSING.getItem(KEY);
    const response = await fetch("v1/models", { headers: key ? { Authorization: `Bearer ${key}` } : {} }).catch(() => null);
    if (!response?.ok) return;
    const [model] = (await response.json()).data;
    byId("model").textContent = model.id;
    const hint = document.querySelector(".welcome p");
    if (hint) say(hint, "welcomeHint", { model: model.id });
  }

  showHistory(isShown) {
    document.body.classList.toggle("shows-history", isShown);
    byId("scrim").hidden = !isShown;
    byId("open-history").setAttribute("aria-expanded", isShown);
  }

  /** Changes a setting and shows it. */
  change(values) {
    this.settings.set(values);
    this.settings.apply();
  }

  bindButtons() {
    const { values } = this.settings;
    byId("stop").onclick = () => this.stop();
    byId("new-chat").onclick = () => this.open(newChat());
    byId("new-chat-key").textContent = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘K" : "Ctrl K";
    byId("open-history").onclick = () => this.showHistory(true);
    for (const id of ["close-history", "scrim"]) byId(id).onclick = () => this.showHistory(false);
    byId("drafted").onclick = () => this.change({ showsDrafted: !values.showsDrafted });
    byId("theme").onclick = () => this.change({ theme: THEMES[(THEMES.indexOf(values.theme) + 1) % THEMES.length] });
    byId("language").onclick = () => this.change({ language: LANGUAGES.find((other) => other !== language) });
    byId("live-toggle").onclick = () => {
      this.settings.set({ showsLive: !values.showsLive });
      this.live.toggle(values.showsLive);
    };
  }

  bindKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.isComposing || byId("settings").open) return;
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.open(newChat());
      }
      if (event.key === "Escape") this.escape();
    });
    addEventListener("pagehide", () => this.conversation.stop()); // keeps what has come
    addEventListener("storage", () => this.history.draw(this.conversation.chat.id)); // another tab
  }

  /** Ends the nearest thing that can be ended. */
  escape() {
    if (document.body.classList.contains("shows-history")) this.showHistory(false);
    else if (this.conversation.isAnswering) this.stop();
    else if (this.box.isEdit) this.box.clear();
  }

  stop() {
    this.conversation.stop();
    focusBox();
  }
}

new Page();
