"""Constants of the engine in one place. Tests make them small, so that rare paths are common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Numbers that change when something is done, and never what comes out."""

    # Planners
    last_number: int = 2**30  # batch numbers are 32-bit per slot: renumber before they overflow
    bulk_part: int = 8  # one ranking picks victims for at least this part of the slots
    relearn: int = 512  # batches between two re-pins, once the counts have settled
    early_relearn: tuple[int, ...] = (16, 32, 64, 128, 256)
    ranked_in_no_time: int = 1 << 16  # slots and known rows
    ranked_per_row: int = 16  # and for every row planned since the last ranking so many more
    spare_victims: int = 1024  # more than seem to be needed
    sorted_from: int = 1 << 14  # rows that leave with a batch, to sort them
    tombstone_part: int = 10  # at that part of its places, a GPU's map is made anew

    # Movers
    most_packed: int = 1 << 16  # rows of a packet, where the budget does not say it
    packet_bytes: int = 24 << 20  # of a packet of rows that go back in bulk, at the most
    places_on_host: int = 8  # for such packets: the CPU writes one while others arrive
    # Batches for which leaving rows can be kept before they go back, for each batch in a packet.
    least_certain: int = 3

    # Room for plans
    small_budget: int = 256 << 20  # is for trying things out: slots are kept, plans come on top
    plans_on_top: int = 16 << 20  # bytes, at most

    # Rows on the host, hot ones on the device
    learn_after: tuple[int, ...] = (16, 64, 256)  # batches
    chunk_rows: int = 1 << 18  # between store and slots at once


DEFAULT = Tuning()
