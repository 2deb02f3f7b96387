"""Gives every reader damaged and hostile files, for a given time.

    python benchmarks/fuzz.py --minutes 5

The tests of those readers are run again and again, with another seed each time, in a process that
may have 4 GiB of data and has to come back: an error that is no ValueError, a crash, a hang or more
memory ends it, and the command that repeats it is said.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parent.parent
_CHECKPOINT, _DATA = "tests/checkpoint/test_fuzz.py", "tests/data/test_prepare_fuzz.py"
READERS = {
    "manifest": f"{_CHECKPOINT}::test_manifests",
    "shard": f"{_CHECKPOINT}::test_shards_whose_checksums_were_made_to_fit",
    "head": f"{_CHECKPOINT}::test_heads_of_any_bytes",
    "state": f"{_CHECKPOINT}::test_states_whose_checksums_were_made_to_fit",
    "values": f"{_CHECKPOINT}::test_values_of_any_form",
    "run": "tests/run/test_resume_fuzz.py::test_runs_to_go_on_with",
    "tables": f"{_CHECKPOINT}::test_tables_of_others",
    "export": f"{_CHECKPOINT}::test_records_of_exports",
    "toml": f"{_CHECKPOINT}::test_run_files",
    "text": f"{_DATA}::test_lines",
    "prepared": f"{_DATA}::test_prepared_folders",
}
_BYTES = 4 << 30
_HANGS = 600  # seconds that no round takes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="for each reader")
    parser.add_argument("--reader", action="append", choices=READERS, help="default: all")
    parser.add_argument("--examples", type=int, default=1000, help="of a round")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args(arguments)
    failed = [
        name
        for name in options.reader or READERS
        if not _fuzz(name, options.minutes, options.examples, options.seed)
    ]
    return 1 if failed else 0


def _fuzz(name: str, minutes: float, examples: int, seed: int) -> bool:
    begun, rounds = monotonic(), 0
    while not rounds or monotonic() - begun < 60 * minutes:
        if (found := _round(name, examples, seed + rounds)) is not None:
            repeat = f"python benchmarks/fuzz.py --reader {name} --minutes 0"
            print(f"{found}\n{name}: {repeat} --examples {examples} --seed {seed + rounds}")
            return False
        rounds += 1
    seconds = monotonic() - begun
    print(f"{name}: {rounds * examples:,} examples in {seconds:.0f} s, no failure", flush=True)
    return True


def _round(name: str, examples: int, seed: int) -> str | None:
    """What went wrong."""
    more = {"HOTROW_FUZZ_EXAMPLES": str(examples), "HOTROW_FUZZ_SEED": str(seed)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", READERS[name]]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, text=True, timeout=_HANGS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it hangs: {_HANGS} s have passed"
    return None if done.returncode == 0 else f"{done.stdout[-6000:]}\nexit {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
