"""Names the types of numpy arrays that hold tokens, positions, scores and times."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

TOKEN_NBYTES: Final = 8  # of a token in an `I64`, and in bytes that name tokens
