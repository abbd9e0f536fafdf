"""With drafts and without, whatever a request asks for and whatever happens to it: the same tokens, scores and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from every_kind import KINDS, Answer, Scripted, params_of, prompt_of, replayed
from stepped_engine import PAGE, Engine
from thread_ranks import Meeting, ThreadCommunicator

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.runner.kv_pool import kv_bytes
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.rank_log import step_from_wire, step_to_wire
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, WaitForResult
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import rank_pb2

NewEngine = Callable[..., Engine]
ROOMS = range(1, 51)
NUM_PAGES = 256
FEW_PAGES = 22  # too few for all that are admitted


class Rows:
    """A runner that counts its rows of several tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_rows = 0

    def logits(self, batch: ForwardBatch) -> Any:
        self.num_rows += int((batch.num_sampled > 1).sum())
        assert batch.mode is not ForwardMode.EXTEND or (batch.num_sampled <= 1).all()
        return self._runner.logits(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, batch: Any, sampling: Any) -> Any:
        return self.sample(batch, self.logits(batch), sampling)()


OpenRunner = Callable[[ModelSource, torch.Tensor], Any]


def one_rank(source: ModelSource, kv: torch.Tensor) -> ModelRunner:
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2)


class TwoRanks:
    """Two runners, each with a part of the model; the other one's thread takes steps from their log's entries."""

    def __init__(self, source: ModelSource, kv: torch.Tensor) -> None:
        meeting = Meeting(2)
        self._entries: SimpleQueue[bytes | None] = SimpleQueue()
        with ThreadPoolExecutor(2) as pool:
            ranks = [ThreadCommunicator(rank, meeting) for rank in range(2)]
            self._lead, other = pool.map(lambda rank: part_of(source, kv.shape, rank), ranks)
        self._thread = threading.Thread(target=self._follow, args=(other,), daemon=True)
        self._thread.start()

    def _follow(self, runner: ModelRunner) -> None:
        while (entry := self._entries.get()) is not None:
            runner.logits(step_from_wire(rank_pb2.Step.FromString(entry)))

    def logits(self, batch: ForwardBatch) -> Any:
        self._entries.put(step_to_wire(batch).SerializeToString())
        return self._lead.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self._lead.sample(batch, logits, sampling)

    def close(self) -> None:
        self._entries.put(None)
        self._thread.join()


def part_of(source: ModelSource, shape: Sequence[int], rank: ThreadCommunicator) -> ModelRunner:
    config = ModelPart.of(source, rank).config
    layout = ModelRunner.pool_layout(config, num_pages=shape[0], page_size=PAGE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", communicator=rank)


class Serving:
    """Serves the requests of `ROOMS` by a tiny model, on engines made alike but for the drafter."""

    def __init__(self, new_engine: NewEngine, source: ModelSource, tokenizer: Tokenizer) -> None:
        self._new_engine = new_engine
        self.source = source
        self._compiler = Compiler(tokenizer, source.config.vocab_size, [0])
        self.num_rows = self.num_retractions = 0

    def answers(
        self,
        drafts: Mapping[int, Sequence[int]],
        *,
        num_pages: int = NUM_PAGES,
        overlap: bool = False,
        prepare: Callable[[ModelRunner], None] = lambda runner: None,
        fields: Callable[[int], dict[str, Any]] = lambda room: {},
        num_slots: int = 0,
        said: Mapping[int, Sequence[int]] = {},
        open_runner: OpenRunner = one_rank,
    ) -> dict[int, Answer]:
        """`said` by earlier attempts: what is answered goes on behind it."""
        layout = ModelRunner.pool_layout(self.source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = torch.full(layout.shape, torch.nan)
        runner = open_runner(self.source, kv)
        prepare(runner)
        copier = HostPages(kv_bytes(kv), layout.page_nbytes, num_slots)
        rows, drafter = Rows(runner), Scripted(drafts)
        engine = self._new_engine(
            drafter=drafter,
            overlap=overlap,
            runner=rows,
            vocab_size=self.source.config.vocab_size,
            num_pages=num_pages,
            compiler=self._compiler,
            tiers=lambda _: [HostTier(num_slots, copier)] if num_slots else [],
        )
        if num_pages < NUM_PAGES:
            engine.expect_short_outputs()
        for room in said or ROOMS:
            if num_pages < NUM_PAGES and room % 16 == 0:
                engine.run()
                engine.expect_short_outputs()
            tokens = said.get(room, ())
            params = replayed(params_of(room), len(tokens))
            engine.start_with(
                room, [*prompt_of(room), *tokens], params, num_prior_output_tokens=len(tokens), **fields(room)
            )
            if num_pages == NUM_PAGES:
                engine.step(check=False)  # else they come all at once
        engine.run()
        self.num_rows, self.num_early = rows.num_rows, drafter.num_early
        self.num_retractions = engine.core.report().counts.retractions
        self.num_restored = engine.cache.num_restored
        return {room: Answer.of(engine.outputs[room]) for room in said or ROOMS}

    def compare(self, **scene: Any) -> dict[int, Answer]:
        """Check that the answers are those of plain steps; return them."""
        plain = self.answers({}, **scene)
        assert self.num_rows == 0
        drafted = self.answers({room: answer.token_ids for room, answer in plain.items()}, **scene)
        assert drafted == plain
        assert self.num_rows > 100
        return plain


@pytest.fixture
def serving(new_engine: NewEngine, tiny_folder: Path, byte_tokenizer: Tokenizer) -> Serving:
    return Serving(new_engine, open_model(str(tiny_folder)), byte_tokenizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_worker(serving: Serving, overlap: bool) -> None:
    answers = serving.compare(overlap=overlap)
    assert len(ROOMS) >= 2 * len(KINDS)
    assert (serving.num_early > 20) == overlap, "guesses were made behind tokens on their way"
    assert len({answer.finish for answer in answers.values()}) == 2, "some end by a stop, some by their length"
    assert len({answer.token_ids for answer in answers.values()}) > 40


def test_retracted_requests(serving: Serving) -> None:
    serving.compare(num_pages=FEW_PAGES)
    assert serving.num_retractions > 3


def test_pages_that_come_back_from_host_memory(serving: Serving) -> None:
    serving.compare(num_pages=FEW_PAGES, num_slots=64, overlap=True)
    assert serving.num_restored > 3


def test_adapters(serving: Serving, tmp_path: Path, write_adapter: Callable[..., Any]) -> None:
    """Two adapters and the model itself share steps."""
    width, source = 64, serving.source
    shapes = {f"model.layers.{layer}.self_attn.{name}_proj": (width, width) for layer in (0, 1) for name in ("q", "o")}
    for slot in (0, 1):
        write_adapter(tmp_path / str(slot), shapes, seed=slot)

    def install(runner: ModelRunner) -> None:
        for slot in (0, 1):
            adapter = read_adapter(tmp_path / str(slot), FAMILIES["llama"].placement(source.config))
            runner.loras.install(slot, runner.loras.prepare(adapter))

    def fields(room: int) -> dict[str, Any]:
        return {"adapter": room % 3 - 1, "extra_key": bytes([room % 3])}

    assert serving.compare(prepare=install, fields=fields, overlap=True) != serving.answers({})


def test_requests_that_are_replayed_in_mid_stream(serving: Serving) -> None:
    whole = serving.answers({})
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(whole[room].token_ids)}
    rest = serving.compare(said=said, overlap=True)
    for room, tokens in said.items():
        assert (*tokens, *rest[room].token_ids) == whole[room].token_ids
        assert rest[room].finish == whole[room].finish
        assert rest[room].logprobs == whole[room].logprobs[len(tokens) :]


@pytest.mark.parametrize("folder", ["tiny_latent_folder", "tiny_sparse_folder"])
def test_latents(new_engine: NewEngine, byte_tokenizer: Tokenizer, request: pytest.FixtureRequest, folder: str) -> None:
    source = open_model(str(request.getfixturevalue(folder)))
    Serving(new_engine, source, byte_tokenizer).compare(num_pages=FEW_PAGES)


def test_two_ranks(serving: Serving) -> None:
    """The other rank hears of steps by the log, and of no draft beside."""
    with ExitStack() as stack:

        def open_ranks(source: ModelSource, kv: torch.Tensor) -> TwoRanks:
            return stack.enter_context(closing(TwoRanks(source, kv)))

        answers = serving.compare(open_runner=open_ranks)
    assert len({answer.token_ids for answer in answers.values()}) > 40
