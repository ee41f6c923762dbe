// The reader's choices, kept in the address, so that a copied link shows the same.
const $ = (id) => document.getElementById(id);
const { measures: MEASURES, kinds: KINDS_OF_TOKENS, pairs: PAIRS, last: LAST, inputs: INPUTS } = data.texts;
const AXES = { log: "logarithmic", linear: "linear" };
const USUAL_AXIS = data.models.every((m) => m.even) ? "linear" : "log"; // as in figures

// What the reader chooses in lists, besides the step and the theme.
const WORDS = ["model", "measure", "k", "pairs", "score", "last", "axis", "kind", "against"];
const NUMBERS = ["l", "m", "block"];

const asked = new URLSearchParams(location.hash.slice(1));
const state = {};
for (const name of [...WORDS, "theme"]) state[name] = asked.get(name) || "";
for (const name of ["step", ...NUMBERS]) state[name] = asked.has(name) ? Number(asked.get(name)) : null;

function remember() {
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== null);
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
}

const model = () => data.models[Number(state.model)];
const union = (lists) => [...new Set(lists.flat())];
const all = (of) => union(data.models.map(of));
const stepIndex = () => model().steps.indexOf(state.step);
// Another model may lack the step: then use the nearest.
const nearest = (steps, step) =>
  step === null ? steps[steps.length - 1] : steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b :
    a));
// One block has no pairs.
const coupled = (m) => m.layers > 1 && Boolean((m.curves[state.measure] || {})[state.k]);
const valid = (value, values, otherwise) => (values.includes(value) ? value : otherwise);

// The blocks that have a basis block across tokens.
const tokenBlocks = (m) => (m.token_layers ? range(m.layers, 1).filter((l) => m.token_layers.others[l - 1] !== null) :
[]);

const MEASURED = (m) => union([Object.keys(m.curves), ...Object.values(m.tokens).map((kind) => Object.keys(kind
  .curves))]);

function settle() {
  const ks = all((m) => m.ks).sort((a, b) => a - b).map(String);
  state.model = valid(state.model, data.models.map((_, i) => String(i)), "0");
  state.measure = valid(state.measure, all(MEASURED), all(MEASURED)[0] || "");
  const shared = ks.filter((k) => data.models.every((m) => m.ks.includes(Number(k))));
  state.k = valid(state.k, ks, shared[0] || String(model().ks[0] ?? ks[0] ?? ""));
  state.pairs = valid(state.pairs, Object.keys(PAIRS), "mean_offdiag");
  state.score = valid(state.score, ["", ...all((m) => Object.keys(m.score))], "");
  state.last = valid(state.last, Object.keys(LAST), "alone");
  state.against = valid(state.against, data.across ? against() : [], "coupling");
  state.axis = valid(state.axis, Object.keys(AXES), USUAL_AXIS);
  const m = model(),
    kinds = Object.keys(m.tokens),
    clamp = (value, otherwise) => Math.min(Math.max(Math.round(value ?? otherwise), 1), m.layers);
  state.kind = valid(state.kind, kinds, kinds[0] || state.kind);
  state.step = nearest(m.steps, state.step);
  const [l, other] = coupled(m) ? m.most_coupled[state.measure][state.k] : [1, 2];
  state.l = clamp(Number.isFinite(state.l) ? state.l : null, l);
  state.m = clamp(Number.isFinite(state.m) ? state.m : null, other);
  state.block = valid(state.block, tokenBlocks(m), m.token_layers ? m.token_layers.middle : null);
}

// Light or dark: as the system has it, unless the reader has chosen. A file may be denied storage.
const system = matchMedia("(prefers-color-scheme: dark)");

function stored(theme) {
  try {
    if (theme) localStorage.setItem("coupling-page-theme", theme);
    return localStorage.getItem("coupling-page-theme");
  } catch (denied) {
    return null;
  }
}
let printing = false; // then charts are drawn for paper: all of them, light, at the width of a page
const dark = () => !printing && (state.theme || (system.matches ? "dark" : "light")) === "dark";
state.theme = valid(state.theme, ["light", "dark"], valid(stored(), ["light", "dark"], ""));

function paint() {
  document.documentElement.dataset.theme = dark() ? "dark" : "light";
  $("theme").textContent = dark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} theme`);
}
