"""Many measurements in one call with a limit, of which a cut leaves all that were finished.

    python benchmarks/session.py --out $OUT --minutes 9 dcnv2 target eager stalls steps
    python benchmarks/session.py --list

Each measurement is a command of this folder, run in a process of its own with a limit of seconds;
those named first come first. Its scripts append a line of JSON for each result as it comes; each
measurement's output is in a file of its own, and `session.jsonl` has a line for each that ended, in
whatever way. Figures are means over all timed steps, with every row written before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GRACE = 12.0  # seconds that a script gets to end by itself before its process is ended
END = 8.0  # seconds that are left at the end of the minutes, for what is said last
TARGET = ("--interaction", "fused", "--masters", "hotrow")
EAGER = ("--no-compile", "--no-graphs")
TRIO = ("hotrow-lookahead-written", "hotrow-all-fast", "fbgemm-cached")


@dataclass(frozen=True)
class Measurement:
    """A command, and about how long it takes."""

    words: tuple[str, ...]  # of the command: a script of this folder, and its options
    seconds: int  # it is not begun with less than half of that, and ended after twice as many


def suite(
    script: str, setting: str, systems: Sequence[str], *options: str, timed: int = 1000
) -> tuple[str, ...]:
    """Return the words of some systems in one setting."""
    only = [f"{setting}/{system}" for system in systems]
    return (f"{script}.py", "--only", *only, "--timed", str(timed), *options)


def dcnv2(setting: str, systems: Sequence[str]) -> tuple[str, ...]:
    return suite("dcnv2", setting, systems, timed=300)


# What the figures of a release need, and variants of what is tuned. `all-fast` is measured beside
# each: cores of one machine run at several speeds.
MEASUREMENTS = {
    "dcnv2": Measurement(dcnv2("budget-5", TRIO[:2]), 110),
    "dcnv2-fresh": Measurement(dcnv2("budget-5", ("hotrow-lookahead", "hotrow-all-fast")), 110),
    "dcnv2-20": Measurement(dcnv2("budget-20", TRIO[:2]), 130),
    "dcnv2-50": Measurement(dcnv2("budget-50", TRIO[:2]), 150),
    "dcnv2-fbgemm": Measurement(dcnv2("rowwise", TRIO), 200),
    "target": Measurement(suite("terabyte", "target", TRIO, *TARGET), 110),
    "target-plain": Measurement(
        suite("terabyte", "target", TRIO, "--no-compile", "--masters", "hotrow"), 110
    ),
    "adam": Measurement(suite("terabyte", "adam", TRIO, *TARGET), 110),
    "dim-128": Measurement(suite("terabyte", "dim-128", TRIO, *TARGET), 170),
    "batch-2048": Measurement(suite("terabyte", "batch-2048", TRIO, *TARGET), 90),
    "zipf-0.9": Measurement(suite("terabyte", "zipf-0.9", TRIO, *TARGET), 130),
    "multihot": Measurement(suite("multihot", "sgd", TRIO), 60),
    "multihot-adam": Measurement(suite("multihot", "adam", TRIO), 70),
    "sequences": Measurement(suite("sequences", "sequences", TRIO), 100),
    "eager": Measurement(
        suite(
            "terabyte", "target", ("hotrow-loop-written", "fbgemm-cached", "dense-alone"), *EAGER
        ),
        110,
    ),
    "eager-2048": Measurement(
        suite(
            "terabyte",
            "batch-2048",
            ("hotrow-loop-written", "fbgemm-cached", "dense-alone"),
            *EAGER,
        ),
        90,
    ),
    "stalls": Measurement(("stalls.py", "--only", "target", "--cold", *TARGET), 130),
    "stalls-adam": Measurement(("stalls.py", "--only", "adam", "--cold", *TARGET), 130),
    "start": Measurement(("stalls.py", "--only", "target", "--steps", "2000", *TARGET), 70),
    "steps": Measurement(("steps.py",), 400),
    "ceilings": Measurement(("ceilings.py",), 200),
    **{
        f"dcnv2-{name}": Measurement((*dcnv2("budget-5", TRIO[:1]), *options), 80)
        for name, options in {
            "zero-copy": ("--fill", "zero-copy"),
            "bulk": ("--fill", "bulk"),
            "staged": ("--fill", "staged"),
            "places-16": ("--tuning", "places_on_host=16"),
            "places-24": ("--tuning", "places_on_host=24"),
            "places-40": ("--tuning", "places_on_host=40"),
            "packets-8": ("--tuning", f"packet_bytes={8 << 20}", "places_on_host=24"),
            "unsorted": ("--tuning", f"sorted_from={1 << 30}"),
        }.items()
    },
}


@dataclass
class Session:
    """One call: until when it may run, and where results go."""

    out: Path
    end: float  # of time.monotonic()
    options: tuple[str, ...]  # that every script gets
    process: subprocess.Popen[bytes] | None = None

    @property
    def seconds_left(self) -> float:
        return self.end - END - time.monotonic()

    def run(self, name: str, measurement: Measurement, *, smoke: bool) -> None:
        """Run one measurement, and write how it ended."""
        if not smoke and self.seconds_left < measurement.seconds / 2:
            self.write({"name": name, "ended": "not begun: the minutes are over"})
            return
        limit = min(2.0 * measurement.seconds, self.seconds_left)
        command = self._command(measurement, limit)
        started, before = time.monotonic(), self._sizes()
        print(f"== {name}: {shlex.join(command)} (at most {limit:.0f} s)", flush=True)
        with (self.out / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            ended = self._wait(limit)
        self.process = None
        results = [shown(line) for line in self._lines_since(before)]
        self.write(
            {
                "name": name,
                "ended": ended,
                "seconds": round(time.monotonic() - started, 1),
                "command": shlex.join(command),
                "results": results,
            }
        )
        for line in compared(results):
            print(f"   {line}", flush=True)

    def stop(self) -> None:
        """End what runs, with all processes that it started."""
        if self.process is not None and self.process.poll() is None:
            _signal(self.process, signal.SIGKILL)
            self.process.wait()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line that is on disk when this returns."""
        print(f"   {line['name']}: {line['ended']}", flush=True)
        with (self.out / "session.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _command(self, measurement: Measurement, limit: float) -> list[str]:
        script, *words = measurement.words
        minutes = f"{max(limit - GRACE, 1) / 60:.2f}"
        limits = ("--minutes", minutes, "--results", str(self.out))
        return [sys.executable, str(HERE / script), *words, *self.options, *limits]

    def _wait(self, limit: float) -> str:
        """Wait for the process; return how it ended."""
        assert self.process is not None
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"ended after {limit:.0f} s"
        return "done" if code == 0 else f"failed with {code}"

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.out.glob("*.jsonl")):
            if path.name != "session.jsonl":
                yield path

    def _sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._files()}

    def _lines_since(self, before: dict[Path, int]) -> list[dict[str, Any]]:
        lines = []
        for path in self._files():
            with path.open("rb") as file:
                file.seek(before.get(path, 0))
                # The last line may be cut off, where a process was ended.
                complete = [text for text in file.read().splitlines(True) if text.endswith(b"\n")]
            lines += [json.loads(text) for text in complete]
        return lines


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # it leads a group of its own


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """Return what a table shows of a result."""
    found = {key: line[key] for key in ("suite", "run", "system") if key in line}
    timing = line.get("step_ms", {})
    whole = timing.get("whole") or timing
    found |= {key: whole[key] for key in ("mean", "p50", "p99", "longest", "steps") if key in whole}
    facts = line.get("facts", {})
    for key in ("fetched_rows_per_step", "hit_rate", "fills", "efforts"):
        if key in facts:
            found[key] = facts[key]
    if "systems" in line:
        kept = ("p50", "p99.9 / p50", "longest / p50", "num_long_steps", "settled")
        found["systems"] = {
            name: {key: each[key] for key in (*kept, "num_compiled_late")}
            for name, each in line["systems"].items()
        }
    return found


def compared(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each result, beside `all-fast` and FBGEMM's cache where they were measured
    in the same setting."""
    means = {(line.get("run"), line.get("system")): line.get("mean") for line in results}
    for line in results:
        if "mean" not in line:
            yield json.dumps(line)
            continue
        beside = ""
        for other in ("hotrow-all-fast", "fbgemm-cached", "dense-alone"):
            reference = means.get((line["run"], other))
            if reference and other != line["system"]:
                beside += f", {reference / line['mean']:.3f} of the speed of {other}"
        yield (
            f"{line['run']}/{line['system']}: mean {line['mean']:.3f} ms of {line['steps']:,} "
            f"steps, p50 {line['p50']:.3f}, p99 {line['p99']:.3f}, longest {line['longest']:.1f}"
            f"{beside}"
        )


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("names", nargs="*", help="measurements, in this order; --list has them")
    made.add_argument("--out", type=Path, default=Path("session"), help="folder for all results")
    made.add_argument("--minutes", type=float, default=9.0, help="for all of them together")
    made.add_argument("--commit", help="of the code measured; else $COMMIT, else what git says")
    made.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    made.add_argument("--list", action="store_true", help="say what there is, and end")
    return made.parse_args()


def main() -> None:
    given, started = _arguments(), time.monotonic()
    if given.list:
        for name, each in MEASUREMENTS.items():
            print(f"{name:18} ~{each.seconds:4} s  {shlex.join(each.words)}")
        return
    unknown = [name for name in given.names if name not in MEASUREMENTS]
    if unknown or not given.names:
        raise SystemExit(f"no measurement {', '.join(unknown) or 'is named'}; --list shows them")
    options = ("--smoke",) if given.smoke else ()
    if given.commit:
        options += ("--commit", given.commit)
    if given.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    given.out.mkdir(parents=True, exist_ok=True)
    session = Session(given.out.resolve(), started + 60 * given.minutes, options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs has a session of its own
    try:
        for name in given.names:
            session.run(name, MEASUREMENTS[name], smoke=given.smoke)
    finally:
        session.stop()


if __name__ == "__main__":
    main()
