"""Names for what many signatures take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: any sequence of ints or an integer array."""
