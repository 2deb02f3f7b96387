"""Train recommendation models whose embedding tables are larger than fast memory."""

from hotrow.support import startup  # noqa: F401  (before torch is imported)

# isort: split

from hotrow.checkpoint import (
    begin_checkpoint,
    load_checkpoint,
    load_model,
    save_checkpoint,
    save_model,
)
from hotrow.embedding.ahead import Ahead, ahead
from hotrow.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from hotrow.embedding.convert import convert, revert
from hotrow.embedding.embedded import Embedded
from hotrow.embedding.joining import join
from hotrow.embedding.keyed_tensor import KeyedTensor
from hotrow.embedding.table_modules import Embedding, EmbeddingBag
from hotrow.engine.profile import load_profile, save_profile
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.inputs.jagged_tensor import JaggedTensor
from hotrow.inputs.tables import Constant, EmbeddingBagConfig, EmbeddingConfig, Normal, Uniform
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from hotrow.store.budget import Budget, Share
from hotrow.store.traffic import TableTraffic, Traffic
from hotrow.support.version import __version__ as __version__
from hotrow.systems.fae.fae import FAE, FAERecord
from hotrow.systems.hotline.hotline import Hotline
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream
from hotrow.training.graphed import GraphedStep, graphed
from hotrow.training.trainer import Trainer

__all__ = [
    "FAE",
    "SGD",
    "STRATEGIES",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ahead",
    "Budget",
    "Constant",
    "Embedded",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FAERecord",
    "GraphedStep",
    "Hotline",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Normal",
    "RandomDrop",
    "RowWiseAdagrad",
    "Share",
    "Slipstream",
    "Strategy",
    "TableTraffic",
    "Traffic",
    "Trainer",
    "Uniform",
    "ahead",
    "begin_checkpoint",
    "convert",
    "graphed",
    "join",
    "load_checkpoint",
    "load_model",
    "load_profile",
    "revert",
    "save_checkpoint",
    "save_model",
    "save_profile",
]
