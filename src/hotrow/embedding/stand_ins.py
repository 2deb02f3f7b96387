"""Stand-ins: small parameters that represent tables to torch's optimizers.

Rows are no parameters, because a table may be larger than fast memory. With `update="step"` each
table has a stand-in instead, and what torch does to the gradient of the stand-in happens to the
gradients of the table's rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from hotrow.engine.row_sums import TableGrads
from hotrow.support.late_flag import LateFlag
from hotrow.support.streams import capturing

# A gradient is [[norm, MARK]]. Clipping and unscaling multiply both by the same factor, which the
# mark gives back to the last bit, as it is a power of two. It is too small to change a norm.
MARK = 2.0**-40
_WATCHED_PASSES = 3  # in which a loss over the stand-ins themselves is noticed
_STAMPS = 1 << 20  # different values of a stand-in, one after the other
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_CLOSE = 1e-4  # how far a norm may be from norm times factor: two roundings are far below


@dataclass(eq=False)
class StandIn:
    """What a parameter stands for: one table. Its value means nothing, and its gradient is the norm
    of the table's row gradients.

    It is an attribute of the parameter. With a class of parameters of its own, torch's optimizers
    would step all other parameters one by one, too.
    """

    table: str
    owner: Callable[[], Any] = lambda: None  # a weak reference to what steps the rows
    build: Callable[[], Any] = lambda: None  # makes rows if there are none yet
    is_sparse_grad: bool = False  # the gradient is a sparse tensor, as SparseAdam wants
    owners_changed: ClassVar[int] = 0  # how often some stand-in got another owner

    def belong_to(self, owner: Callable[[], Any]) -> None:
        self.owner = owner
        StandIn.owners_changed += 1


def stand_in_of(parameter: object) -> StandIn | None:
    """Return what a parameter stands for; None: itself."""
    return getattr(parameter, "stands_for", None)


class StandIns:
    """The stand-ins of a collection's tables, in their order."""

    def __init__(self, tables: Sequence[str], device: torch.device) -> None:
        self.names, self.device = tuple(tables), device
        # Of all tables side by side: one launch sets or resets them all.
        # Their values are the number of steps, so that other values are noticed, averages as well.
        self._stamp = 1.0
        self._values = torch.full((len(tables), 1, 2), self._stamp, device=device)
        self.parameters = [nn.Parameter(value) for value in self._values]
        self._facts = [StandIn(name) for name in tables]
        self._has_sparse = False
        self._hooks = []
        for parameter, facts in zip(self.parameters, self._facts, strict=True):
            parameter.stands_for = facts  # type: ignore[attr-defined]
            # A call for each table takes time, and who penalises parameters does so from the start.
            self._hooks.append(parameter.register_hook(partial(_refuse_gradient, facts.table)))
            for name in HOOKS:
                setattr(parameter, name, partial(refuse_hook, name))
        self._passes = 0
        self.are_stepped = False  # an optimizer's step is under way
        self._by_tables: dict[tuple[str, ...], list[nn.Parameter]] = {}
        _refuse_other_norms()
        self._allocate()

    def _allocate(self) -> None:
        """Make what gradients are written to."""
        count = len(self.names)
        self._grads = torch.zeros(count, 1, 2, device=self.device)
        self._norms = torch.zeros(count, device=self.device)  # as they were published
        self._found = LateFlag(self.device)  # a gradient was changed by other means
        self._dense = list(self._grads)  # the gradients of those that are not sparse
        for grad in self._dense:
            grad.is_norm_of_rows = True
        self._marks = self._marks_now()  # after what we did ourselves

    def move_to(self, device: torch.device) -> None:
        """Be on another device, as the same parameters; no gradient may wait."""
        self.device = device
        self._values = torch.full_like(self._values, self._stamp, device=device)
        for parameter, value in zip(self.parameters, self._values, strict=True):
            parameter.data, parameter.grad = value, None
        self._allocate()

    def wait_for(self, build: Callable[[], Any]) -> None:
        """Let `build` make rows where their state is asked for."""
        for facts in self._facts:
            facts.build = build

    def belong_to(self, owner: Any) -> None:
        for facts in self._facts:
            facts.belong_to(weakref.ref(owner))

    def be_sparse(self, tables: Collection[str], is_sparse: bool) -> None:
        """Choose whether gradients of some tables are sparse tensors, from the next one on."""
        for facts in self._facts:
            if facts.table in tables:
                facts.is_sparse_grad = is_sparse
        self._has_sparse = any(facts.is_sparse_grad for facts in self._facts)

    def of_tables(self, tables: tuple[str, ...]) -> list[nn.Parameter]:
        """Return the stand-ins of some tables."""
        if tables not in self._by_tables:
            by_name = dict(zip(self.names, self.parameters, strict=True))
            self._by_tables[tables] = [by_name[name] for name in tables]
        return self._by_tables[tables]

    def waiting(self) -> list[bool]:
        """Return whether each table has a gradient: `zero_grad()` takes it away."""
        return [parameter.grad is not None for parameter in self.parameters]

    def table_grads(self, places: Tensor) -> TableGrads:
        """Return where the gradients of the tables at some places are written."""
        return TableGrads(self._norms, self._grads, MARK, places)

    def clear(self) -> None:
        """Let every gradient be that of no row."""
        self._norms.zero_()
        self._grads[:, 0, 0].zero_()
        self._grads[:, 0, 1].fill_(MARK)

    def change_norms(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the norms that were written, before they are published."""
        self._norms.copy_(change(self._norms))
        self._grads[:, 0, 0] = self._norms

    def publish(self, places: Sequence[int]) -> None:
        """Give these tables their gradients."""
        for place in places:
            grad = self._dense[place]
            if self._has_sparse and self._facts[place].is_sparse_grad:
                grad = _as_sparse(grad)  # a new one: zeroing empties a sparse tensor for good
            self.parameters[place].grad = grad
        if self._hooks and self._passes == _WATCHED_PASSES:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        self._passes += 1

    def judge(self) -> tuple[Tensor, Tensor]:
        """Return what each table's gradient was multiplied by since it was published, and whether
        it has one that was not zeroed; [T] float32 and bool.

        Raises if a gradient was changed by something else than a multiplication. On a GPU that is
        known some steps later: the host does not wait for it.
        """
        now, is_late = self._now(), self.device.type == "cuda"
        if is_late:
            from hotrow.kernels.triton.norms import judge

            factors, kept = judge(now, self._norms, MARK, _CLOSE, self._found.there)
        else:
            factors, kept = now[:, 1] / MARK, (now != 0).any(1)
            is_close = torch.isclose(now[:, 0], self._norms * factors, rtol=_CLOSE, atol=1e-30)
            # What becomes of NaN and of infinity is torch's affair.
            is_close |= ~(now.isfinite().all(1) & self._norms.isfinite())
            self._found.there |= (~is_close).any()
        for place, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None or (self._has_sparse and grad.is_sparse and not grad._nnz()):
                kept[place] = False
        if self._found.is_set():
            when = "rows were updated without it" if is_late else "no row was changed"
            raise RuntimeError(
                "the gradient of a table was changed by something else than a multiplication (such "
                "as clip_grad_value_), which cannot be done to the gradients of its rows: they are "
                "not in one tensor. clip_grad_norm_, GradScaler and multiplying all gradients "
                f"work; {when}"
            )
        return factors, kept

    def _now(self) -> Tensor:
        """Return norm and mark of each table's gradient as they are now, [T, 2]."""
        pairs = zip(self.parameters, self._dense, strict=True)
        other = [place for place, (x, dense) in enumerate(pairs) if x.grad is not dense]
        now = self._grads.view(-1, 2)
        if other:
            now = now.clone()
            for place in other:
                grad = self.parameters[place].grad
                if grad is None:  # as if it were untouched
                    now[place, :1] = self._norms[place : place + 1]
                    now[place, 1:].fill_(MARK)  # to assign a number would copy it from the host
                else:
                    now[place] = _values_of(grad)
        return now

    def refuse_other_values(self) -> None:
        """Raise if a stand-in was written to, where its rows were meant."""
        marks = self._marks_now()
        if marks == self._marks and self.device.type != "cpu":
            return  # reading values would wait for the device
        if self.are_stepped:  # an error, or Ctrl-C, came in the middle of a step
            self.reset()
            return
        moved = [now != then for now, then in zip(marks[1], self._marks[1], strict=True)]
        is_other = (self._values != self._stamp).flatten(1).any(1).tolist()
        found = [
            place for place, wrong in enumerate(zip(moved, is_other, strict=True)) if any(wrong)
        ]
        if not found:
            return
        place = found[0]
        raise RuntimeError(
            f"the parameter that stands for table {self.names[place]!r} was written to, but it "
            "holds no rows, so they did not change. To initialise rows use init=, to replace them "
            "load_weights(); optimizers that move weights before a step, such as SAM, do not work, "
            "nor do averages of model.parameters(): average state_dict()"
        )

    def reset(self) -> None:
        """Undo what an optimizer's step did to the stand-ins themselves."""
        if not capturing():  # a replay would leave the same value every time
            self._stamp = self._stamp % _STAMPS + 1
        with torch.no_grad():
            self._values.fill_(self._stamp)
        self.are_stepped, self._marks = False, self._marks_now()

    def _marks_now(self) -> tuple[list[int], list[int]]:
        """Return the versions and the addresses of all stand-ins."""
        parameters = self.parameters
        return [x._version for x in parameters], [x.data_ptr() for x in parameters]


def refuse_hook(name: str, *_: Any) -> NoReturn:
    """Refuse a hook that would not see the gradients of rows."""
    raise RuntimeError(
        f"{name}: the gradient of a table of hotrow is not one tensor, and is there after the "
        "whole backward pass, so no hook of its weight is called; register hooks on the vectors "
        "that a lookup returns, and step optimizers after backward()"
    )


@cache
def _refuse_other_norms() -> None:
    """Refuse norms of gradients that cannot be computed from the L2 norm of each table; clip those
    of stand-ins and of sharded parameters together, which torch does not mix."""
    from torch.nn.utils import clip_grad

    norm_of_torch, clip_of_torch = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_

    @wraps(norm_of_torch)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        has_norms = any(hasattr(x, "is_norm_of_rows") for x in tensors)
        if float(norm_type) != 2.0 and has_norms:
            raise ValueError(
                f"norm_type={norm_type} needs the gradients of all rows in one tensor; with tables "
                "whose rows hotrow updates, clip_grad_norm_ takes norm_type=2 only"
            )
        sharded = [x for x in tensors if _is_sharded(x)]
        if not has_norms or not sharded:
            return norm_of_torch(tensors, norm_type, *args, **kwargs)
        whole = [x for x in tensors if not _is_sharded(x)]
        norms: list[Any] = [norm_of_torch(x, norm_type, *args, **kwargs) for x in (sharded, whole)]
        joined: Tensor = torch.linalg.vector_norm(torch.stack([norms[0].full_tensor(), norms[1]]))
        return joined

    @wraps(clip_of_torch)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for is_sharded in (False, True):
            some = [x for x in parameters if _is_sharded(x) == is_sharded]
            if some:
                clip_of_torch(some, *args, **kwargs)

    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = total_norm, clip


def _is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 makes them of parameters."""
    return hasattr(tensor, "full_tensor")


def _refuse_gradient(table: str, grad: Tensor | None) -> None:
    """Raise if a loss uses a stand-in itself; a lookup gives it no gradient of autograd's."""
    if grad is not None:
        raise RuntimeError(
            f"the loss uses the parameter that stands for table {table!r}, such as a sum of "
            "squares over model.parameters(). It holds no rows, so this would not act on them; "
            "leave it out, and penalise the vectors that a batch looks up"
        )


def _as_sparse(values: Tensor) -> Tensor:
    index = torch.zeros(1, 1, dtype=torch.int64, device=values.device)
    return torch.sparse_coo_tensor(index, values, (1, 2), is_coalesced=True, check_invariants=False)


def _values_of(grad: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad.reshape(2)
    return grad.coalesce().values().reshape(2) if grad._nnz() else grad.new_zeros(2).to_dense()
