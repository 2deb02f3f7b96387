"""`hotrow prepare`: logs of clicks into a folder that training reads, with progress."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.cli._options import JsonLinesFlag
from hotrow.cli._output import JsonLines, progress_bar
from hotrow.data.prepared.format import Manifest
from hotrow.data.prepared.job import Settings, Watch
from hotrow.data.prepared.sources import KINDS, open_source
from hotrow.data.prepared.work import prepare as prepare_files
from hotrow.report.page import Table
from hotrow.report.terminal import show_parts
from hotrow.support.messages import many
from hotrow.support.units import parse_bytes, show_bytes


def prepare(
    kind: Annotated[str, typer.Argument(help=f"What the files are: {', '.join(KINDS)}.")],
    files: Annotated[
        list[Path],
        typer.Argument(help="Files in the order of time; text may be compressed (.gz, .zst)."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    min_frequency: Annotated[
        int, typer.Option(help="Values seen less often share row 0 of their table.")
    ] = 1,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Rows of a table at the most: the most frequent values keep theirs."),
    ] = None,
    use_hash: Annotated[
        bool,
        typer.Option("--hash", help="No vocabulary: hash every value into --max-rows rows."),
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(
            help="'time': the last file, or of one file the last seventh, is halved into "
            "validation and test. 'random': a tenth each."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    bad_rows: Annotated[
        str, typer.Option(help="'error' stops at a bad line; 'skip' leaves it out and counts it.")
    ] = "error",
    memory: Annotated[
        str, typer.Option(help="The most that is used. A table that does not fit is hashed.")
    ] = "4GiB",
    columns: Annotated[
        Path | None, typer.Option(help="TOML file that describes the columns (parquet, csv).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads; as many as there are cores if left out.")
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Delete what is in --out and begin again."),
    ] = False,
    as_json: JsonLinesFlag = False,
) -> None:
    """Turn logs into shards that training maps into memory.

    Values are counted, given rows, and written as fixed-width numbers, beside a manifest with
    checksums and the access counts of every row. Memory stays below --memory whatever the size of
    the input; a run that was stopped goes on where it was when the same command is given again.
    For a while the folder takes up to twice the bytes of its shards. **hotrow verify** compares the
    checksums again, whenever you like.

    **Kinds of files**

    - `criteo`: Kaggle's train.txt or the days of the Terabyte log: 40 columns, tabs between

    - `avazu`: Kaggle's train.csv of the Avazu contest, with its header

    - `taobao`: UserBehavior.csv, into sequences: who saw what, and what came next

    - `parquet`, `csv`: columns of any name, described by --columns:

    &nbsp;

        label = "clicked"
        dense = ["price", "age"]          # numbers
        log = ["price"]                   # those of them that become log(x + 1)
        categories = ["user", "item", "last_item", "tags"]    # one table each
        [tables]
        last_item = "item"                # a column that reads another's table
        [lists]
        tags = "|"                        # CSV: between the values of a list; Parquet has its own

    **Examples**

    - `hotrow prepare criteo train.txt --out prepared/kaggle`

    - `hotrow prepare criteo day_{0..23}.gz --out prepared/terabyte --max-rows 40000000
      --memory 64GiB`

    - `hotrow prepare criteo day_0.gz --out prepared/day0 --hash --max-rows 1000000`

    - `hotrow prepare avazu train.csv.zst --out prepared/avazu --min-frequency 2 --bad-rows skip`

    - `hotrow prepare parquet part-*.parquet --columns columns.toml --out prepared/mine`

    - `hotrow prepare csv clicks.csv --columns columns.toml --out prepared/mine`

    pyarrow reads .gz, .zst and Parquet.
    """
    settings = Settings(
        min_frequency=min_frequency,
        max_rows=max_rows,
        hash=use_hash,
        split=split or ("random" if kind == "avazu" else "time"),
        seed=seed,
        bad_rows=bad_rows,
        memory_bytes=parse_bytes(memory),
    )
    source = open_source(kind, files, out=out, columns=columns, settings=settings)
    watch = _Lines() if as_json else _Bar()
    try:
        with watch:
            manifest = prepare_files(
                source, out, settings, workers=workers, restart=restart, watch=watch
            )
    except KeyboardInterrupt:
        again = "give the same command again" + (" without --restart" if restart else "")
        raise KeyboardInterrupt(f"what is finished is kept: {again} to resume") from None
    watch.end(manifest, out)


class _Bar(Watch):
    """Shows a bar for each stage, and a table at the end."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._bar = progress_bar(self._console, "{task.percentage:>3.0f}%", "{task.fields[rate]}")
        self._task: Any = None
        self._started = 0.0

    def stage(self, title: str, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._bar.tasks[self._task].total)
        self._task = self._bar.add_task(title, total=max(1, total), rate="")
        self._started = monotonic()

    def advance(self, done: int, samples: int) -> None:
        seconds = monotonic() - self._started
        rate = f"{samples / seconds:,.0f} rows/s" if seconds > 1 else ""
        self._bar.update(self._task, completed=done, rate=rate)

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def end(self, manifest: Manifest, out: Path) -> None:
        if self._task is None:
            return  # there was nothing to do, as a message said
        cells = [
            [
                table.name,
                f"{table.rows:,}",
                "not counted" if table.values is None else f"{table.values:,}",
                table.ids,
            ]
            for table in manifest.tables
        ]
        heads = ("table", "rows", "values", "ids")
        show_parts([Table(heads, cells, words=("ids",))], self._console)
        if bad := manifest.source["bad_rows"]:
            self._console.print(f"[yellow]{many(bad, 'bad row')} left out[/], the first of them:")
            for example in manifest.source["bad_examples"]:
                self._console.print(f"  {escape(example)}", soft_wrap=True)
        rows = sum(table.rows for table in manifest.tables)
        samples = ", ".join(f"{manifest.samples(name):,} {name}" for name in manifest.splits)
        size = show_bytes(sum(file.bytes for file in manifest.files))
        self._console.print(
            f"{many(rows, 'row')} in {many(len(manifest.tables), 'table')}; {samples}; {size}"
        )
        self._console.print(f"written to {escape(str(out))}", soft_wrap=True)


class _Lines(JsonLines, Watch):
    """Writes the same as JSON objects."""

    def stage(self, title: str, total: int) -> None:
        self._stage = {"stage": title, "total": total}
        self.write("stage", **self._stage)

    def advance(self, done: int, samples: int) -> None:
        if self.progress_is_due():
            stage, total = self._stage["stage"], self._stage["total"]
            self.write("progress", stage=stage, done=done, total=total, samples=samples)

    def say(self, text: str) -> None:
        self.write("message", text=text)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def end(self, manifest: Manifest, out: Path) -> None:
        self.write(
            "end",
            folder=str(out),
            samples={name: manifest.samples(name) for name in manifest.splits},
            tables={table.name: table.rows for table in manifest.tables},
            bytes=sum(file.bytes for file in manifest.files),
            bad_rows=manifest.source["bad_rows"],
            bad_examples=manifest.source["bad_examples"],
        )
