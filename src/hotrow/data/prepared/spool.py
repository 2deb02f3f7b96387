"""The first pass: samples with keys in place of rows, on disk, and what was counted meanwhile.

Text is read, uncompressed and parsed once. What it becomes is as large as the shards that are made
of it, waits beside them, and goes as they come; so little more than their room is needed.

A stretch is some consecutive pieces, as many as the files alone decide, and one file here. What is
in place is noted in a log. A stopped run goes on after the last stretch that is whole, and counts
the values of those before again, in the same order, so that it ends as if it had not been stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from numpy.typing import NDArray

from hotrow.data.prepared.format import Schema, Section, in_sections, map_section, side_by_side
from hotrow.data.prepared.pieces import Piece, Place
from hotrow.data.prepared.rows import EXAMPLES, Samples
from hotrow.support import files
from hotrow.support.files import FileRecord, inside, why_wrong

WORK = ".work"
LOG = f"{WORK}/read.jsonl"


class Disk(files.Disk):
    """The folder that `hotrow prepare` makes."""

    remedy = "What is finished is kept: make room and give the same command again to resume"

    def append(self, name: str, line: str) -> None:
        """Adds a line to a log; it is on the disk when this returns.

        It starts with an end of line, so that half a line before it spoils nothing.
        """
        self.extend(name, b"\n" + line.encode() + b"\n", durable=True)

    def extend(self, name: str, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Adds to the end of a file; an error may leave a part of it there."""
        path = self.folder / name
        try:
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self.in_plain_words(error, path) from None


@dataclass(frozen=True)
class BadRows:
    """Lines that were left out: how many, and the first of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def and_more(self, count: int, examples: list[str]) -> BadRows:
        return BadRows(self.count + count, [*self.examples, *examples][:EXAMPLES])


@dataclass(frozen=True)
class Stretch:
    """A file of the spool, and where it comes from."""

    number: int
    file: FileRecord
    samples: int
    values: dict[str, int]  # of each jagged feature
    place: Place
    after: Place
    lines: dict[int, int]  # of each file that it is made of
    bad: BadRows
    checked: tuple[str, ...] = ()  # features whose checks it has

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Stretch:
        return cls(
            found["number"], FileRecord(**found["file"]), found["samples"], found["values"],
            Place(**found["place"]), Place(**found["after"]),
            {int(file): lines for file, lines in found["lines"].items()},
            BadRows(**found["bad"]), tuple(found["checked"]),
        )  # fmt: skip


class Spool:
    """Stretches on disk."""

    PIECES = 16  # in a stretch, or fewer:
    BYTES = 48 << 20  # of samples are enough, which short lines have sooner

    def __init__(self, disk: Disk, schema: Schema, key_dtype: str) -> None:
        self._disk, self._schema, self._dtype = disk, schema, key_dtype
        self._written: set[int] = set()  # by this run, not by one before it

    def write(self, number: int, found: list[tuple[Piece, Samples]], bad: BadRows) -> Stretch:
        samples = sum(len(each.lines) for _, each in found)
        values = {
            each.name: sum(len(part.keys[each.name]) for _, part in found)
            for each in self._schema.jagged
        }
        names = (each.name for each in self._schema.features)
        checked = tuple(name for name in names if any(name in part.checks for _, part in found))
        data = self._bytes(found, samples, values, checked)
        file = self._disk.write(f"{WORK}/{number:05}.keys", data, durable=False)
        lines: dict[int, int] = {}
        for piece, _ in found:
            lines[piece.place.file] = lines.get(piece.place.file, 0) + piece.lines
        place, after = found[0][0].place, found[-1][0].after
        stretch = Stretch(number, file, samples, values, place, after, lines, bad, checked)
        self._disk.append(LOG, json.dumps(asdict(stretch)))
        self._written.add(number)
        return stretch

    def finish(self) -> None:
        self._disk.append(LOG, json.dumps({"finished": True}))

    def log(self) -> tuple[list[Stretch], bool]:
        """The stretches that were written, and whether those were all."""
        path = self._disk.folder / LOG
        found: list[Stretch] = []
        if not path.exists():
            return found, False
        for line in path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # half a line, of a run that was killed
            if "finished" in record:
                return found, True
            stretch = Stretch.from_json(record)
            found[stretch.number :] = [stretch]  # one that was written again counts
        return found, False

    def is_whole(self, stretch: Stretch) -> bool:
        contents = stretch.number not in self._written
        return why_wrong(self._disk.folder, stretch.file, contents=contents) is None

    def remove(self, stretch: Stretch) -> None:
        (self._disk.folder / stretch.file.file).unlink(missing_ok=True)

    def read(self, stretch: Stretch) -> Samples:
        """Memory-mapped; lines are counted over all files."""
        path = inside(self._disk.folder, stretch.file.file)
        arrays = {
            name: map_section(path, each)
            for name, each in self._sections(
                stretch.samples, stretch.values, stretch.checked
            ).items()
        }
        return Samples(
            arrays["lines"], arrays["label"], arrays["dense"],
            {each.name: arrays[f"{each.name}.keys"] for each in self._schema.features},
            lengths={each.name: arrays[f"{each.name}.lengths"] for each in self._schema.jagged},
            checks={name: arrays[f"{name}.checks"] for name in stretch.checked},
        )  # fmt: skip

    def _sections(
        self, samples: int, values: dict[str, int], checked: Sequence[str]
    ) -> dict[str, Section]:
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("lines", "int64", (samples,)),
            ("dense", "float32", (samples, len(self._schema.dense))),
            ("label", "uint8", (samples,)),
        ]
        for each in self._schema.features:
            count = values[each.name] if each.jagged else samples
            wanted.append((f"{each.name}.keys", self._dtype, (count,)))
            if each.name in checked:
                wanted.append((f"{each.name}.checks", "uint32", (count,)))
            if each.jagged:
                wanted.append((f"{each.name}.lengths", "int64", (samples,)))
        return side_by_side(wanted)

    def _bytes(
        self,
        found: list[tuple[Piece, Samples]],
        samples: int,
        values: dict[str, int],
        checked: Sequence[str],
    ) -> Iterator[memoryview]:
        def arrays(name: str) -> Iterator[NDArray[Any]]:
            for piece, part in found:
                if name == "lines":
                    yield part.lines + piece.place.line
                elif name in ("label", "dense"):
                    yield getattr(part, name)
                else:
                    feature, _, what = name.rpartition(".")
                    if what == "checks":
                        yield part.checks_of(feature)
                    else:
                        yield (part.keys if what == "keys" else part.lengths)[feature]

        places = self._sections(samples, values, checked)
        yield from in_sections((each, arrays(name)) for name, each in places.items())
