"""What loops do on several ranks: passes without gradients on one of them, gradients that are not
finite, evaluation beside training, whole tables in and out, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import hotrow
from builders import readout, variant
from hotrow.distributed.ranks import RankError
from rank_cases import TOLERANCE, few_shards, tables_of
from rank_processes import Failed, run

Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 300, 4, ["f"]), Table("b", 200, 4, ["g"]), Table("c", 150, 6, ["h"])]
ROOM = hotrow.Budget((hotrow.Share(14, 64, True),) * 2, 1 << 14)
RULE = hotrow.Adagrad(lr=0.1)
TIGHT = {
    "lookahead": variant("lookahead", victims="random"),
    "lru": variant("lru", victims="most-recent"),
    "scratchpipe": variant("scratchpipe", victims="random"),
}


def build(strategy: Any = "all-fast", **options: Any) -> Any:
    budget = None if strategy == "all-fast" else ROOM
    options = {"seed": 3, **options}
    rule = options.pop("rule", RULE)
    return hotrow.EmbeddingBagCollection(TABLES, rule, budget, strategy=strategy, **options)


def batches(rank: int, count: int = 8) -> list[Tensor]:
    draw = torch.Generator().manual_seed(50 + rank)
    sizes = [4 + (number + rank) % 4 for number in range(count)]
    limits = torch.tensor([300, 200, 150])
    return [(torch.rand(size, 3, generator=draw) ** 2 * limits).long() for size in sizes]


def alone(rank: int) -> Any:
    return dist.new_group([rank], use_local_synchronization=True)


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> list[str]:
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    pairs = ((name, x.float(), expected[name].float()) for name, x in found.items())
    return [name for name, x, y in pairs if not torch.allclose(x, y, **tolerance)]


def checked(world: int, function: Callable[..., Any], *args: Any) -> None:
    with_rank = enumerate(run(world, function, *args, timeout=120, group_timeout=30))
    found = [f"rank {rank}: {said}" for rank, of_rank in with_rank for said in of_rank]
    assert not found, "\n".join(found)


# -- no gradients on one rank ----------------------------------------------------------------


def has_gradient(rank: int, step: int) -> bool:
    """The last step has none on rank 1."""
    return rank != 1 or step % 3 == 0


def loss_of(embedding: Any, ids: Tensor, rank: int, step: int) -> Tensor:
    """Sometimes the loss of a rank uses one table alone."""
    out = embedding(ids)
    return out["f"].square().sum() if (rank + step) % 4 == 2 else readout(out)


def without_backward(rank: int, world: int) -> list[str]:
    with few_shards():
        return _without_backward(rank, world)


def _without_backward(rank: int, world: int) -> list[str]:
    found = []
    whole = build(process_group=alone(rank))
    for step, parts in enumerate(zip(*map(batches, range(world)), strict=True)):
        losses = [loss_of(whole, part, r, step) for r, part in enumerate(parts)]
        losses = [loss for r, loss in enumerate(losses) if has_gradient(r, step)]
        (torch.stack(losses).sum() / world).backward()
    expected = None
    for name, loader in [("all-fast", "direct"), ("lookahead", None), ("lru", "direct"),
                         ("scratchpipe", 5), ("lookahead", 0), ("all-fast", None),
                         ("hybrid", None), ("cpu", "direct")]:  # fmt: skip
        embedding = build(TIGHT.get(name, name))
        stream: Any = batches(rank)
        if loader != "direct":
            stream = hotrow.ahead(stream, embedding, depth=loader)
        for step, ids in enumerate(stream):
            loss = loss_of(embedding, ids, rank, step)
            if has_gradient(rank, step):
                loss.backward()
            with torch.no_grad():  # different numbers of batches
                for _ in range((step + rank) % 3):
                    embedding(ids)
        outcome = tables_of(embedding)  # the last step's gradients are exchanged here
        if expected is None:
            expected = outcome
            found += [f"{x} differs from one process"
                      for x in unlike(outcome, tables_of(whole), **TOLERANCE)]  # fmt: skip
        found += [f"{name}, {loader}: {x} differs" for x in unlike(outcome, expected)]
        if name in TIGHT and not embedding.traffic().evicted_rows:
            found.append(f"{name}: no row was evicted")
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_may_skip_its_backward_pass(world: int) -> None:
    checked(world, without_backward)


def not_noticed(rank: int, world: int) -> list[str]:
    """The end of a backward pass is not noticed; afterwards training goes on without it."""
    said, tables = [], []
    missed: Any = torch.autograd.backward
    while hasattr(missed, "__wrapped__"):
        missed = missed.__wrapped__  # as if it was imported before
    ways: list[Callable[[Tensor], None]] = [lambda loss: None, in_thread, missed]
    for way in ways:
        embedding = build()
        for step, ids in enumerate(batches(rank)):
            loss = readout(embedding(ids))
            if step == 3:
                try:
                    way(loss)
                except RuntimeError as error:
                    said.append(str(error))
            else:
                loss.backward()
        tables.append(tables_of(embedding))
    assert len(said) == 2
    assert all("this one would not be noticed" in text for text in said)
    return [x for found in tables[1:] for x in unlike(found, tables[0])]


def in_thread(loss: Tensor) -> None:
    """Call `backward()` in another thread than the lookup; raise its error here."""
    with ThreadPoolExecutor() as pool:
        pool.submit(loss.backward).result()


def test_a_backward_pass_whose_end_is_not_noticed_is_refused() -> None:
    checked(2, not_noticed)


def one_sided(rank: int, world: int) -> list[str]:
    """One rank alone has gradients, of rows that it owns, and of a part of its batch's rows."""
    found = []
    with few_shards():
        embedding = build()
        shared = embedding._rows.lookup_groups[0].owners.tables[0]
        owner, _ = shared.find(torch.arange(300).numpy())
        mine = torch.from_numpy((owner == rank).nonzero()[0])[:6]
        ids = torch.stack([mine, mine % 200, mine % 150], 1)
        for _ in range(3):
            out = embedding(ids)
            if rank == 0:
                out["f"].sum().backward()
        after = tables_of(embedding)["a"][:, :4]
        start = tables_of(build())["a"][:, :4]
    moved = (after != start).any(1).nonzero().flatten()
    if rank == 0 and moved.tolist() != mine.tolist():
        found.append(f"rows {moved.tolist()} moved, not {mine.tolist()}")
    return found


def test_gradients_of_one_rank_reach_the_rows_that_it_owns() -> None:
    checked(2, one_sided)


# -- gradients that are not finite -----------------------------------------------------------


def not_finite(rank: int, world: int) -> list[str]:
    found = []
    for name in ("all-fast", "lookahead"):
        for how in ("skip", "error", "scaler"):
            options: dict[str, Any] = {} if how == "scaler" else {"on_nonfinite": how}
            embedding = build(TIGHT.get(name, name), **options)
            if how == "scaler":
                embedding.grad_scale = torch.amp.GradScaler("cpu", init_scale=8.0)
                embedding.grad_scale.scale(torch.ones(1))
            said = ""
            for step, ids in enumerate(batches(rank, 4)):
                bad = step == 2 and rank == world - 1
                before = tables_of(embedding)
                loss = readout(embedding(ids)) * (float("inf") if bad else 1.0)
                try:
                    loss.backward()
                except FloatingPointError as error:
                    said = str(error)
                changed = unlike(tables_of(embedding), before)
                if bool(changed) == (step == 2):
                    found.append(f"{name}, {how}, step {step}: changed {changed}")
            if (how == "error") != ("of rank " in said and "no row was changed" in said):
                found.append(f"{name}, {how}: said {said!r}")
            if embedding.optimizer.steps != [3] * 3:
                found.append(f"{name}, {how}: steps {embedding.optimizer.steps}")
    return found


def test_all_ranks_skip_an_update_that_is_not_finite_on_one() -> None:
    checked(2, not_finite)


def scaled_steps(rank: int, world: int) -> list[str]:
    """update="step": an overflow on one rank is skipped by all, and all clip by one norm."""
    found, alike = [], None
    for name in ("all-fast", "lru"):
        embedding = build(TIGHT.get(name, name), rule=None, update="step")
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        norms = []
        for step, ids in enumerate(batches(rank, 5)):
            before = tables_of(embedding)
            optimizer.zero_grad()
            loss = readout(embedding(ids)) * (float("inf") if step == 2 and rank else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(embedding.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            if bool(unlike(tables_of(embedding), before)) == (step == 2):
                found.append(f"{name}: step {step} changed rows, or did not")
        every: list[Any] = [None] * world
        dist.all_gather_object(every, torch.stack(norms).nan_to_num(-1.0))
        if any(not torch.equal(x, every[0]) for x in every):
            found.append(f"{name}: ranks have other norms: {every}")
        if scaler.get_scale() != 4.0:
            found.append(f"{name}: scale {scaler.get_scale()}")
        outcome = {**tables_of(embedding), "norms": every[0]}
        alike = alike or outcome
        found += [f"{name}: {x} differs" for x in unlike(outcome, alike)]
    return found


def test_all_ranks_skip_the_step_of_an_optimizer() -> None:
    checked(2, scaled_steps)


def unequal_steps(rank: int, world: int) -> list[str]:
    """The optimizer of one rank does not step, so its own rows are not updated."""
    embedding = build(update="step")
    try:
        for step, ids in enumerate(batches(rank)):
            embedding.optimizer.zero_grad()
            readout(embedding(ids)).backward()
            if rank == 0 or step != 3:
                embedding.optimizer.step()
    except RankError as error:
        said = str(error)
        return [] if "rank 0 has updated its rows 4 times, and rank 1 3" in said else [said]
    return ["no error"]


def test_an_optimizer_that_does_not_step_on_one_rank_is_an_error() -> None:
    checked(2, unequal_steps)


def accumulated(rank: int, world: int) -> list[str]:
    """Inside of accumulate() ranks evaluate different numbers of batches."""
    outcomes = []
    for evaluates in (False, True):
        for name in ("all-fast", "lookahead"):
            embedding = build(TIGHT.get(name, name))
            stream = hotrow.ahead(batches(rank), embedding)
            for _ in range(4):
                with embedding.accumulate():
                    for ids in islice(stream, 2):
                        loss = readout(embedding(ids))
                        for _ in range(rank if evaluates else 0):
                            with torch.no_grad():
                                embedding(ids)
                        loss.backward()
            stream.close()
            outcomes.append(tables_of(embedding))
            assert embedding.optimizer.steps == [4] * 3
    return [x for found in outcomes[1:] for x in unlike(found, outcomes[0])]


def test_ranks_may_evaluate_while_they_accumulate() -> None:
    checked(2, accumulated)


# -- evaluation in another thread ------------------------------------------------------------


def beside_training(rank: int, world: int) -> list[str]:
    """Each vector that a thread reads is of some finished step, and training keeps its bits."""
    found, probe, few = [], torch.arange(40).unsqueeze(1).expand(40, 3).contiguous(), 12
    expected, history = None, []
    for name in ("all-fast", "lookahead", "scratchpipe", "hybrid"):
        embedding, read, errors = build(TIGHT.get(name, name)), [], []

        def watch(embedding: Any = embedding, read: Any = read, errors: Any = errors) -> None:
            try:
                for _ in range(few):
                    with torch.no_grad():
                        read.append(embedding(probe)["f"])
                    for _, chunk in embedding.weights("a"):
                        read.append(chunk[:40])
            except BaseException as error:
                errors.append(error)  # noqa: B023

        thread = None
        for step, ids in enumerate(hotrow.ahead(batches(rank, 12), embedding)):
            readout(embedding(ids)).backward()
            if step == 0:
                dist.barrier()  # all ranks have a thread that trains
                thread = threading.Thread(target=watch)
            if name == "all-fast":
                with torch.no_grad():
                    history.append(embedding(probe)["f"])
            if step == 0:
                assert thread is not None
                thread.start()
            with torch.no_grad():  # the thread that trains evaluates at the same time
                embedding(ids)
        assert thread is not None
        thread.join()
        found += [f"{name}: {type(error).__name__}: {error}" for error in errors]
        outcome = tables_of(embedding)
        expected = expected or outcome
        found += [f"{name}: {x} differs" for x in unlike(outcome, expected)]
        for vectors in read:
            steps = torch.stack([(vectors == past).all(1) for past in history])
            if not bool(steps.any(0).all()):
                found.append(f"{name}: a thread has read a vector of no finished step")
    return found


def test_threads_evaluate_together_while_all_ranks_train() -> None:
    checked(2, beside_training)


def reading_first(rank: int, world: int) -> list[str]:
    """A thread reads before the first batch is trained, and while ranks train two collections."""
    found, outcomes = [], []
    for beside in (False, True):
        embeddings = [build("all-fast"), build(TIGHT["lookahead"])]

        def watch(embeddings: list[Any] = embeddings) -> list[Tensor]:
            with torch.no_grad():
                return [x(batches(0)[0])["f"] for _ in range(30) for x in embeddings]

        with ThreadPoolExecutor() as pool:
            reading = pool.submit(watch) if beside else None
            for ids in batches(rank, 12):
                torch.stack([readout(x(ids)) for x in embeddings]).sum().backward()
            if reading is not None and len(reading.result()) < 60:
                found.append("vectors are missing")
        outcomes.append([tables_of(x) for x in embeddings])
    for one, other in zip(*outcomes, strict=True):
        found += unlike(one, other)
    return found


def test_a_thread_may_read_before_another_one_trains() -> None:
    checked(2, reading_first)


def modules_beside_training(rank: int, world: int) -> list[str]:
    """The same for modules, whose lookups are read one by one."""
    module = hotrow.EmbeddingBag(300, 4, mode="sum", strategy="all-fast", seed=5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ids, shapes, errors = torch.arange(30).view(10, 3) + rank, [], list[BaseException]()

    def watch() -> None:
        try:
            with torch.no_grad():
                shapes.extend(module(ids).shape for _ in range(10))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    for step in range(6):
        optimizer.zero_grad()
        module(ids).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            module(ids)
        if step == 0:
            dist.barrier()
            thread.start()
    thread.join()
    return [*map(repr, errors), *(["vectors are missing"] if len(shapes) < 10 else [])]


def test_threads_evaluate_modules_while_all_ranks_train() -> None:
    checked(2, modules_beside_training)


# -- whole tables ----------------------------------------------------------------------------


def in_and_out(rank: int, world: int, strategy: str) -> list[str]:
    found = []
    with few_shards():
        embedding = build(TIGHT.get(strategy, strategy))
        for ids in batches(rank, 4):
            readout(embedding(ids)).backward()
        whole = torch.cat([x for _, x in embedding.rows("a")])
        for dst in range(world):
            chunks = list(embedding.rows("a", dst=dst))
            mine = torch.cat([x for _, x in chunks]) if chunks else None
            if (rank == dst) != (mine is not None and torch.equal(mine, whole)):
                found.append(f"rows with dst={dst}")
        some = torch.randperm(300, generator=torch.Generator().manual_seed(rank))[: 40 + rank]
        read = torch.empty(len(some), 4)
        for places, weights in embedding.weights_at("a", some):
            read[places] = weights
        if not torch.equal(read, whole[some, :4]):
            found.append("weights_at")
        with torch.no_grad():
            if not torch.equal(embedding(some.unsqueeze(1) % 150 * torch.ones(1, 3).long())["f"],
                               whole[some % 150, :4]):  # fmt: skip
                found.append("evaluation")
        embedding.load_weights("a", 17, torch.full((50, 4), 0.25))
        whole[17:67, :4] = 0.25  # their state stays
        if not torch.equal(torch.cat([x for _, x in embedding.rows("a")]), whole):
            found.append("load_weights")
        draw = torch.Generator().manual_seed(9)
        plain = {embedding.key_of(x.name): torch.rand(x.num_embeddings, x.embedding_dim,
                                                      generator=draw) for x in TABLES}  # fmt: skip
        sums = {
            x.name: torch.rand(x.num_embeddings, x.embedding_dim, generator=draw) for x in TABLES
        }
        state = {name: {"step": 7, "sum": values} for name, values in sums.items()}
        groups = [{"name": x.name, "lr": 0.05} for x in TABLES]
        embedding.load_state_dict(plain)
        embedding.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for x in TABLES:
            rows = torch.cat([chunk for _, chunk in embedding.rows(x.name)])
            expected = torch.cat([plain[embedding.key_of(x.name)], sums[x.name]], 1)
            if not torch.equal(rows, expected):
                found.append(f"load_state_dict of table {x.name}")
        if embedding.optimizer.steps != [7] * 3:
            found.append("steps")
        readout(embedding(batches(rank, 1)[0])).backward()  # and training goes on
    return found


@pytest.mark.parametrize(("world", "strategy"), [(2, "lru"), (4, "lru"), (2, "static-hybrid")])
def test_whole_tables_in_and_out(world: int, strategy: str) -> None:
    checked(world, in_and_out, strategy)


def refused(rank: int, world: int) -> dict[str, str]:
    """What each call says; nothing here may need the other ranks."""
    torch.manual_seed(0)
    embedding, static = build(), build(variant("static"))
    net = nn.Sequential(nn.Embedding(300, 4), nn.Linear(4, 1))
    hotrow.convert(net, ROOM_OF_ONE, strategy="lru", seed=3, show=False)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    net(torch.arange(5)).sum().backward()
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": embedding.state_dict,
        "row state": embedding.optimizer.state_dict,
        "state_dict of a module": net.state_dict,
        "state of torch": optimizer.state_dict,
        "pin_rows": lambda: static.pin_rows({"a": torch.arange(3)}),
        "train_on_host": static.train_on_host,
        "revert": lambda: hotrow.revert(net, optimizer=optimizer),
    }
    said = {}
    for name, call in calls.items():
        if rank and "state" in name:
            continue  # as in `if rank == 0: torch.save(...)`, which must not hang
        try:
            call()
            said[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    optimizer.step()
    optimizer.zero_grad()
    weights = torch.cat([x for _, x in net[0].weights()])  # type: ignore[operator]
    hotrow.revert(net, optimizer=optimizer)
    assert torch.equal(net[0].weight, weights)  # type: ignore[arg-type]
    return said


ROOM_OF_ONE = hotrow.Budget((hotrow.Share(14, 64, True),), 1 << 14)


def test_what_several_ranks_cannot_do_is_refused() -> None:
    said = run(2, refused, timeout=60, group_timeout=20)[0]
    for name in ("state_dict", "row state", "state_dict of a module", "state of torch"):
        assert "hotrow.save_checkpoint, which every rank calls" in said[name], (name, said[name])
        assert "dst=0" in said[name]
    assert "weights(table, dst=0)" in said["state_dict"]
    assert "weights(dst=0)" in said["state_dict of a module"]
    assert "works on one rank so far" in said["train_on_host"]
    assert "build the collection with them, such as replicate='64MiB'" in said["pin_rows"]
    assert "let the optimizer step, or call zero_grad()" in said["revert"]


# -- ranks that disagree ---------------------------------------------------------------------


def ones(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), 4)


def zeros(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), 4)


def disagreeing(rank: int, world: int) -> dict[str, tuple[str, str]]:
    table = [Table("a", 300, 4, ["f"])]

    def make(tables: Any = table, rule: Any = RULE, **options: Any) -> Callable[[], Any]:
        options = {"strategy": "all-fast", "seed": 3, **options}
        return lambda: hotrow.EmbeddingBagCollection(tables, rule, **options)

    def starts(init: Any) -> Callable[[], Any]:
        return make([Table("a", 300, 4, ["f"], init=init)])

    last = rank == world - 1
    cases = {
        "rows": make([Table("a", 301 if last else 300, 4, ["f"])]),
        "rule": make(rule=hotrow.Adagrad(lr=0.2 if last else 0.1)),
        "strategy": make(budget=ROOM_OF_ONE, strategy="lru" if last else "lookahead"),
        "seed": make(seed=rank),
        "drawn seed": make(seed=None if last else 3),
        "settings": make(on_nonfinite="skip" if last else "error"),
        "start": starts(ones if last else zeros),
        "weights": lambda: (
            hotrow.Embedding.from_pretrained(
                torch.full((30, 4), float(rank)), strategy="all-fast", seed=3
            ).collection
        ),
    }
    said = {}
    for name, build_one in cases.items():
        try:
            build_one()
            said[name] = ("nothing", "")
        except Exception as error:
            said[name] = (type(error).__name__, str(error))
    # What is equal has the same text in all processes, wherever its functions lie.
    starts(lambda rows: torch.ones(len(rows), 4))()
    make([Table("a", 300, 4, ["f"], init_fn=nn.init.normal_)])()
    same = hotrow.Embedding.from_pretrained(torch.ones(30, 4), strategy="all-fast", seed=3)
    assert same.collection.ranks is not None
    return said


def test_ranks_that_disagree_are_refused_with_the_difference() -> None:
    differences = {
        "rows": "num_embeddings=301", "rule": "lr=0.2", "strategy": "lru", "seed": "seed is 0",
        "drawn seed": "drawn", "settings": "skip", "start": "ones", "weights": "checksum",
    }  # fmt: skip
    for said in run(2, disagreeing, timeout=60, group_timeout=20):
        for name, difference in differences.items():
            kind, text = said[name]
            assert kind == RankError.__name__, (name, kind, text)
            assert text.startswith("ranks build different collections: "), text
            assert " on rank 0 and " in text
            assert text.endswith(" on rank 1"), text
            assert difference in text, text


# -- ids that no table has -------------------------------------------------------------------


def bad_ids(rank: int, world: int) -> list[tuple[str, str, bool, int]]:
    """By form of the loop: the error, its text, whether rows and traffic are as before, and how
    many batches were trained."""
    found = []
    for name, loader in [("lru", "direct"), ("lookahead", None), ("lookahead", 5), ("lru", 0),
                         ("hybrid", None), ("cpu", "direct")]:  # fmt: skip
        embedding = build(TIGHT.get(name, name))
        good, said = batches(rank, 6), ("nothing", "")
        wrong = [x.clone() for x in good]
        if rank == world - 1:
            wrong[4][1, 1] = 200
        stream: Any = wrong
        if loader != "direct":
            stream = hotrow.ahead(iter(wrong), embedding, depth=loader)
        trained = 0
        try:
            for ids in stream:
                readout(embedding(ids)).backward()
                trained += 1
        except Exception as error:
            said = (type(error).__name__, str(error))
        expected = build()
        for ids in good[:trained]:
            readout(expected(ids)).backward()
        same = not unlike(tables_of(embedding), tables_of(expected))
        for ids in (good[5], good[3]):  # and training goes on
            readout(embedding(ids)).backward()
            readout(expected(ids)).backward()
        same = same and not unlike(tables_of(embedding), tables_of(expected))
        found.append((*said, same, trained))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_bad_id_on_one_rank_raises_on_all_before_a_row_moves(world: int) -> None:
    for rank, results in enumerate(run(world, bad_ids, timeout=60, group_timeout=20)):
        assert not isinstance(results, Failed)
        for kind, text, same, trained in results:
            assert kind == "BadId", (kind, text)
            assert "200" in text, text
            assert "'g'" in text, text
            assert f"rank {world - 1}" in text, text
            assert same, (rank, text)
            assert trained == 4
