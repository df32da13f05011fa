// The server's figures of the last two minutes as small charts, asked for once a second while they can be seen.
"use strict";

const LIVE_POINTS = 120;
const LIVE_MS = 1000;
const WIDTH = 240;
const HEIGHT = 44;

/** The charts: where their lines are in `GET /stats`, and how the newest value reads. `top` is the least height. */
const CHARTS = [
  { name: "chartSpeed", lines: ["tokens_per_s"], top: 10, read: ([speed]) => rounded(speed) },
  { name: "chartQueue", lines: ["running", "waiting"], top: 4, read: (values) => values.join(" + ") },
  { name: "chartMemory", lines: ["kv_use"], top: 1, read: ([share]) => percent(share) },
  { name: "chartHits", lines: ["prefix_hit_rate"], top: 1, read: ([share]) => percent(share) },
  { name: "chartAcceptance", lines: ["acceptance"], top: 1, read: ([share]) => percent(share) },
];

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** One chart: a title, the newest value, and a line for each figure; a gap where there was none. */
class Chart {
  constructor(kind) {
    this.kind = kind;
    this.points = kind.lines.map(() => Array(LIVE_POINTS).fill(null));
    this.value = make("output", {}, "–");
    this.paths = kind.lines.map((_, index) => drawing("path", { class: `line line-${index}` }));
    const view = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    const head = make("div", { className: "chart-head" }, say(make("span"), kind.name), this.value);
    this.element = hint(make("div", { className: "chart" }, head, drawing("svg", view, ...this.paths)), "lastMinutes");
  }

  /** Adds the values of a second, null where the server tells none. */
  add(values) {
    const isKnown = values.every((value) => value !== null);
    this.value.textContent = isKnown ? this.kind.read(values) : "–";
    if (isKnown && values.length === 2) {
      const [running, waiting] = values;
      label(this.value, `${this.kind.name}Value`, { running, waiting });
    }
    this.points.forEach((line, index) => {
      line.push(values[index]);
      line.shift();
    });
    const top = Math.max(this.kind.top, ...this.points.flat());
    this.paths.forEach((path, index) => path.setAttribute("d", pathOf(this.points[index], top)));
  }
}

function pathOf(points, top) {
  const step = WIDTH / (LIVE_POINTS - 1);
  let isDrawing = false;
  const parts = points.map((value, index) => {
    if (value === null) return (isDrawing = false), "";
    const command = isDrawing ? "L" : "M";
    isDrawing = true;
    return `${command}${(index * step).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 5)).toFixed(1)}`;
  });
  return parts.join("");
}

class LivePanel {
  #charts = CHARTS.map((kind) => new Chart(kind));
  #problem = byId("live-problem");
  #timer = 0;
  #isOpen = false;

  constructor() {
    byId("charts").append(...this.#charts.map(({ element }) => element));
    document.addEventListener("visibilitychange", () => this.#plan());
  }

  /** Shows or hides the panel. */
  toggle(isOpen) {
    this.#isOpen = isOpen;
    byId("live").hidden = !isOpen;
    byId("live-toggle").setAttribute("aria-expanded", isOpen);
    this.#plan();
  }

  #plan() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#isOpen && !document.hidden) this.#poll();
  }

  async #poll() {
    const timer = setTimeout(() => this.#poll(), LIVE_MS);
    this.#timer = timer;
    const key = PASSING.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("stats", { headers }).catch(() => null);
    const stats = response?.ok ? await response.json() : {};
    if (response?.status === 404) clearTimeout(timer);
    this.#problem.hidden = response?.ok ?? false;
    if (!this.#problem.hidden) say(this.#problem, response?.status === 404 ? "liveMissing" : "liveLost");
    for (const chart of this.#charts) chart.add(chart.kind.lines.map((name) => stats[name] ?? null));
  }
}
