"""What torch offers to wrap, copy, trace and transform modules works, or is refused clearly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotrow
from hotrow.embedding.in_models import bare, collections_in

Table = hotrow.EmbeddingBagConfig
IDS = torch.arange(12).view(6, 2)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [Table("t", 20, 4, ["f"]), Table("u", 20, 4, ["g"])]
        self.rows = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(lr=0.1), strategy="all-fast", seed=0, **options
        )
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.dense(self.rows(ids).values())
        return out


def weights(model: Model) -> Tensor:
    return torch.cat([chunk for _, chunk in model.rows.weights("t")])


FUNC = r"torch.func \(vmap, grad, jvp and others\) cannot transform lookups"
TRACE = "torch.jit.trace and torch.onnx.export would store the rows as constants"
SCRIPT = "a collection cannot be compiled by torch.jit.script; save rows by hotrow.save_model"
REFUSED: dict[str, tuple[Callable[[Model], Any], str]] = {
    "deepcopy": (copy.deepcopy, "a collection cannot be copied: its tables may fill"),
    "copy": (lambda m: copy.copy(m.rows), "a collection cannot be copied: two of them"),
    "pickle": (pickle.dumps, "a collection cannot be pickled; save state_dict"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "a collection cannot be pickled"),
    "replicas": (
        lambda m: m.rows._replicate_for_data_parallel(),  # what nn.DataParallel calls
        "nn.DataParallel would copy a collection to several GPUs",
    ),
    "vmap": (lambda m: torch.func.vmap(lambda x: m(x.view(1, 2)))(IDS), FUNC),
    "vmap, eval": (lambda m: torch.func.vmap(lambda x: m.eval()(x.view(1, 2)))(IDS), FUNC),
    "grad": (
        lambda m: torch.func.grad(
            lambda p: torch.func.functional_call(m, p, (IDS,)).sum()
        )({"dense.bias": m.dense.bias}),
        FUNC,
    ),
    "jvp": (lambda m: torch.func.jvp(lambda w: m(IDS) * w, (IDS + 0.5,), (IDS + 0.5,)), FUNC),
    "trace": (lambda m: torch.jit.trace(m, (IDS,)), TRACE),
    "trace, eval": (lambda m: torch.jit.trace(m.eval(), (IDS,), check_trace=False), TRACE),
    "script": (torch.jit.script, SCRIPT),
    "script, itself": (lambda m: torch.jit.script(m.rows), SCRIPT),
    "export": (lambda m: torch.export.export(m, (IDS,)), "torch.export cannot store rows; save"),
    "export, eval": (lambda m: torch.export.export(m.eval(), (IDS,)), "torch.export cannot store"),
    "fx": (torch.fx.symbolic_trace, "torch.fx cannot trace lookups; trace the part"),
    "fullgraph": (
        lambda m: torch.compile(m, backend="eager", fullgraph=True)(IDS),
        "torch.compile works without fullgraph=True",
    ),
    "modules": (lambda m: m.rows.embedding_bags, r"no embedding_bags, .* embedding.weights\("),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(name: str) -> None:
    model, (use, message) = Model(), REFUSED[name]
    before = weights(model)
    with pytest.raises((TypeError, RuntimeError, AttributeError), match=message):
        use(model)
    assert torch.equal(weights(model), before)
    model.train()(IDS).sum().backward()  # and the model still trains
    assert not torch.equal(weights(model), before)


def converted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1))
    return hotrow.convert(model, "100%", strategy="all-fast", show=False)


MODULE = "a module with hotrow's rows cannot be "
OF_MODULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepcopy": (copy.deepcopy, MODULE + "copied: its tables"),
    "copy": (lambda m: copy.copy(m[0]), MODULE + "copied: two of them"),
    "pickle": (pickle.dumps, MODULE + "pickled"),
    "replicas": (lambda m: m[0]._replicate_for_data_parallel(), "nn.DataParallel would copy a mod"),
    "vmap": (lambda m: torch.func.vmap(lambda x: m(x.view(1)))(IDS[0]), FUNC),
    "trace": (lambda m: torch.jit.trace(m, (IDS,)), TRACE),
    "trace, eval": (lambda m: torch.jit.trace(m.eval(), (IDS,), check_trace=False), TRACE),
    "script": (torch.jit.script, MODULE + "compiled by torch.jit.script"),
    "export": (lambda m: torch.export.export(m, (IDS,)), "torch.export cannot store rows; save"),
    "fx": (torch.fx.symbolic_trace, "torch.fx cannot trace lookups; trace the part"),
    "other weights": (
        lambda m: torch.func.functional_call(m, {"0.weight": torch.zeros(20, 4)}, (IDS,)),
        "was replaced by another tensor, as torch.func.functional_call does",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_MODULES)
def test_converted_modules_refuse_it_in_one_sentence(name: str) -> None:
    model, (use, message) = converted(), OF_MODULES[name]
    before = model.state_dict()["0.weight"]
    with pytest.raises((TypeError, RuntimeError), match=message):
        use(model)
    assert torch.equal(model.state_dict()["0.weight"], before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(IDS).sum().backward()  # and the model still trains
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_rows_replaced_by_functional_call_are_not_taken(update: str) -> None:
    model = Model(update=update)
    with pytest.raises(AttributeError, match="no attribute `embedding_bags`"):
        torch.func.functional_call(model, model.state_dict(), (IDS,))


def test_the_dense_part_can_be_called_with_other_weights() -> None:
    model = Model()
    other = {name: 2 * parameter for name, parameter in model.named_parameters()}
    right = model.rows(IDS).values() @ (2 * model.dense.weight.T) + 2 * model.dense.bias
    torch.testing.assert_close(torch.func.functional_call(model, other, (IDS,)), right)


def test_functions_of_evaluated_vectors_have_gradients() -> None:
    model = Model().eval()
    bias = {"dense.bias": model.dense.bias.detach()}
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (IDS,)).sum())(bias)
    assert grads["dense.bias"].tolist() == [6.0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_as_the_plain_one() -> None:
    compiled, plain = Model(), Model()
    torch.compile(compiled, backend="eager")(IDS).sum().backward()
    plain(IDS).sum().backward()
    assert torch.equal(weights(compiled), weights(plain))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it calls the model")
def test_data_parallel_without_gpus_calls_the_model() -> None:
    torch.testing.assert_close(nn.DataParallel(Model())(IDS), Model()(IDS))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel_of_one_rank_trains_rows() -> None:
    wrapped, plain = Model(), Model()
    nn.parallel.DistributedDataParallel(wrapped)(IDS).sum().backward()
    plain(IDS).sum().backward()
    assert torch.equal(weights(wrapped), weights(plain))
    assert not torch.equal(weights(plain), weights(Model()))


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel_leaves_stand_ins_alone() -> None:
    model, plain = Model(update="step"), Model(update="step")
    for trained, call in ((model, nn.parallel.DistributedDataParallel(model)), (plain, plain)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        call(IDS).sum().backward()
        optimizer.step()
    assert torch.equal(weights(model), weights(plain))
    assert not torch.equal(weights(plain), weights(Model(update="step")))


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel_leaves_converted_modules_alone() -> None:
    model, plain = converted(), converted()
    for trained, call in ((model, nn.parallel.DistributedDataParallel(model)), (plain, plain)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        call(IDS).sum().backward()
        optimizer.step()
    named = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in named)


@pytest.mark.usefixtures("one_rank")
def test_what_distributed_data_parallel_cannot_train_is_refused() -> None:
    embedding = Model(update="step").rows
    with pytest.raises(ValueError, match="all parameters of the model stand for tables"):
        nn.parallel.DistributedDataParallel(embedding)


@pytest.mark.usefixtures("one_rank")
def test_names_do_not_have_the_parts_of_wrappers() -> None:
    model = nn.ModuleDict({"module": Model()})  # a name that the user chose
    wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    for wrapper in (wrapped, torch.compile(wrapped, backend="eager")):
        assert [*collections_in(wrapper)] == ["module.rows"]
        assert bare(wrapper) is model
    inside = nn.ModuleDict({"tower": nn.parallel.DistributedDataParallel(Model())})
    assert [*collections_in(inside)] == ["tower.rows"]
