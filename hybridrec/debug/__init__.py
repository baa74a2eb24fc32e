"""Finding a wrong result: where a row is, and whether what is trained is what a plain table would hold.

`where` tells the owner, place, values and state of one id's row; `verified` trains beside a plain, unlimited table and
names the first step, table and id that differ. See docs/debugging.md.
"""

from hybridrec.debug.difference import Difference, Verification, VerifyError
from hybridrec.debug.location import RowLocation, where
from hybridrec.debug.verification import verified

__all__ = ["Difference", "RowLocation", "Verification", "VerifyError", "verified", "where"]
