"""What torch's wrappers and TorchRec's callers meet on a collection. Knows no rows."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from hotrow.inputs.batch import raw_weights
from hotrow.inputs.tables import EmbeddingBagConfig, output_names

_EXPORTS = "save rows by hotrow.save_model, or export a run by `hotrow export`"
_VMAP = torch._C._functorch.TransformType.Vmap
_current_transform = torch._C._functorch.peek_interpreter_stack


class OutsideGraphs(nn.Module):
    """A module that refuses in one sentence what cannot work.

    Rows are no parameters and lookups change maps of rows, so graphs and copies would train or
    store other rows than its own.
    """

    _described = "a module with hotrow's rows"

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{self._described} cannot be copied: two of them would train the same rows. Build a "
            "second one, or pass weights by state_dict()"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise TypeError(
            f"nn.DataParallel would copy {self._described} to several GPUs, and hotrow trains rows "
            "on one: call the model without the wrapper"
        )

    def _slow_forward(self, *features: Any, **options: Any) -> NoReturn:
        # torch calls this instead of `forward` while it traces.
        raise TypeError(
            "torch.jit.trace and torch.onnx.export would store the rows as constants of a graph; "
            + _EXPORTS
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(f"{self._described} cannot be compiled by torch.jit.script; {_EXPORTS}")


class TorchSurface(OutsideGraphs):
    """What torch's wrappers meet on a collection, and the methods of TorchRec's collections."""

    _described = "a collection"
    _prefix: str
    tables: tuple[EmbeddingBagConfig, ...]
    _is_weighted: bool | None

    def is_weighted(self) -> bool:
        """Return whether batches must have per-sample weights."""
        return bool(self._is_weighted)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""
        return list(self.tables)

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""
        return list(self.tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""
        names = output_names(self.tables)
        return [[names[table.name, key] for key in table.feature_names] for table in self.tables]

    def __getattr__(self, name: str) -> Any:
        if name == self._prefix:
            raise AttributeError(
                f"rows are not in modules or parameters, so there is no {name}, and "
                "torch.func.functional_call cannot replace them; embedding.weights(table) reads "
                "them and embedding.load_weights writes them"
            )
        return super().__getattr__(name)


def weights_count(is_weighted: bool | None, features: Any) -> bool:
    """Return whether a batch's weights are used; raise if they are missing."""
    has_weights = raw_weights(features) is not None
    if is_weighted and not has_weights:
        raise ValueError(
            "the collection has is_weighted=True and the batch has no weights; give the batch "
            "weights=, or make the collection without is_weighted"
        )
    return has_weights and is_weighted is not False


def refuse_transforms(features: Any, *, trains: bool) -> None:
    """Raise where a lookup would be recorded or repeated by torch and could not be."""
    transform = _current_transform()
    if transform is not None and (trains or transform.key() == _VMAP):
        raise RuntimeError(
            "torch.func (vmap, grad, jvp and others) cannot transform lookups, which move rows and "
            "update them in backward(); look up before, and transform a function of the vectors"
        )
    if torch.compiler.is_exporting():
        raise RuntimeError(f"torch.export cannot store rows; {_EXPORTS}")
    if type(features).__module__.startswith("torch.fx"):
        raise TypeError(
            "torch.fx cannot trace lookups; trace the part of the model that takes the vectors, or "
            "make the collection a leaf by Tracer.is_leaf_module"
        )


def outside_graphs(forward: Any) -> Any:
    """Return a lookup that torch.compile leaves out of graphs."""
    reason = (
        "hotrow looks up rows outside of graphs: torch.compile works without fullgraph=True; "
        f"for torch.export, {_EXPORTS}"
    )
    return torch.compiler.disable(forward, reason=reason)
