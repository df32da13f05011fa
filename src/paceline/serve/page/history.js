// The list of chats at the side: open, rename, delete with a way back, export and import.
"use strict";

class HistoryView {
  #list = byId("chats");

  /** `onopen(chat)` shows a chat, `onremove(id)` leaves one that is about to go, `ontitle(id, title)` renames it. */
  constructor({ store, onopen, onremove, ontitle }) {
    Object.assign(this, { store, onopen, onremove, ontitle });
    byId("export").onclick = () => this.#export();
    byId("import").onclick = () => byId("import-file").click();
    byId("import-file").onchange = (event) => this.#import(event.target);
  }

  /** Draws the list; the chat that is open is marked. */
  draw(openId) {
    this.openId = openId;
    const chats = this.store.list();
    byId("export").disabled = !chats.length;
    if (chats.length) this.#list.replaceChildren(...chats.map((entry) => this.#row(entry)));
    else this.#list.replaceChildren(say(make("li", { className: "empty" }), "noChats"));
  }

  #row({ id, title }) {
    const open = label(make("button", { type: "button", className: "open", onclick: () => this.#open(id) }, title), "open", {
      title,
    });
    if (id === this.openId) open.setAttribute("aria-current", "page");
    const row = make("li");
    const rename = iconButton("edit", "rename", () => this.#rename(row, id, title), { title });
    const remove = iconButton("delete", "deleteChat", () => this.#remove(id), { title });
    row.append(open, rename, remove);
    return row;
  }

  #open(id) {
    const chat = this.store.load(id);
    if (chat) this.onopen(chat);
    else this.draw(this.openId); // another tab has deleted it
  }

  #rename(row, id, title) {
    const input = label(make("input", { value: title, maxLength: 80 }), "newTitle");
    const end = (isKept) => {
      input.onblur = null;
      if (isKept && input.value.trim()) this.ontitle(id, input.value.trim());
      this.draw(this.openId);
    };
    input.onblur = () => end(true);
    input.onkeydown = (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter");
    };
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  #remove(id) {
    this.onremove(id); // first: leaving a chat keeps what has come of its answer
    const chat = this.store.load(id);
    this.store.remove(id);
    this.draw(this.openId);
    const bringBack = () => {
      this.store.save(chat);
      this.onopen(chat);
    };
    if (chat) notify("chatDeleted", {}, { key: "undo", run: bringBack });
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.store.exported()], { type: "application/json" }));
    make("a", { href: url, download: "paceline-chats.json" }).click();
    URL.revokeObjectURL(url);
  }

  async #import(input) {
    const [file] = input.files;
    try {
      notify("imported", { count: this.store.import(await file.text()) });
    } catch (error) {
      if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
      notify("importFailed");
    }
    input.value = "";
    this.draw(this.openId);
  }
}
