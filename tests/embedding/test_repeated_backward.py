"""Loops that would train otherwise than torch are told so, once; all others are left in peace."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import CASES, RULES, readout
from dense_masters import MasterWeights
from hotrow.embedding import dense_steps
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows

CASE = CASES["one-hot"]
BATCHES = CASE.batches(12)
TOLD = r"second backward\(\) .* without an optimizer step .*accumulate\(\)"


def collection(rule: str = "adam", **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"strategy": "all-fast", "seed": 3, **options}
    return hotrow.EmbeddingBagCollection(CASE.tables, RULES[rule], **options)


class Model(nn.Module):
    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Any) -> Tensor:
        return readout(self.embedding(batch)) * self.scale


@pytest.fixture(params=[cpu_rows, gpu_rows])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param is gpu_rows and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    return Model(collection(engine=request.param))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def micro_batches(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for place, batch in enumerate(BATCHES[:8]):
        model(batch).backward()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()


# -- two passes, one step --------------------------------------------------------------------


def two_passes_over_one_graph(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for batch in BATCHES[:3]:
        loss = model(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def two_losses_one_after_the_other(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for batch in hotrow.ahead(BATCHES[:3], model):
        out = model.embedding(batch)
        readout(out).mul(model.scale).backward(retain_graph=True)
        (out["f"].sum() * model.scale).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "loop", [micro_batches, two_passes_over_one_graph, two_losses_one_after_the_other]
)
def test_loops_of_two_passes_are_told_of_accumulate(model: Model, loop: Any) -> None:
    with pytest.warns(UserWarning, match=TOLD) as told:
        loop(model, sgd(model))
    assert len(told) == 1
    assert told[0].filename == __file__


def test_masters_are_an_optimizer_too() -> None:
    model = Model(collection())
    optimizer = MasterWeights(model, lambda each: torch.optim.SGD(each, lr=0.01))
    with pytest.warns(UserWarning, match=TOLD):
        micro_batches(model, optimizer)


def test_nothing_is_said_before_an_optimizer_has_stepped() -> None:
    model = Model(collection())
    sgd(model)
    for batch in BATCHES[:4]:
        model(batch).backward()


def ordinary(model: Model, optimizer: Any) -> None:
    for batch in BATCHES[:6]:
        model(batch).backward()
        optimizer.step()


def accumulated(model: Model, optimizer: Any) -> None:
    for first in range(0, 6, 2):
        with model.embedding.accumulate():
            for batch in BATCHES[first : first + 2]:
                model(batch).backward()
        optimizer.step()


def one_loss_of_two_batches(model: Model, optimizer: Any) -> None:
    for first in range(0, 6, 2):
        (model(BATCHES[first]) + model(BATCHES[first + 1])).backward()
        optimizer.step()


def two_optimizers_in_turn(model: Model, optimizer: Any) -> None:
    other = sgd(model)
    for batch in BATCHES[:3]:
        for each in (optimizer, other):
            model(batch).backward()
            each.step()


def rows_alone(model: Model, optimizer: Any) -> None:
    """Beside a dense part that is trained elsewhere."""
    layer = nn.Linear(2, 1)
    stepping = sgd(layer)
    for _ in range(3):
        for batch in BATCHES[:4]:
            readout(model.embedding(batch)).backward()
        layer(torch.ones(2)).sum().backward()
        stepping.step()


def two_collections(model: Model, optimizer: Any) -> None:
    other = Model(collection())
    for batch in BATCHES[:4]:
        model(batch).backward()
        (readout(other.embedding(batch)) * model.scale).backward()
        optimizer.step()


def weights_alone(model: Model, optimizer: Any) -> None:
    for batch in BATCHES[:4]:
        torch.autograd.grad(model(batch), [model.scale])
        model(batch).backward()
        optimizer.step()


def step_inside_backward(model: Model, optimizer: Any) -> None:
    model.scale.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for batch in BATCHES[:4]:
        model(batch).backward()


def evaluation_between(model: Model, optimizer: Any) -> None:
    for batch in BATCHES[:4]:
        model(batch).backward()
        model.eval()
        for other in BATCHES[:5]:
            model(other)  # with gradients on
        model.train()
        optimizer.step()


def frozen(model: Model, optimizer: Any) -> None:
    model.embedding.requires_grad_(False)
    micro_batches(model, optimizer)


def skipped_with_the_scaler(model: Model, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    model.embedding.grad_scale = scaler
    for batch in BATCHES[:6]:
        loss = model(batch) * 1e-5 + model.scale * 1e27  # the rows' gradients are finite
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # leaves the first ones out
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**40
    assert model.embedding.optimizer.steps[0] > 5


def trainer(model: Model, optimizer: Any) -> None:
    run = hotrow.Trainer(
        model, lambda found, _: found, dense_optimizer=optimizer,
        ids=lambda batch: batch, labels=lambda batch: batch[:, 0],
    )  # fmt: skip
    assert len(list(run.run(BATCHES))) == len(BATCHES)


def graphed(model: Model, optimizer: Any) -> None:
    step = hotrow.graphed(
        model, lambda found, _: found, optimizer, labels=lambda batch: batch[:, 0]
    )
    for batch in hotrow.ahead(BATCHES[:6], model, step=step):
        step(batch)


LOOPS = [
    ordinary,
    accumulated,
    one_loss_of_two_batches,
    two_optimizers_in_turn,
    rows_alone,
    two_collections,
    weights_alone,
    step_inside_backward,
    evaluation_between,
    frozen,
    skipped_with_the_scaler,
    trainer,
    graphed,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda each: each.__name__)
def test_loops_that_train_like_torch_are_left_in_peace(loop: Any) -> None:
    model = Model(collection())
    optimizer = sgd(model)
    model(BATCHES[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    loop(model, optimizer)


# -- eval() left on --------------------------------------------------------------------------

LEFT_ON = r"3 optimizer steps .* eval\(\) mode.*model\.train\(\).*requires_grad_\(False\)"


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 8, *, ahead: bool = False
) -> None:
    for batch in hotrow.ahead(BATCHES[:count], model) if ahead else BATCHES[:count]:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loop_in_eval_mode_is_told_once(model: Model, ahead: bool) -> None:
    optimizer = sgd(model)
    train(model, optimizer, 2)
    model.eval()
    with pytest.warns(UserWarning, match=LEFT_ON) as told:
        train(model, optimizer, 12, ahead=ahead)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_loop_that_was_never_in_training_mode_is_told() -> None:
    model = nn.Sequential(Model(collection())).eval()
    with pytest.warns(UserWarning, match=LEFT_ON):
        train(model, sgd(model))


def test_a_thread_that_trains_in_an_eval_mode_of_its_own_is_told() -> None:
    model = Model(collection())
    optimizer = sgd(model)
    train(model, optimizer, 2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.eval).result()  # holds for that thread, because this one has trained
        model.train()
        with pytest.warns(UserWarning, match=LEFT_ON):
            pool.submit(train, model, optimizer, ahead=True).result()
        pool.submit(model.train).result()
        pool.submit(train, model, optimizer, ahead=True).result()  # without a warning


def collection_alone(model: Model) -> None:
    model.embedding.eval()
    train(model, sgd(model))


def frozen_collection(model: Model) -> None:
    model.embedding.requires_grad_(False)
    model.eval()
    train(model, sgd(model))


def validation(model: Model) -> None:
    optimizer = sgd(model)
    for _ in range(5):
        train(model, optimizer, 1)
        model.eval()
        for batch in BATCHES[:5]:
            model(batch)
        model.train()


def validation_between_replays(model: Model) -> None:
    """Captured steps count, and look nothing up."""
    optimizer = sgd(model)
    train(model, optimizer, 1)
    for batch in BATCHES[:8]:
        dense_steps.note(optimizer)
        model.eval()
        model(batch)
        model.train()


def validation_by_another_thread(model: Model) -> None:
    optimizer = sgd(model)
    train(model, optimizer, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.eval).result()
        for batch in BATCHES[:8]:
            dense_steps.note(optimizer)
            pool.submit(model, batch).result()


def another_model_is_trained(model: Model) -> None:
    model.eval()
    student = nn.Linear(1, 1)
    optimizer = sgd(student)
    for batch in BATCHES[:8]:
        student(model(batch).detach().view(1)).sum().backward()
        optimizer.step()


def no_grad(model: Model) -> None:
    model.eval()
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*layer.parameters(), *model.parameters()], lr=0.1)
    for batch in BATCHES[:8]:
        with torch.no_grad():
            found = model(batch)
        layer(found.view(1)).sum().backward()
        optimizer.step()


DELIBERATE = [
    collection_alone,
    frozen_collection,
    validation,
    validation_between_replays,
    validation_by_another_thread,
    another_model_is_trained,
    no_grad,
]


@pytest.mark.parametrize("loop", DELIBERATE, ids=lambda each: each.__name__)
def test_rows_that_rest_on_purpose_are_left_in_peace(loop: Any) -> None:
    loop(Model(collection()))


# -- weights without their state -------------------------------------------------------------

NO_STATE = r"not the Adam state .*exp_avg, exp_avg_sq.*embedding\.optimizer\.load_state_dict"


def trained(rule: str = "adam") -> Model:
    model = Model(collection(rule))
    train(model, sgd(model), 3)
    return model


def saved_to_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "saved", [lambda x: x, dict, saved_to_a_file], ids=["as it is", "dict", "file"]
)
def test_weights_without_their_state_are_told_of_once(saved: Any) -> None:
    state = saved(trained().state_dict())
    model = Model(collection())
    optimizer = sgd(model)
    model.load_state_dict(state)
    with pytest.warns(UserWarning, match=NO_STATE) as told:
        train(model, optimizer)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_weights_loaded_into_a_trained_collection_are_told_of() -> None:
    model = trained()
    train(model, sgd(model), 2)
    model.load_state_dict(trained().state_dict())
    with pytest.warns(UserWarning, match=NO_STATE):
        train(model, sgd(model), 2)


def state_first(model: Model, source: Model, folder: Path) -> None:
    model.embedding.optimizer.load_state_dict(source.embedding.optimizer.state_dict())
    model.load_state_dict(source.state_dict())


def weights_first(model: Model, source: Model, folder: Path) -> None:
    model.load_state_dict(source.state_dict())
    model.embedding.optimizer.load_state_dict(source.embedding.optimizer.state_dict())


def untrained_weights(model: Model, source: Model, folder: Path) -> None:
    model.load_state_dict(Model(collection(seed=4)).state_dict())


def weights_by_table(model: Model, source: Model, folder: Path) -> None:
    """This says that state starts anew."""
    for table in CASE.tables:
        for first, weights in source.embedding.weights(table.name):
            model.embedding.load_weights(table.name, first, weights)


def saved_model(model: Model, source: Model, folder: Path) -> None:
    hotrow.save_model(folder, source)
    hotrow.load_model(folder, model)


def checkpoint(model: Model, source: Model, folder: Path) -> None:
    hotrow.save_checkpoint(folder, source, step=3)
    hotrow.load_checkpoint(folder, model)


LOADS = [
    state_first, weights_first, untrained_weights, weights_by_table, saved_model, checkpoint
]  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_with_their_state_or_without_any_need_of_it_nothing_is_said(
    load: Any, tmp_path: Path
) -> None:
    model = Model(collection())
    load(model, trained(), tmp_path)
    train(model, sgd(model))


def test_rules_without_state_have_none_to_miss() -> None:
    model = Model(collection("sgd"))
    model.load_state_dict(trained("sgd").state_dict())
    train(model, sgd(model))


def test_evaluating_loaded_weights_says_nothing() -> None:
    model = Model(collection())
    model.load_state_dict(trained().state_dict())
    with torch.no_grad():
        for batch in BATCHES:
            model.eval()(batch)
