// Coupling across tokens: J of token t in block l, in the basis of token t′ in block l′ (paper, section 3.1).
const tokensOf = (m) => m.tokens[state.kind];
const baseMeasure = () => MEASURES[state.measure].base;
const hasTokens = (m) => Boolean(tokensOf(m) && tokensOf(m).curves[baseMeasure()] && tokensOf(m).curves[
baseMeasure()][state.k]);
const tokenName = (i) => (model().token_positions ? `token ${model().token_positions[i]}` : `${i + 1}`);
// Where the compared tokens have the same positions in all prompts, these name them.
const tokenRows = (table) => (model().token_positions ? table.map((row) => ({ ...row, token: model().token_positions[row.token - 1],
  token_other: model().token_positions[row.token_other - 1] })) : table);
const tokenAxes = (count, size = 1) => {
  const ticks = { tickvals: range(count).map((i) => i * size + (size - 1) / 2), ticktext: range(count).map((i) =>
      (model().token_positions ? String(model().token_positions[i]) : String(i + 1))), showgrid: false,
    constrain: "domain" };
  return { xaxis: { ...ticks, title: { text: "basis of token t′" } }, yaxis: { ...ticks,
    title: { text: "token t" }, autorange: "reversed", scaleanchor: "x" } };
};

const acrossTokens = () => ({ measure: `${state.kind}_${baseMeasure()}`, k: Number(state.k) });
const tokenLayers = () => union(shown(hasTokens).map(([m]) => m.token_layers.said));
figures.token_curves = {
  has: () => data.models.some(hasTokens),
  title: () =>
    `Coupling across tokens over training, ${state.kind.replace("_", " ")}: ${MEASURES[baseMeasure()].label}, K = ${state.k}` +
    (tokenLayers().length > 1 ? "" : `, ${tokenLayers()[0]}`),
  draw() {
    const layers = tokenLayers(),
      curve = (m) => tokensOf(m).curves[baseMeasure()][state.k],
      name = (m) => labelled(m, `mean over ${INPUTS}`) + (layers.length > 1 ? `, ${m.token_layers.said}` : "");
    return { traces: shown(hasTokens).flatMap(([m, i]) => withNull(m, curve(m), name(m), i)),
      layout: { xaxis: stepAxis(), yaxis: { rangemode: "tozero" } },
      table: () => shown(hasTokens).flatMap(([m]) => curveRows(m, acrossTokens(), curve(m))),
    };
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
      layout: tokenAxes(T),
      table: () => tokenRows(entries({ model: model().name, ...acrossTokens(), step: stepOf(packed), layer: state.block,
        layer_other: other }, ["token", "token_other"], "mean", z)),
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
    const z = range(side).map(() => Array(side).fill(null)),
      tile = (a, b) => rows(values.subarray((a * T + b) * K * K, (a * T + b + 1) * K * K), K),
      tiles = range(T).flatMap((a) => range(T).map((b) => [a, b]));
    for (const [a, b] of tiles) tile(a, b).forEach((line, i) => z[a * (K + 1) + i].splice(b * (K + 1), K, ...line));
    return {
      traces: [heatmap(range(side), range(side), z, [0, 1], "%{z:.3f}", "|A| / s₁")],
      layout: tokenAxes(T, K + 1),
      table() {
        const { middle, others } = model().token_layers;
        return tokenRows(tiles.flatMap(([a, b]) => entries({ model: model().name, measure: `${state.kind}_matrix`, k: K,
          step: stepOf(packed), layer: middle, layer_other: others[middle - 1], token: a + 1, token_other: b + 1 }, ["row",
          "column"], "absolute", tile(a, b))));
      },
    };
  },
};
