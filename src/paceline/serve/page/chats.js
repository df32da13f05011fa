// Chats as the browser keeps them: a list of what there is, and each chat under a key of its own.
//
// A chat is {id, title, updated, messages, skipped}; `skipped` counts the oldest messages that are no longer sent.
// A message is {role, text}; an answer may add `drafted` (half-open ranges of its text, flat), `figures` and `ending`.
"use strict";

const LIST = "paceline.chats";
const CHAT_KEY = "paceline.chat.";
const EXPORT_KIND = "paceline.chats/1";

/** A chat without messages. It is kept once it has one. */
function newChat() {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", updated: 0, messages: [], skipped: 0 };
}

/** What to call a chat: its title, or how it begins. */
function titleOf(chat) {
  return chat.title || (chat.messages[0]?.text ?? "").trim().split("\n")[0].slice(0, 60);
}

class ChatStore {
  constructor(storage) {
    this.storage = storage;
  }

  /** {id, title, updated} of each chat, the newest first. */
  list() {
    const list = storedJson(this.storage, LIST) ?? [];
    return list.sort((one, other) => other.updated - one.updated);
  }

  /** The chat, null when it is not there. */
  load(id) {
    return storedJson(this.storage, CHAT_KEY + id);
  }

  /** Keeps a chat; false when the browser has no room for it. One without messages is forgotten. */
  save(chat) {
    const others = this.list().filter(({ id }) => id !== chat.id);
    try {
      if (chat.messages.length) {
        this.storage.setItem(CHAT_KEY + chat.id, JSON.stringify(chat));
        others.push({ id: chat.id, title: titleOf(chat), updated: chat.updated });
      } else {
        this.storage.removeItem(CHAT_KEY + chat.id);
      }
      this.storage.setItem(LIST, JSON.stringify(others));
      return true;
    } catch (error) {
      if (error.name === "QuotaExceededError") return false;
      throw error;
    }
  }

  /** Forgets a chat. */
  remove(id) {
    this.save({ id, messages: [] });
  }

  /** All chats as a JSON text. */
  exported() {
    const chats = this.list().map(({ id }) => this.load(id));
    return JSON.stringify({ kind: EXPORT_KIND, chats }, null, 1);
  }

  /** Adds the chats of such a text and returns how many; throws for a text that is none. Replaces equal ids. */
  import(text) {
    const { kind, chats } = JSON.parse(text);
    if (kind !== EXPORT_KIND || !chats.every(isChat)) throw new TypeError("not an export of chats");
    return chats.filter((chat) => this.save(chat)).length;
  }
}

function isChat(value) {
  const isMessage = ({ role, text }) => ["user", "assistant"].includes(role) && typeof text === "string";
  const { id, title, updated, messages, skipped } = value;
  const hasKinds = typeof id === "string" && typeof title === "string" && Number.isFinite(updated);
  return hasKinds && Number.isInteger(skipped) && messages.length > 0 && messages.every(isMessage);
}
