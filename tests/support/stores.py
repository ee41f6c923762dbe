"""Generated stores of any size, with distinct numbers, for tests that need no measured model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tracker.measures.coupling import (
    BY_ROTATIONS,
    level_name,
)
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import MISCOUPLINGS
from tracker.measures.trajectory import DECLARED as TRAJECTORY
from tracker.store import Store
from tracker.version import SCHEMA

WIDTH = 64  # of the models
# What differs between two runs with the same numbers. In a resumed store, the convention comes from the store.
VOLATILE = ("created", "seconds", "final_norm_reason")


def lasting(results: xr.Dataset) -> xr.Dataset:
    """Return results without what differs between two runs with the same numbers."""
    kept = results.drop_vars(VOLATILE, errors="ignore")
    kept.attrs = {name: value for name, value in kept.attrs.items() if name not in VOLATILE}
    return kept


def generated(
    path: Path,
    steps: Sequence[int],
    layers: int = 6,
    ks: Sequence[int] = (4, 8),
    prompts: int = 3,
    matrices: bool = False,
    seed: int = 0,
    **attributes: Any,
) -> Path:
    """Write a store of the default measures, with scores; return it."""
    store = Store(path)
    store.check_settings({"model": path.name})
    for step in steps:
        store.write(step, unit(step, layers, ks, prompts, matrices, seed, **attributes))
    return path


def stored(path: Path, units: Mapping[int, xr.Dataset], **settings: Any) -> Store:
    """Write a store of units by their steps; return it."""
    store = Store(path)
    store.check_settings(settings)
    for step, made in units.items():
        absent = {} if "suspect" in made.coords else {"suspect": ""}
        store.write(step, made.assign_coords(step=step, **absent))
    return store


def unit(
    step: int,
    layers: int,
    ks: Sequence[int],
    prompts: int,
    matrices: bool,
    seed: int,
    positions: int = 12,
    **attributes: Any,
) -> xr.Dataset:
    rng = np.random.default_rng([seed, step])

    def values(low: float, high: float, *shape: int) -> np.ndarray:
        return rng.uniform(low, high, (prompts, *shape)).astype(np.float32)

    pair, depth = ("prompt", "token", "k", "layer", "layer_other"), ("prompt", "depth", "position")
    window = ("prompt", "layer", "position")
    L, n, diagonal = layers, positions, np.eye(layers, dtype=bool)
    variables = {
        name: (pair, np.where(diagonal, 0, values(0.5, 1.1, 1, len(ks), L, L)))
        for name in MISCOUPLINGS
    }
    s, layer = -np.sort(-values(0.1, 9, 1, L, max(ks))), ("prompt", "token", "layer")
    variables["singular_value"] = ((*layer, "rank"), s)
    variables["isotropic"], variables["alignment"] = (
        (layer, np.zeros_like(s[..., 0])),
        ((*layer, "rank"), 0 * s),
    )
    for name in BY_ROTATIONS:
        level = values(1.1, 1.5, 1, len(ks), L, L)
        variables[level_name(name, name)] = pair, np.where(diagonal, 0, level)
    for name in (measure.name for measure in TRAJECTORY if measure.dims == ("position",)):
        variables[name] = (("prompt", "position"), values(1, 5, n))
    for name in ("lss", "expodistance", "equidistance"):
        for states in ("", "_normed"):
            variables[f"{name}_window{states}"] = (window, values(1, 5, L, n))
    for name in ("norm", "norm_normed"):
        variables[name] = (depth, values(1, 50, L + 1, n))
    ones = np.ones((prompts, 1, L), np.float32)
    checks = [f"{DIAGNOSTICS}{name}" for name in ("sliced", "complete", "full_svd")]
    variables |= {name: (("prompt", "token", "layer"), ones) for name in checks}
    errors = [f"{DIAGNOSTICS}{name}" for name in ("residual", "value_error", "derivative_error")]
    variables |= {name: (("prompt", "token", "layer"), 1e-6 * ones) for name in errors}
    if matrices:
        shape = ("prompt", "token", "layer", "layer_other", "row", "column")
        variables["matrix"] = (shape, values(-1, 1, 1, L, L, min(ks), min(ks)))
    tasks = ["lambada", "piqa"]
    variables["score"] = (("task",), rng.uniform(0.2, 0.8, len(tasks)))
    variables[f"{DIAGNOSTICS}undefined"] = (("quantity",), np.zeros(2, int))
    dataset = xr.Dataset(
        variables, {"task": tasks, "quantity": ["miscoupling", "lss"], "k": list(ks)}
    )
    first = {
        dim: np.arange(dataset.sizes[dim]) + 1
        for dim in ("layer", "layer_other", "rank", "row", "column")
        if dim in dataset.dims
    }
    dataset = dataset.assign_coords(
        **first,
        prompt_text=("prompt", [f"prompt {i}" for i in range(prompts)]),
        step=step,
        commit=f"{step:040x}",
        suspect="",
    ).assign_coords(depth=np.arange(L + 1), prompt=np.arange(prompts))
    return dataset.assign_attrs(
        {
            "schema": SCHEMA,
            "final_norm": "include",
            "dtype": "float32",
            "precision": "float32",
            "tokens": "last",
            "inputs_sha256": "ab" * 32,
            "window": 3,
            "post_norm": 0,
            "width": WIDTH,
            "blocks": ", ".join(f"h.{l}" for l in range(L)),
            "fallbacks": "{}",
            "model_class": "tests.Generated",
            "settings_sha256": str(seed),
            **attributes,
        }
    )


def assert_same_results(a: Path, b: Path):
    """Assert that two stores have bit-identical numbers."""
    assert Store(a).steps() == Store(b).steps()
    for step in Store(a).steps():
        xr.testing.assert_identical(*(lasting(Store(path).read(step)) for path in (a, b)))
