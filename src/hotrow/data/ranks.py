"""The part of every batch that a rank trains, for loaders. `inputs/rank_part.py` has the rules."""

from hotrow.inputs.rank_part import PartReader, RankPart, current_part, given_part

__all__ = ["PartReader", "RankPart", "current_part", "given_part"]
