// What the reader chose: sampling, system prompt, colours, language, what is shown. Kept in the browser.
"use strict";

const SETTINGS = "paceline.settings";
const LANGUAGES = ["en", "ko"];
const THEMES = ["auto", "light", "dark"];
const THEME_TEXTS = { auto: "themeAuto", light: "themeLight", dark: "themeDark" };

/** The sampling parameters as inputs; an empty one is left to the server. */
const SAMPLING = [
  { name: "temperature", min: 0, max: 2, step: 0.05 },
  { name: "top_p", min: 0.05, max: 1, step: 0.05 },
  { name: "top_k", min: 0, step: 1 },
  { name: "min_p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", min: 1, step: 1 },
  { name: "seed", min: 0, max: 2 ** 32 - 1, step: 1 },
  { name: "repetition_penalty", min: 0.5, max: 2, step: 0.05 },
];

class Settings {
  constructor(storage) {
    this.storage = storage;
    this.values = {
      language: navigator.language.startsWith("ko") ? "ko" : "en",
      theme: "auto",
      system: "",
      sampling: {},
      showsDrafted: false,
      showsLive: false,
      ...storedJson(storage, SETTINGS),
    };
  }

  /** Changes and keeps values. */
  set(values) {
    Object.assign(this.values, values);
    this.storage.setItem(SETTINGS, JSON.stringify(this.values));
  }

  /** Fills the dialog and listens to it. */
  bindDialog() {
    const dialog = byId("settings");
    const system = byId("system");
    system.oninput = () => this.set({ system: system.value });
    byId("sampling").append(...SAMPLING.map((parameter) => this.#field(parameter)));
    byId("settings-open").onclick = () => dialog.showModal();
    byId("reset").onclick = () => {
      this.set({ sampling: {}, system: "" });
      this.#fill();
    };
    dialog.onclick = (event) => {
      if (event.target === dialog && dialog.querySelector("form").reportValidity()) dialog.close();
    };
    this.#fill();
  }

  /** Shows the theme, the language and what is switched on. */
  apply() {
    const { theme, showsDrafted } = this.values;
    speak(this.values.language);
    document.documentElement.dataset.theme = theme;
    document.body.classList.toggle("shows-drafted", showsDrafted);
    byId("drafted").setAttribute("aria-pressed", showsDrafted);
    byId("legend").hidden = !showsDrafted;
    label(byId("theme"), THEME_TEXTS[theme]);
    const button = label(say(byId("language"), "otherLanguage"), "language");
    button.lang = LANGUAGES.find((other) => other !== language);
  }

  #field(parameter) {
    const { name, ...limits } = parameter;
    const input = make("input", { type: "number", id: name, inputMode: "decimal", ...limits });
    input.dataset.placeholder = "standard";
    input.setAttribute("aria-describedby", `${name}-hint`);
    input.oninput = () => {
      const { [name]: _, ...others } = this.values.sampling;
      const isGiven = input.value !== "" && input.validity.valid;
      this.set({ sampling: isGiven ? { ...others, [name]: input.valueAsNumber } : others });
    };
    const about = say(make("small", { id: `${name}-hint` }), `${name}Hint`);
    return make("div", { className: "field" }, say(make("label", { htmlFor: name }), name), input, about);
  }

  #fill() {
    byId("system").value = this.values.system;
    for (const { name } of SAMPLING) byId(name).value = this.values.sampling[name] ?? "";
  }
}
