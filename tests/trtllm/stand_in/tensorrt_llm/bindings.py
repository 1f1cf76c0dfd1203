"""What the real package has in C++."""

from enum import Enum


class KVCacheType(Enum):
    CONTINUOUS = 0
    PAGED = 1
    DISABLED = 2
