"""`hotrow train`: one run, from its settings to its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli._options import JsonLinesFlag, RunFile, Settings
from hotrow.cli._output import one_line_warnings
from hotrow.cli._process import DIVERGED, INTERRUPTED, UNEQUAL, use_threads
from hotrow.cli._ranks import (
    check_settings,
    ending_together,
    launch,
    read_ranks,
    share_cores,
    show_warnings_of_others,
)
from hotrow.cli._watch import OtherRank, RunLines, Screen
from hotrow.run.config import RunConfig, is_data, load
from hotrow.run.ranks import RunRanks, find_place
from hotrow.run.resume import find_restarted, find_run_to_resume, settings_of
from hotrow.run.session import Result, refuse_small_batches, train_run
from hotrow.run.stopping import StopAfterStep
from hotrow.run.strategy_names import find_named
from hotrow.run.tracing import parse_traced


def train(
    file: RunFile = None,
    settings: Settings = None,
    as_json: JsonLinesFlag = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print warnings and the summary only."),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="steps=N", help="Also write a Chrome trace of N steps."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's folder is made.")] = Path(
        "runs"
    ),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from a run's last checkpoint; FILE may also be the run's folder.",
        ),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Train on N ranks of this machine, which share rows and batches; data.batch_size "
            "is that of all ranks together.",
            show_default="one, or those of torchrun",
        ),
    ] = None,
) -> None:
    """Train a model; it and its records are left in runs/NAME.

    Without a file it trains a small DLRM on generated clicks in under a minute, then trains it
    again with every row in fast memory and compares all bits.

    **Examples**

    - `hotrow train`

    - `hotrow train --set embedding.budget=2% --set embedding.strategy=lru`

    - `hotrow train run.toml --set training.steps=200 --json`

    - `hotrow train --set run.device=cuda`

    - `hotrow train --set model.kind=dcnv2`

    - `hotrow train --set model.kind=tbsm`

    - `hotrow train --set run.tensorboard=true`, then `tensorboard --logdir runs`

    - `hotrow train --trace steps=20`, then `hotrow report default`

    - `hotrow train`, then `hotrow evaluate default` and `hotrow predict default --out a.parquet`

    - `hotrow train run.toml --set checkpoint.every_steps=1000`, and when it was stopped
      `hotrow train run.toml --resume`, or `hotrow train runs/first --resume`

    - `hotrow train run.toml --ranks 2`, or across machines `torchrun --nnodes 2 --nproc-per-node 4
      --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id job -m hotrow train run.toml`

    **run.toml**, every key optional:

    ```
    [run]
    name = "first"
    device = "cuda"
    [data]
    rows = [1_000_000, 50_000, 100]
    skew = 1.1
    samples = 1_000_000
    [model]
    embedding_dim = 32
    [embedding]
    budget = "10%"
    strategy = "lookahead"
    [embedding.optimizer]
    name = "row-wise-adagrad"
    lr = 0.02
    [training]
    epochs = 1
    eval_every = 500
    ```

    `training.steps`, where it is given, takes the place of `epochs`. Without a file,
    `run.threads = 1` is set, and on generated data `training.eval_every = 64` and, where the
    strategy is exact, `training.check_equality = true`.

    The trained model goes to runs/NAME/model, as safetensors: dense weights, and those of all
    rows. `--set run.save=false` leaves it out.

    **While it runs**: samples/s, the bytes that move per second, hits (the share of lookups that
    caused no fetch), the share of a step in which training waited for rows, AUC and fast memory.
    At the end it says whether the loader, planning, the link or the dense part is what limits it.

    **--trace steps=20** profiles 20 steps, from the 68th on where the run is long enough;
    `steps=20,from=500` begins later. runs/NAME/trace.json.gz opens in ui.perfetto.dev or
    chrome://tracing, and stages have names in it: read, plan, confirm, fill (or send, collect,
    exchange, insert), write-back, train. The profiler slows those steps down.

    **--ranks 2** trains one run on two ranks. Each owns a part of the rows and trains its part of
    every batch of `data.batch_size`; `embedding.budget` is that of each rank, and
    `embedding.replicate` the bytes of rows that all of them keep. The first rank shows the run and
    writes its folder. On GPUs, each rank gets one; ranks share them where there are fewer. Where
    torchrun restarts ranks, the run goes on from its last checkpoint; any number of ranks may
    resume it.

    Ctrl-C ends the run after the step under way; its records and the model are kept, with a
    checkpoint, and the exit code is 130. SIGTERM does the same and exits with 0. A loss that
    is NaN ends the run, too, which then exits with 3.
    """
    place = find_place()
    count = 1 if ranks is None else read_ranks(ranks, place)
    if count > 1:
        config, folder = _settings(file, settings or (), runs, resume=resume)
        refuse_small_batches(config, count)  # before ranks are started
        if folder is None:
            _find_folder(config, runs, RunRanks(), resume=resume)
        words = _words(file, settings or (), runs, trace, (as_json, quiet, resume))
        raise typer.Exit(launch(words, count))
    team = RunRanks(place)
    with ending_together(team):
        config, folder = _settings(file, settings or (), runs, resume=resume)
        team.open(config.run.device)
        team.check_versions()
        check_settings(team, "hotrow train", config)
        if folder is None:
            found = team.from_first(lambda: _found(config, runs, team, resume=resume))
            folder = Path(found) if found else None
        traced = None if trace is None else parse_traced(trace)
        observer: RunLines | Screen | OtherRank = OtherRank()
        if team.is_first:
            observer = RunLines(quiet) if as_json else Screen(quiet)
        with one_line_warnings(observer.warn):
            if team.size > 1:
                share_cores(config.run, place)
            else:
                use_threads(config.run, observer.warn)
            stop = StopAfterStep(ranks=team.size, is_first=team.is_first)
            result = train_run(
                config, runs=runs, folder=folder, traced=traced, observer=observer, stop=stop,
                ranks=team,
            )  # fmt: skip
            show_warnings_of_others(team, observer)
        _exit(result, stop, config)


def _exit(result: Result | None, stop: StopAfterStep, config: RunConfig) -> None:
    """Raise what gives the command its exit code; the same on all ranks."""
    if result is None:
        return
    if result.unsaved is not None:
        raise result.unsaved
    if stop.asked:
        raise typer.Exit(0 if stop.to_terminate and result.saved is not None else INTERRUPTED)
    is_promised = find_named(config.embedding.strategy).contract == "exact"
    if result.record.summary.equal_to_all_fast is False and is_promised:
        raise typer.Exit(UNEQUAL)
    if result.record.outcome == "diverged":
        raise typer.Exit(DIVERGED)


def _words(
    file: Path | None,
    settings: Sequence[str],
    runs: Path,
    trace: str | None,
    flags: tuple[bool, bool, bool],
) -> list[str]:
    """Return the command that each rank runs."""
    words = ["train", *(() if file is None else (str(file),)), "--runs", str(runs)]
    for setting in settings:
        words += ["--set", setting]
    if trace is not None:
        words += ["--trace", trace]
    names = ("--json", "--quiet", "--resume")
    return words + [name for name, is_on in zip(names, flags, strict=True) if is_on]


def _settings(
    file: Path | None, settings: Sequence[str], runs: Path, *, resume: bool
) -> tuple[RunConfig, Path | None]:
    """Return the settings of the run, and the folder to resume if `file` is that."""
    if file is not None and not file.is_file():
        folder = next((path for path in (file, runs / file) if path.is_dir()), None)
        if folder is not None and not is_data(folder):  # for data, `load` says what to do
            if resume:
                return settings_of(folder, settings), folder
            raise ValueError(f"{folder} is the folder of a run; with --resume it continues")
    return load(file, overrides=settings), None


def _found(config: RunConfig, runs: Path, team: RunRanks, *, resume: bool) -> str:
    folder = _find_folder(config, runs, team, resume=resume)
    return "" if folder is None else str(folder)


def _find_folder(config: RunConfig, runs: Path, team: RunRanks, *, resume: bool) -> Path | None:
    """Return the folder to resume; None: a new run. After a restart it is that of before."""
    if not resume and config.checkpoint.resume == "never":
        return find_restarted(config, runs, team.launch) if team.restarts else None
    folder = find_run_to_resume(config, runs)
    if folder is None and resume and not team.restarts:
        raise ValueError(
            f"there is no checkpoint of a run {config.run.name!r} in {runs} to go on from"
        )
    return folder
