// The page put together: choices filled in, listened to, and kept; figures framed, observed and drawn.
const CHOICES = [...WORDS, ...NUMBERS];

function fill(id, values, labels = values) {
  $(id).replaceChildren(...values.map((value, i) => new Option(labels[i], value)));
}

function offer() {
  const measures = all(MEASURED),
    coupling = data.models.some((m) => m.layers > 1 && Object.keys(m.curves).length),
    kinds = Object.keys(model().tokens),
    layers = blocks();
  fill("model", data.models.map((_, i) => String(i)), data.models.map((m) => m.name));
  fill("measure", measures, measures.map((name) => MEASURES[name].label));
  fill("k", all((m) => m.ks).sort((a, b) => a - b).map(String));
  fill("pairs", Object.keys(PAIRS), Object.values(PAIRS));
  fill("score", ["", ...all((m) => Object.keys(m.score))], ["none", ...all((m) => Object.keys(m.score))]);
  fill("last", Object.keys(LAST), Object.values(LAST));
  fill("axis", Object.keys(AXES), Object.values(AXES));
  if (data.across) fill("against", against());
  fill("kind", kinds, kinds.map((kind) => KINDS_OF_TOKENS[kind]));
  for (const id of ["l", "m"]) fill(id, layers.map(String));
  fill("block", tokenBlocks(model()).map(String));
  $("step").max = model().steps.length - 1;
  $("step").disabled = model().steps.length < 2;
  const hidden = {
    model: !several,
    axis: data.models.every((m) => m.steps.length < 2),
    measure: !measures.length,
    k: !measures.length,
    pairs: !coupling,
    score: !all((m) => Object.keys(m.score)).length,
    last: !all((m) => Object.keys(m.trajectory)).length,
    kind: !kinds.length,
    block: !kinds.length,
    l: layers.length < 2 || !coupling,
    m: layers.length < 2 || !coupling
  };
  for (const [id, hide] of Object.entries(hidden)) $(id).closest("label").hidden = hide;
  listPrompts();
  $("last-note").hidden = hidden.last || model().final_norm !== "exclude";
}

function show(ids) {
  settle();
  remember();
  for (const id of CHOICES) $(id).value = String(state[id] ?? "");
  $("step").value = stepIndex();
  $("step").setAttribute("aria-valuetext", `step ${stepName(state.step)}`);
  $("step-shown").textContent = stepName(state.step);
  for (const span of document.querySelectorAll(".at-step")) span.textContent = stepName(state.step);
  refresh(ids);
  for (const section of document.querySelectorAll("main section")) {
    section.hidden = ![...section.querySelectorAll("figure, .listed")].some((part) => !part.hidden);
    document.querySelector(`nav a[href="#${section.id}"]`).parentElement.hidden = section.hidden;
  }
}

for (const id of Object.keys(figures)) {
  const button = (text, label, save) => {
    const made = element("button", { type: "button", className: text.toLowerCase() }, text);
    made.setAttribute("aria-label", label);
    made.addEventListener("click", save);
    return made;
  };
  const pictures = $(id).matches(".chart") ? ["PNG", "SVG"] : [];
  const buttons = [button("CSV", "Numbers of this chart as CSV", () => download(id)), ...pictures.map((format) => button(format,
    `This chart as ${format}`, () => picture(id, format.toLowerCase())))];
  $(`${id}-figure`).prepend(element("div", { className: "head" }, element("h3", { id: `${id}-title` }), element("div", {
    className: "saves" }, ...buttons)));
  if ($(id).matches(".chart:not([role])")) $(id).setAttribute("role", "img");
}

$("controls").addEventListener("submit", (event) => event.preventDefault());
for (const id of [...CHOICES, "step"]) {
  $(id).addEventListener("input", () => {
    if (id === "step") state.step = model().steps[Number($("step").value)];
    else state[id] = NUMBERS.includes(id) ? Number($(id).value) : $(id).value;
    if (id === "model") { settle();
      offer(); }
    show();
  });
}
$("theme").addEventListener("click", () => {
  state.theme = dark() ? "light" : "dark";
  stored(state.theme);
  paint();
  show();
});
system.addEventListener("change", () => { paint();
  show(); });

function pick(l, m) {
  const within = (value) => Math.min(Math.max(value, 1), model().layers);
  [state.l, state.m] = [within(l), within(m)];
  show(["matrix", "history", "absolute"]);
}
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
$("matrix").addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  pick(state.l + move[0], state.m + move[1]);
});
// The cell under the pointer, also on the diagonal, where there is no value to click on.
$("matrix").addEventListener("click", (event) => {
  const { xaxis, yaxis } = $("matrix")._fullLayout, box = $("matrix").querySelector(".nsewdrag")
    .getBoundingClientRect();
  if (event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box
    .bottom) return;
  pick(Math.round(yaxis.p2c(event.clientY - box.top)), Math.round(xaxis.p2c(event.clientX - box.left)));
});

// The address keeps the choices, so links within the page move the focus instead.
for (const link of document.querySelectorAll('a[href^="#"]')) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const target = $(link.getAttribute("href").slice(1));
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  });
}

let drawnFor = window.innerWidth;
window.addEventListener("resize", () => {
  if (printing || window.innerWidth === drawnFor) return;
  drawnFor = window.innerWidth;
  refresh();
});

// Charts that were not in sight are drawn for print; a chart is as wide as its column on paper.
let unfolded = [];
window.addEventListener("beforeprint", () => {
  if (printing) return;
  printing = true;
  document.documentElement.classList.add("printing");
  unfolded = [...document.querySelectorAll("details:not([open], .more)")];
  for (const details of unfolded) details.open = true;
  paint();
  refresh();
  for (const id of [...stale]) draw(id);
});
window.addEventListener("afterprint", () => {
  printing = false;
  document.documentElement.classList.remove("printing");
  for (const details of unfolded) details.open = false;
  paint();
  refresh();
});

if (data.differences.length) {
  $("differences").hidden = false;
  $("differences").querySelector("span").textContent = data.differences.join("; ");
}
settle();
paint();
offer();
show();
for (const id of Object.keys(figures)) observer.observe($(id));
document.addEventListener("DOMContentLoaded", () => { for (const id of seen)
    if (stale.has(id)) draw(id); });
