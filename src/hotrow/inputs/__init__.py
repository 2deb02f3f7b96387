"""Tables and their features, and batches: any accepted input becomes checked ids, here.

Also samples out of and into batches, batches that are held while their loader goes on, and sets
of hot rows. Does not know where rows live or how they move.
"""
