"use strict";
// The page's data, and its arrays unpacked when they are first drawn (in the format of tracker/report/contents.py).
const data = JSON.parse(document.getElementById("data").textContent);

const bytes = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;
let arrays =
null; // the codes of all packed arrays: in the page after this script, so that the first charts need not wait for them
const KINDS = { 8: Uint8Array, 16: Uint16Array, 32: Float32Array };

function unpacked(packed) {
  if (packed.values) return packed.values;
  if (packed.base) return (packed.values = edged(packed));
  arrays ??= JSON.parse(document.getElementById("arrays").textContent);
  const codes = new KINDS[packed.bits](bytes(arrays[packed.codes]));
  if (packed.bits === 32) return (packed.values = codes);
  const low = new Float32Array(bytes(packed.low)),
    span = new Float32Array(bytes(packed.span));
  const size = codes.length / low.length,
    top = 2 ** packed.bits - 2,
    values = new Float64Array(codes.length);
  for (let part = 0, i = 0; part < low.length; part++) {
    for (const end = i + size; i < end; i++) {
      values[i] = codes[i] > top ? NaN : low[part] + codes[i] * (span[part] / top);
    }
  }
  arrays[packed.codes] = null;
  return (packed.values = values);
}

// Matrices that differ from others in their last row and column alone are carried as those.
function edged({ base, edge, steps, shape }) {
  const L = shape[1],
    values = Float64Array.from(unpacked(base)),
    ends = unpacked(edge);
  steps.forEach((step, place) => {
    for (const i of range(L)) {
      values[(place * L + L - 1) * L + i] = ends[2 * step * L + i];
      values[(place * L + i) * L + L - 1] = ends[(2 * step + 1) * L + i];
    }
  });
  return values;
}
for (const { matrices, levels } of data.models) {
  for (const byName of [matrices, levels]) {
    for (const byK of Object.values(byName)) {
      for (const [k, packed] of Object.entries(byK).filter(([, { edge }]) => edge)) {
        const base = byName[packed.of][k];
        Object.assign(packed, { base, steps: base.steps, shape: base.shape });
      }
    }
  }
}

// The place of the step that an array is shown at: the last carried one that is not later.
const placeOf = (packed, index) => Math.max(0, packed.steps.findLastIndex((kept) => kept <= index));

// One step's values, and the index of the step that they are of.
function atStep(packed, index) {
  const place = placeOf(packed, index);
  const size = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  return { values: unpacked(packed).subarray(place * size, (place + 1) * size), index: packed.steps[place] };
}

const finite = (value) => (Number.isFinite(value) ? value : null);
const rows = (values, length) =>
  Array.from({ length: values.length / length }, (_, i) => Array.from(values.subarray(i * length, (i + 1) * length),
    finite));
const range = (length, first = 0) => Array.from({ length }, (_, i) => i + first);
const mean = (values) => {
  const there = values.filter(Number.isFinite);
  return there.length ? there.reduce((a, b) => a + b, 0) / there.length : null;
};
