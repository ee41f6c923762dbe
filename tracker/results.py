"""Units of result on disk: one NetCDF file per step of a walk or a run, atomic, resumable, never mixed.

    DIR/settings.json             what every unit of this store was measured with
    DIR/units/step00000128.nc     one labelled Dataset
    DIR/superseded/               units of a training run beyond the checkpoint that it was resumed from

A unit is serialised in memory, written under a temporary name, synced and renamed: a reader sees all of it or nothing.
The store is the truth; W&B, the figures and the page are views of it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr

from checkpoints.files import Lock, differences, remove_stale_temporaries, write_atomic
from checkpoints.integrity import find_repeats

# Measured anew in every run, so they differ between two runs that agree in every number.
VOLATILE = ("created", "seconds")


class Store:
    """A directory of units that were all measured with the same settings."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.units = self.path / "units"
        self.settings = self.path / "settings.json"

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Take these settings for a store without results, or check that they are the store's own.

        Raises:
            ValueError: if the store was written with other settings; names each that differs.
        """
        self.units.mkdir(parents=True, exist_ok=True)
        with self.alone():
            self._check_settings(settings)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self.settings
        if not self.steps() and not self.remove_abandoned():
            write_atomic(file, json.dumps(settings, indent=2).encode())
            return
        try:
            stored = self.read_settings()
        except ValueError as error:
            raise ValueError(f"{error}; results are never mixed: choose another --out") from error
        if changes := differences(stored, settings):
            raise ValueError(
                f"{self.path} holds results measured with other settings ({changes}); results are never mixed: "
                "choose another --out, or the settings it was written with"
            )

    def file(self, step: int) -> Path:
        """Where the unit of a step is, or would be."""
        return self.units / f"step{step:08d}.nc"

    def has(self, step: int) -> bool:
        """Whether the unit of a step has been measured."""
        return self.file(step).exists()

    def claim(self, step: int) -> Lock | None:
        """The sole right to measure a step, until it is released or this process ends; None where another has it."""
        lock = Lock.take(self._claim(step))
        if lock:
            lock.sign()
        return lock

    def wait(self, step: int) -> Lock:
        """The claim on a step that has been measured, once no other has it: nobody keeps it for long."""
        lock = Lock.wait(self._claim(step))
        lock.sign()
        return lock

    def claimant(self, step: int) -> str:
        """Who has the claim on a step: host and process."""
        try:
            return self._claim(step).read_text()
        except FileNotFoundError:
            return ""

    def remove_abandoned(self) -> bool:
        """Remove the claims and half-written files of processes that were killed; whether some process is measuring."""
        for directory in (self.path, self.units):
            remove_stale_temporaries(directory)
        locks = [Lock.take(file) for file in self.units.glob(".step*.claim")]
        for lock in filter(None, locks):
            lock.release(remove=True)
        return None in locks

    def alone(self) -> Lock:
        """A lock for what concerns the whole store, such as its page; waits while another process has it."""
        return Lock.wait(self.path / ".lock")

    def _claim(self, step: int) -> Path:
        return self.units / f".step{step:08d}.claim"

    def write(self, step: int, unit: xr.Dataset) -> Path:
        """Write one unit, whole or not at all."""
        # Numbers with a checksum: a byte that has changed on the disk is noticed.
        numbers = [name for name, v in unit.variables.items() if v.dtype.kind in "biuf" and v.size and v.ndim]
        summed = {name: {"fletcher32": True} for name in numbers}
        write_atomic(self.file(step), unit.to_netcdf(engine="h5netcdf", encoding=summed))
        return self.file(step)

    def read(self, step: int) -> xr.Dataset:
        """One unit, loaded.

        Raises:
            ValueError: if the file is damaged, or not one of ours.
        """
        with self._opened(step) as opened:
            unit = opened.load()
        if "prompt" not in unit.dims:
            raise ValueError(
                f"{self.file(step)} is no unit of results but something else; take it out of the directory"
            )
        return unit

    def revision(self, step: int) -> str:
        """Which revision a unit says it was measured from; the rest of its file is not read.

        Raises:
            ValueError: if the file is damaged where it says so.
        """
        with self._opened(step) as opened:
            return str(opened.coords["revision"].item())

    @contextmanager
    def _opened(self, step: int) -> Iterator[xr.Dataset]:
        file = self.file(step)
        try:
            with xr.open_dataset(file, engine="h5netcdf") as opened:
                yield opened
        except (OSError, KeyError, RuntimeError) as error:
            raise ValueError(f"{file} can't be read ({error}); the file is damaged") from error

    def set_aside(self, steps: Iterable[int]) -> None:
        """Move units that no longer belong to the curve to DIR/superseded: nothing measured is deleted."""
        for step in steps:
            superseded = self.path / "superseded"
            superseded.mkdir(exist_ok=True)
            os.replace(self.file(step), superseded / self.file(step).name)

    def steps(self) -> list[int]:
        """The steps measured so far, ascending."""
        found = (re.fullmatch(r"step(\d{8,})\.nc", file.name) for file in self.units.glob("step*.nc"))
        return sorted(int(match[1]) for match in found if match)

    def read_settings(self) -> dict[str, Any]:
        """What every unit was measured with.

        Raises:
            ValueError: if settings.json, which says it, is missing or damaged.
        """
        try:
            stored = json.loads(self.settings.read_text())
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{self.path} holds results, but no readable settings.json that says how they were measured"
            ) from error
        if not isinstance(stored, dict):
            raise ValueError(f"{self.settings} is damaged: it should say how these results were measured")
        return stored


def open_results(path: str | Path) -> xr.Dataset:
    """All units of a walk or a run, joined along `step`, ascending.

    Attributes that all units share are kept; those that differ become coordinates along `step`. The coordinate `repeats`
    names the earlier step whose weights a step has in every tensor, -1 where there is none.

    Raises:
        FileNotFoundError: if there are no units at `path`.
        ValueError: if a unit is damaged.
    """
    store = Store(path)
    return join({step: store.read(step) for step in require_steps(store)}, store.path)


def distinct_names(directories: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart.

    >>> distinct_names([Path("/a/70m"), Path("/b/70m"), Path("/a/160m")])
    ['a/70m', 'b/70m', 'a/160m']
    """
    parts = [directory.resolve().parts for directory in directories]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    same = next(path for path, part in zip(directories, parts, strict=True) if parts.count(part) > 1)
    raise ValueError(f"{same} is given twice; give each directory of results once")


def require_steps(store: Store) -> list[int]:
    """The steps of a store that has results.

    Raises:
        FileNotFoundError: if it has none.
    """
    steps = store.steps()
    if not steps:
        raise FileNotFoundError(
            f"no results in {store.path}: it holds no units/step*.nc; give a walk's --out directory"
        )
    return steps


def join(by_step: Mapping[int, xr.Dataset], path: Path) -> xr.Dataset:
    """Units, or what was taken from each, along `step`, as `open_results` joins them; attributes that differ are moved.

    Raises:
        ValueError: if the units of `path` were not measured alike.
    """
    steps, units = list(by_step), list(by_step.values())
    for name, values in (
        ("settings", {unit.attrs.get("settings_sha256", "") for unit in units}),
        ("number of blocks", {unit.sizes.get("layer") for unit in units}),
        ("layers compared across tokens", {_pair_layers(unit) for unit in units if "pair_position" in unit}),
    ):
        if len(values) > 1:
            raise ValueError(f"{path} holds units that differ in their {name} ({values}); they make no curve")
    prints = {
        step: str(u.coords["fingerprint"].item())
        for step, u in zip(steps, units, strict=True)
        if "fingerprint" in u.coords
    }
    repeated = find_repeats(prints)
    labelled = [unit.coords["prompt_source"].variable for unit in units if "prompt_source" in unit.coords]
    if labelled:  # steps that were measured before prompts had sources, on the same prompts
        units = [u if "prompt_source" in u.coords else u.assign_coords(prompt_source=labelled[0]) for u in units]
    names = {name: None for unit in units for name in unit.attrs}
    for name in names:
        values = [unit.attrs.get(name, "") for unit in units]
        if any(value != values[0] for value in values):
            for unit in units:
                unit.coords[name] = unit.attrs.pop(name, "")
    joined = xr.concat(
        units,
        xr.IndexVariable("step", steps),
        data_vars="all",
        coords="different",
        compat="equals",
        join="outer",
        combine_attrs="drop_conflicts",
    )
    return joined.assign_coords(repeats=("step", [repeated.get(step, -1) for step in steps]))


def _pair_layers(unit: xr.Dataset) -> str:
    """The block l' of each block l, as `dataset.pair_layers` has it."""
    return str(unit.coords["pair_layer_other"].values.tolist()) if "pair_layer_other" in unit.coords else "l' = l"
