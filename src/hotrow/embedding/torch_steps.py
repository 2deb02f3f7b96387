"""Lets steps of torch's optimizers update rows: those of `update="step"`.

torch calls hooks before and after the step of every optimizer. They look for stand-ins among its
params, and the tables of those make a step, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hotrow.embedding.optimizer import RowOptimizer
from hotrow.embedding.pipeline import Pipeline
from hotrow.embedding.row_groups import RowGroups
from hotrow.embedding.stand_ins import StandIn, StandIns, stand_in_of
from hotrow.embedding.step import PendingStep
from hotrow.embedding.torch_rules import (
    START,
    NoRule,
    TorchRule,
    common_rule,
    have_state_of,
    number,
    rules_for,
)
from hotrow.embedding.torch_state import include_rows
from hotrow.embedding.waiting import WaitingGrads
from hotrow.embedding.whole_table import WholeTable
from hotrow.kernels.dense_rules import DenseAdagrad, DenseRule, DenseSGD
from hotrow.kernels.rules import SGD, Adagrad, RowRule
from hotrow.support.messages import warn
from hotrow.support.streams import capturing

# Those that stand-ins were given to; some of these may not belong to any rows yet.
_with_stand_ins: WeakSet[Optimizer] = WeakSet()
# What was found in the param groups of an optimizer, and what it was found by.
_found: WeakKeyDictionary[Optimizer, tuple[list[Any], list[_Held]]] = WeakKeyDictionary()


@cache
def watch() -> None:
    """Let the steps of all optimizers reach rows from now on; once in a process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    _hear_of_new_optimizers()


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    for owner, groups in _held_by(optimizer):
        owner.before(optimizer, groups, has_closure=closure is not None)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for owner, groups in _held_by(optimizer):
        owner.after(optimizer, groups)


class _Groups(dict[str, dict[str, Any]]):
    """Param groups by table. Unlike other dicts it can be referred to weakly: param groups keep
    every weight of a model in memory."""


class _Held(NamedTuple):
    """Stand-ins of one collection that an optimizer holds."""

    owner: Callable[[], TorchSteps | None]  # weakly
    groups: _Groups


def _held_by(optimizer: Optimizer) -> Iterator[tuple[TorchSteps, dict[str, Any]]]:
    """Yield what owns stand-ins of an optimizer, with the param group of each of its tables."""
    key: list[Any] = [StandIn.owners_changed]
    for group in optimizer.param_groups:
        key.append(id(group))
        key += map(id, group["params"])
    known = _found.get(optimizer)
    if known is None or known[0] != key:
        known = _found[optimizer] = key, _find_held(optimizer)
    for held in known[1]:
        owner = held.owner()
        if owner is not None:
            yield owner, held.groups


def _find_held(optimizer: Optimizer) -> list[_Held]:
    found: dict[int, _Held] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            stands_for = stand_in_of(param)
            owner = None if stands_for is None else stands_for.owner()
            if stands_for is not None and owner is not None:
                held = found.setdefault(id(owner), _Held(stands_for.owner, _Groups()))
                held.groups[stands_for.table] = group
    return list(found.values())


def _hear_of_new_optimizers() -> None:
    """Note which optimizers hold stand-ins when they are made: rows get their state then, and the
    optimizer's own state dict includes it. torch has no hook for that."""
    of_torch = Optimizer.add_param_group

    @wraps(of_torch)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        of_torch(self, _with_stand_ins_for(param_group))
        note_stand_ins(self)

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _with_stand_ins_for(param_group: Any) -> Any:
    """Return a param group in which the weights of modules are their stand-ins."""
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if isinstance(params, WholeTable):
        return {**param_group, "params": [params.stand_in]}
    if params is None or isinstance(params, Tensor | set):
        return param_group
    listed = [_held_for(param) for param in params]
    return {**param_group, "params": listed}


def _held_for(param: Any) -> Any:
    if isinstance(param, WholeTable):
        return param.stand_in
    if isinstance(param, tuple) and len(param) == 2 and isinstance(param[1], WholeTable):
        return param[0], param[1].stand_in
    return param


def note_stand_ins(optimizer: Optimizer) -> None:
    """Note which stand-ins an optimizer holds; a collection's own knows its rows anyway."""
    if isinstance(optimizer, RowOptimizer):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(stand_in_of(param) is not None for param in params):
        if not all(group["params"] for group in optimizer.param_groups):
            warn(
                f"a param group of {type(optimizer).__name__} is empty. The weight of a converted "
                "module is no element of model.parameters(), so groups that are chosen by id() or "
                "`is` miss it: choose by name, or by module.parameters()"
            )
        _include(optimizer)
        for owner, groups in _held_by(optimizer):
            owner.hold(optimizer, groups)


def _include(optimizer: Optimizer) -> None:
    """Let the state dict of an optimizer that holds stand-ins have the state of their rows."""
    if optimizer not in _with_stand_ins and not isinstance(optimizer, RowOptimizer):
        _with_stand_ins.add(optimizer)
        include_rows(optimizer)


def known_rule(stand_ins: StandIns, idle: str | None) -> RowRule | None:
    """Return the rule of the optimizers that hold stand-ins; None: there are none, or no rule."""
    rules: dict[str, TorchRule] = {}
    with suppress(NoRule, RuntimeError, ValueError):
        for optimizer in _with_stand_ins:
            groups = {
                stand_ins.names[place]: group
                for group in optimizer.param_groups
                for place, param in enumerate(stand_ins.parameters)
                if any(param is held for held in group["params"])
            }
            rules |= rules_for(optimizer, groups, idle, None)
        return common_rule(rules) if rules else None
    return None


class TorchSteps:
    """Steps of one collection's rows, as torch's optimizers make them."""

    def __init__(
        self,
        rows: RowGroups,
        stand_ins: StandIns,
        pending: PendingStep,
        pipeline: Pipeline,
        *,
        idle: str | None,
        is_known: bool,  # the rule was given
    ) -> None:
        watch()
        self._rows, self._optimizer = rows, rows.optimizer
        self._stand_ins, self._pending, self._pipeline = stand_ins, pending, pipeline
        pending.for_step = WaitingGrads(rows, stand_ins, self.refuse_unheld)
        self._idle, self._is_known = idle, is_known
        self._holders: WeakSet[Optimizer] = WeakSet([self._optimizer] if is_known else [])
        self._stepped: dict[str, Callable[[], Any]] = {}  # by table: the optimizer, weakly
        # Weakly: the param groups of the newest step's optimizer, while it holds the same tables.
        self._newest: Callable[[], Any] = _no_optimizer
        self._applied: dict[str, int] = {}  # by table: the pass whose gradients were applied
        stand_ins.belong_to(self)
        self._past: dict[str, WeakSet[Optimizer]] = {}  # by table: those that have stepped it
        for optimizer in [*_with_stand_ins]:  # modules have stand-ins before they have rows
            for owner, groups in _held_by(optimizer):
                if owner is self:  # its rule is used in its first step, if it is another
                    self._note(optimizer, groups)

    def hold(self, optimizer: Optimizer, groups: Mapping[str, Any]) -> None:
        """Note an optimizer that was made; one without a rule is refused in its first step."""
        is_new = optimizer not in self._holders
        self._note(optimizer, groups)
        if is_new and not self._is_known:
            with suppress(NoRule):
                self._use(optimizer, self._rules(optimizer, groups))

    def _note(self, optimizer: Optimizer, groups: Mapping[str, Any]) -> None:
        self._newest = _no_optimizer
        self._stand_ins.be_sparse(groups, isinstance(optimizer, torch.optim.SparseAdam))
        self._holders.add(optimizer)
        _include(optimizer)

    @property
    def trains(self) -> bool:
        """Whether some table is trained."""
        return any(parameter.requires_grad for parameter in self._stand_ins.parameters)

    def refuse_unheld(self) -> None:
        """Raise if gradients wait that no optimizer will ever apply."""
        if not len(self._holders):
            raise RuntimeError(
                "row gradients of an earlier backward() still wait, and no optimizer holds the "
                "tables' stand-ins, so rows would never be updated. Give them to one, such as "
                "torch.optim.Adagrad(model.parameters()), or freeze the rows: "
                "requires_grad_(False)"
            )

    @property
    def rows(self) -> Any:
        return self._optimizer.rows

    def steps(self, table: str) -> int:
        """Return how often a table's rows were updated."""
        return self._optimizer.steps[self._optimizer.names.index(table)]

    def state_bytes(self, table: str) -> int:
        """Return the bytes of a table's optimizer state."""
        return sum(4 * rows * width for rows, width in self.rows.state_shapes(table).values())

    def grads_of(self, table: str) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of the rows of a table whose gradients wait, and these gradients;
        None: the table has no gradient."""
        waiting = self._pending.for_step
        return None if waiting is None else waiting.of_table(table)

    def load_state(
        self, optimizer: Optimizer, table: str, state: Mapping[str, Tensor], step: int
    ) -> None:
        """Replace the state that an optimizer has of a table's rows."""
        self._optimizer.load_table(table, state, step)
        self.has_state_of(optimizer, table)

    def start_anew(self, table: str) -> None:
        """Let the state of a table's rows be as before its first step."""
        self._optimizer.start_anew([table])

    def has_state_of(self, optimizer: Optimizer, table: str) -> None:
        """Note that the state of a table's rows is that of an optimizer."""
        self._newest = _no_optimizer
        self._stepped[table] = weakref.ref(optimizer)
        self._past[table] = WeakSet([optimizer])

    def has_stepped(self, optimizer: Optimizer, table: str) -> bool | None:
        """Whether the state of a table's rows is that of an optimizer, perhaps as it starts; None:
        it was, and another optimizer has begun anew since."""
        if table not in self._stepped or self._stepped[table]() is optimizer:
            return True
        return None if optimizer in self._past.get(table, ()) else False

    def before(self, optimizer: Optimizer, groups: Mapping[str, Any], *, has_closure: bool) -> None:
        """Refuse a step that rows cannot make, before anything has changed."""
        if not any(self._stand_ins.waiting()) and not (has_closure and self.trains):
            return
        if self._pending.is_accumulating:
            raise RuntimeError(
                "an optimizer's step inside of accumulate() would come before the gradients that "
                "it joins; step after it. With update='step' gradients add up without it"
            )
        rules = self._rules(optimizer, groups)
        for name in groups:
            other = self._stepped.get(name, _no_optimizer)()
            if self._applied.get(name) == self._pending.passes and other not in (None, optimizer):
                raise RuntimeError(
                    f"two optimizers hold table {name!r}, and {type(other).__name__} has applied "
                    "these gradients already; a table belongs into one optimizer. The weight of a "
                    "converted module is no element of model.parameters(): choose parameters by "
                    "name, or by module.parameters()"
                )
        if self._newest() is not groups:
            self.hold(optimizer, groups)
        self._use(optimizer, rules)
        if self._stand_ins.device.type == "cpu":
            self._stand_ins.judge()  # before the dense part has changed
        if self._newest() is not groups:
            self._take_over(optimizer, groups)
            self._newest = weakref.ref(groups)
        self._stand_ins.are_stepped = True

    def after(self, optimizer: Optimizer, groups: Mapping[str, Any]) -> None:
        """Update the rows of the tables that have a gradient."""
        names, waiting = self._stand_ins.names, self._stand_ins.waiting()
        tables = [name for name, waits in zip(names, waiting, strict=True) if waits]
        tables = [name for name in tables if name in groups]
        if not tables:
            self._stand_ins.are_stepped = False
            return
        try:
            # Here, not before: a closure, or a hook of the user, may have changed settings.
            self._follow(optimizer, {name: groups[name] for name in tables})
            # A GradScaler lets a fused optimizer decide whether this step is skipped, and divide
            # gradients, those of stand-ins as well.
            found = getattr(optimizer, "found_inf", None)
            skips_late = found is not None and self._pending.skips_late
            if skips_late or found is None or not bool(torch.as_tensor(found).any()):
                self._pending.step(tables, found if skips_late else None)
                self._applied.update(dict.fromkeys(tables, self._pending.passes))
        finally:
            self._stand_ins.reset()

    def _follow(self, optimizer: Optimizer, groups: Mapping[str, Any]) -> None:
        """Take the settings of an optimizer's param groups for some tables."""
        if optimizer is self._optimizer or capturing():  # `in_one_step` has taken them
            return
        rules = self._rules(optimizer, groups)
        # A tensor on a device is read once for each param group, not for each of its tables.
        settings = {
            id(rule): {name: number(value) for name, value in rule.settings.items()}
            for rule in {id(x): x for x in rules.values()}.values()
        }
        for group in self._optimizer.param_groups:
            if group["name"] in rules:
                group.update(settings[id(rules[group["name"]])])

    def fused(self) -> AbstractContextManager[None]:
        """Inside, the end of a backward pass updates rows; `in_one_step` comes before."""
        return self._pending.fused()

    def in_one_step(self) -> Optimizer:
        """Prepare a backward pass that the step of one optimizer follows at once, which is
        returned: the end of the pass may then update rows."""
        holders = list(self._holders)
        if len(holders) != 1:
            raise RuntimeError(
                f"{len(holders)} optimizers hold the stand-ins of tables; a step that hotrow makes "
                "needs exactly one, such as torch.optim.Adagrad(model.parameters())"
            )
        held = [groups for owner, groups in _held_by(holders[0]) if owner is self]
        groups = held[0] if held else {}
        if len(groups) < len(self._stand_ins.names):
            missing = next(name for name in self._stand_ins.names if name not in groups)
            raise RuntimeError(
                f"{type(holders[0]).__name__} does not hold the stand-in of table {missing!r}; a "
                "step that hotrow makes needs one optimizer for all tables, or frozen rows "
                "(embedding.freeze_rows)"
            )
        self._use(holders[0], self._rules(holders[0], groups))
        self._take_over(holders[0], groups)
        self._follow(holders[0], groups)
        return holders[0]

    def _take_over(self, optimizer: Optimizer, tables: Mapping[str, Any]) -> None:
        """Begin with new state if another optimizer has stepped these tables before."""
        self._newest = _no_optimizer
        others = [
            name for name in tables if self._stepped.get(name, _no_optimizer)() is not optimizer
        ]
        again = [name for name in others if optimizer in self._past.get(name, ())]
        if again and self._optimizer.rule.state_names:
            raise RuntimeError(
                f"two optimizers step table {again[0]!r} in turns, and its rows have the state of "
                "one; give each table to one optimizer"
            )
        self._optimizer.start_anew([name for name in others if name in self._stepped])
        for name in others:
            self._stepped[name] = weakref.ref(optimizer)
            self._past.setdefault(name, WeakSet()).add(optimizer)

    def _rules(self, optimizer: Optimizer, groups: Mapping[str, Any]) -> dict[str, TorchRule]:
        known = self._optimizer.rule if self._is_known else None
        return rules_for(optimizer, groups, self._idle, known)

    def _use(self, optimizer: Optimizer, rules: Mapping[str, TorchRule]) -> None:
        """Let all rows have the state of an optimizer's rule."""
        before = self._optimizer.rule
        if self._is_known and have_state_of(rules, before):
            return
        rule = common_rule(rules)
        if not self._is_known or not any(self._optimizer.steps):
            if rule.state_names and not self._rows.has_state_of(rule):
                what = f"the first use of {type(optimizer).__name__}, whose state rows get now,"
                self._pipeline.refuse_if_running(what)
                self._pipeline.forget_planned()
            if not self._rows.has_state_of(rule):
                # A save under way ends before, and the next checkpoint is whole.
                if self.rows.being_saved is not None:
                    self.rows.being_saved.join()
                self.rows.changed_since = None
            self._rows.use_rule(rule)
            self._is_known = True
        elif type(rule) is type(before):
            if isinstance(before, DenseRule):
                before.with_setting(vars(rule))  # raises where rows would have other state
            if set(rules) != set(self._stand_ins.names):
                raise RuntimeError(f"all tables of a collection have one {START}")
            # It takes all tables over, and their state starts anew.
            self._optimizer.change_rule(rule)
        elif (type(before), type(rule)) in ((SGD, DenseSGD), (Adagrad, DenseAdagrad)):
            raise RuntimeError(
                f"{type(optimizer).__name__} moves rows that no batch looks up from this step on, "
                "and steps before did not, so the step of each row's last gradient is not known. "
                "Give it its weight_decay, momentum or lr_decay, however small, from the first "
                "step on"
            )
        else:
            raise RuntimeError(
                f"rows have the state of {type(before).__name__}, and {type(optimizer).__name__} "
                "steps them now; all tables of a collection have optimizers of one class, from the "
                "first to the last"
            )


def _no_optimizer() -> None:
    """No optimizer has stepped a table yet."""
