// What all charts share: colours, axes, bands, drawing when seen, the numbers of a chart as CSV.
// A model also has its own marker and dash.
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon"];
const DASHES = ["solid", "dash", "dashdot", "longdash", "longdashdot", "8px,2px,2px,2px,2px,2px", "solid"];
const colour = (i) => { const of = data.texts.colours[dark() ? "dark" : "light"]; return of [i % of.length]; };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PAPER = 680; // pixels, the width of a printed page
const width = () => (printing ? PAPER : window.innerWidth);
const narrow = () => width() < 760;
const stepName = (step) => step.toLocaleString("en");

const several = data.models.length > 1;

// A logarithmic axis has no 0: step 0 stands at half the first positive step, and steps between the two in between.
const positive = all((m) => m.steps).filter((step) => step > 0);
const earliest = positive.length ? Math.min(...positive) : 2;
const left = earliest / 2;
const at = (step) => (step >= earliest || state.axis === "linear" ? step : left * 2 ** (step / earliest));

// The last step has a tick, and those before it that have room.
function stepAxis(more = []) {
  const steps = union([all((m) => m.steps), more]).sort((a, b) => a - b),
    linear = state.axis === "linear",
    last = steps[steps.length - 1],
    place = (step) => (linear ? step : Math.log(at(step))),
    apart = ((place(last) - place(steps[0])) / (width() < 1100 ? 6 : 9)) * 0.99 || 1,
    ticks = [];
  for (const step of linear ? roundSteps(steps[0], last, apart) : steps)
    if ((!ticks.length || place(step) - place(ticks[ticks.length - 1]) >= apart) && place(last) - place(step) >= apart) ticks.push(
      step);
  ticks.push(last);
  return { ...(linear ? {} : { type: "log" }), title: { text: `training step${linear ? "" : " (log scale)"}` }, tickvals: ticks
      .map(at), ticktext: ticks.map(stepName) };
}

// Multiples of 1, 2 or 5 times a power of ten, at least so far apart.
function roundSteps(first, last, apart) {
  const power = 10 ** Math.max(0, Math.floor(Math.log10(apart))),
    gap = [1, 2, 5, 10].map((times) => times * power).find((step) => step >= apart);
  return range(Math.floor(last / gap) - Math.ceil(first / gap) + 1, Math.ceil(first / gap)).map((i) => i * gap);
}

function layerAxis(count, title = "block", first = 1) {
  const every = [1, 2, 4, 5, 10, 20].find((gap) => count / gap <= (narrow() ? 8 : 14)) || 40;
  return { title: { text: title }, dtick: every, tick0: first, range: [first - 0.5, first + count - 0.5] };
}
// Over many decades only their powers of ten have room for a label.
function logarithmic(values) {
  const there = values.flat().filter((value) => value > 0),
    ratio = Math.max(...there) / Math.min(...there);
  const digits = ratio > 1e3 ? [1] : ratio > 8 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
  const ticks = range(25, -12).flatMap((e) => digits.map((d) => Number(`${d}e${e}`)));
  return { type: "log", tickvals: ticks, ticktext: ticks.map((tick) => (tick >= 1e4 || tick < 1e-3 ? tick
      .toExponential() : String(tick))) };
}

// An axis of values: { scale: "logarithmic" or "from zero", ...Plotly's }.
function scaled({ scale, ...axis } = {}, lines) {
  if (scale === "logarithmic") return { ...logarithmic(lines.map((line) => line.y)), ...axis };
  return scale === "from zero" ? { rangemode: "tozero", ...axis } : axis;
}

function styled(axis, base = {}) {
  const line = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
  return { ...line, ...base, ...axis };
}

const traces = {
  line: (x, y, name, i, more = {}) => ({
    x,
    y,
    name,
    mode: "lines+markers",
    connectgaps: false,
    line: { color: colour(i), width: 2, dash: DASHES[i % DASHES.length], ...more.line },
    marker: { size: 6, symbol: SYMBOLS[i % SYMBOLS.length], color: colour(i), line: { width: 0 }, ...more
      .marker },
    ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "line" && key !== "marker")),
  }),
  // From lower to upper; where a value is missing the band has a gap, like its line.
  band(x, low, high, i) {
    const xs = [],
      ys = [];
    for (let start = 0; start < x.length; start++) {
      if (low[start] === null || high[start] === null) continue;
      let end = start;
      while (end + 1 < x.length && low[end + 1] !== null && high[end + 1] !== null) end++;
      const run = range(end - start + 1, start),
        back = [...run].reverse();
      xs.push(...run.map((j) => x[j]), ...back.map((j) => x[j]), null);
      ys.push(...run.map((j) => low[j]), ...back.map((j) => high[j]), null);
      start = end;
    }
    return {
      x: xs,
      y: ys,
      mode: "lines",
      line: { width: 0, color: colour(i) },
      fill: "toself",
      fillcolor: colour(i) + "33",
      hoverinfo: "skip",
      showlegend: false,
      meta: { part: "band" }
    };
  },
  // A line over training, on which suspect steps are marked.
  training(m, y, name, i, more = {}) {
    const text = m.steps.map((step, j) => `step ${stepName(step)}${m.suspect[j] ? " (suspect)" : ""}`);
    const size = m.steps.length > 60 ? 4 : 6;
    const marker = { size: m.suspect.map((doubted) => (doubted ? 11 : size)), symbol: m.suspect.map((doubted) => (
        doubted ? "x-open" : SYMBOLS[i % SYMBOLS.length])) };
    return traces.line(m.steps.map(at), y, name, i, { text, customdata: m.steps,
      hovertemplate: "%{text}: %{y:.5g}", ...more, marker: { ...marker, ...more.marker } });
  },
  null: (m, y, i) => ({
    x: m.steps.map(at),
    y,
    name: several ? `${m.name}, null level` : "null level",
    showlegend: !several,
    mode: m.steps.length > 1 ? "lines" : "markers",
    marker: { symbol: "line-ew-open", size: 14, color: colour(i) },
    line: { color: colour(i), dash: "dot", width: 2 },
    customdata: m.steps,
    connectgaps: false,
    hovertemplate: "null level at step %{customdata}: %{y:.5g}",
  }),
};

const evenly = (colours) => colours.map((of, i, { length }) => [i / (length - 1), of]);
const SEQUENTIAL = evenly(data.texts.colours.sequential);
const heatmap = (x, y, z, [low, high], hovertemplate, name, more = {}) => ({
  type: "heatmap",
  x,
  y,
  z,
  zmin: low,
  zmax: high,
  colorscale: SEQUENTIAL,
  colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: css("--ink") } },
  hoverongaps: false,
  hovertemplate: `${hovertemplate}<extra></extra>`,
  name,
  ...more
});

const element = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

// id -> { has, title, draw }; draw gives { traces, layout, table, says }, or { element, table } where that is no chart.
const figures = {};
const seen = new Set(),
  stale = new Set();

function draw(id) {
  stale.delete(id);
  const { element: drawn, traces: lines, layout = {}, says = "" } = figures[id].draw(),
    title = figures[id].title();
  const area = $(id);
  if (drawn) return area.replaceChildren(drawn);
  if (area.getAttribute("role") === "img") area.setAttribute("aria-label", `${title}. ${says || describe(lines)}`);
  const { xaxis, yaxis, yaxis2, ...rest } = layout;
  const base = {
    width: area.clientWidth, // said, because Plotly keeps its first size when the page is laid out for paper
    height: area.clientHeight,
    margin: { l: 56, r: 14, t: 8, b: 44 },
    font: { size: 13, color: css("--ink"), family: getComputedStyle(document.body).fontFamily },
    hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: css("--paper"), font: { color: css("--ink") }, bordercolor: css("--faint"),
      namelength: -1 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", font: { size: 12 },
      traceorder: "normal", itemwidth: 30 },
    dragmode: narrow() ? false : "zoom",
  };
  const axes = { xaxis: styled(xaxis), yaxis: styled(scaled(yaxis, lines)), ...(yaxis2 ? { yaxis2: styled(yaxis2, { overlaying: "y", side: "right", showgrid: false,
        tickmode: "auto", nticks: 6 }) } : {}) };
  Plotly.react(area, lines, { ...base, ...rest, ...axes }, { displaylogo: false,
    displayModeBar: false });
}

// Describe a chart for screen readers: its lines, with their first and last values.
function describe(lines) {
  const short = (value) => (typeof value === "number" ? Number(value.toPrecision(3)) : value);
  const told = lines.filter((line) => line.name && line.y && !(line.meta && line.meta.part)).slice(0, 6).map((
    line) => {
      const there = line.y.map((value, i) => [value, i]).filter(([value]) => Number.isFinite(value));
      if (!there.length) return `${line.name}: no value`;
      const x = line.customdata || line.x,
        [first, last] = [there[0], there[there.length - 1]];
      return `${line.name}: ${short(first[0])} at ${short(x[first[1]])}, ${short(last[0])} at ${short(x[last[1]])}`;
    });
  return told.join("; ");
}

// The numbers of a chart: a record for each row, which says of which model, measure, K and step it is.
const records = (fixed, columns) => Object.values(columns)[0].map((_, i) => ({ ...fixed,
  ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])) }));
const entries = (fixed, [row, column], value, z, more = () => ({})) => z.flatMap((line, i) => line.map((entry, j) => (
  { ...fixed, [row]: i + 1, [column]: j + 1, [value]: entry, ...more(i, j) })));
const coupledBy = () => ({ measure: state.measure, k: Number(state.k) });

function csv(table) {
  const cell = (value) => (value === null || value === undefined || Number.isNaN(value) ? "" : /[",\r\n]/.test(value) ?
    `"${String(value).replaceAll('"', '""')}"` : value);
  const names = union(table.map(Object.keys));
  return [names, ...table.map((row) => names.map((name) => row[name]))].map((line) => line.map(cell).join(",") + "\n").join("");
}

function fileName(id, table) {
  const said = (name, one, more) => {
    const values = union([table.map((row) => row[name])]).filter((value) => value !== undefined);
    return values.length > 1 ? [more(values)] : values.map(one);
  };
  const parts = [id,
    ...said("model", (name) => name, (names) => `${names.length}-models`),
    ...said("measure", (name) => name, (names) => `${names.length}-measures`),
    ...said("k", (k) => `K${k}`, (ks) => `K${ks.join("-")}`),
    ...said("step", (step) => `step${step}`, (steps) => `steps${Math.min(...steps)}-${Math.max(...steps)}`)
  ];
  return parts.join("_").replace(/[^\p{L}\p{N}._-]+/gu, "-");
}

function download(id) {
  const link = document.createElement("a"),
    table = figures[id].draw().table();
  link.href = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
  link.download = `${fileName(id, table)}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The chart as a picture: as it is on the page and on its colour, below its title.
const LINE = 18, // pixels: the height of a line of the title
  LETTER = 7.5; // pixels: the width of a letter

function wrapped(text, letters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= letters) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) && " "}${word}`;
  }
  return lines;
}

function picture(id, format) {
  draw(id);
  const { data: lines, layout, _fullLayout } = $(id),
    linesOfTitle = wrapped(figures[id].title().replaceAll("<", "&lt;"), layout.width / LETTER),
    above = 12 + LINE * linesOfTitle.length,
    title = { text: linesOfTitle.join("<br>"), font: { size: 14 }, x: 0.01, xanchor: "left", y: 1, yanchor: "top", yref: "container", pad: { t: 8 } },
    height = layout.height + above,
    margin = { ...layout.margin, t: _fullLayout._size.t + above };
  const shown = { ...layout, title, height, margin, paper_bgcolor: css("--paper") };
  return Plotly.downloadImage({ data: lines, layout: shown }, { format, scale: format === "png" ? 3 : 1, width: layout.width, height,
    filename: fileName(id, figures[id].draw().table()) });
}

// Charts are drawn when they come near the window; a choice redraws those, the others when they are seen.
const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) seen.add(target.id);
    else seen.delete(target.id);
    if (isIntersecting && drawable(target.id)) draw(target.id);
  }
  if (!performance.getEntriesByName("usable").length) performance.mark(
  "usable"); // all that is in sight has been drawn
}, { rootMargin: "120px" });

// Only the curves can be drawn before the whole page is there.
const drawable = (id) => stale.has(id) && (document.readyState !== "loading" || $(id).closest("#training"));
let due = 0;

function refresh(ids = Object.keys(figures)) {
  for (const id of ids) {
    const has = figures[id].has();
    $(`${id}-figure`).hidden = !has;
    // Titles are there before their charts are drawn, for a search in the page.
    $(`${id}-title`).textContent = has ? figures[id].title() : "";
    if (has) stale.add(id);
    else stale.delete(id);
  }
  cancelAnimationFrame(due);
  due = requestAnimationFrame(() => { for (const id of seen)
      if (drawable(id)) draw(id); });
}
