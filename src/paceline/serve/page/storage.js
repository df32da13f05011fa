// What the browser keeps: across visits, and for this one. A reader may forbid both; then it lasts until the page is left.
"use strict";

/** As much of the Storage interface as the page uses, in memory. */
class PassingStorage {
  #values = new Map();

  getItem(key) {
    return this.#values.get(key) ?? null;
  }

  setItem(key, value) {
    this.#values.set(key, value);
  }

  removeItem(key) {
    this.#values.delete(key);
  }
}

/** The browser's storage of that name. Where the reader blocks it, the mere property throws. */
function storageNamed(name) {
  try {
    return window[name] ?? new PassingStorage();
  } catch {
    return new PassingStorage();
  }
}

/** What a key holds, null for what is no JSON: somebody else, or an older page, wrote it. */
function storedJson(storage, key) {
  try {
    return JSON.parse(storage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

const LASTING = storageNamed("localStorage");
const PASSING = storageNamed("sessionStorage");
