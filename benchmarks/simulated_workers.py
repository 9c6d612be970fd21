"""Rollout workers in virtual time: the controller's part is real, their own processes are simulated.

Orders, progress, groups and the messages of shards are pickled as Monarch does, and counted. Callbacks of the event
loop that belong to workers have their own context, so that their processor time is not the controller's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from typing import Any

import cloudpickle

from benchmarks.shards import context_of
from benchmarks.simulated_generators import LOGPROBS, STEP_S, TOKENS, Traffic
from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.cluster import rollout_worker_pool
from titan_rl.cluster.rollout_worker import GroupOrder, ProgressSender
from titan_rl.core.arrays import logprob_array, token_array
from titan_rl.generation.recording import RecordedAnswer, prompt_digest
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.router.shard_control import Ended, ShardLoad, TellLoad, ToShard, Update

PACKED_TOKENS, PACKED_LOGPROBS = token_array(TOKENS), logprob_array(LOGPROBS)


class WorkerEndpoint:
    """Endpoint of a worker's actor, called by the controller."""

    def __init__(self, worker: SimulatedWorker, run: Callable[[bytes], Any]) -> None:
        self._worker = worker
        self._run = run

    async def call_one(self, *args: Any) -> Any:
        sent = cloudpickle.dumps(args)
        self._worker.traffic.count(sent)
        running = asyncio.get_running_loop().create_task(self._run(sent), context=self._worker.context)
        answer: bytes = await running
        self._worker.traffic.count(answer)
        return cloudpickle.loads(answer)


class Service:
    """The controller's `GroupService`, called by a worker. Its answer is a message, too."""

    def __init__(self, traffic: Traffic) -> None:
        self.note = self
        self._traffic = traffic
        self._controllers_context = contextvars.copy_context()

    async def call_one(self, *args: Any) -> bool:
        sent = cloudpickle.dumps(args)
        self._traffic.count(sent)
        loop = asyncio.get_running_loop()
        keeps_up = await loop.create_task(self._receive(sent), context=self._controllers_context)
        self._traffic.count(b"")
        return keeps_up

    async def _receive(self, sent: bytes) -> bool:
        _, _, answers, finished = cloudpickle.loads(sent)
        return await rollout_worker_pool.wait_for_room(rollout_worker_pool.record(answers, finished))


class SimulatedWorker:
    """Actor of a worker whose rollouts have one turn, each of whose requests gets a token per step. Its shard has the
    requests evenly on all generators.

    Args:
        router: Knows the version that tokens have.
        length_of: Tokens of the answer to a request, by its id.
        prompt: Of all requests.
    """

    def __init__(
        self, router: GeneratorRouter, traffic: Traffic, length_of: Callable[[str], int], prompt: list[int]
    ) -> None:
        self.traffic = traffic
        self.context = context_of("workers")
        self.run_group = WorkerEndpoint(self, self._run_group)
        self.send_to_shard = WorkerEndpoint(self, self._send_to_shard)
        self.num_tokens = 0  # generated so far
        self._router = router
        self._length_of = length_of
        self._prompt = token_array(prompt)
        self._digest = prompt_digest(prompt)
        self._sender = ProgressSender(Service(traffic), "simulated")
        self._names: dict[str, None] = {}  # names of the generators, in order
        self._in_flight = 0

    async def _send_to_shard(self, sent: bytes) -> bytes:
        _, message = cloudpickle.loads(sent)
        return cloudpickle.dumps((self._carry_out(message), Counter[str]()))

    def _carry_out(self, message: ToShard) -> Ended:
        match message:
            case Update(replicas):
                self._names |= dict.fromkeys(state.name for state in replicas)
            case TellLoad():
                each, more = divmod(self._in_flight, len(self._names))
                counts = {name: each + (place < more) for place, name in enumerate(self._names)}
                loads = {name: (576 * count, count) for name, count in counts.items() if count}
                return Ended(load=ShardLoad(loads, 128 * self._in_flight, None, self._in_flight, self._in_flight, 0))
            case _:
                pass
        return Ended()

    async def _run_group(self, sent: bytes) -> bytes:
        (order,) = cloudpickle.loads(sent)
        rollouts = await asyncio.gather(*(self._run(order, sibling) for sibling in range(order.group_size)))
        self._sender.drop(order.key)
        return cloudpickle.dumps(RolloutGroup(order.group_id, None, list(rollouts)))

    async def _run(self, order: GroupOrder, sibling: int) -> Rollout:
        request_id = f"{order.group_id}/{sibling}/0"
        length, version = self._length_of(request_id), self._router.version or 0
        self._in_flight += 1
        await asyncio.sleep(length * STEP_S)
        self._in_flight -= 1
        self.num_tokens += length
        metrics = {"queue_s": 0.0, "time_to_first_token_s": STEP_S, "inter_token_s": STEP_S}
        tokens, logprobs = PACKED_TOKENS[:length], PACKED_LOGPROBS[:length]
        spans = (VersionSpan(version, length),)
        completion = Completion(request_id, tokens, logprobs, FinishReason.STOP, spans, None, metrics)
        assert order.index is not None
        self._sender.add_answer(order.key, RecordedAnswer(order.index, self._digest, order.sampling, completion))
        rollout = Rollout(f"{order.group_id}/{sibling}", order.group_id, sibling, None)
        rollout.turns.append(Turn(self._prompt, completion, sampling=order.sampling))
        rollout.reward = rollout.advantage = float(sibling == 0)
        rollout.reward_breakdown = {"first": rollout.reward}
        self._sender.add_finished(order.key, rollout)
        return rollout
