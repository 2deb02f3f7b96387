"""Kill a training process a few times; fifty are killed by benchmarks/kill.py --kills 50."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"


def test_a_process_that_is_killed_again_and_again_ends_in_the_same_bits() -> None:
    words = [sys.executable, str(SCRIPT), "--kills", "5", "--steps", "48"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["equal"]
    assert report["kills"] == 5
