"""The transaction between the host store and the device tier: who owns a batch's rows, and when they move."""

from hybridrec.cache.swap import HostMemorySwapper, StagedSwapper, Swapper
from hybridrec.cache.transaction import BatchTransaction, Lease, TransactionLog, TransactionState

__all__ = [
    "BatchTransaction",
    "HostMemorySwapper",
    "Lease",
    "StagedSwapper",
    "Swapper",
    "TransactionLog",
    "TransactionState",
]
