"""FBGEMM's table-batched embeddings, in the forms that TorchRec runs them.

Always with `uvm_host_mapped`: managed memory beyond the GPU's can hang the card. Ids are not
checked (BoundsCheckMode.NONE), which is FBGEMM at its fastest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from harness import say
from hostmem import seen_by_gpu
from torch import Tensor

from hotrow.data import ClickBatch
from systems import Unavailable
from systems.upload import uploaded

if TYPE_CHECKING:
    from suite import Bench

LR = 0.01
WAYS = 32  # slots of a set
INDEX_BYTES = 4  # per row of a cached table: which table it is of
SLOT_BYTES = 16  # per slot: its row and its last use
LOCK_BYTES = 4  # per slot, with prefetch
PAGE = 4096


class Fbgemm:
    def __init__(self, bench: Bench, form: str) -> None:
        if bench.device.type != "cuda":
            raise Unavailable(f"FBGEMM's form {form!r} needs a GPU")
        try:
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        except (ImportError, OSError) as reason:
            raise Unavailable(f"fbgemm_gpu cannot be imported: {reason}") from None
        self.bench, self.training, self.form = bench, training, form
        self.does_prefetch = form == "prefetch"
        setting = bench.setting
        with _quick_setup(training, bench):
            self.embedding = self._build()
        for weights, num_rows in zip(
            self.embedding.split_embedding_weights(), setting.rows, strict=True
        ):
            weights.uniform_(-(num_rows**-0.5), num_rows**-0.5)
        lengths = torch.tensor(setting.hot, device="cuda").repeat_interleave(setting.batch)
        self.offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.side = torch.cuda.Stream()
        torch.cuda.synchronize()

    def _build(self) -> Any:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            CacheAlgorithm,
            EmbeddingLocation,
            PoolingMode,
        )

        setting = self.bench.setting
        locations = {"hbm": EmbeddingLocation.DEVICE, "uvm": EmbeddingLocation.MANAGED}
        location = locations.get(self.form, EmbeddingLocation.MANAGED_CACHING)
        optimizers = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise-adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "adam": EmbOptimType.ADAM,
        }
        outputs = {torch.bfloat16: SparseType.BF16, torch.float32: SparseType.FP32}
        cuda = self.training.ComputeDevice.CUDA
        return self.training.SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, setting.dim, location, cuda) for num_rows in setting.rows],
            optimizer=optimizers[setting.optimizer],
            learning_rate=LR,
            cache_algorithm=CacheAlgorithm.LRU,
            cache_sets=self._cache_sets() if location == EmbeddingLocation.MANAGED_CACHING else 0,
            cache_precision=SparseType.FP32,
            weights_precision=SparseType.FP32,
            output_dtype=outputs[setting.output_dtype],
            pooling_mode=PoolingMode.SUM if setting.is_pooled else PoolingMode.NONE,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            prefetch_pipeline=self.does_prefetch,
            uvm_host_mapped=True,
            device=torch.device("cuda", torch.cuda.current_device()),
        )

    def _cache_sets(self) -> int:
        """As many as the budget holds beside what FBGEMM keeps in HBM for every row."""
        setting = self.bench.setting
        num_rows = sum(setting.rows)
        if self.form == "cached-rows":
            return int(setting.budget * num_rows) // WAYS
        per_row = INDEX_BYTES + 4 * (setting.optimizer == "rowwise-adagrad")
        per_slot = 4 * setting.dim + SLOT_BYTES + LOCK_BYTES * self.does_prefetch
        sets = (setting.budget_bytes - per_row * num_rows) // (per_slot * WAYS)
        if sets < 1:
            raise Unavailable(
                f"FBGEMM's {per_row} bytes of HBM per row are more than the budget of "
                f"{setting.budget_bytes:,} bytes"
            )
        return sets

    def steps(self, batches: Iterable[ClickBatch]) -> Generator[None, None, None]:
        main = torch.cuda.current_stream()
        for now, after in pairwise(uploaded(batches)):
            main.wait_stream(self.side)
            now.wait()
            vectors = self.embedding(now.indices, self.offsets)
            if self.does_prefetch:
                with torch.cuda.stream(self.side):
                    after.wait()
                    self.embedding.prefetch(after.indices, self.offsets, forward_stream=main)
            vectors.backward(self.bench.gradient(vectors, now.dense, now.label))
            yield

    def table_bytes(self) -> int:
        """Everything it registers, less what lies in host memory."""
        return sum(
            buffer.numel() * buffer.element_size()
            for name, buffer in self.embedding.named_buffers()
            if buffer.is_cuda and not name.endswith("_uvm")
        )

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        import fbgemm_gpu

        return {
            "fbgemm_gpu": str(getattr(fbgemm_gpu, "__version__", "unknown")),
            "slots": int(self.embedding.lxu_cache_weights.shape[0]),
        }


# -- set-up in seconds instead of minutes; nothing of it runs in a step ----------------


@contextmanager
def _quick_setup(training: Any, bench: Bench) -> Iterator[None]:
    """FBGEMM makes a Python list with an entry per row, and touches host pages on one core."""
    operations = torch.ops.fbgemm
    old_state, old_tensor = training.construct_cache_state, operations.new_unified_tensor
    training.construct_cache_state = _cache_state
    operations.new_unified_tensor = _Arena(bench, old_tensor)
    try:
        yield
    finally:
        training.construct_cache_state, operations.new_unified_tensor = old_state, old_tensor


def _cache_state(
    rows: Sequence[int], locations: Sequence[Any], feature_table_map: Sequence[int]
) -> Any:
    """What FBGEMM's own gives where all tables are cached or none, with one feature each."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheState, EmbeddingLocation

    is_cached = locations[0] == EmbeddingLocation.MANAGED_CACHING
    sizes = torch.tensor(rows if is_cached else [0] * len(rows))
    starts = [0, *sizes.cumsum(0).tolist()]
    return CacheState(
        cache_hash_size_cumsum=starts if is_cached else [-1] * len(rows) + [0],
        cache_index_table_map=torch.repeat_interleave(
            torch.arange(len(rows), dtype=torch.int32), sizes
        ).numpy(),
        total_cache_hash_size=starts[-1],
    )


class _Arena:
    """Hands out parts of the bench's page-locked memory in place of new host-mapped tensors."""

    def __init__(self, bench: Bench, own: Any) -> None:
        self._bench, self._own, self._used = bench, own, 0

    def __call__(self, like: Tensor, sizes: Sequence[int], is_host_mapped: bool) -> Tensor:
        assert is_host_mapped
        memory = self._bench.host_memory
        host = memory.tensor(tuple(sizes), like.dtype, first_byte=self._used)
        try:
            seen = seen_by_gpu(host)
            seen[:1].fill_(0.5)
            torch.cuda.synchronize()
            assert host[0] == 0.5, "the GPU writes elsewhere"
        except Exception as reason:
            say(f"    FBGEMM allocates by itself, which takes long: {reason}")
            return self._own(like, sizes, is_host_mapped)
        self._used += -(-host.numel() * host.element_size() // PAGE) * PAGE
        return seen
