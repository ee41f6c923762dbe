"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const BLUE = "#0072B2", ORANGE = "#D55E00", GREEN = "#009E73", GREY = "#c4c9cf";
const $ = (id) => document.getElementById(id);
const phone = () => window.innerWidth < 760;

// Matrices come as base64 of little-endian float32, step by step: the store's own numbers.
function floats(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
const matrices = {};
for (const [measure, byK] of Object.entries(data.matrices)) {
  matrices[measure] = {};
  for (const [k, packed] of Object.entries(byK)) matrices[measure][k] = floats(packed);
}

// A logarithmic axis has no 0: step 0 stands half a step left of the first.
const first = Math.min(...data.steps.filter((s) => s > 0), Infinity);
const left = Number.isFinite(first) ? first / 2 : 1;
const at = (step) => (step > 0 ? step : left);
const short = (n) => (n >= 1000 && n % 1000 === 0 ? n / 1000 + "k" : String(n));
const ticks = data.steps.filter((s, i) => {
  const room = phone() ? 6 : 12;
  return data.steps.length <= room || i % Math.ceil(data.steps.length / room) === 0;
});
const stepAxis = {
  type: "log", title: { text: "training step" }, tickvals: ticks.map(at), ticktext: ticks.map(short),
  gridcolor: "#eceff2", zeroline: false,
};
const layerAxis = { title: { text: "block" }, gridcolor: "#eceff2", zeroline: false, dtick: data.layers > 12 ? 4 : 1 };

const round = Array.from({ length: 13 }, (_, i) => i - 6).flatMap((e) => [1, 2, 5].map((d) => Number(`${d}e${e}`)));
const logarithmic = { type: "log", tickvals: round, ticktext: round.map(String) };

function draw(id, traces, layout) {
  const base = {
    margin: { l: 58, r: 12, t: 56, b: 48 }, font: { size: 13, color: "#1a1d21" }, hovermode: "closest",
    legend: { orientation: "h", y: 1.0, yanchor: "bottom", x: 0, traceorder: "normal", font: { size: 12 } }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    title: { x: 0, xanchor: "left", xref: "paper", y: 0.985, yanchor: "top", font: { size: 15 } },
  };
  const title = { ...base.title, ...layout.title };
  const yaxis = { gridcolor: "#eceff2", zeroline: false, automargin: true, ...layout.yaxis };
  Plotly.react(id, traces, { ...base, ...layout, title, yaxis }, { responsive: true, displaylogo: false, displayModeBar: false });
}

function band(x, low, high, colour) {
  return [
    { x, y: low, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false },
    { x, y: high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: colour + "33", hoverinfo: "skip", showlegend: false },
  ];
}
const line = (x, y, name, colour, more = {}) => ({
  x, y, name, mode: "lines+markers", line: { color: colour, width: 2 }, marker: { size: 6 }, ...more,
});

const chosen = () => ({ measure: $("measure").value, k: $("k").value, pairs: $("pairs").value, i: Number($("step").value) });

function overTraining() {
  const { measure, k, pairs } = chosen();
  const x = data.steps.map(at), text = data.steps.map((s, i) => "step " + s + (data.suspect[i] ? " (suspect)" : ""));
  const pick = (yes, no) => data.suspect.map((doubted) => (doubted ? yes : no));
  const marker = { size: pick(11, 6), symbol: pick("x-open", "circle") };
  if (measure) {
    const c = data.curves[measure][k][pairs];
    draw("coupling", [
      ...band(x, c.q25, c.q75, BLUE),
      line(x, c.value, measure, BLUE, { text, marker }),
      { x, y: c.null, name: "null level", mode: "lines", line: { color: BLUE, dash: "dot", width: 2 }, text },
    ], { title: { text: `${measure}, K = ${k}, ${data.pair_names[pairs]}` }, xaxis: stepAxis, yaxis: { rangemode: "tozero" } });
    $("coupling-caption").textContent = data.captions[measure];
  }
  const spread = (id, names, title, more) => draw(id, names.flatMap(([name, label, colour]) => {
    const s = data.trajectory[name];
    return s ? [...band(x, s.q25, s.q75, colour), line(x, s.median, label, colour, { text, marker })] : [];
  }), { title: { text: title }, xaxis: stepAxis, yaxis: more });
  spread("lss", [["lss", "median", GREEN]], "Line-shape score", {});
  spread("expodistance", [["expodistance_raw", "before the final norm", GREEN], ["expodistance", data.final_norm, ORANGE]],
    "Expodistance", logarithmic);
  const tasks = Object.entries(data.score);
  $("score-figure").hidden = tasks.length === 0;
  if (tasks.length) {
    draw("score", tasks.map(([task, y], i) => line(x, y, task, i ? undefined : ORANGE, { text, marker, visible: i < 8 ? true : "legendonly" })),
      { title: { text: tasks.length === 1 ? tasks[0][0] : "Scores" }, xaxis: stepAxis, showlegend: tasks.length > 1 });
  }
}

function emphasised(id, x, rows, i, title, xaxis, yaxis, low, high) {
  const faint = rows.map((y, j) => (j === i ? null : { x, y, mode: "lines", line: { color: GREY, width: 1 }, name: "step " + data.steps[j], showlegend: false }));
  draw(id, [...faint.filter(Boolean), ...(low ? band(x, low[i], high[i], BLUE) : []), line(x, rows[i], "step " + data.steps[i], BLUE, { showlegend: false })],
    { title: { text: title }, xaxis, yaxis });
}

function atStep() {
  const { measure, k, i } = chosen();
  const step = data.steps[i], L = data.layers, layer = Array.from({ length: L }, (_, l) => l + 1);
  $("step-shown").textContent = step.toLocaleString("en");
  for (const span of document.querySelectorAll(".at-step")) span.textContent = step.toLocaleString("en");
  if (measure) {
    const all = matrices[measure][k], z = layer.map((_, l) =>
      Array.from(all.subarray((i * L + l) * L, (i * L + l + 1) * L), (value, m) => (l === m ? null : value)));
    const [low, high] = data.ranges[measure][k];
    draw("matrix", [{
      type: "heatmap", x: layer, y: layer, z, zmin: low, zmax: high, colorscale: "Cividis", reversescale: true,
      colorbar: { thickness: 12, title: { text: "" } },
      hovertemplate: "block %{y} in the basis of block %{x}: %{z:.4f}<extra></extra>",
    }], { title: { text: `${measure}, K = ${k}, step ${step}` },
      xaxis: { ...layerAxis, title: { text: "basis of block l′" }, constrain: "domain" },
      yaxis: { ...layerAxis, title: { text: "block l" }, autorange: "reversed", scaleanchor: "x", constrain: "domain" } });
    const rings = (data.distance[measure] || {})[k]; // a single block has no distances
    if (rings) emphasised("distance", layer.slice(0, -1), rings, i, `${measure} by |l − l′|`,
      { ...layerAxis, title: { text: "distance |l − l′|" } }, { rangemode: "tozero" });
    draw("singular", data.singular.ranks.map((rank, r) => line(layer, data.singular.values[i][r], "s" + rank, undefined)),
      { title: { text: "Singular values" }, xaxis: layerAxis, yaxis: logarithmic });
  }
  for (const [id, name, title] of [["lss_window", "lss_window", "Line-shape score by depth"], ["expodistance_window", "expodistance_raw_window", "Expodistance by depth"]]) {
    const w = data.windows[name];
    if (w) emphasised(id, layer, w.median, i, title, layerAxis, name === "lss_window" ? {} : logarithmic, w.q25, w.q75);
  }
}

function fill(select, values, labels = values) {
  select.replaceChildren(...values.map((value, i) => new Option(labels[i], value)));
}
fill($("measure"), Object.keys(data.curves));
fill($("k"), data.ks.map(String));
fill($("pairs"), data.pairs, data.pairs.map((p) => data.pair_names[p]));
$("pairs").value = "mean_offdiag";
$("step").max = data.steps.length - 1;
$("step").value = data.steps.length - 1;
for (const span of document.querySelectorAll(".window")) span.textContent = data.window;
$("controls").addEventListener("input", (event) => { if (event.target.id !== "step") overTraining(); atStep(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
overTraining();
atStep();
