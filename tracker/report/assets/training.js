// Over training: curves of every model on one axis.
const shown = (has) => data.models.map((m, i) => [m, i]).filter(([m]) => has(m));
const labelled = (m, label) => (several ? m.name : label);
// Of a curve over training with a null level: its lines, and its numbers.
const withNull = (m, { value, q25, q75, null: level }, name, i) =>
  [traces.band(m.steps.map(at), q25, q75, i), traces.training(m, value, name, i), traces.null(m, level, i)];
const curveRows = (m, fixed, { value, q25, q75, null: null_level }, more = {}) =>
  records({ model: m.name, ...fixed }, { step: m.steps, mean: value, q25, q75, null_level, coupling: above(value, null_level), ...more });
const chosen = () => `${MEASURES[state.measure].label}, K = ${state.k}`;

figures.coupling = {
  has: () => data.models.some(coupled),
  title: () => `How coupled blocks are over training: ${chosen()}, ${PAIRS[state.pairs]}`,
  draw() {
    const curve = (m) => m.curves[state.measure][state.k][state.pairs];
    const lines = shown(coupled).flatMap(([m, i]) => withNull(m, curve(m), labelled(m, `mean over ${INPUTS}`), i));
    const scored = state.score ? shown((m) => m.score[state.score]).map(([m, i]) =>
      traces.training(m, m.score[state.score], several ? `${m.name}, ${state.score}` : state.score, several ? i
        : i + 1, { yaxis: "y2", line: { width: 1.5, dash: "dashdot" }, marker: { symbol: "diamond-open",
          size: 7 } })) : [];
    const begun = state.pairs === "mean_offdiag" ? shown(coupled).map(([m, i]) => [m, i, m.onset[state.measure][state
      .k]]) : [];
    const shade = (low, high, opacity, line) => ({ type: "rect", x0: at(low), x1: at(high), y0: 0, y1: 1, yref: "paper",
      opacity, line, layer: "below" });
    // The edges show steps between which there is no room: an onset at step 0.
    const shapes = begun.filter(([, , o]) => o.later !== null).flatMap(([, i, o]) => [
      { ...shade(o.low, o.high, 0.1, { width: 0 }), fillcolor: colour(i) },
      { ...shade(o.earlier, o.later, 0.15, { color: colour(i), width: 1 }), fillcolor: colour(i) },
    ]);
    const absent = data.models.filter((m) => !coupled(m)).map((m) => m.name);
    $("coupling-caption").textContent = MEASURES[state.measure].text + onsetSaid(begun)
      + (data.differences.length ? " These results are not measured alike: see the top of the page." : "") + (
        absent.length ? ` Not measured in ${absent.join(", ")}.` : "");
    return {
      traces: [...lines, ...scored],
      layout: {
        shapes,
        xaxis: stepAxis(begun.map(([, , o]) => o.low).filter((low) => low !== null)),
        yaxis: { rangemode: "tozero", title: { text: "mis-coupling" } },
        ...(scored.length ? { yaxis2: { title: { text: state.score } } } : {})
      },
      table: () => shown(coupled).flatMap(([m]) => curveRows(m, { ...coupledBy(), pairs: state.pairs }, curve(m),
        m.score[state.score] && { [state.score]: m.score[state.score] })),
    };
  },
};

// The words are those of Fig. 1b, which is of its own measure: the same measure has the same onset in both.
const PAPERS = data.texts.paper;

function onsetSaid(begun) {
  return begun.map(([m, , o]) => {
    const who = several ? ` of ${m.name}` : "",
      other = state.measure !== PAPERS && m.onset[PAPERS] && m.onset[PAPERS][state.k];
    return ` Onset${who}: ${o.words}.` + (other ? ` Onset${who} by ${MEASURES[PAPERS].label}, as in the paper's Fig. 1b: ${other.words}.` :
      "");
  }).join("");
}

// The charts that the registry of measures declares, each of one variable, before or after the final norm.
// Results that leave the norm out have the values before it alone.
const nameBy = (values, chart) => (chart.variants[state.last] in values ? chart.variants[state.last] : chart.variants.alone);
const valuesBy = (values, chart) => values[nameBy(values, chart)];
const titleOf = (chart, where) =>
  `${chart.title}${chart.windowed ? ` of ${model().window} states` : ""} ${where}` + (chart.both ?
  `, ${LAST[state.last]}` : "");
const valuesOf = (chart) => ({ scale: chart.axis, title: { text: chart.unit } });

function overTraining(chart) {
  const has = (m) => valuesBy(m.trajectory, chart);
  return {
    has: () => data.models.some(has),
    title: () => titleOf(chart, "over training"),
    draw: () => ({
      traces: shown(has).flatMap(([m, i]) => {
        const s = has(m);
        return [traces.band(m.steps.map(at), s.q25, s.q75, i),
          traces.training(m, s.median, labelled(m, "median"), i)
        ];
      }),
      layout: { xaxis: stepAxis(), yaxis: valuesOf(chart) },
      table: () => shown(has).flatMap(([m]) => {
        const { median, q25, q75 } = has(m);
        return records({ model: m.name, measure: nameBy(m.trajectory, chart) }, { step: m.steps, median, q25, q75 });
      }),
    }),
  };
}

figures.scores = {
  has: () => Object.keys(model().score).length > 0,
  title: () => `Scores over training${several ? `, ${model().name}` : ""}`,
  draw() {
    const tasks = Object.entries(model().score);
    return {
      traces: tasks.map(([task, y], i) => traces.training(model(), y, task, i, { visible: i < 8 ? true
          : "legendonly" })),
      layout: { xaxis: stepAxis(), showlegend: true },
      table: () => records({ model: model().name }, { step: model().steps, ...model().score }),
    };
  },
};

// Coupling: how far a mis-coupling is below its null level; 0 is that of unrelated blocks.
const COUPLING = "coupling: null level − mis-coupling";
const above = (values, levels) => values.map((value, i) => (value === null || levels[i] === null ? null : levels[i] -
  value));
const noCoupling = (x) => {
  const there = x.filter(Number.isFinite);
  return { x: [Math.min(...there), Math.max(...there)], y: [0, 0], name: "unrelated blocks", mode: "lines", hoverinfo: "skip",
    line: { color: css("--faint"), dash: "dot", width: 2 } };
};

const scatterTask = () => {
  const tasks = union(shown(coupled).map(([m]) => Object.keys(m.score)));
  return valid(state.score, tasks, tasks[0]);
};
figures.scatter = {
  has: () => data.models.some((m) => coupled(m) && Object.keys(m.score).length),
  title: () => `Coupling against ${scatterTask()}, a point for each step: ${chosen()}, ${PAIRS[state.pairs]}`,
  draw() {
    const task = scatterTask(),
      scored = shown((m) => coupled(m) && m.score[task]);
    const lines = scored.map(([m, i]) => {
      const { value, null: level } = m.curves[state.measure][state.k][state.pairs];
      return traces.line(m.score[task], above(value, level), labelled(m, "a point a step"), i, { text: m.steps.map((
          step) => `step ${stepName(step)}`),
        hovertemplate: "%{text}: score %{x:.4g}, coupling %{y:.4g}", line: { width: 1 } });
    });
    return {
      traces: [...lines, noCoupling(scored.flatMap(([m]) => m.score[task]))],
      layout: { xaxis: { title: { text: task } }, yaxis: { title: { text: COUPLING } } },
      table: () => scored.flatMap(([m], i) => records({ model: m.name, ...coupledBy(), pairs: state.pairs }, { step: m.steps,
        [task]: m.score[task], coupling: lines[i].y })),
    };
  },
};
