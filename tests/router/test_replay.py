"""Many streams while decode workers die at random and others take their place: each says what it would have said."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from diptych.v1 import inference_pb2, worker_pb2

Cluster = Any

NUM_STREAMS = 500
NUM_AT_ONCE = 24
NUM_TOKENS = 24
STREAMS_A_DEATH = 40


async def stream(port: int, seed: int) -> str:
    """Ask for a streamed completion; return its text as a client puts it together."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"prompt": f"prompt {seed}", "temperature": 0, "seed": seed, "max_tokens": NUM_TOKENS, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
    assert events[-1:] == [b"[DONE]"], answer
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def undisturbed(cluster: Cluster, seed: int) -> str:
    sampling = inference_pb2.SamplingParams(seed=seed, max_tokens=NUM_TOKENS)
    leg = worker_pb2.StartLeg(prompt_token_ids=cluster.tokenizer.encode(f"prompt {seed}"), sampling=sampling)
    text: str = cluster.tokenizer.decode(cluster.recite(leg)[0])
    return text


async def stream_all(port: int, ended: asyncio.Queue[int]) -> dict[int, str]:
    texts: dict[int, str] = {}
    seeds = iter(range(NUM_STREAMS))

    async def client() -> None:
        for seed in seeds:
            texts[seed] = await stream(port, seed)
            ended.put_nowait(seed)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(client())
    return texts


async def kill_at_random(cluster: Cluster, ended: asyncio.Queue[int]) -> None:
    """Whenever so many streams have ended a decode worker dies, and a new one comes up at its address."""
    rng, next_id = random.Random(6), 1000
    while True:
        for _ in range(STREAMS_A_DEATH):
            await ended.get()
        victim = rng.choice([worker for worker in cluster.workers if worker.instance.role == cluster.decode_role])
        await asyncio.to_thread(cluster.stop_worker, victim)
        victim.instance.instance_id = victim.answers_as = next_id = next_id + 1
        await asyncio.to_thread(cluster.restart_worker, victim)
        await asyncio.to_thread(cluster.publish, *cluster.workers)


def test_500_greedy_streams_are_the_same_while_decode_workers_die(start_cluster: Any) -> None:
    cluster = start_cluster(2, 4)
    cluster.script = None  # a token depends on the seed and its position, as a greedy one does on what is before it
    cluster.decode_role = cluster.decode().instance.role
    for worker in cluster.workers:
        worker.step_s = 0.001

    async def run() -> dict[int, str]:
        ended: asyncio.Queue[int] = asyncio.Queue()
        killer = asyncio.create_task(kill_at_random(cluster, ended))
        try:
            return await stream_all(cluster.router.http.port, ended)
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)

    texts = asyncio.run(run())
    assert texts == {seed: undisturbed(cluster, seed) for seed in range(NUM_STREAMS)}
    replays = [leg for worker in cluster.workers for leg in worker.started if leg.num_prior_output_tokens]
    assert len(replays) >= NUM_STREAMS // STREAMS_A_DEATH  # else nobody noticed the deaths
