"""One TOML file describes a run, and every mistake in it is named."""

from pathlib import Path

import pytest
import torch

from hotrow.kernels.rules import AdamW
from hotrow.run.config import RunConfig, ScheduleSection, load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def refused(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the callers check the message
        load(path, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "strategy", ["lookahead", "lru", "hotline", "fae", "lru+random-drop", "hybrid"]
)
def test_the_built_in_job_compares_bits_if_the_strategy_is_exact(strategy: str) -> None:
    config = load(overrides=[f"embedding.strategy={strategy}"])
    assert config.training.check_equality == (strategy in ("lookahead", "lru"))
    assert load().embedding.strategy == "lookahead"


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:", "cuda:x", "cuda:-1", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    message = f'device must be "cpu", "cuda" or "cuda:1", not {device!r}'
    message += '; did you mean "cuda"?' if device == "gpu" else ""
    assert refused(None, f"run.device={device}").endswith(message)


def test_an_empty_file_gives_the_defaults(file: Path) -> None:
    file.write_text("")
    assert load(file) == RunConfig()


def test_a_file_sets_every_kind_of_value(file: Path) -> None:
    file.write_text(
        """
        [run]
        name = "night-1"
        [data]
        rows = [1000, 50]
        skew = [1, 0.5]
        batch_size = 10
        samples = 95
        [embedding]
        budget = 4_000_000
        depth = 3
        [embedding.optimizer]
        name = "adamw"
        betas = [0.8, 0.9]
        [training]
        epochs = 2
        """
    )
    config = load(file)
    assert config.run.name == "night-1"
    assert config.data.rows == (1000, 50)
    assert config.data.skew == (1.0, 0.5)
    assert config.embedding.budget == 4_000_000
    assert config.embedding.depth == 3
    assert config.embedding.optimizer.rule() == AdamW(lr=0.05, betas=(0.8, 0.9))


def test_overrides_win_over_the_file(file: Path) -> None:
    file.write_text("[embedding]\nstrategy = 'lru'\nbudget = '5%'")
    config = load(file, overrides=["embedding.strategy=static", "run.seed = 3"])
    assert (config.embedding.strategy, config.embedding.budget) == ("static", "5%")
    assert config.run.seed == 3


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("embedding.budget=10%", lambda c: c.embedding.budget == "10%"),
        ("embedding.budget=1_000_000", lambda c: c.embedding.budget == 1_000_000),
        ("run.name=2026", lambda c: c.run.name == "2026"),
        ("run.device=cuda", lambda c: c.run.device == "cuda"),  # wherever the file is read
        ("run.device=cuda:0", lambda c: c.run.device == "cuda:0"),
        ("run.name='quoted'", lambda c: c.run.name == "quoted"),
        ("data.rows=[10, 20]", lambda c: c.data.rows == (10, 20)),
        ("model.kind=dcnv2", lambda c: c.model.kind == "dcnv2"),
        ("model.top=[8]", lambda c: c.model.top == (8,)),
        ("model.top=[]", lambda c: c.model.top == ()),
        ("data.skew=1", lambda c: c.data.skew == 1.0),
        ("training.check_equality=false", lambda c: not c.training.check_equality),
        ("embedding.optimizer.lr=1e-3", lambda c: c.embedding.optimizer.lr == 1e-3),
    ],
)
def test_an_override_is_read_as_its_key_asks(override: str, read: object) -> None:
    assert callable(read)
    assert read(load(overrides=[override]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 1", "unknown section [trainin]; did you mean [training]?"),
        ("[training]\nstep = 1", "unknown key 'step' in [training]; did you mean 'steps'?"),
        (
            "[embedding.optimiser]\nlr = 1.0",
            "unknown key 'optimiser' in [embedding]; did you mean 'optimizer'?",
        ),
        (
            "[run]\nzzz = 1",
            "unknown key 'zzz' in [run]; there are name, seed, device, threads",
        ),
        ("steps = 1", "unknown section [steps]; there are [run], [data], [model]"),
        ("training = 1", "[training] is a section, not a value"),
        ("[training]\nsteps = '9'", "training.steps must be a whole number, not '9'"),
        ("[training]\nsteps = true", "training.steps must be a whole number, not True"),
        ("[training]\ncheck_equality = 1", "training.check_equality must be true or false, not 1"),
        ("[training]\nsteps = 0", "[training] steps must be a number of at least 1, got 0"),
        ("[data]\nrows = 7", "data.rows must be a list of whole numbers, not 7"),
        (
            "[data]\nskew = 'high'",
            "data.skew must be a number or a list of numbers, not 'high'",
        ),
        ("[data]\nskew = -1.0", "[data] skew must be at least 0, got -1.0"),
        ("[data]\nsamples = 3", "[data] samples must fill one batch of 2,048 at least, got 3"),
        (
            "[data]\nkind = 'criteo'",
            "kind must be one of synthetic, prepared, counted, not 'criteo'",
        ),
        ("[model]\nbottom = [64, 0]", "[model] bottom must be a number of at least 1, got 0"),
        (
            "[model]\nkind = 'dcnv3'",
            "kind must be one of dlrm, dcnv2, deepfm, tbsm, not 'dcnv3'; did you mean 'dcnv2'?",
        ),
        ("[model]\nkind = 'tbsm'\ndeep = [8]", "[model] tbsm takes bottom, top, sequence, final"),
        ("[model]\nnum_steps = 5", "[model] dlrm takes bottom, top, but not num_steps"),
        ("[model]\nkind = 'tbsm'\nnum_steps = 0", "num_steps must be a number of at least 1"),
        ("[model]\nkind = 'tbsm'\nfinal = [0]", "final must be a number of at least 1"),
        (
            "[model]\nkind = 'dcnv2'\ncross_rank = 0",
            "[model] cross_rank must be a number of at least 1, got 0",
        ),
        (
            "[model]\nkind = 'dcnv2'\ncross_rank = 'all'",
            "[model] cross_rank must be \"full\" or a number, not 'all'",
        ),
        (
            "[model]\nkind = 'dcnv2'\ncross_layers = 0",
            "[model] cross_layers must be a number of at least 1, got 0",
        ),
        ("[embedding]\nbudget = '4 gigs'", "[embedding] cannot read '4 gigs' as a number of bytes"),
        (
            "[embedding]\nstrategy = 'lookahed'",
            "no strategy 'lookahed' (did you mean 'lookahead'?)",
        ),
        (
            "[embedding]\ndepth = 'deep'",
            "depth must be \"auto\" or a number of batches, not 'deep'",
        ),
        (
            "[embedding.optimizer]\nname = 'sgd'\neps = 0.1",
            "[embedding.optimizer] sgd takes lr, weight_decay, but not eps",
        ),
        ("[embedding.optimizer]\nlr = -1.0", "lr must be a number of at least 0, not -1.0"),
        ("[training.optimizer]\nlr = inf", "lr must be a number of at least 0, got inf"),
        (
            "[embedding.optimizer]\nbetas = [0.9]",
            "embedding.optimizer.betas must be a list of 2 numbers, not [0.9]",
        ),
        ("[run]\nname = 'a/b'", "[run] name becomes a folder under runs/"),
        ("[run", "is not valid TOML"),
    ],
)
def test_a_mistake_names_the_file_and_what_is_wrong(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    error = refused(file)
    assert error.startswith(str(file))
    assert message in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training", "write section.key=value, such as training.steps=200"),
        ("=3", "write section.key=value"),
        ("trainin.steps=3", "unknown section [trainin]; did you mean [training]?"),
        ("training.stepps=3", "unknown key 'stepps' in [training]; did you mean 'steps'?"),
        ("training=3", "[training] is a section; name one of its keys"),
        ("run.name.first=3", "run.name is a value, not a section"),
        ("training.steps=many", "the value must be a whole number, not 'many'"),
    ],
)
def test_a_wrong_override_is_quoted(override: str, message: str) -> None:
    error = refused(None, override)
    assert error.startswith(f"--set {override}: ")
    assert message in error


def test_an_override_into_a_section_that_is_a_value_is_refused(file: Path) -> None:
    file.write_text("training = 1")
    assert "[training] is a section, not a value" in refused(file, "training.steps=3")


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    assert refused(file).endswith("run.toml: No such file or directory")
    file.write_bytes(b"\xff\xfe\x00")
    assert refused(file).endswith("is not UTF-8 text")


# -- learning rates ---------------------------------------------------------------------


def reference(step: int, warmup: int, start: int, steps: int) -> float:
    """Return the factor by the rule of facebookresearch/dlrm: warm-up, decay, else frozen."""
    if step < warmup:
        return 1.0 - (warmup - step) / warmup
    if start <= step < start + steps:
        return ((steps - (step - start)) / steps) ** 2
    return 1.0 if step < start else (1 / steps) ** 2


def test_rates_follow_the_reference() -> None:
    section = ScheduleSection(warmup_steps=5, decay_start=12, decay_steps=8)
    for step in range(1, 40):
        assert section.scale(step) == pytest.approx(reference(step, 5, 12, 8))


def test_both_optimizers_are_driven_tensors_too() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    number = torch.optim.SGD([weight], lr=0.4)
    tensor = torch.optim.Adam([weight], lr=torch.tensor(0.2), capturable=False, foreach=False)
    schedules = ScheduleSection(warmup_steps=4).drive([number, tensor])
    seen = []
    for _ in range(6):
        seen.append((number.param_groups[0]["lr"], float(tensor.param_groups[0]["lr"])))
        for optimizer, schedule in zip((number, tensor), schedules, strict=True):
            optimizer.step()
            schedule.step()
    factors = (0.25, 0.5, 0.75, 1, 1, 1)
    assert [rate for rates in seen for rate in rates] == pytest.approx(
        [factor * rate for factor in factors for rate in (0.4, 0.2)]
    )
    assert ScheduleSection().drive([number]) == []  # a constant rate needs none


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be a number of at least 0, got -1"),
        ({"decay_start": 5}, "decay_start and decay_steps belong together"),
        ({"decay_start": 5, "decay_steps": 0}, "decay_steps must be a number of at least 1, got 0"),
        (
            {"warmup_steps": 9, "decay_start": 5, "decay_steps": 3},
            "decay_start is step 5, before the end of warm-up, step 9",
        ),
    ],
)
def test_a_schedule_without_sense_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSection(**settings)
