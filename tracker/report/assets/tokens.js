// Coupling across tokens: J of token t in block l, in the basis of token t′ in block l′ (paper, section 3.1).
const tokensOf = (m) => m.tokens[state.kind];
const baseMeasure = () => MEASURES[state.measure].base;
const hasTokens = (m) => Boolean(tokensOf(m) && tokensOf(m).curves[baseMeasure()] && tokensOf(m).curves[
baseMeasure()][state.k]);
const tokenName = (i) => (model().token_positions ? `token ${model().token_positions[i]}` : `${i + 1}`);
const tokenAxes = (count, size = 1) => {
  const ticks = { tickvals: range(count).map((i) => i * size + (size - 1) / 2), ticktext: range(count).map((i) =>
      (model().token_positions ? String(model().token_positions[i]) : String(i + 1))), showgrid: false,
    constrain: "domain" };
  return { xaxis: { ...ticks, title: { text: "basis of token t′" } }, yaxis: { ...ticks,
    title: { text: "token t" }, autorange: "reversed", scaleanchor: "x" } };
};

const tokenLayers = () => union(shown(hasTokens).map(([m]) => m.token_layers.said));
figures.token_curves = {
  has: () => data.models.some(hasTokens),
  title: () =>
    `Coupling across tokens over training, ${state.kind.replace("_", " ")}: ${MEASURES[baseMeasure()].label}, K = ${state.k}` +
    (tokenLayers().length > 1 ? "" : `, ${tokenLayers()[0]}`),
  draw() {
    const layers = tokenLayers();
    const lines = shown(hasTokens).flatMap(([m, i]) => {
      const c = tokensOf(m).curves[baseMeasure()][state.k],
        name = labelled(m, "mean over prompts") + (layers.length > 1 ? `, ${m.token_layers.said}` : "");
      return [traces.band(m.steps.map(at), c.q25, c.q75, i),
        traces.training(m, c.value, name, i, { meta: { low: c.q25, high: c
              .q75 } }),
        traces.null(m, c.null, i)
      ];
    });
    return { traces: lines,
      layout: { xaxis: stepAxis(), yaxis: { rangemode: "tozero" } } };
  },
};

const otherBlock = () => model().token_layers.others[state.block - 1];
const tokenMatrices = () => tokensOf(model()).matrices[baseMeasure()][state.k];
figures.token_matrix = {
  has: () => hasTokens(model()),
  title: () =>
    `Mis-coupling of pairs of tokens: block ${state.block}, in bases of ${otherBlock() === state.block ? "the same block" : `block ${otherBlock()}`}, ${ofStep(tokenMatrices())}`,
  draw() {
    const packed = tokenMatrices(),
      { values } = atStep(packed, stepIndex()),
      T = packed.shape[2],
      other = otherBlock(),
      own = other === state.block;
    const z = rows(values.subarray((state.block - 1) * T * T, state.block * T * T), T).map((row, i) => row.map((
      value, j) => (own && i === j ? null : value)));
    return {
      traces: [heatmap(range(T), range(T), z, [], "%{text}: %{z:.4f}", state.kind, {
        reversescale: true,
        text: range(T).map((i) => range(T).map((j) =>
          `${tokenName(i)} in block ${state.block}, in the basis of ${tokenName(j)} in block ${other}`))
      })],
      layout: tokenAxes(T)
    };
  },
};

figures.token_absolute = {
  has: () => Boolean(tokensOf(model()) && tokensOf(model()).absolute),
  title() {
    const { middle, others } = model().token_layers;
    return `Coupling matrices |A| of pairs of tokens, l = ${middle}, l′ = ${others[middle - 1]}, ${ofStep(tokensOf(model()).absolute)}`;
  },
  draw() {
    const packed = tokensOf(model()).absolute,
      { values } = atStep(packed, stepIndex()),
      [, T, , K] = packed.shape,
      side = T * (K + 1) - 1;
    const z = range(side).map(() => Array(side).fill(null));
    for (const a of range(T))
      for (const b of range(T))
        for (const i of range(K))
          for (const j of range(K)) z[a * (K + 1) + i][b * (K + 1) + j] = finite(values[((a * T + b) * K + i) * K
            + j]);
    return {
      traces: [heatmap(range(side), range(side), z, [0, 1], "%{z:.3f}", "|A| / s₁")],
      layout: tokenAxes(T, K + 1)
    };
  },
};
