"""Train recommendation models whose embedding tables are larger than fast memory."""

from hotrow import _quiet  # noqa: F401  (first: before torch is imported)
from hotrow.ahead import Ahead, ahead
from hotrow.batch import KeyedJaggedTensor
from hotrow.budget import Budget, Share
from hotrow.checkpoint import (
    begin_checkpoint,
    load_checkpoint,
    load_model,
    save_checkpoint,
    save_model,
)
from hotrow.embedding import Embedded, EmbeddingBagCollection, EmbeddingCollection
from hotrow.fae import FAE, FAERecord
from hotrow.graphed import GraphedStep, graphed
from hotrow.hotline import Hotline
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from hotrow.profile import load_profile, save_profile
from hotrow.slipstream import RandomDrop, Slipstream
from hotrow.strategy import STRATEGIES, Strategy
from hotrow.support.version import __version__ as __version__
from hotrow.tables import Constant, EmbeddingBagConfig, EmbeddingConfig, Normal, Uniform
from hotrow.traffic import TableTraffic, Traffic
from hotrow.trainer import Trainer

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
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FAERecord",
    "GraphedStep",
    "Hotline",
    "KeyedJaggedTensor",
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
    "graphed",
    "load_checkpoint",
    "load_model",
    "load_profile",
    "save_checkpoint",
    "save_model",
    "save_profile",
]
