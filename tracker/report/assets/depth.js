// Values by depth: the chosen step in colour, other steps in grey behind it.
const OTHERS = 24; // how many others at most

function emphasised(x, middle, faint, low = null, high = null) {
  const i = stepIndex(),
    n = model().steps.length,
    xs = [],
    ys = [];
  const others = range(Math.min(n, OTHERS)).map((j) => Math.round((j * (n - 1)) / Math.max(1, Math.min(n, OTHERS) -
    1)));
  for (const other of new Set(others))
    if (other !== i) { xs.push(...x, null);
      ys.push(...faint(other), null); }
  const l = low && low(i),
    h = high && high(i);
  return [
    { x: xs, y: ys, mode: "lines", line: { color: css("--ghost"), width: 1 }, hoverinfo: "skip",
      showlegend: false, name: "other steps", meta: { part: "others" } },
    ...(l ? [traces.band(x, l, h, 0)] : []),
    traces.line(x, middle(i), `step ${stepName(state.step)}`, 0, { showlegend: false }),
  ];
}

const QUARTILES = (of) => Object.fromEntries(["median", "q25", "q75"].map((statistic) => [statistic, of(statistic)]));

function byDepth(chart) {
  const has = () => valuesBy(model().depth, chart);
  return {
    has: () => Boolean(has()),
    title: () => `${ofModel()}${titleOf(chart, "by depth")}, step ${stepName(state.step)}`,
    draw() {
      const d = has(),
        count = d.median.shape[1],
        x = d.defined; // products of blocks are known at some depths, windows where they fit
      const of = (statistic) => (i) => x.map((depth) => finite(atStep(d[statistic], i).values[depth - d.first]));
      return {
        traces: emphasised(x, of("median"), of("median"), of("q25"), of("q75")),
        layout: { xaxis: layerAxis(count, d.first ? "block" : "depth (0: the first block's input)", d.first),
          yaxis: valuesOf(chart) },
        table: () => records({ model: model().name, measure: nameBy(model().depth, chart), step: state.step }, { [d.first ?
            "layer" : "depth"]: x, ...QUARTILES((statistic) => of(statistic)(stepIndex())) }),
      };
    },
  };
}

// Over training, at an early, a middle and a late block (Figs 28, 29).
function atBlocks(chart) {
  const has = () => valuesBy(model().depth, chart);
  return {
    has: () => Boolean(has()) && threeBlocks(has()).length > 0 && model().steps.length > 1,
    title: () => `${ofModel()}${titleOf(chart, "over training, at three blocks")}`,
    draw() {
      const m = model(),
        of = (statistic, l) => m.steps.map((_, s) => finite(atStep(has()[statistic], s).values[l - 1]));
      return {
        traces: threeBlocks(has()).flatMap((l, i) => [traces.band(m.steps.map(at), of("q25", l), of("q75", l), i),
          traces.training(m, of("median", l), `block ${l}`, i)
        ]),
        layout: { xaxis: stepAxis(), yaxis: valuesOf(chart) },
        table: () => threeBlocks(has()).flatMap((l) => records({ model: m.name, measure: nameBy(m.depth, chart), layer: l },
          { step: m.steps, ...QUARTILES((statistic) => of(statistic, l)) })),
      };
    },
  };
}

function threeBlocks({ defined }) {
  return union([
    [0, Math.round((defined.length - 1) / 2), defined.length - 1].map((i) => defined[i])
  ]).filter((l) => l !== undefined);
}

const CHARTS = { training: [overTraining, "scores"], depth: [byDepth, "noise"], blocks: [atBlocks, "noise"] };
for (const chart of data.texts.charts) {
  const [of, following] = CHARTS[chart.chart];
  $(`${following}-figure`).before(element("figure", { id: `${chart.id}-figure` },
    element("div", { id: chart.id, className: "chart" }), element("figcaption", {}, chart.caption)));
  figures[chart.id] = of(chart);
}

// A table of texts and numbers.
function listing(id, head, lines) {
  const cell = (text) => element("td", { className: /^[-\d.e]+$/.test(text) ? "number" : "" }, String(text));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" },
    text)))), element("tbody", {}, ...lines.map((line) => element("tr", {}, ...line.map(cell)))));
  table.setAttribute("aria-labelledby", `${id}-title`);
  return table;
}

// One row for each block, in the order of the first column, its medians at the step.
const COLUMNS = data.texts.columns;
figures.used = {
  has: () => COLUMNS.some(([name]) => model().depth[name]),
  title: () => `${ofModel()}How much each block is used, step ${stepName(state.step)}`,
  draw() {
    const there = COLUMNS.filter(([name]) => model().depth[name]),
      medians = there.map(([name]) => Array.from(atStep(model().depth[name].median, stepIndex()).values, finite)),
      order = blocks().sort((a, b) => medians[0][a - 1] - medians[0][b - 1]),
      short = (value) => (value === null ? "" : Number(value.toPrecision(3)));
    return {
      element: listing("used", ["block", ...there.map(([, label]) => label)], order.map((l) => [l, ...medians.map((values) =>
        short(values[l - 1]))])),
      table: () => records({ model: model().name, step: state.step }, { layer: order, ...Object.fromEntries(there.map(([
        name], i) => [name, order.map((l) => medians[i][l - 1])])) }),
    };
  },
};

figures.singular = {
  has: () => Boolean(model().singular),
  title: () => `${ofModel()}Singular values of the Jacobians by depth, step ${stepName(state.step)}`,
  draw() {
    const m = model(),
      { ranks, values, r2, n, slope, intercept } = m.singular,
      of = rows(atStep(values, stepIndex()).values, m.layers),
      fit = enough({ r2: r2[stepIndex()], n: n[stepIndex()] }) ? r2[stepIndex()] : null;
    $("singular-fit").textContent = fit === null ? ` 1 / s₁ against depth: ${noFit({ n: n[stepIndex()] })}.` :
      ` Dashed: 1 / s₁ against depth by a straight line, R² = ${fit.toFixed(2)} over ${n[stepIndex()]} blocks.`;
    return {
      traces: [...ranks.map((rank, r) => traces.line(blocks(), of [r], `s${rank}`, r)), ...(fit === null ? [] : [
        { x: blocks(), y: blocks().map((l) => intercept[stepIndex()] + slope[stepIndex()] * l).map((inverse) => (
            inverse > 0 ? 1 / inverse : null)), name: "fit of 1 / s₁", mode: "lines",
          line: { color: colour(0), dash: "dash", width: 2 } }
      ])],
      layout: { xaxis: layerAxis(m.layers), yaxis: { scale: "logarithmic" } },
      table: () => records({ model: m.name, measure: "singular_value", step: state.step }, { layer: blocks(),
        ...Object.fromEntries(ranks.map((rank, r) => [`s${rank}`, of[r]])) }),
    };
  },
};

figures.plane = {
  has: () => Boolean(model().plane && model().plane.shape[1]),
  title: () => `${ofModel()}Paths of tokens through the blocks, on a plane, ${ofStep(model().plane)}`,
  draw() {
    const m = model(),
      { values } = atStep(m.plane, stepIndex()),
      [, paths, depths] = m.plane.shape;
    const path = (p, c) => range(depths).map((d) => finite(values[(p * depths + d) * 2 + c]));
    return {
      traces: range(paths).map((p) => ({
        x: path(p, 0),
        y: path(p, 1),
        name: p === paths - 1 ? "last token" : `token ${p + 1} of ${paths} drawn`,
        mode: "lines+markers",
        line: { color: p === paths - 1 ? colour(1) : css("--faint"), width: p === paths - 1 ? 2.5 : 1 },
        marker: { size: p === paths - 1 ? 6 : 3, color: p === paths - 1 ? colour(1) : css("--faint") },
        opacity: p === paths - 1 ? 1 : 0.6,
        showlegend: p === paths - 1,
        text: range(depths).map((d) => `depth ${d}`),
        hovertemplate: "%{text}"
      })),
      layout: { xaxis: { title: { text: "first principal axis" } }, yaxis: { title: { text: "second principal axis" } } },
      table: () => range(paths).flatMap((p) => records({ model: m.name, measure: "pca", step: stepOf(m.plane), path: p + 1 },
        { depth: range(depths), first_axis: path(p, 0), second_axis: path(p, 1) })),
    };
  },
};

figures.noise = {
  has: () => Boolean(model().noise),
  title: () => `${ofModel()}Response to noise on the embeddings, step ${stepName(state.step)}`,
  draw() {
    const { levels, depths, values } = model().noise, at = values[stepIndex()];
    return {
      traces: depths.map((depth, i) => traces.line(levels, at[i], `after block ${depth}`, i)),
      layout: { xaxis: { ...logarithmic(levels), title: { text: "noise / embedding" } },
        yaxis: { title: { text: "cosine similarity" } } },
      table: () => depths.flatMap((depth, i) => records({ model: model().name, measure: "noise_response", step: state.step,
        depth }, { noise: levels, cosine_similarity: at[i] })),
    };
  },
};
