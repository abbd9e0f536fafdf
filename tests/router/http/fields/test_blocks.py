from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.http.fields.blocks import Block, Blocks, Change, Closed, Grown, Opened
from diptych.router.text.parsing.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart

CALL: list[Part] = [ToolCallStart(0, "c0", "now"), ToolArguments(0, "{"), ToolArguments(0, "}")]


def shown(changes: list[Change]) -> list[tuple[str, int, str]]:
    return [(type(change).__name__, change.block.index, getattr(change, "text", "")) for change in changes]


def test_neighbours_of_one_kind_are_one_block_and_each_call_is_its_own() -> None:
    blocks = Blocks()
    changes = blocks.push([Reasoning("hm"), Content("a"), Content("b"), *CALL, ToolCallStart(1, "c1", "now")])
    assert shown([*changes, *blocks.close()]) == [
        ("Opened", 0, ""),
        ("Grown", 0, "hm"),
        ("Closed", 0, ""),
        ("Opened", 1, ""),
        ("Grown", 1, "a"),
        ("Grown", 1, "b"),
        ("Closed", 1, ""),
        ("Opened", 2, ""),
        ("Grown", 2, "{"),
        ("Grown", 2, "}"),
        ("Closed", 2, ""),
        ("Opened", 3, ""),
        ("Closed", 3, ""),
    ]
    assert blocks.all == [
        Block(0, "reasoning", pieces=["hm"]),
        Block(1, "text", pieces=["a", "b"]),
        Block(2, "call", "c0", "now", ["{", "}"]),
        Block(3, "call", "c1", "now"),
    ]
    assert blocks.has_calls


def test_nothing_to_close_is_no_change() -> None:
    assert Blocks().close() == []


RUNS: list[list[Part]] = [[Content("a")], [Reasoning("b")], CALL]
PARTS: st.SearchStrategy[list[list[Part]]] = st.lists(
    st.lists(st.sampled_from(RUNS), max_size=4).map(lambda runs: [part for run in runs for part in run]),
    max_size=4,
)


@given(pushes=PARTS)
def test_every_block_opens_grows_and_closes_in_its_turn(pushes: list[list[Part]]) -> None:
    blocks, open_index, num_opened = Blocks(), None, 0
    changes = [change for parts in pushes for change in blocks.push(parts)]
    for change in [*changes, *blocks.close()]:
        match change:
            case Opened(block):
                assert (open_index, block.index) == (None, num_opened)
                open_index, num_opened = block.index, num_opened + 1
            case Grown(block):
                assert block.index == open_index
            case Closed(block):
                assert block.index == open_index
                open_index = None
    assert open_index is None
