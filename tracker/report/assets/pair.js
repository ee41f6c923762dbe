// Layer pairs at a step: the matrix, and the history and |A| of the selected pair.
const matrixOf = (m, index) => atStep(m.matrices[state.measure][state.k], index);
const levelOf = (m, index) => atStep(m.levels[state.measure][state.k], index).values;
const here = () => coupled(model());
const blocks = () => range(model().layers, 1);
const ofModel = () => (several ? `${model().name}, ` : "");
const stepOf = (packed) => model().steps[packed.steps[placeOf(packed, stepIndex())]];
const ofStep = (packed) => {
  const step = stepOf(packed);
  return step === state.step ? `step ${stepName(step)}` :
    `step ${stepName(step)}, the last carried before ${stepName(state.step)}`;
};
const packedMatrix = () => model().matrices[state.measure][state.k];
const ofMatrix = () => ofStep(packedMatrix());
// What the rows of the numbers of layer pairs have in common.
const pairRows = () => ({ model: model().name, ...coupledBy(), step: stepOf(packedMatrix()) });
const spans = {}; // colour ranges over all steps

function span(packed, key) {
  if (!spans[key]) {
    let low = Infinity,
      high = -Infinity;
    for (const value of unpacked(packed)) { if (value < low) low = value; if (value > high) high = value; }
    spans[key] = Number.isFinite(low) ? [low, high] : [0, 1];
  }
  return spans[key];
}

const square = (title, otherTitle, count, first = 1) => ({
  xaxis: { ...layerAxis(count, otherTitle, first), showgrid: false, constrain: "domain" },
  yaxis: { ...layerAxis(count, title, first), range: [first + count - 0.5, first - 0.5], showgrid: false,
    scaleanchor: "x", constrain: "domain" },
});

figures.matrix = {
  has: here,
  title: () => `${ofModel()}How coupled each pair of blocks is: ${chosen()}, ${ofMatrix()}`,
  draw() {
    const m = model(),
      { values, index } = matrixOf(m, stepIndex()),
      matrix = rows(values, m.layers);
    const [low, high] = span(packedMatrix(), [state.model, state.measure, state.k].join());
    const box = { type: "rect", x0: state.m - 0.5, x1: state.m + 0.5, y0: state.l - 0.5, y1: state.l + 0.5,
      line: { color: css("--warn"), width: 3 } };
    $("last-row").textContent = MEASURES[state.measure].normed ?
      "The last row and column are of the last block with the final norm in it, as in the paper. The norm makes its Jacobian nearly a negative multiple of the identity." :
      "";
    const place = (state.l - 1) * m.layers + state.m - 1,
      value = values[place],
      level = levelOf(m, index)[place];
    $("picked").textContent = trivial() ? `Block ${state.l} in its own basis: 0 by definition.`
      :
      `Block ${state.l} in the basis of block ${state.m}: ${digits(value)}, null level ${digits(level)}.`;
    return {
      traces: [heatmap(blocks(), blocks(), matrix, [low, high],
        "block %{y} in the basis of block %{x}: %{z:.4f}", state.measure, { reversescale: true })],
      layout: { ...square("block l", "basis of block l′", m.layers), shapes: [box], dragmode: false },
      table: () => {
        const levels = rows(levelOf(m, index), m.layers);
        return entries(pairRows(), ["layer", "layer_other"], "mean", matrix, (i, j) => ({ null_level: levels[i][j] }));
      },
    };
  },
};

// With swapped bases, a block in its own basis is not trivial.
const trivial = () => state.l === state.m && MEASURES[state.measure].trivial;
const digits = (value) => (Number.isFinite(value) ? value.toPrecision(4) : "undefined");
const alike = (m) => coupled(m) && m.layers === model().layers;
figures.history = {
  has: figures.matrix.has,
  title: () => `One pair over training: block ${state.l} in the basis of block ${state.m}, ${chosen()}`,
  draw() {
    const curves = shown(alike).map(([m, i]) => {
      const packed = m.matrices[state.measure][state.k],
        L = m.layers,
        offset = (state.l - 1) * L + state.m - 1;
      const y = m.steps.map((_, s) => {
        const place = packed.steps.indexOf(s);
        return place < 0 ? null : trivial() ? 0 : finite(unpacked(packed)[place * L * L +
          offset]);
      });
      const there = y.map((_, s) => packed.steps.includes(s)),
        kept = (list) => list.filter((_, s) => there[s]);
      const part = { ...m, steps: kept(m.steps), suspect: kept(m.suspect) };
      const levels = part.steps.map((step) => finite(levelOf(m, m.steps.indexOf(step))[(state.l - 1) * m.layers + state.m - 1]));
      return { part, i, values: kept(y), levels };
    });
    return {
      traces: curves.flatMap(({ part, i, values, levels }) => [traces.training(part, values, labelled(part,
        `mean over ${INPUTS}`), i), traces.null(part, levels, i)]),
      layout: { xaxis: stepAxis(), yaxis: { rangemode: "tozero" }, shapes: [now()] },
      table: () => curves.flatMap(({ part, values, levels }) => records({ model: part.name, ...coupledBy(), layer: state.l,
        layer_other: state.m }, { step: part.steps, mean: values, null_level: levels })),
    };
  },
};
const now = () => ({ type: "line", x0: at(state.step), x1: at(state.step), y0: 0, y1: 1, yref: "paper",
  line: { color: css("--faint"), width: 1 } });

figures.absolute = {
  has: () => Boolean(model().absolute),
  title: () =>
    `Coupling matrix |A| of block ${state.l} in the basis of block ${state.m}, K = ${model().absolute.shape[3]}, ${ofStep(model().absolute)}`,
  draw() {
    const m = model(),
      packed = m.absolute,
      { values } = atStep(packed, stepIndex()),
      K = packed.shape[3],
      size = K * K;
    const tile = (l, other) => values.subarray(((l - 1) * m.layers + other - 1) * size, ((l - 1) * m.layers +
      other) * size);
    const largest = (of) => of.reduce((a, b) => (b > a ? b : a), 0),
      own = largest(tile(state.l, state.l)),
      top = largest(tile(state.l, state.m));
    $("absolute-largest").textContent =
      `Largest entry: ${digits(top)}; of block ${state.l} in its own basis, where A is its singular values: ${digits(own)}.`;
    return {
      traces: [heatmap(range(K, 1), range(K, 1), rows(tile(state.l, state.m), K), [0, top || 1],
        "|A| at row %{y}, column %{x}: %{z:.4g}", "|A|")],
      layout: square("row", "column", K),
      table: () => entries({ model: m.name, k: K, step: stepOf(packed), layer: state.l, layer_other: state.m }, ["row",
        "column"], "absolute", rows(tile(state.l, state.m), K)),
    };
  },
};

figures.distance = {
  has: figures.matrix.has,
  title: () => `By the distance between blocks: ${chosen()}, ${ofMatrix()}`,
  draw() {
    const m = model(),
      L = m.layers,
      x = range(L - 1, 1);
    const byDistance = (values) => x.map((r) => mean(range(L * L).filter((i) => Math.abs(Math.floor(i / L) - (i % L)) ===
      r).map((i) => values[i])));
    const profile = (index) => byDistance(matrixOf(m, index).values);
    const levels = byDistance(levelOf(m, matrixOf(m, stepIndex()).index));
    return {
      traces: [...emphasised(x, profile, profile), { x, y: levels, name: "null level", mode: "lines",
        line: { color: colour(0), dash: "dot", width: 2 } }],
      layout: { xaxis: layerAxis(L - 1, "distance |l − l′|"), yaxis: { rangemode: "tozero" } },
      table: () => records(pairRows(), { distance: x, mean: profile(stepIndex()), null_level: levels }),
    };
  },
};

figures.layers = {
  has: figures.matrix.has,
  title: () => `Each block with all others: ${chosen()}, ${ofMatrix()}`,
  draw() {
    const m = model(),
      L = m.layers,
      { values, index } = matrixOf(m, stepIndex());
    const row = (l) => mean(Array.from(values.subarray(l * L, (l + 1) * L))),
      column = (l) => mean(range(L).map((i) => values[i * L + l]));
    const ofPairs = levelOf(m, index),
      levels = range(L).map((l) => finite(mean(range(L).filter((i) => i !== l).map((i) => ofPairs[l * L + i]))));
    return {
      traces: [traces.line(blocks(), range(L).map(row), "its Jacobian in the others' bases", 0), traces.line(
        blocks(), range(L).map(column), "the others' Jacobians in its basis", 1),
        { x: blocks(), y: levels, name: "null level of its Jacobian", mode: "lines",
          line: { color: colour(0), dash: "dot", width: 2 } }
      ],
      layout: { xaxis: layerAxis(L), yaxis: { rangemode: "tozero" } },
      table: () => records(pairRows(), { layer: blocks(), in_bases_of_others: range(L).map(row), others_in_its_basis:
          range(L).map(column), null_level: levels }),
    };
  },
};

// Layers on a circle; a line's width and opacity: how far two layers are below their null level, both ways averaged.
const LEVELS = 6,
  strongest = {};

function gains(m, index) {
  const L = m.layers,
    { values } = matrixOf(m, index),
    level = levelOf(m, index);
  return range(L).flatMap((a) => range(L - a - 1, a + 1).map((b) => [a, b, (level[a * L + b] - values[a * L + b] +
    level[b * L + a] - values[b * L + a]) / 2]));
}
figures.graph = {
  has: figures.matrix.has,
  title: () => `Which blocks are coupled: ${chosen()}, ${ofMatrix()}`,
  draw() {
    const m = model(),
      L = m.layers,
      key = [state.model, state.measure, state.k].join(),
      { index } = matrixOf(m, stepIndex());
    strongest[key] ??= Math.max(1e-12, ...m.matrices[state.measure][state.k].steps.map((s) => gains(m, s).reduce((
      top, [, , g]) => (g > top ? g : top), 0)));
    const place = (l) => [Math.sin((2 * Math.PI * l) / L), Math.cos((2 * Math.PI * l) / L)];
    const binned = range(LEVELS).map(() => ({ x: [], y: [] }));
    for (const [a, b, gain] of gains(m, index)) {
      if (!(gain > 0)) continue;
      const bin = binned[Math.min(LEVELS - 1, Math.floor((gain / strongest[key]) * LEVELS))];
      for (const end of [place(a), place(b), [null, null]]) { bin.x.push(end[0]);
        bin.y.push(end[1]); }
    }
    const edges = binned.map(({ x, y }, i) => ({ x, y, mode: "lines", hoverinfo: "skip", meta: { part: "edges" },
      opacity: (i + 0.5) / LEVELS, line: { color: colour(0), width: 0.5 + (3 * i) / LEVELS } }));
    const nodes = {
      x: blocks().map((l) => place(l - 1)[0]),
      y: blocks().map((l) => place(l - 1)[1]),
      text: blocks().map(String),
      name: "blocks",
      mode: "markers+text",
      marker: { size: L > 20 ? 18 : 24, color: css("--paper"), line: { color: css("--faint"), width: 1 } },
      textfont: { size: L > 20 ? 9 : 12 },
      hoverinfo: "skip",
      meta: { part: "nodes" }
    };
    const bare = { visible: false, range: [-1.15, 1.15] };
    return {
      traces: [...edges, nodes],
      table: () => gains(m, index).map(([a, b, gain]) => ({ ...pairRows(), layer: a + 1, layer_other: b + 1, coupling: finite(
        gain) })),
      says: `The strongest line is ${Number(strongest[key].toPrecision(3))} below its null level.`,
      layout: { xaxis: { ...bare, constrain: "domain" }, yaxis: { ...bare, scaleanchor: "x" }, showlegend: false }
    };
  },
};
