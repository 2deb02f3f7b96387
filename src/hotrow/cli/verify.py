"""`hotrow verify`: compare files on the disk with what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from hotrow.checkpoint import Checkpoint, SavedModel
from hotrow.checkpoint.folder import IN_RUN, named_in, named_latest
from hotrow.checkpoint.manifest import CHECKPOINT_FILE, NAME
from hotrow.checkpoint.tables import is_export, verify_export
from hotrow.checkpoint.tensors import row_not_finite
from hotrow.cli._options import JsonFlag, Runs
from hotrow.cli._process import USER_ERROR
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import MANIFEST, read_manifest
from hotrow.data.prepared.job import WORK
from hotrow.run.files import MODEL_FOLDER, to_json
from hotrow.support.manifests import read_json
from hotrow.support.messages import many
from hotrow.support.progress import bytes_bar
from hotrow.support.units import show_bytes


def verify(
    path: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a run, a model, an export, or a prepared folder."),
    ],
    as_json: JsonFlag = False,
    runs: Runs = Path("runs"),
) -> None:
    """Read every byte of a folder and compare it with what was written.

    - a checkpoint, with the one it builds upon: checksums, shapes, row numbers, and whether all
      weights and states are finite

    - a model: checksums and shapes, and whether all weights are finite

    - prepared data: checksums

    - an export: checksums and shapes. An earlier version wrote no checksums: then the values are
      read, and the output says what could not be checked

    - a run, or a folder of runs, of checkpoints or of prepared data: all that is in it

    Every error is printed, the rest is still checked, and the exit code is 2.

    **Examples**

    - `hotrow verify runs/first/checkpoints/00012-step-12000`

    - `hotrow verify first`

    - `hotrow verify prepared/kaggle --json`

    - `hotrow export first --to parquet --out tables`, and after a copy `hotrow verify tables`
    """
    below = (part for folder in sorted(path.glob("*/")) for part in _parts(folder))
    folders = list(_parts(path)) or list(_parts(runs / path)) or list(below)
    if not folders and not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if not folders and (path / WORK).is_dir():
        read_manifest(path)  # says how to resume a preparation that was not finished
    if not folders:
        raise ValueError(f"{path} holds no checkpoint, no model, no export and no prepared data")
    is_wrong = False
    for folder in folders:
        try:
            what = _verify(folder)
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            is_wrong = True
            continue
        if as_json:
            typer.echo(to_json({"event": "verified", "folder": str(folder), **asdict(what)}))
        else:
            text = f"{folder}: {what.kind}, {many(what.files, 'file')}, {show_bytes(what.bytes)}"
            typer.echo(f"{text}, {what.note or 'as written'}")
    if is_wrong:
        raise typer.Exit(USER_ERROR)


@dataclass(frozen=True)
class _Verified:
    kind: str
    files: int
    bytes: int
    note: str = ""  # what could not be checked


def _parts(path: Path) -> Iterator[Path]:
    """Yield what can be verified in a folder."""
    files = (path / CHECKPOINT_FILE, path / MANIFEST)
    if any(file.is_file() for file in files) or (path.is_dir() and is_export(path)):
        yield path
        return
    for root in (path, path / IN_RUN):
        yield from named_in(root)
        latest = named_latest(root)
        if latest is not None and not (root / latest).exists():  # reported as missing
            yield root / latest
    if (path / MODEL_FOLDER / MANIFEST).is_file():
        yield path / MODEL_FOLDER


def _verify(folder: Path) -> _Verified:
    """Return what a folder is; a ValueError says what is wrong with it."""
    if (folder / CHECKPOINT_FILE).is_file() or NAME.fullmatch(folder.name):
        Checkpoint(folder).verify()
        return _counted("checkpoint", folder)
    if not (folder / MANIFEST).is_file() and is_export(folder):
        return _Verified(**asdict(verify_export(folder)))
    manifest = read_json(folder / MANIFEST)
    if isinstance(manifest, dict) and "tables" in manifest and "splits" not in manifest:
        model = SavedModel(folder)
        model.verify()
        _check_finite(model)
        return _counted("model", folder)
    data, done = Prepared(folder), 0

    def note(size: int) -> None:
        nonlocal done
        done += size
        advance(done, data.num_bytes)

    with bytes_bar("checking the data") as advance:
        data.verify(note)
    return _Verified("prepared data", len(data.manifest.files), data.num_bytes)


def _counted(kind: str, folder: Path) -> _Verified:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return _Verified(kind, len(sizes), sum(sizes))


def _check_finite(model: SavedModel) -> None:
    for key, tensor in model.dense.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{model.folder}: {key} holds NaN or infinite values")
    for table in model.tables:
        for first, rows in model.weights(table.key):
            if (row := row_not_finite(rows)) is not None:
                where = f"{model.folder}: row {first + row:,} of {table.key}"
                raise ValueError(f"{where} holds NaN or infinite values")
