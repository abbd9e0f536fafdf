"""Serves requests of every kind by a tiny model, with drafts and without, in scenes that differ in all else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final

import torch
from draft_models import InOneThread
from every_kind import MAX_DRAFTS, Answer, Scripted, params_of, prompt_of, replayed
from stepped_engine import PAGE, Engine
from thread_ranks import Meeting, ThreadCommunicator

from diptych.checkpoints.source import ModelSource
from diptych.common.arrays import I64
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.runner.kv_pool import kv_bytes
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import TpModelWorkerClient
from diptych.engine.tensor_parallel.rank_log import draft_from_wire, draft_to_wire, step_from_wire, step_to_wire
from diptych.engine.values.batch import DraftBatch, ForwardBatch, ForwardMode, SamplingBatch, WaitForResult
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import rank_pb2

NewEngine = Callable[..., Engine]
ROOMS: Final = range(1, 51)
NUM_PAGES: Final = 256
FEW_PAGES: Final = 22  # too few for all that are admitted
SIZES: Final[Mapping[str, Any]] = {"max_requests": 64, "row_tokens": 1 + MAX_DRAFTS}  # of a runner


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
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2, **SIZES)


class TwoRanks:
    """Two runners, each with a part of the model; the other one's thread takes steps from their log's entries."""

    def __init__(self, source: ModelSource, kv: torch.Tensor, draft: ModelSource | None = None) -> None:
        meeting = Meeting(2)
        self._entries: SimpleQueue[bytes | None] = SimpleQueue()
        with ThreadPoolExecutor(2) as pool:
            ranks = [ThreadCommunicator(rank, meeting) for rank in range(2)]
            self._lead, other = pool.map(lambda rank: part_of(source, kv.shape, rank, draft), ranks)
        self._thread = threading.Thread(target=self._follow, args=(other,), daemon=True)
        self._thread.start()

    def _follow(self, runner: ModelRunner) -> None:
        while (data := self._entries.get()) is not None:
            entry = rank_pb2.RankEntry.FromString(data)
            if entry.HasField("draft"):
                assert runner.draft_model is not None
                runner.draft_model.draft(draft_from_wire(entry.draft))
            else:
                runner.logits(step_from_wire(entry.step))

    def _put(self, entry: rank_pb2.RankEntry) -> None:
        self._entries.put(entry.SerializeToString())

    def logits(self, batch: ForwardBatch) -> Any:
        self._put(rank_pb2.RankEntry(step=step_to_wire(batch)))
        return self._lead.logits(batch)

    @property
    def draft_model(self) -> TwoRanks:
        return self

    def draft(self, batch: DraftBatch) -> I64:
        self._put(rank_pb2.RankEntry(draft=draft_to_wire(batch)))
        assert self._lead.draft_model is not None
        return self._lead.draft_model.draft(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self._lead.sample(batch, logits, sampling)

    def close(self) -> None:
        self._entries.put(None)
        self._thread.join()


def part_of(
    source: ModelSource, shape: Sequence[int], rank: ThreadCommunicator, draft: ModelSource | None = None
) -> ModelRunner:
    config = ModelPart.of(source, rank).config
    layout = ModelRunner.pool_layout(config, num_pages=shape[0], page_size=PAGE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    parts: dict[str, Any] = {"communicator": rank, "draft": draft, **SIZES}
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", **parts)


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
        drafter: Any = None,
        rooms: Sequence[int] = ROOMS,
        params_of: Callable[[int], SamplingParams] = params_of,
    ) -> dict[int, Answer]:
        """`said` by earlier attempts: what is answered goes on behind it.

        `drafter` guesses by a model, in place of drafts that are told.
        """
        layout = ModelRunner.pool_layout(self.source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = torch.full(layout.shape, torch.nan)
        runner = open_runner(self.source, kv)
        prepare(runner)
        copier = HostPages(kv_bytes(kv), layout.page_nbytes, num_slots)
        rows, drafter = Rows(runner), Scripted(drafts) if drafter is None else drafter
        engine = self._new_engine(
            drafter=drafter,
            overlap=overlap,
            worker=InOneThread if drafter.asks_model else TpModelWorkerClient,
            runner=rows,
            vocab_size=self.source.config.vocab_size,
            num_pages=num_pages,
            compiler=self._compiler,
            tiers=lambda _: [HostTier(num_slots, copier)] if num_slots else [],
            windows=window_pages(self.source.config, 1),
            pages_per_state=pages_per_state(self.source.config, 1, "float32", layout),
        )
        if drafter.asks_model:
            drafter.begin(runner.draft_model, engine.cache)
        if num_pages < NUM_PAGES:
            engine.expect_short_outputs()
        for room in said or rooms:
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
        self.num_restored = engine.cache.moves.num_restored
        return {room: Answer.of(engine.outputs[room]) for room in said or rooms}

    def compare(self, **scene: Any) -> dict[int, Answer]:
        """Check that the answers are those of plain steps; return them."""
        plain = self.answers({}, **scene)
        assert self.num_rows == 0
        drafted = self.answers({room: answer.token_ids for room, answer in plain.items()}, **scene)
        assert drafted == plain
        assert self.num_rows > 100
        return plain
