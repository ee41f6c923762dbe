// The prompts: their texts, and the coupling of each against one of its properties.
const BEGINNING = 20; // of a long list of prompts, how many are shown before the rest is unfolded
const LONG = 300; // characters of a prompt before the rest is unfolded
const TOKENS_SAID = { last: "the last token of each", cls: "the class token of each", all: "every token" };
const shortened = (text, length) => (text.length > length ? text.slice(0, length - 3) + "…" : text);

function listedPrompt(of, i) {
  const about = [of.lengths && `${of.lengths[i]} token${of.lengths[i] === 1 ? "" : "s"}`, of.sources && of.sources[i], of.difficulty &&
    `difficulty ${of.difficulty[i]}`
  ].filter(Boolean).join(", ");
  const text = of.texts[i] || "(no text)",
    beginning = text.slice(0, LONG);
  const shownText = text.length > LONG ? element("details", {}, element("summary", {}, `${beginning}…`), "…" + text.slice(
    LONG)) : text;
  return element("li", {}, element("span", { className: "prompt" }, shownText), about ? element("span",
    { className: "about" }, about) : "");
}

function listPrompts() {
  const of = model().prompts,
    at = TOKENS_SAID[of.tokens] || (of.tokens && `positions ${of.tokens}`),
    inputs = of.texts ? `${of.count} prompt${of.count === 1 ? "" : "s"}` : `${of.count} sample${of.count === 1 ? "" : "s"}, of which the results hold no text`;
  $("prompts-said").textContent = `${inputs}.${at && coupled(model()) ? ` Jacobians, and therefore mis-couplings, are those at ${at}.` : ""}`;
  const items = of.texts ? of.texts.map((_, i) => listedPrompt(of, i)) : [],
    rest = items.slice(BEGINNING);
  $("prompts-listed").replaceChildren(element("ol", {}, ...items.slice(0, BEGINNING)), ...(rest.length ? [element(
    "details", { className: "more" }, element("summary", {}, `${rest.length} more`), element("ol", { start: BEGINNING +
        1 }, ...rest))] : []));
}

// Coupling of each prompt against one of its properties.
function ofPrompts(id, property, axis, values, hover) {
  figures[id] = {
    has: () => here() && Boolean(model().prompts && values(model().prompts) && (model().prompts.coupling[state
      .measure] || {})[state.k]),
    title: () => `${ofModel()}Coupling of each prompt against its ${property}: ${chosen()}, step ${stepName(state.step)}`,
    draw() {
      const { texts, coupling } = model().prompts, x = values(model().prompts), y = Array.from(atStep(coupling[
        state.measure][state.k], stepIndex()).values, finite);
      const text = x.map((_, i) => (texts && texts[i] ? shortened(texts[i], 60) : `input ${i + 1}`));
      return {
        traces: [noCoupling(x),
          { x, y, text: text.map((t) => t.replaceAll("<", "&lt;")), name: "prompts", mode: "markers",
            marker: { size: 8, color: colour(0) }, hovertemplate: `%{text}<br>${hover}: %{y:.4f}<extra></extra>` }
        ],
        layout: { xaxis: { title: { text: axis } },
          yaxis: { title: { text: COUPLING } } },
        table: () => records({ model: model().name, ...coupledBy(), step: state.step }, { ...(texts ? { prompt: texts } : {}),
          [axis]: x, coupling: y }),
      };
    },
  };
}
ofPrompts("prompts", "length", "tokens", (of) => of.lengths, "%{x} tokens");
ofPrompts("difficulty", "difficulty", "difficulty", (of) => of.difficulty, "difficulty %{x}");
