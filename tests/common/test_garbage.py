from __future__ import annotations

import gc

import pytest

from diptych.common.lifecycle import garbage_postponed


def test_garbage_is_searched_for_again_when_all_is_imported_or_that_failed() -> None:
    with garbage_postponed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), garbage_postponed():
        raise ImportError
    assert gc.isenabled()
