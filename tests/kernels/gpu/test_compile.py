"""What the kernels become on a GPU, as far as its code shows it.

`compile_*.py` in the folders beside this name the kernels, a file for each area, found here by that name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = pytest.mark.integration

HERE: Final = Path(__file__).parent
COMPILER: Final = HERE.parents[1] / "support" / "ahead_of_time.py"
SHARED_NBYTES: Final = 227 << 10  # what a program on an H200 may have
SYSTEM_NBYTES: Final = 1 << 10  # what each takes beside its own

Code = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    """Every kernel: its PTX, and what was said of it. Triton keeps what it compiled, by a digest of its input."""
    cache = request.config.cache
    kept = tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(kept)
    command = [sys.executable, str(COMPILER), *map(str, sorted(HERE.glob("*/compile_*.py")))]
    found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    assert isinstance(found, dict)
    return found


def accesses(ptx: str, what: str) -> set[str]:
    """The widths of its global loads (`ld`) or stores (`st`): `v2.b64`, `b32`, ...; `async 16`: bytes a thread."""
    widths = re.findall(rf"\b{what}\.global(?:\.[\w:]+)*?\.((?:v\d\.)?b\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (?:0x)?([0-9a-f]+)(?:, %r\d+)?;", ptx)
    return {*widths, *(f"async {int(nbytes, 16)}" for nbytes in copies if what == "ld")}


def test_loads_are_as_wide_as_they_should_be(code: Code) -> None:
    found = {name: accesses(each["ptx"], "ld") for name, each in code.items()}
    assert [(name, found[name]) for name, each in code.items() if not {*each["loads"]} <= found[name]] == []


def test_stores_are_as_wide_as_they_should_be(code: Code) -> None:
    found = {name: accesses(each["ptx"], "st") for name, each in code.items() if each["stores"]}
    assert [(name, widths) for name, widths in found.items() if widths != {*code[name]["stores"]}] == []


def test_no_kernel_has_what_it_must_not_have(code: Code) -> None:
    found = {name: [what for what in each["never"] if what in each["ptx"]] for name, each in code.items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_programs_fit_into_shared_memory(code: Code) -> None:
    assert {name: each["shared_nbytes"] for name, each in code.items() if each["shared_nbytes"] > SHARED_NBYTES} == {}


def test_two_programs_that_multiply_gates_fit_into_a_multiprocessor(code: Code) -> None:
    sizes = [each["shared_nbytes"] for name, each in code.items() if name.startswith("gated GEMM")]
    assert len(sizes) == 2
    assert max(sizes) + SYSTEM_NBYTES <= (SHARED_NBYTES + SYSTEM_NBYTES) // 2


def test_prompts_come_page_by_page_and_two_products_are_on_their_way_at_once(code: Code) -> None:
    ptx = code["prompt attention"]["ptx"]
    assert ptx.count("cp.async.bulk.tensor.2d") == 2 * 8 * 2  # keys and values, 8 pages of 16 each, halves of heads
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", ptx)  # of two groups: first, two loops, last
    assert sorted(waits) == ["0"] * 2 * 4 + ["1"] * 2 * 2
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+240", ptx)


def test_latents_on_hopper_come_page_by_page_to_three_groups_of_warps_that_multiply(code: Code) -> None:
    pages = {
        "decode on Hopper": 1,
        "decode on Hopper, small pages": 4,
        "decode on Hopper, FP8": 1,
        "extend on Hopper": 1,
    }
    for kernel, count in pages.items():
        ptx = code[f"latent {kernel}"]["ptx"]
        assert ptx.count("cp.async.bulk.tensor.2d") == 9 * count  # boxes of 64 dimensions
        kinds = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)", ptx)
        assert {kind: kinds.count(kind) for kind in kinds} == {"m64n64": 2 * 576 // 16, "m64n128": 2 * 2 * 64 // 16}
        assert len(re.findall(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+184", ptx)) == 2


@pytest.mark.parametrize(("kernel", "copies", "barriers"), [("", 4 * 9, 3), (", FP8", 2 * 9, 1)])
def test_chosen_latents_on_hopper_are_gathered_by_threads_that_say_each_when_its_copies_are_there(
    code: Code, kernel: str, copies: int, barriers: int
) -> None:
    ptx = code[f"chosen latents on Hopper{kernel}"]["ptx"]
    queries = 0 if kernel else 4 * 9  # of FP8's queries the type is another than of products
    assert len(re.findall(r"cp\.async\.c[ag]\.shared\.global", ptx)) == copies + queries
    assert ptx.count("cp.async.mbarrier.arrive.noinc.shared") == barriers
    assert "cp.async.bulk" not in ptx
    kinds = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)", ptx)
    assert {kind: kinds.count(kind) for kind in kinds} == {"m64n64": 2 * 576 // 16, "m64n128": 2 * 2 * 64 // 16}


def test_sums_of_parts_of_latents_begin_early_and_wait_before_they_read_one(code: Code) -> None:
    for kernel in ("latent decode, bfloat16", "latent decode on Hopper", "latent decode on Hopper, FP8"):
        assert "griddepcontrol.launch_dependents" in code[kernel]["ptx"]
    ptx = code["latent merge"]["ptx"]
    events = re.findall(r"griddepcontrol\.wait|ret;|ld\.global\.v4", ptx)
    assert events[0] == "griddepcontrol.wait"  # nor does any program end before


@pytest.mark.parametrize("kernel", ["mover, large pages", "mover, small pages"])
def test_the_last_thing_a_mover_does_is_to_release_its_stores_to_the_system(code: Code, kernel: str) -> None:
    ends = re.findall(r"st\.global|bar\.sync|atom\.global\.\w+\.\w+\.add", code[kernel]["ptx"])
    assert ends[-2:] == ["bar.sync", "atom.global.sys.release.add"]


@pytest.mark.parametrize(
    "kernel",
    ["one-shot sum", "one-shot sum and norm", "one-shot sum of eight", "combine", "combine, in segments"],
)
def test_a_rank_releases_its_stores_to_the_system_and_reads_what_it_acquired(code: Code, kernel: str) -> None:
    own = r"st\.global\.v4|bar\.sync|atom\.global\.sys\.release\.exch|(?:ld|atom)\.global\.sys\.acquire"
    events = re.findall(own, code[kernel]["ptx"])
    first = events.index("atom.global.sys.release.exch")
    assert events[first - 2 : first] == ["st.global.v4", "bar.sync"]
    assert len(re.findall(r"ld\.global\.cg\.v4", code[kernel]["ptx"])) >= 2  # what came, past the first cache
    assert sum("acquire" in event for event in events[first:]) >= 2  # a poll, and those that follow
    assert "acquire" not in "".join(events[:first])


def test_tiles_of_a_fixed_order_multiply_by_one_kind_of_instruction(code: Code) -> None:
    found = [
        set(re.findall(r"(wgmma|mma)\S*\.m\d+", each["ptx"])) for name, each in code.items() if name.startswith("fixed")
    ]
    assert found == [{"wgmma"}, {"wgmma"}]
