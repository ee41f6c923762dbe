"""Results on disk: one NetCDF file, a unit, per step of a walk or a training run; atomic and resumable.

    DIR/settings.json             settings that all units of this store share
    DIR/units/step00000128.nc     one Dataset, whose variables are described when it is read
    DIR/superseded/               units of a training run beyond the checkpoint that it was resumed from
    DIR/damaged/                  damaged files, whose steps were measured again
    DIR/skipped.json              steps that could not be measured, and why

A unit is serialised in memory, written under a temporary name, synced and renamed: a reader sees a complete file or none. It
ends with a hash of its content, which is compared when it is read, and so are the steps in its name and in its content.
W&B, the figures and the page are derived from the store. Units make one curve if they were measured alike (`likeness`).
"""

import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import xarray as xr

from tracker.common.errors import UsageError
from tracker.common.files import (
    Lock,
    read_json,
    remove_stale_temporaries,
    require_same_settings,
    write_atomic,
)
from tracker.common.text import find_repeats
from tracker.measures.dataset import labelled, unlabelled
from tracker.measures.settings import Settings
from tracker.netcdf import (
    Content,
    DamagedFile,
    common,
    decoded,
    file_content,
    read_content,
    seal,
    stacked,
)
from tracker.version import SCHEMA

# What a curve has one value of, and how messages call it
ATTRIBUTES = {"settings_sha256": "settings", "final_norm": "final norm", "tokens": "tokens"}


def attribute_values(ds: xr.Dataset, name: str) -> list[str]:
    """Return the values of an attribute, or of the coordinate along `step` where units differ in it."""
    held: Any = ds.coords[name].values if name in ds.coords else ds.attrs.get(name, [])
    return list(
        dict.fromkeys(str(value) for value in np.atleast_1d(np.asarray(held, dtype=object)))
    )


def by_step(ds: xr.Dataset, name: str) -> np.ndarray:
    """Return the text of each step, (step,), of a coordinate or attribute that all steps may share; "" without it."""
    held = ds.coords[name].values if name in ds.coords else ds.attrs.get(name, "")
    return np.broadcast_to(np.asarray(held, dtype=object), ds.sizes.get("step", 1))


def likeness(ds: xr.Dataset) -> dict[str, set[str]]:
    """Return what all steps of a curve have in common, each with the values found: one, where they make a curve."""
    values = {words: set(attribute_values(ds, name)) or {""} for name, words in ATTRIBUTES.items()}
    values["number of blocks"] = {str(ds.sizes.get("layer"))}
    pairs = ds["pair_layer_other"] if "pair_position" in ds else None
    values["layers compared across tokens"] = (
        set() if pairs is None else set(map(str, np.atleast_2d(pairs).tolist()))
    )
    return values


def require_one_curve(likenesses: Sequence[Mapping[str, set[str]]], path: Path) -> None:
    """Check that Datasets, given by their `likeness`, can be joined.

    Raises:
        ValueError: if the units of `path` were measured differently.
    """
    for name in likenesses[0]:
        values = set().union(*(likeness[name] for likeness in likenesses))
        if len(values) > 1:
            raise ValueError(
                f"{path} holds units that differ in their {name} ({', '.join(sorted(values))}); they make no curve: remove the "
                "units of one kind"
            )


ONE_DIRECTORY = (
    "give one directory. For several, {name: tracker.open_results(directory), ...} is what tracker.plot draws, and "
    "tracker.report.write_report(directories, 'page.html') makes one page of all"
)
REMEDY = "move it away, or, if a walk measured it, repeat the walk, which measures its step again"
INTEGRITY, UNCHECKED = "integrity", "unchecked"  # the attribute of a unit without a hash
AT_ONCE = 2**26  # bytes of files that are read together where all would be too much


def whole_step(step: Any) -> int:
    """Return a step as the number in its unit's name.

    Raises:
        UsageError: if it is no whole number from 0 on.
    """
    try:
        number = index(step)
    except TypeError:
        number = -1
    if number < 0:
        shown = shortened(step).replace("\n", " ")
        raise UsageError(
            f"the step is {shown} ({type(step).__name__}); give the number of optimizer steps, a whole number from 0 on: "
            "watch(step, model)"
        )
    return number


class Store:
    """A directory of units that were all measured with the same settings."""

    def __init__(self, path: "str | os.PathLike[str]"):
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"{path!r} is a {type(path).__name__}; {ONE_DIRECTORY}")
        self.path = Path(path)
        self.units = self.path / "units"
        self.settings = self.path / "settings.json"

    def __fspath__(self) -> str:
        """Return its directory: a store may be given where a path may."""
        return str(self.path)

    def check_settings(self, settings: Mapping[str, Any], hold: bool = False) -> Lock | None:
        """Write the settings of a store without results, or check that they are those of the store.

        Args:
            hold: return a lock; until it is released, or this process ends, no other settings are written.

        Raises:
            ValueError: if the store was written with other settings; names each that differs.
        """
        self.units.mkdir(parents=True, exist_ok=True)
        with self.alone():
            self._check_settings(settings)
            # A claim on no step: `remove_abandoned` finds a process at work, before it has claimed a step.
            return Lock.take(self.units / f".step-{secrets.token_hex(8)}.claim") if hold else None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self.settings
        # Settings of a walk that ended before its first unit are those of no result.
        if not self.steps() and not self.remove_abandoned():
            write_atomic(file, json.dumps(settings, indent=2).encode())
            return
        try:
            stored = self.read_settings()
        except ValueError as error:
            raise ValueError(
                f"{error}; results are never mixed: choose another directory"
            ) from error
        of_training = "weights" in stored
        if of_training != ("weights" in settings):
            kind = "a training run" if of_training else "a walk"
            raise ValueError(
                f"{self.path} holds results of {kind}; results are never mixed: choose another directory (save_dir=, of a walk "
                "--out)"
            )
        require_same_settings(self.path, stored, settings)

    def file(self, step: int) -> Path:
        """Return the file of a step's unit, which may not exist."""
        return self.units / f"step{whole_step(step):08d}.nc"

    def has(self, step: int) -> bool:
        """Whether the unit of a step has been measured."""
        return self.file(step).exists()

    def claim(self, step: int) -> Lock | None:
        """Claim a step, until the claim is released or this process ends; return None if another process has it."""
        lock = Lock.take(self._claim(step))
        if lock:
            lock.sign()
        return lock

    def wait(self, step: int) -> Lock:
        """Wait for the claim on a step that has been measured; no process keeps such a claim for long."""
        lock = Lock.wait(self._claim(step))
        lock.sign()
        return lock

    def claimant(self, step: int) -> str:
        """Return who claimed a step."""
        return Lock.holder(self._claim(step))

    def remove_abandoned(self) -> bool:
        """Remove the claims and partial files of killed processes; return whether a process is measuring."""
        for directory in (self.path, self.units):
            remove_stale_temporaries(directory)
        locks = [Lock.take(file) for file in self.units.glob(".step*.claim")]
        for lock in filter(None, locks):
            lock.release(remove=True)
        return None in locks

    def alone(self) -> Lock:
        """Wait for the lock of the whole store, which protects its settings and its page."""
        return Lock.wait(self.path / ".lock")

    def _claim(self, step: int) -> Path:
        return self.units / f".step{step:08d}.claim"

    def write(self, step: int, unit: xr.Dataset) -> Path:
        """Write one unit atomically."""
        return self.write_content(step, file_content(unlabelled(unit)))

    def write_content(self, step: int, content: bytes | memoryview) -> Path:
        """Write the `file_content` of one unit atomically; a damaged file in its place moves to DIR/damaged."""
        # A whole unit gives way to an equal one, or to itself with more scores.
        aside = None
        if self.has(step):
            try:
                self._content(step)
            except DamagedFile:
                aside = self._aside("damaged", step)
        write_atomic(self.file(step), content, seal(content), aside=aside)
        return self.file(step)

    def _aside(self, name: str, step: int) -> Path:
        """Return a new file for a unit, in a directory of units that no longer count."""
        directory, unit = self.path / name, self.file(step)
        directory.mkdir(exist_ok=True)
        # A step may be measured and set aside several times; none replaces another.
        names = (f"{unit.stem}{f'-{i}' if i else ''}{unit.suffix}" for i in itertools.count())
        return next(file for file in map(directory.joinpath, names) if not file.exists())

    def read(self, step: int) -> xr.Dataset:
        """Read one unit into memory.

        Raises:
            FileNotFoundError: if it was not measured.
            DamagedFile: if the file is damaged, or not one of ours.
            UsageError: if another version of the package wrote it.
        """
        return labelled(decoded(self._content(step)))

    def attributes(self, step: int) -> dict[str, Any]:
        """Read the attributes of a unit."""
        return self._content(step, ()).attrs

    def curve(self, steps: Sequence[int], names: Collection[str] | None = None) -> xr.Dataset:
        """Read units, joined along `step` as `join` does.

        Args:
            names: read only those of these variables that they have.

        Raises:
            ValueError: as `read` and `join`.
        """
        contents: list[Content] = []
        for step in steps:
            contents.append(self._content(step, names, *contents[-1:]))
        return self._joined(contents)

    def curves(
        self,
        steps: Sequence[int],
        leave_out: Callable[[int, OSError | ValueError], None] | None = None,
    ) -> Iterator[xr.Dataset]:
        """Read units, joined along `step` in parts that fit in memory.

        Args:
            leave_out: called for a unit that is damaged or no longer there, which is left out; by default an error is raised.
        """
        contents: list[Content] = []
        size = 0
        for step in steps:
            try:
                size += self.file(step).stat().st_size
                contents.append(self._content(step, None, *contents[-1:]))
            except (FileNotFoundError, DamagedFile) as error:
                if leave_out is None:
                    raise
                leave_out(step, error)
            if contents and (size > AT_ONCE or step == steps[-1]):
                yield self._joined(contents)
                contents, size = [], 0

    def _content(
        self, step: int, names: Collection[str] | None = None, like: Content | None = None
    ) -> Content:
        file = self.file(step)
        try:
            content = read_content(file, None if names is None else {*names, "step"}, like)
        except DamagedFile as error:
            raise DamagedFile(f"{error}; {REMEDY}") from error
        # Variables that are named need not be of prompts.
        has_prompts = names is not None or any("prompt" in dims for dims in content.dims.values())
        if "schema" not in content.attrs or "step" not in content.values or not has_prompts:
            raise DamagedFile(f"{file} is not a unit of results; {REMEDY}")
        if (held := content.values["step"]).tolist() != step:
            raise DamagedFile(f"{file} is damaged (it holds step {held}); {REMEDY}")
        if content.attrs["schema"] != SCHEMA:
            raise UsageError(
                f"{file} was measured by another version of this package; measure again, into a new directory"
            )
        # What a Dataset says of an earlier reading was stored if it was written again.
        content.attrs.pop(INTEGRITY, None)
        if not content.checked:  # of an earlier version of the package
            content.attrs[INTEGRITY] = UNCHECKED
        return content

    def _joined(self, contents: list[Content]) -> xr.Dataset:
        # Units of one form are stacked, which is fast; xarray joins the few forms that there are.
        forms: dict[str, list[Content]] = {}
        for content in contents:
            forms.setdefault(content.form, []).append(content)
        contents.clear()  # what is stacked is not needed any more
        return join([stacked(alike) for alike in forms.values()], self.path)

    def set_aside(self, steps: Iterable[int]) -> None:
        """Move units that no longer belong to the curve to DIR/superseded."""
        for step in steps:
            os.replace(self.file(step), self._aside("superseded", step))

    def skipped(self) -> dict[int, str]:
        """Return the steps that could not be measured and why, ascending; none that was measured later."""
        file = self.path / "skipped.json"
        try:
            stored = read_json(file, dict)
        except FileNotFoundError:
            return {}
        if wrong := [step for step in stored if not step.isdecimal()]:
            raise ValueError(f"{file} is damaged: {wrong[0]!r} is no step; remove it")
        reasons = {int(step): str(reason) for step, reason in stored.items()}
        return {step: reasons[step] for step in sorted(reasons) if not self.has(step)}

    def write_skipped(self, reasons: Mapping[int, str]) -> None:
        """Replace the record of steps that could not be measured."""
        write_atomic(self.path / "skipped.json", json.dumps(reasons, indent=2).encode())

    def continued(self, settings: Settings) -> Settings:
        """Return the settings that continue this store: the final norm, where they leave it open, is as in its units."""
        shared = self.shared("final_norm") if settings.final_norm == "auto" else None
        return settings if shared is None else replace(settings, final_norm=shared)

    def shared(self, name: str) -> Any:
        """Return an attribute that all units share, from the last that is whole; None if there is none."""
        for step in reversed(self.steps()):
            with suppress(DamagedFile, FileNotFoundError):
                return self.attributes(step)[name]
        return None

    def steps(self) -> list[int]:
        """Return the steps measured so far, ascending."""
        names = (
            re.fullmatch(r"step(\d{8,})\.nc", file.name) for file in self.units.glob("step*.nc")
        )
        return sorted(int(match[1]) for match in names if match)

    def read_settings(self) -> dict[str, Any]:
        """Read the settings that all units share.

        Raises:
            ValueError: if settings.json is missing or damaged.
        """
        try:
            return read_json(self.settings, dict)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{self.path} holds results, but no readable settings.json that says how they were measured ({error})"
            ) from error


def open_results(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read all units of a walk or a training run, joined along `step`, ascending.

    Attributes that all units share are kept; those that differ become coordinates along `step`. The coordinate `repeats`
    names the earlier step whose weights a step has in every tensor, -1 where there is none.

    Raises:
        FileNotFoundError: if there are no units at `path`.
        ValueError: if a unit is damaged, or `path` is several.
    """
    store = Store(path)
    return labelled(store.curve(require_steps(store)))


def short_name(ds: xr.Dataset) -> str:
    """Return the name of a result: its suite or repository, or its class where the name is a long path."""
    name = str(ds.attrs.get("suite") or ds.attrs.get("model_name") or "")
    if in_cache := re.search(r"models--(.+?)/", name):  # a directory of the hub's cache
        return in_cache[1].replace("--", "/")
    return (
        name
        if name and not Path(name).is_absolute()
        else str(ds.attrs.get("model_class", "")).rpartition(".")[2]
    )


Result = xr.Dataset | os.PathLike[str] | str  # a Dataset, or a store or its directory
GIVE = (
    "give a Dataset as from tracker.measure or tracker.open_results, a directory of results, or several of these in a list or in "
    'a mapping from names; tracker.summary and the curves of tracker.plot also take the runs of recipes, {"a": [run, run], '
    '"b": [run, run]}'
)


def by_name(results: Any) -> dict[str, Result]:
    """Return one result or several by name: that given, that of its directory, or for a Dataset its `short_name`.

    Raises:
        UsageError: for what is no result, and for none.
    """
    listed: list[Any]
    if isinstance(results, Mapping) and not isinstance(results, xr.Dataset):
        listed, names = list(results.values()), [str(name) for name in results]
    else:
        listed, names = list(results) if isinstance(results, list | tuple) else [results], []
    if not listed:
        raise UsageError(f"no results; {GIVE}")
    for result in listed:
        if not isinstance(result, xr.Dataset | os.PathLike | str):
            raise UsageError(f"{type(result).__name__} is no result; {GIVE}")
    # Paths tell directories apart; Datasets, which have none, and what is beside them get numbers.
    if not names and not any(isinstance(result, xr.Dataset) for result in listed):
        names = distinct_names([Path(directory) for directory in listed])
    elif not names:
        names = [short_name(of) if isinstance(of, xr.Dataset) else Path(of).name for of in listed]
        if len(set(names)) < len(names):
            names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    return dict(zip(names, listed, strict=True))


def runs_of_recipes(results: Any) -> dict[str, dict[str, Result]]:
    """Return the runs of each recipe by name, as `by_name`; a result that is no list or mapping of runs is a recipe of one."""
    of_recipes = isinstance(results, Mapping) and not isinstance(results, xr.Dataset) and results
    named: Any = results if of_recipes else by_name(results)
    return {str(recipe): by_name(runs) for recipe, runs in named.items()}


def distinct_names(directories: Sequence[Path]) -> list[str]:
    """Return as many last parts of the paths as distinguish them.

    >>> distinct_names([Path("/a/70m"), Path("/b/70m"), Path("/a/160m")])
    ['a/70m', 'b/70m', 'a/160m']
    """
    parts = [directory.resolve().parts for directory in directories]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    same = next(
        path for path, part in zip(directories, parts, strict=True) if parts.count(part) > 1
    )
    raise ValueError(f"{same} is given twice; give each directory of results once")


def require_steps(store: Store) -> list[int]:
    """Return the steps of a store that has results.

    Raises:
        FileNotFoundError: if it has none.
    """
    steps = store.steps()
    if not steps:
        raise FileNotFoundError(
            f"no results in {store.path}: it holds no units/step*.nc; give a walk's --out directory, or the save_dir of a "
            "training run. A file written by ds.to_netcdf is opened with xarray.load_dataset"
        )
    return steps


def join(curves: Sequence[xr.Dataset], path: Path) -> xr.Dataset:
    """Join Datasets along `step`, ascending; attributes that differ become coordinates.

    Raises:
        ValueError: if the units of `path` were measured differently.
    """
    require_one_curve([likeness(curve) for curve in curves], path)
    if len(curves) > 1:
        _, differing = common([curve.attrs for curve in curves])
        curves = [_with_attributes(curve, differing) for curve in curves]
        curves = [_with_coordinates(curve, curves) for curve in curves]
        joined = xr.concat(
            curves,
            "step",
            data_vars="all",
            coords="different",
            compat="equals",
            join="outer",
            combine_attrs="drop_conflicts",
        )
    else:
        joined = curves[0]
    if (np.diff(joined["step"]) < 0).any():
        joined = joined.sortby("step")
    steps = joined["step"].values.tolist()
    repeated = find_repeats(dict(zip(steps, by_step(joined, "fingerprint"), strict=True)))
    return joined.assign_coords(repeats=("step", [repeated.get(step, -1) for step in steps]))


def _with_attributes(curve: xr.Dataset, differing: Collection[str]) -> xr.Dataset:
    """Return a curve whose attributes of these names are coordinates along `step`."""
    along = {
        name: ("step", [curve.attrs[name]] * curve.sizes["step"])
        for name in differing
        if name in curve.attrs
    }
    kept = {name: value for name, value in curve.attrs.items() if name not in differing}
    return curve.assign_coords(along).drop_attrs(deep=False).assign_attrs(kept)


def _with_coordinates(curve: xr.Dataset, curves: Sequence[xr.Dataset]) -> xr.Dataset:
    """Return a curve that has each coordinate of the others: theirs where it is of prompts, else "" or NaN."""
    coordinates = {}
    for other in curves:
        for name, coordinate in other.coords.items():
            if name in curve.coords or name in coordinates:
                continue
            variable = coordinate.variable
            of_prompts = variable.isel(step=0) if "step" in variable.dims else variable
            unknown = np.nan if coordinate.dtype.kind in "iuf" else ""
            coordinates[name] = of_prompts if of_prompts.dims else unknown
    return curve.assign_coords(coordinates)
