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
    traces.line(x, middle(i), `step ${stepName(state.step)}`, 0, { showlegend: false, ...(l ? { meta: { low: l,
          high: h } } : {}) }),
  ];
}

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
          yaxis: valuesOf(chart) }
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
    draw: () => ({
      traces: threeBlocks(has()).flatMap((l, i) => {
        const d = has(),
          of = (statistic) => model().steps.map((_, s) => finite(atStep(d[statistic], s).values[l - 1]));
        return [traces.band(model().steps.map(at), of("q25"), of("q75"), i),
          traces.training(model(), of("median"), `block ${l}`, i, { meta: { low: of("q25"), high: of(
                "q75") } })
        ];
      }),
      layout: { xaxis: stepAxis(), yaxis: valuesOf(chart) },
    }),
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
  const figure = Object.assign(document.createElement("figure"), { id: `${chart.id}-figure` });
  figure.append(Object.assign(document.createElement("div"), { id: chart.id, className: "chart" }), Object.assign(
    document.createElement("figcaption"), { textContent: chart.caption }));
  $(`${following}-figure`).before(figure);
  figures[chart.id] = of(chart);
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
      columns = medians.map((values) => order.map((l) => values[l - 1])),
      short = (value) => (value === null ? "" : Number(value.toPrecision(3)));
    const cells = { align: "right", height: 26, line: { color: css("--line") }, fill: { color: css("--paper") },
      font: { color: css("--ink"), size: 13 } };
    return {
      traces: [{ type: "table", name: "blocks", header: { ...cells, values: ["block", ...there.map(([, label]) => label)] },
        cells: { ...cells, values: [order, ...columns.map((column) => column.map(short))] } }],
      layout: { margin: { l: 8, r: 8, t: 8, b: 8 } },
      table: [["block", ...there.map(([name]) => name)], ...order.map((l, i) => [l, ...columns.map((column) => column[i])])],
      says: `Blocks from the least used: ${order.join(", ")}`,
    };
  },
};

// Words that the singular directions of the chosen block stand for, beside those of a random direction.
figures.words = {
  has: () => Boolean(model().directions),
  title: () => `${ofModel()}Words for the directions of block ${state.l}, step ${stepName(model().steps[model().directions
    .steps[wordsAt()]])}`,
  draw() {
    const d = model().directions,
      i = wordsAt(),
      of = (name) => d[name][i][state.l - 1],
      round = (value) => (value === null ? "" : value.toFixed(1)),
      ks = range(of("out_words").length, 1);
    const head = ["k", "output direction uₖ", "score", "input direction vₖ", "score"],
      columns = [[...ks, "random"], [...of("out_words"), d.random[i]], [...of("out_score").map(round), `< ${round(d
          .out_null[i])}`], [...of("in_words"), ""], [...of("in_score").map(round), `< ${round(d.in_null[i])}`]];
    const cells = { align: ["right", "left", "right", "left", "right"], height: 26, line: { color: css("--line") },
      fill: { color: css("--paper") }, font: { color: css("--ink"), size: 13 } };
    return {
      traces: [{ type: "table", name: "words", columnwidth: [1, 5, 1, 5, 1], header: { ...cells, values: head },
        cells: { ...cells, values: columns } }],
      layout: { margin: { l: 8, r: 8, t: 8, b: 8 } },
      table: [head, ...columns[0].map((_, row) => columns.map((column) => column[row]))],
      says: `Strongest output direction: ${of("out_words")[0]}`,
    };
  },
};
const wordsAt = () => Math.max(0, model().directions.steps.findLastIndex((step) => step <= stepIndex()));

figures.singular = {
  has: () => Boolean(model().singular),
  title: () => `${ofModel()}Singular values of the Jacobians by depth, step ${stepName(state.step)}`,
  draw() {
    const m = model(),
      { ranks, values, r2, n, slope, intercept } = m.singular,
      of = rows(atStep(values, stepIndex()).values, m.layers),
      fit = r2[stepIndex()];
    $("singular-fit").textContent = fit === null ? "" :
      ` Dashed: 1 / s₁ against depth by a straight line, R² = ${fit.toFixed(2)} over ${n[stepIndex()]} blocks.`;
    return {
      traces: [...ranks.map((rank, r) => traces.line(blocks(), of [r], `s${rank}`, r)), ...(fit === null ? [] : [
        { x: blocks(), y: blocks().map((l) => intercept[stepIndex()] + slope[stepIndex()] * l).map((inverse) => (
            inverse > 0 ? 1 / inverse : null)), name: "fit of 1 / s₁", mode: "lines",
          line: { color: colour(0), dash: "dash", width: 2 } }
      ])],
      layout: { xaxis: layerAxis(m.layers), yaxis: { scale: "logarithmic" } }
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
      layout: { xaxis: { title: { text: "first principal axis" } }, yaxis: { title: { text: "second" } } },
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
        yaxis: { title: { text: "cosine similarity" } } }
    };
  },
};
