"""Finding a wrong result: where a row is, and whether what is trained is what a plain table would hold.

`where` tells the owner, place, values and state of one id's row; `verified` trains beside a plain, unlimited table and
names the first step, table and id that differ. `recorded_collectives` finds the first collective in which ranks differ.
See docs/debugging.md.
"""

from hybridrec.debug.collectives import CollectiveLog, recorded_collectives
from hybridrec.debug.difference import Difference, Verification, VerifyError
from hybridrec.debug.location import RowLocation, where
from hybridrec.debug.verification import verified

__all__ = [
    "CollectiveLog",
    "Difference",
    "RowLocation",
    "Verification",
    "VerifyError",
    "recorded_collectives",
    "verified",
    "where",
]
