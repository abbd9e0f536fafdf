from __future__ import annotations

from diptych.engine.embedded.detokenizer_manager import DetokenizerManager
from diptych.generation.finish import Finish
from diptych.generation.output_text import TextDelta
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.byte_detokenizer import ByteDetokenizer


class Letters:
    """Token 1 is "a", 2 is "b", ...; 0 is the end and has no text."""

    eos_ids = (0,)

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer({0: b"", **{letter - 96: bytes([letter]) for letter in b"abcdefghij"}})


def test_each_request_has_its_own_text() -> None:
    manager = DetokenizerManager(Letters())
    plain, stopped = manager.open(SamplingParams()), manager.open(SamplingParams(stop=("cd",)))
    assert plain.push([1, 2, 3]) == TextDelta("abc", [1, 2, 3])
    assert stopped.push([1, 2, 3]).text == "ab"
    assert plain.push([4, 0], Finish.STOP) == TextDelta("d", [4, 0], Finish.STOP, stop_token=0)
    assert stopped.push([4, 5]) == TextDelta("", [4], Finish.STOP, offsets=[3], stop="cd")
