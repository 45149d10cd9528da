"""The arms of Ray: plain actor calls (`core`), or compiled graphs (`compiled`), with 3 actors.

python benchmarks/ray_comparison/ray_arm.py compiled --json FILE
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode
from sampling import (
    ACTORS,
    MIB,
    PATTERNS,
    WINDOWS,
    Figures,
    Recorder,
    arguments,
    check,
    idle,
    payload,
    sample,
    sample_async,
    throughput,
)

GET_SECONDS = 30


@ray.remote(num_cpus=0)
class Echo:
    """Gives back what it gets."""

    def echo(self, x: Any) -> Any:
        return x

    def pid(self) -> int:
        return os.getpid()


def call(pattern: str, actors: list[Any], x: Any) -> Any:
    """A pattern by plain actor calls."""
    if pattern == "scatter-gather":
        return [actor.echo.remote(x) for actor in actors]
    for actor in actors if pattern == "chain" else actors[:1]:
        x = actor.echo.remote(x)
    return x


def bind(pattern: str, actors: list[Any], tensors: bool) -> Any:
    """A pattern as a graph."""
    with InputNode() as given:
        node = given.with_tensor_transport("shm") if tensors else given
        if pattern == "scatter-gather":
            return MultiOutputNode([actor.echo.bind(node) for actor in actors])
        for actor in actors if pattern == "chain" else actors[:1]:
            node = actor.echo.bind(node)
            if tensors:
                node = node.with_tensor_transport("shm")
        return node


class Core:
    """Plain actor calls."""

    def __init__(self, recorder: Recorder, actors: list[Any]) -> None:
        self._recorder = recorder
        self._actors = actors

    def latency(self, pattern: str, cell: str, kind: str, size: int) -> None:
        value = payload(kind, size)

        def go() -> Any:
            return ray.get(call(pattern, self._actors, value), timeout=GET_SECONDS)

        check(pattern, value, go())
        self._recorder.note(cell, sample(go, self._recorder.samples()))

    def latency_async(self, pattern: str, cell: str) -> None:
        async def go() -> None:
            found = call(pattern, self._actors, b"x")
            if pattern == "scatter-gather":
                check(pattern, b"x", await asyncio.gather(*found))
            else:
                check(pattern, b"x", await found)

        self._recorder.note(cell, asyncio.run(sample_async(go, self._recorder.samples())))

    def throughput(self, pattern: str, cell: str, window: int) -> None:
        figures = throughput(
            lambda: call(pattern, self._actors, b"x"),
            lambda reference: ray.get(reference, timeout=GET_SECONDS),
            window,
            self._recorder.seconds,
        )
        self._recorder.note(cell, figures)

    def idle(self, cell: str, pids: list[int]) -> None:
        def go() -> None:
            ray.get(call("chain", self._actors, b"x"), timeout=GET_SECONDS)

        self._recorder.note(cell, idle(go, pids))


class Compiled:
    """Compiled graphs; one at a time, since an actor can be in no more."""

    def __init__(self, recorder: Recorder, actors: list[Any]) -> None:
        self._recorder = recorder
        self._actors = actors

    def latency(self, pattern: str, cell: str, kind: str, size: int) -> None:
        value = payload(kind, size)
        # Room for the whole message from the start, so that no buffer has to grow.
        DAGContext.get_current().buffer_size_bytes = max(1_000_000, size + size // 4)

        def measure(graph: Any) -> None:
            def go() -> Any:
                return ray.get(graph.execute(value), timeout=GET_SECONDS)

            check(pattern, value, go())
            self._recorder.note(cell, sample(go, self._recorder.samples()))

        self._with(bind(pattern, self._actors, kind == "tensor"), measure)

    def latency_async(self, pattern: str, cell: str) -> None:
        node = bind(pattern, self._actors, False)

        async def measure() -> Figures:
            # Compiled inside of the loop, whose tasks move it on.
            graph = node.experimental_compile(enable_asyncio=True)

            async def go() -> None:
                found = await graph.execute_async(b"x")
                if pattern == "scatter-gather":
                    check(pattern, b"x", await asyncio.gather(*found))
                else:
                    check(pattern, b"x", await found)

            try:
                return await sample_async(go, self._recorder.samples())
            finally:
                graph.teardown()

        self._recorder.note(cell, asyncio.run(measure()))

    def throughput(self, pattern: str, cell: str, window: int) -> None:
        def measure(graph: Any) -> None:
            figures = throughput(
                lambda: graph.execute(b"x"),
                lambda reference: ray.get(reference, timeout=GET_SECONDS),
                window,
                self._recorder.seconds,
            )
            self._recorder.note(cell, figures)

        graph = bind(pattern, self._actors, False)
        self._with(graph, measure, _max_inflight_executions=max(WINDOWS))

    def idle(self, cell: str, pids: list[int]) -> None:
        def measure(graph: Any) -> None:
            def go() -> None:
                ray.get(graph.execute(b"x"), timeout=GET_SECONDS)

            self._recorder.note(cell, idle(go, pids))

        self._with(bind("chain", self._actors, False), measure)

    def _with(self, node: Any, measure: Callable[[Any], None], **options: Any) -> None:
        graph = node.experimental_compile(**options)
        try:
            measure(graph)
        finally:
            graph.teardown()
            DAGContext.get_current().buffer_size_bytes = 1_000_000


def drive(arm: Core | Compiled, recorder: Recorder, pids: list[int]) -> None:
    """Measure everything."""
    for pattern in PATTERNS:
        if recorder.wants(cell := f"{pattern} 1 B"):
            arm.latency(pattern, cell, "bytes", 1)
    for pattern in PATTERNS:
        if recorder.wants(cell := f"{pattern} 1 B asyncio"):
            arm.latency_async(pattern, cell)
    for size in (MIB, 10 * MIB):
        for kind in ("numpy", "tensor"):
            if recorder.wants(cell := f"round trip {size // MIB} MiB {kind}"):
                arm.latency("round trip", cell, kind, size)
    for pattern in ("round trip", "chain"):
        for window in WINDOWS:
            if recorder.wants(cell := f"{pattern} 1 B, {window} in flight"):
                arm.throughput(pattern, cell, window)
    if recorder.wants("chain idle"):
        arm.idle("chain idle", pids)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("arm", choices=["core", "compiled"])
    args = parser.parse_args()
    recorder = Recorder(f"ray {args.arm}", args)
    folder = tempfile.mkdtemp(prefix="cg-ray-")
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=1 << 30,
        _temp_dir=folder,
    )
    try:
        actors = [Echo.remote() for _ in range(ACTORS)]
        pids = ray.get([actor.pid.remote() for actor in actors], timeout=60)
        drive((Core if args.arm == "core" else Compiled)(recorder, actors), recorder, pids)
        recorder.save()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
