"""Load of one controller process with many generators, in virtual time.

    python -m benchmarks.scale                       # 8, 64, 512 and 2,048 generators of 64 requests each
    python -m benchmarks.scale --generators 64       # one of these
    python -m benchmarks.scale --generators 4096 --requests 8  # as many in flight as with 512 of 64
    python -m benchmarks.scale --workers 16 --generators 2048  # with rollout workers, which have shards of the router
    python -m benchmarks.scale --messages            # cost of a Monarch message alone

Router, rollouter, scheduler, the mix of two tasks, the streams of requests, the health checks of processes and the
manifests are the real ones; engines are simulated (`simulated_generators.py`). Figures of time are the controller's
processor time, except those of the run's virtual clock, in which an engine's step takes 40 ms and an answer 10 s.
Monarch is left out: its cost is that of `--messages` times `messages_per_s`. So is the journal. With `--workers`,
rollouts are simulated, too (`simulated_workers.py`); the control of real shards is measured in `shards.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import subprocess
import sys
import time
from asyncio.events import Handle
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import looptime

from benchmarks.paired import report
from benchmarks.shards import ProcessorTime
from benchmarks.simulated_generators import STEP_S, SimulatedProcesses, SimulatedSupervisor, Traffic, nothing, now
from benchmarks.simulated_workers import SimulatedWorker
from titan_rl import (
    Completion,
    GroupScheduler,
    Reward,
    Rollout,
    Rollouter,
    RolloutGroup,
    RolloutStatus,
    Rubric,
    SamplingParams,
    SchedulingConfig,
    TokenObservation,
    TokenStep,
)
from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.generator_actor import GeneratorPlan
from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.host import Host
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.processes.garbage_collection import settled_heap
from titan_rl.cluster.processes.process import LOOPBACK
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_worker_pool import WorkerPool
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.core.console import LOG
from titan_rl.generation.group_requests import GroupRequests
from titan_rl.generation.recording import RecordedAnswer, Recorder
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.checked_copies import completion_of
from titan_rl.rollout.group.running_groups import RunningGroups
from titan_rl.scheduling.curriculum import InOrder
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.task_mix import TaskMix, WeightedTask
from titan_rl.training.settings import ModelConfig
from titan_rl.weights.manifest import ShardLayout
from titan_rl.weights.types import Manifest, Probe, PublishedWeights, Shard, TensorEntry

SIZES = (8, 64, 512, 2048)
REQUESTS, GROUP_SIZE = 64, 8  # in flight on each generator; siblings
PROMPT = [11 * place % 150_000 for place in range(128)]
LENGTHS = (64, 448)  # tokens of an answer, evenly spread
TENSORS, RANKS = 400, 8  # tensors of the model, ranks of the trainer that publishes it
HOST = 8  # generators that die together
TRAIN_S = 2.0
STEPS, WARM_STEPS = 2, 1
LIMIT_S = 1500.0  # limit for one size; on idle cores 2,048 generators take a quarter of it


class RunFiles:
    run_id, logs = "scale", Path("logs")


class OneAnswer:
    async def reset(self) -> TokenObservation:
        return TokenObservation(PROMPT)

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


LAYOUT = ShardLayout.of(
    TensorEntry(f"model.layers.{index}.weight", "bfloat16", (512, 4096), index << 22, 1 << 22)
    for index in range(TENSORS)
)
PROBES = tuple(Probe(tuple(range(64)), tuple(-0.1 * place for place in range(63))) for _ in range(4))


def manifest_of(version: int) -> Manifest:
    shards = [Shard(f"titan_rl-scale-{version}-{rank}", TENSORS << 22, 0, LAYOUT) for rank in range(RANKS)]
    return Manifest(version, tuple(shards), PROBES)


def length_of_id(request_id: str) -> int:
    """Length of the whole answer to a request."""
    return random.Random(request_id).randint(*LENGTHS)


def length_of(request: EngineRequest) -> int:
    """Length of the rest of a request."""
    request_id, done = request.request_id.partition("~")[0], len(request.prompt_token_ids) - len(PROMPT)
    return max(1, length_of_id(request_id) - done)


class ScaledRun:
    """A run of a few steps, followed by the deaths of a generator and of a host's generators."""

    def __init__(self, num_generators: int, num_requests: int) -> None:
        self.num_generators = num_generators
        self.num_requests = num_requests  # in flight on each
        self.figures: dict[str, float] = {}
        self._traffic = Traffic()
        self._published = PublishedWeights()
        self._mix = TaskMix({"first": WeightedTask(2.0, InOrder()), "second": WeightedTask(1.0, InOrder())})
        self._announcements: list[float] = []

    async def run(self) -> None:
        files, model = RunFiles(), ModelConfig(path="unused", max_context=4096)
        generation = GenerationConfig(num_generators=self.num_generators)
        plan = GeneratorPlan(model, generation, StateDictConfig(), files.run_id, 0, self.num_requests)
        processes = SimulatedProcesses(plan, RoutingConfig(), files, self._published, _one_host())
        processes.traffic, processes.length_of, processes.generators = self._traffic, length_of, {}
        await processes.start()
        router = self._router = processes.router = processes.make_router()
        rubric = Rubric([Reward(lambda rollout: float(rollout.sibling == 0), name="first")])
        self._rollouter = Rollouter(
            lambda sample: OneAnswer(), rubric, max_context=4096, finish_session=router.finish_session
        )
        watching = asyncio.ensure_future(processes.watch())
        await self._begin(router)
        await self._pull(0)
        groups_per_step = self.num_generators * self.num_requests // GROUP_SIZE // 2
        async with GroupScheduler(
            self._run_group,
            SchedulingConfig(groups_per_step=groups_per_step),
            group_size=GROUP_SIZE,
            budget=1 << 40,
            observer=self,
            order=self._mix,
        ) as scheduler:
            with settled_heap():
                await self._train(scheduler)
                await self._kill(processes)
        self.figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await router.close()
        await processes.close()

    async def _begin(self, router: GeneratorRouter) -> None:
        """Start what the run needs besides generators."""

    async def _kill(self, processes: SimulatedProcesses) -> None:
        for name, count in (("death_of_one_ms", 1), ("death_of_host_ms", HOST)):
            gone = [replica for replica in processes.replicas if replica.remote.reason is None]
            gone = gone[: min(count, self.num_generators // 2)]
            await asyncio.sleep(TRAIN_S + STEP_S / 4)  # between two steps of engines: nothing else happens
            ids = [id for replica in gone for id in processes.generators[replica.name].request_ids]
            self.figures[name] = await self._move_requests(gone, ids) * count * self.num_requests / len(ids)

    @property
    def _num_tokens(self) -> int:
        """Tokens generated so far, by those that count them."""
        return 0

    def _now(self) -> float:
        """Processor time of the controller."""
        return now() - self._traffic.generators_s

    async def _run_group(self, lease: Lease) -> RolloutGroup:
        return await self._rollouter.run_group(
            self._router.generate,
            None,
            group_id=f"g{lease.index}",
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_tokens=LENGTHS[1]),
            on_finished=lease.rollout_finished,
        )

    # The scheduler's observer

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._mix.finished(index, [0.5] * GROUP_SIZE)

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        self._mix.dropped(index)

    def discarded(self, index: int, group: RolloutGroup) -> None: ...

    def batch(self, version: int, indices: Sequence[int]) -> None: ...

    async def _train(self, scheduler: GroupScheduler) -> None:
        loop, traffic = asyncio.get_running_loop(), self._traffic
        began = cpu = 0.0
        num_messages = num_bytes = num_tokens = 0
        for version in range(1, 1 + WARM_STEPS + STEPS):
            if version == 1 + WARM_STEPS:
                began, cpu = loop.time(), self._now()
                num_messages, num_bytes, num_tokens = traffic.num_messages, traffic.num_bytes, self._num_tokens
                self._announcements.clear()
            batch = await scheduler.next_batch()
            await asyncio.sleep(TRAIN_S)
            batch.trained(version)
            self._mix.trained([int(group.group_id[1:]) for group in batch.groups])
            await self._pull(version)
            batch.release()
        seconds = loop.time() - began
        self.figures |= {
            "controller_cpu_per_s": (self._now() - cpu) / seconds,
            "megabytes_per_s": (traffic.num_bytes - num_bytes) / seconds / 1e6,
            "messages_per_s": (traffic.num_messages - num_messages) / seconds,
            "announce_ms": 1e3 * min(self._announcements),
        }
        if generated := self._num_tokens - num_tokens:
            self.figures["messages_per_token"] = (traffic.num_messages - num_messages) / generated
            self.figures["bytes_per_token"] = (traffic.num_bytes - num_bytes) / generated

    async def _pull(self, version: int) -> None:
        self._published.announce(manifest_of(version))
        began = now()
        await self._router.pull_state_dict(version)
        self._announcements.append(self._traffic.told_at - began)

    async def _move_requests(self, gone: Sequence[ActorReplica], request_ids: Sequence[str]) -> float:
        """Milliseconds of the controller from the death of these generators until the last of their requests was sent
        elsewhere.
        """
        traffic = self._traffic
        traffic.awaited.update(request_ids)
        traffic.all_sent.clear()
        began = self._now()
        for replica in gone:
            replica.remote.end("was killed by SIGKILL")
        await traffic.all_sent.wait()
        return 1e3 * (traffic.sent_at - began)


class RunWithWorkers(ScaledRun):
    """The same steps over rollout workers, without deaths."""

    def __init__(self, num_generators: int, num_requests: int, num_workers: int, spent: ProcessorTime) -> None:
        super().__init__(num_generators, num_requests)
        self._num_workers = num_workers
        self._spent = spent
        self._answers: dict[int, dict[tuple[str, bytes], RecordedAnswer]] = {}  # by group, as the journal has them

    def _now(self) -> float:
        return self._spent.seconds["router"]

    async def _begin(self, router: GeneratorRouter) -> None:
        self._pool = WorkerPool()
        self._running = RunningGroups(router.finish_session)
        self._workers = [SimulatedWorker(router, self._traffic, length_of_id, PROMPT) for _ in range(self._num_workers)]
        for number, worker in enumerate(self._workers):
            await self._pool.join(RemoteProcess(f"rollout-worker-{number}"), worker, f"rollout-worker-{number}")
        await self._pool.use(router)

    async def _kill(self, processes: SimulatedProcesses) -> None:
        """Do nothing: the shards move the requests of dead generators."""

    @property
    def _num_tokens(self) -> int:
        return sum(worker.num_tokens for worker in self._workers)

    async def _run_group(self, lease: Lease) -> RolloutGroup:
        with self._running.one(GROUP_SIZE) as playing:
            recorder = Recorder(lease.index, lambda: self._answers.get(lease.index, {}), self._record, completion_of)
            requests = GroupRequests(
                self._router, playing, recorder=recorder, suspension=lease.suspension, room=nothing, max_context=4096
            )

            def finish(rollout: Rollout) -> None:
                playing.ended(rollout.rollout_id)
                lease.rollout_finished(rollout)

            return await self._pool.of("first").run_group(
                requests,
                None,
                group_id=f"g{lease.index}",
                group_size=GROUP_SIZE,
                sampling=SamplingParams(max_tokens=LENGTHS[1]),
                on_finished=finish,
            )

    def _record(self, answer: RecordedAnswer) -> None:
        key = answer.completion.request_id, answer.prompt_digest
        self._answers.setdefault(answer.index, {})[key] = answer

    def finished(self, index: int, group: RolloutGroup) -> None:
        super().finished(index, group)
        self._answers.pop(index, None)


def _one_host() -> Hosts:
    hosts = Hosts(SimulatedSupervisor(), HostsConfig(max_respawns=1 << 20), HostNeeds(Path(), Path()), LOG)
    hosts.lifecycles.add(Host("here", LOOPBACK, None))
    return hosts


async def measure_messages(num_messages: int = 20_000) -> None:
    """Processor time of the process that receives a Monarch message from another process."""
    from monarch.actor import Channel, this_host

    from benchmarks.sending_actor import Sender

    processes = this_host().spawn_procs(per_host={"procs": 1})
    sender: Any = processes.spawn("sender", Sender)
    for num_bytes in (100, 10_000):
        port, receiver = Channel[bytes].open()
        for count in (100, num_messages):  # the first to warm up
            began = time.process_time()
            sending = asyncio.ensure_future(sender.send.call_one(port, count, num_bytes))
            for _ in range(count):
                await receiver.recv()
            await sending
        report(f"message_us_{num_bytes}_bytes", (time.process_time() - began) / num_messages * 1e6, "us")
    await processes.stop()


def measure(num_generators: int, num_requests: int, num_workers: int) -> None:
    # logging.disable(logging.WARNING)  # which generators died
    run, spent, run_handle = ScaledRun(num_generators, num_requests), ProcessorTime(), Handle._run
    with ExitStack() as metered, asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        if num_workers:
            run = RunWithWorkers(num_generators, num_requests, num_workers, spent)
            metered.enter_context(patch.object(Handle, "_run", lambda handle: spent.run(handle, run_handle)))
        runner.run(run.run())
    for name, value in run.figures.items():
        report(f"{name}_{num_generators}", value, name.rpartition("_")[2])
    in_flight = num_generators * num_requests
    report(f"cpu_us_a_request_{num_generators}", run.figures["controller_cpu_per_s"] / in_flight * 1e6, "us a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=None)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="in flight on each generator")
    parser.add_argument(
        "--workers", type=int, default=0, help="rollout workers; by default rollouts run in the controller"
    )
    parser.add_argument("--messages", action="store_true")
    options = parser.parse_args()
    if options.messages:
        asyncio.run(measure_messages())
    elif options.generators:
        measure(options.generators, options.requests, options.workers)
    else:
        for size in SIZES:  # each in its own process, for its memory
            command = [sys.executable, "-m", "benchmarks.scale", "--generators", str(size)]
            command += ["--requests", str(options.requests), "--workers", str(options.workers)]
            subprocess.run(command, check=True, timeout=LIMIT_S)


if __name__ == "__main__":
    main()
