// Comparison of results, one point each: coupling and score after the last step, and fits of one on another.
const SIGNED = evenly(data.texts.colours.diverging);
const against = () => ["coupling", ...Object.keys(data.across.sizes)];
const couplingAcross = () => data.across && ((data.across.coupling[state.measure] || {})[state.k] || {})[state.pairs];
const p = (value) => (value === null ? "undefined" : value < 0.001 ? value.toExponential(1) : value.toPrecision(2));

// As figures have it: a fit is stated of enough points alone.
const FEWEST = () => data.texts.fewest;
const enough = (fit) => fit.r2 !== null && fit.n >= FEWEST();
const noFit = ({ n }) => (n < FEWEST() ? `n = ${n}: fewer than ${FEWEST()} points, no fit` : "no fit: the points have no spread");

function said(fit) {
  if (!enough(fit)) return `${noFit(fit)}.`;
  const corrected = fit.p_holm === undefined ? "" :
    `, ${p(fit.p_holm)} corrected for all ${data.across.tests} definitions on this page (Holm)`;
  return `R² = ${fit.r2.toFixed(2)} (95 % interval over results: ${fit.r2_low.toFixed(2)} to ${fit.r2_high.toFixed(2)}), ` +
    `p = ${p(fit.p)}${corrected}.${averaged(fit)}`;
}

function averaged(fit) {
  if (!fit.averaged) return "";
  const o = fit.averaged;
  return " With clusters averaged, " + (!enough(o) ? `${noFit(o)}.` : `n = ${o.n}: ` +
    `R² = ${o.r2.toFixed(2)} (${o.r2_low.toFixed(2)} to ${o.r2_high.toFixed(2)}), p = ${p(o.p)}.`);
}

// Each result's numbers are those of its last step.
const acrossRows = (columns, ofCoupling = true) => records(ofCoupling ? { ...coupledBy(), pairs: state.pairs } : {}, { model: data
    .across.models, step: data.across.models.map((name) => data.models.find((m) => m.name === name).steps.at(-1)), ...columns });

function points(x, y, fit, interval, exponential) {
  const names = data.across.models,
    ends = [Math.min(...x), Math.max(...x)];
  const dots = names.map((name, r) => {
    const i = data.models.findIndex((m) => m.name === name);
    const bar = (end) => (interval && interval[end][r] !== null ? [Math.abs(interval[end][r] - x[r])] : [0]);
    return traces.line([x[r]], [y[r]], name, i, { mode: "markers", marker: { size: 9 },
      hovertemplate: "%{x:.4g}, %{y:.4g}", ...(interval ? { error_x: { type: "data", symmetric: false,
          array: bar(1), arrayminus: bar(0), color: css("--faint"), thickness: 1, width: 3 } } : {}) });
  });
  const line = !enough(fit) ? [] : [{ x: ends, y: ends.map((v) => fit.intercept + fit.slope * v), name: "linear fit",
    mode: "lines", line: { color: css("--ink"), width: 1.5 }, hoverinfo: "skip", meta: { part: "fit" } }];
  const along = range(41).map((i) => ends[0] + ((ends[1] - ends[0]) * i) / 40);
  const curve = !exponential || !enough(exponential) ? [] : [{ x: along, y: along.map((v) => exponential.a *
      Math.exp(exponential.b * v)), name: "exponential fit", mode: "lines", line: { color: css("--ink"), width: 1.5,
      dash: "dash" }, hoverinfo: "skip", meta: { part: "fit" } }];
  return [...dots, ...line, ...curve];
}

figures.fit = {
  has: () => Boolean(couplingAcross()),
  title: () =>
    `Score against ${state.against === "coupling" ? `coupling: ${chosen()}, ${PAIRS[state.pairs]}` : state.against}`,
  draw() {
    const a = data.across,
      c = couplingAcross(),
      of = state.against === "coupling",
      x = of ? c.values : a.sizes[state.against],
      fit = of ? c.fit : a.size_fits[state.against];
    const controlled = !enough(c.controlled) ? noFit(c.controlled) :
      `R² = ${c.controlled.r2.toFixed(2)} (${c.controlled.r2_low.toFixed(2)} to ${c.controlled.r2_high.toFixed(2)}), p = ${p(c.controlled.p)} (uncorrected)`;
    $("fit-caption").textContent = `${said(fit)} The score is the mean over ${a.benchmarks.join(", ")}.` + (of ?
      ` Exponential: ${enough(c.exponential) ? `R² = ${c.exponential.r2.toFixed(2)}` : noFit(c.exponential)}. Blocks, width and parameters controlled for: ${controlled}.` +
      averaged(c.controlled) + (c.interval ? ` Bars: 95 % interval over ${INPUTS}.` : "") : "") + ` ${a.independence}`;
    return {
      traces: points(x, a.score, fit, of && c.interval, of && c.exponential),
      layout: { xaxis: { title: { text: of ? COUPLING : state.against } }, yaxis: {
          title: { text: "mean score" } } },
      table: () => acrossRows({ [state.against]: x, score: a.score, ...(of && c.interval ? { coupling_low: c.interval[0],
          coupling_high: c.interval[1] } : {}) }, of),
    };
  },
};

const sizeShown = () => (state.against === "coupling" ? "blocks" : state.against);
figures.sizes = {
  has: () => Boolean(couplingAcross()),
  title: () => `Coupling against ${sizeShown()}: ${chosen()}, ${PAIRS[state.pairs]}`,
  draw() {
    const a = data.across,
      c = couplingAcross(),
      name = sizeShown();
    $("sizes-caption").textContent = `${said(c.size_fits[name])} ${a.independence}`;
    return {
      traces: points(a.sizes[name], c.values, c.size_fits[name]),
      layout: { xaxis: { title: { text: name } }, yaxis: { title: { text: COUPLING } } },
      table: () => acrossRows({ [name]: a.sizes[name], coupling: c.values }),
    };
  },
};

figures.definitions = {
  has: () => Boolean(data.across),
  title: () => "Correlation of score and coupling, by definition of coupling",
  draw() {
    const a = data.across.coupling,
      measures = Object.keys(a),
      ks = Object.keys(a[measures[0]]),
      kinds = measures.flatMap((measure) => Object.keys(PAIRS).map((pairs) => [measure, pairs]));
    const fit = (measure, pairs, k) => a[measure][k][pairs].fit;
    return {
      traces: [heatmap(ks.map((k) => `K = ${k}`), kinds.map(([m, pairs]) => `${MEASURES[m].definition}, ${PAIRS[pairs]}`),
        kinds.map(([m, pairs]) => ks.map((k) => (enough(fit(m, pairs, k)) ? fit(m, pairs, k).r : null))), [-1, 1], "%{y}, %{x}: r = %{z:.3f}", "r", {
          colorscale: SIGNED,
          text: kinds.map(([m, pairs]) => ks.map((k) => (!enough(fit(m, pairs, k)) ? "" :
            `${fit(m, pairs, k).r.toFixed(2)}${fit(m, pairs, k).p_holm < 0.05 ? "*" : ""}`))),
          texttemplate: "%{text}"
        })],
      layout: { xaxis: { type: "category", showgrid: false }, yaxis: { type: "category", autorange: "reversed",
          showgrid: false } },
      table: () => kinds.flatMap(([m, pairs]) => ks.map((k) => ({ measure: m, k: Number(k), pairs, r: fit(m, pairs, k).r, r2: fit(
        m, pairs, k).r2, p_holm: fit(m, pairs, k).p_holm }))),
    };
  },
};

figures.subsets = {
  has: () => Boolean(couplingAcross()),
  title: () => `R² of score and coupling in subsets of the results: ${chosen()}, ${PAIRS[state.pairs]}`,
  draw() {
    const s = couplingAcross().subsets,
      y = s.subset.map((name, i) => `${name} (n = ${s.n[i]})`),
      r2 = s.r2.map((value, i) => (s.n[i] < FEWEST() ? null : value));
    return {
      traces: [{ x: r2, y, name: "R²", mode: "markers", marker: { size: 9, color: colour(0) }, text: s.p_holm.map(p),
          error_x: { type: "data", symmetric: false, color: colour(0), thickness: 1.5, array: s.r2_high.map((
            high, i) => high - s.r2[i]), arrayminus: s.r2_low.map((low, i) => s.r2[i] - low) },
        hovertemplate: "%{y}: R² = %{x:.3f}, p = %{text} corrected<extra></extra>" }],
      layout: { xaxis: { title: { text: "R²" }, range: [-0.02, 1.02] }, yaxis: { type: "category",
          autorange: "reversed" }, showlegend: false },
      table: () => records({ ...coupledBy(), pairs: state.pairs }, { subset: s.subset, n: s.n, r2: s.r2, r2_low: s.r2_low,
        r2_high: s.r2_high, p_holm: s.p_holm }),
      says: s.subset.map((name, i) => `${name}: ${r2[i] === null ? "no fit" : r2[i].toFixed(2)}`).join("; ")
    };
  },
};
