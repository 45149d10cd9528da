"""Which calls of the host wait for a GPU on which a kernel waits?

    python benchmarks/host_waits.py              # all calls, a process each: needs one GPU
    python benchmarks/host_waits.py graph-end    # one of them

A receive that is posted early is a kernel that waits for another rank. Here a kernel of one block
takes its place: on a stream of its own it spins until a flag in the host's memory is set. Each
probe makes some calls meanwhile. Another process sets the flag after three seconds (a thread could
not while a call holds Python's lock), so a call that waits for the device takes three seconds, and
every other one next to nothing. A line gives the call, "waits" or "returns", and the seconds that
it took. The table in docs/design/0030-devices.md was made by this.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from spinning import Probe

_LOCAL = r"""
extern "C" __global__ void grow(int* out, int n) {
    int room[%d];
    for (int i = 0; i < n; i++) room[(i * 7 + threadIdx.x) %% %d] = i;
    out[threadIdx.x] = room[n %% %d];
}
"""
LOADING = os.environ.get("CUDA_MODULE_LOADING", "default")


def graph_end(p: Probe, size: int = 1) -> None:
    """Capture under way, the kernel spinning: the end of a capture, and what follows it."""
    torch = p.torch
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    p.spin()
    with torch.cuda.stream(p.compute):
        p.time(
            f"capture_begin ({size} bodies)",
            lambda: graph.capture_begin(
                pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
            ),
        )
        p.time(
            f"work inside of a capture, pool grows ({size} bodies)",
            lambda: [p.body() for _ in range(size)],
        )
        p.time(f"cudaStreamEndCapture ({size} bodies)", graph.capture_end)
        p.time(f"cudaGraphInstantiate ({size} bodies)", graph.instantiate)
        p.time(f"first cudaGraphLaunch ({size} bodies)", graph.replay)
        p.time(f"second cudaGraphLaunch ({size} bodies)", graph.replay)


def graph_large(p: Probe) -> None:
    graph_end(p, 200)


def graph_branches(p: Probe) -> None:
    """As `graph_end`, with a second branch, as messages have them."""
    torch = p.torch
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    other = torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    p.spin()
    with torch.cuda.stream(p.compute):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        p.body()
        for _ in range(4):
            event = torch.cuda.Event()
            event.record(p.compute)
            other.wait_event(event)
            with torch.cuda.stream(other):
                p.on_device.add_(1)
            p.body()
            back = torch.cuda.Event()
            back.record(other)
            p.compute.wait_event(back)
        p.time("cudaStreamEndCapture (two branches)", graph.capture_end)
        p.time("cudaGraphInstantiate (two branches)", graph.instantiate)
        p.time("first cudaGraphLaunch (two branches)", graph.replay)


def graph_upload(p: Probe) -> None:
    torch, cudart = p.torch, p.runtime()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(p.compute):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle())
        p.body()
        graph.capture_end()
        graph.instantiate()
    torch.cuda.synchronize()
    p.spin()
    handle = graph.raw_cuda_graph_exec() if hasattr(graph, "raw_cuda_graph_exec") else None
    if handle is None:
        print("cudaGraphUpload: torch does not give the handle")
    else:
        p.time(
            "cudaGraphUpload",
            lambda: cudart.cudaGraphUpload(
                ctypes.c_void_p(handle), ctypes.c_void_p(p.compute.cuda_stream)
            ),
        )
    with torch.cuda.stream(p.compute):
        p.time("first launch of a graph instantiated before", graph.replay)
    p.time("cudaGraphExecDestroy (graph in flight or done)", graph.reset)


def graph_drop(p: Probe) -> None:
    torch = p.torch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(p.compute):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle())
        p.body()
        graph.capture_end()
        graph.replay()
    torch.cuda.synchronize()
    p.spin()
    with torch.cuda.stream(p.compute):
        p.time("launch of a warm graph", graph.replay)
        p.time("1,200 launches of a warm graph", lambda: [graph.replay() for _ in range(1200)])
    p.time("cudaGraphExecDestroy", graph.reset)


def behind(p: Probe) -> None:
    """A stream that waits for the kernel takes so many launches."""
    torch = p.torch
    event = torch.cuda.Event()
    p.spin()
    event.record(p.side)
    p.compute.wait_event(event)
    with torch.cuda.stream(p.compute):
        for _ in range(8):
            p.time(
                "500 kernels behind the kernel that waits",
                lambda: [p.on_device.add_(1) for _ in range(500)],
            )


def torch_alloc(p: Probe) -> None:
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time(
            "torch's allocator: memory that it has", lambda: p.torch.empty(1 << 10, device="cuda")
        )
        p.time(
            "torch's allocator: 1 GiB more (cudaMalloc)",
            lambda: p.torch.empty(1 << 28, device="cuda"),
        )


def torch_free(p: Probe) -> None:
    block = p.torch.empty(1 << 28, device="cuda")
    del block
    p.torch.cuda.synchronize()
    p.spin()
    p.time("torch.cuda.empty_cache (cudaFree)", p.torch.cuda.empty_cache)


def cuda_alloc(p: Probe) -> None:
    runtime, pointer = p.cupy.cuda.runtime, [0]
    p.spin()

    def malloc() -> None:
        pointer[0] = runtime.malloc(1 << 28)

    p.time("cudaMalloc, 256 MiB", malloc)
    p.time("cudaFree, 256 MiB", lambda: runtime.free(pointer[0]))


def cuda_free(p: Probe) -> None:
    runtime = p.cupy.cuda.runtime
    pointer = runtime.malloc(1 << 28)
    p.spin()
    p.time("cudaFree of memory that nothing uses", lambda: runtime.free(pointer))


def cuda_async(p: Probe) -> None:
    runtime, stream = p.cupy.cuda.runtime, p.compute.cuda_stream
    warm = runtime.mallocAsync(1 << 20, stream)
    runtime.freeAsync(warm, stream)
    p.torch.cuda.synchronize()
    p.spin()
    pointer = p.time("cudaMallocAsync, 256 MiB", lambda: runtime.mallocAsync(1 << 28, stream))
    p.time("cudaFreeAsync", lambda: runtime.freeAsync(pointer, stream))


def local_memory(p: Probe) -> None:
    cupy = p.cupy
    sizes = (64, 16384)
    kernels = [cupy.RawKernel(_LOCAL % (n, n, n), "grow") for n in sizes]
    out = cupy.zeros(1024, dtype=cupy.int32)
    for kernel in kernels:
        kernel.compile()
    kernels[0]((1,), (32,), (out, 10))
    p.torch.cuda.synchronize()
    p.spin()
    with cupy.cuda.ExternalStream(p.compute.cuda_stream):
        p.time(
            "first launch of a kernel that needs more local memory",
            lambda: kernels[1]((1,), (32,), (out, 10)),
        )


def module_load(p: Probe) -> None:
    kernel = p.cupy.RawKernel(_LOCAL % (8, 8, 8), "grow")
    out = p.cupy.zeros(1024, dtype=p.cupy.int32)
    p.torch.cuda.synchronize()
    p.spin()
    p.time(f"cuModuleLoadData, loading: {LOADING}", kernel.compile)
    with p.cupy.cuda.ExternalStream(p.compute.cuda_stream):
        p.time("first launch of a loaded kernel", lambda: kernel((1,), (32,), (out, 4)))


def lazy_kernel(p: Probe) -> None:
    """A kernel of torch that has not run yet: loaded now if modules are loaded lazily."""
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time(
            f"first run of a kernel of torch, loading: {LOADING}",
            lambda: p.torch.special.erfinv(p.on_device[:1024]),
        )


def new_product(p: Probe) -> None:
    a = p.torch.randn(512, 512, device="cuda", dtype=p.torch.bfloat16)
    p.torch.cuda.synchronize()
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time("first product in bfloat16 (cuBLAS loads a kernel)", lambda: a @ a)


def pinned(p: Probe) -> None:
    runtime = p.cupy.cuda.runtime
    p.spin()
    pointer = p.time("cudaHostAlloc, 1 MiB", lambda: runtime.hostAlloc(1 << 20, 0))
    p.time("cudaFreeHost", lambda: runtime.freeHost(pointer))


def pinned_torch(p: Probe) -> None:
    p.spin()
    p.time("torch pin_memory, 64 MiB", lambda: p.torch.empty(1 << 24, pin_memory=True))


def register(p: Probe) -> None:
    cudart = p.runtime()
    size = 1 << 24
    memory = ctypes.create_string_buffer(size)
    p.spin()
    p.time("cudaHostRegister, 16 MiB", lambda: cudart.cudaHostRegister(memory, size, 0))
    p.time("cudaHostUnregister", lambda: cudart.cudaHostUnregister(memory))


def events(p: Probe) -> None:
    runtime = p.cupy.cuda.runtime
    p.spin()
    event = p.time("cudaEventCreate", lambda: runtime.eventCreateWithFlags(2))
    p.time("cudaEventRecord", lambda: runtime.eventRecord(event, p.compute.cuda_stream))
    p.time("cudaEventDestroy", lambda: runtime.eventDestroy(event))


def streams(p: Probe) -> None:
    runtime = p.cupy.cuda.runtime
    p.spin()
    stream = p.time("cudaStreamCreateWithPriority", lambda: runtime.streamCreateWithFlags(1))
    p.time("cudaStreamDestroy", lambda: runtime.streamDestroy(stream))


def cublas(p: Probe) -> None:
    a = p.torch.randn(512, 512, device="cuda")
    stream = p.torch.cuda.Stream()
    p.torch.cuda.synchronize()
    p.spin()
    with p.torch.cuda.stream(stream):
        p.time("first product on a new stream (cuBLAS's workspace)", lambda: a @ a)


def cublas_handle(p: Probe) -> None:
    from cupy_backends.cuda.libs import cublas as library

    p.spin()
    handle = p.time("cublasCreate", library.create)
    p.time("cublasDestroy", lambda: library.destroy(handle))


def cudnn(p: Probe) -> None:
    conv = p.torch.nn.Conv2d(3, 8, 3, device="cuda")
    image = p.torch.randn(1, 3, 32, 32, device="cuda")
    p.torch.cuda.synchronize()
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time("first convolution (cuDNN's handle and workspace)", lambda: conv(image))


def attention(p: Probe) -> None:
    q = p.torch.randn(1, 8, 128, 64, device="cuda", dtype=p.torch.bfloat16)
    p.torch.cuda.synchronize()
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time(
            "first attention (cuDNN or flash)",
            lambda: p.torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        )


def copies(p: Probe) -> None:
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time(
            "copy to the device from pinned memory",
            lambda: p.on_device.copy_(p.pinned, non_blocking=True),
        )
        p.time(
            "copy to the device from pageable memory, 256 KiB",
            lambda: p.on_device.copy_(p.pageable, non_blocking=True),
        )
        p.time("copy to pinned memory", lambda: p.pinned.copy_(p.on_device, non_blocking=True))
        p.time("item() on another stream", lambda: p.on_device[0].item())
        p.time("cudaMemset by torch zero_", lambda: p.on_device.zero_())


def legacy(p: Probe) -> None:
    p.spin()
    p.time(
        "a kernel on the default stream, and its synchronize",
        lambda: (p.on_device.add_(1), p.torch.cuda.current_stream().synchronize()),
    )


def mem_info(p: Probe) -> None:
    p.spin()
    p.time("cudaMemGetInfo", p.torch.cuda.mem_get_info)
    p.time("cudaFuncSetAttribute / occupancy", lambda: p.torch.cuda.get_device_properties(0))


def triton_kernel(p: Probe) -> None:
    compiled = p.torch.compile(lambda a: p.torch.sin(a) * 2 + 1)
    p.spin()
    with p.torch.cuda.stream(p.compute):
        p.time(
            "first run of a Triton kernel (compiled now)", lambda: compiled(p.on_device[: 1 << 12])
        )


def nccl(p: Probe) -> None:
    import nccl.bindings.nccl as low

    comm = low.comm_init_rank(1, low.get_unique_id(), 0)
    p.torch.cuda.synchronize()
    p.spin()
    handle = p.time(
        "ncclCommRegister", lambda: low.comm_register(comm, p.on_device.data_ptr(), 1 << 18)
    )
    p.time("ncclCommDeregister", lambda: low.comm_deregister(comm, handle))


def nccl_join(p: Probe) -> None:
    import nccl.bindings.nccl as low

    low.comm_init_rank(1, low.get_unique_id(), 0)
    p.torch.cuda.synchronize()
    p.spin()
    comm = p.time(
        "ncclCommInitRank, one rank", lambda: low.comm_init_rank(1, low.get_unique_id(), 0)
    )
    p.time("ncclCommDestroy", lambda: low.comm_destroy(comm))


PROBES: tuple[Callable[[Probe], None], ...] = (
    graph_end,
    graph_large,
    graph_branches,
    graph_upload,
    graph_drop,
    behind,
    torch_alloc,
    torch_free,
    cuda_alloc,
    cuda_free,
    cuda_async,
    local_memory,
    module_load,
    lazy_kernel,
    new_product,
    pinned,
    pinned_torch,
    register,
    events,
    streams,
    cublas,
    cublas_handle,
    cudnn,
    attention,
    copies,
    legacy,
    mem_info,
    triton_kernel,
    nccl,
    nccl_join,
)
"""In the order of the table."""


def main() -> None:
    by_name = {probe.__name__.replace("_", "-"): probe for probe in PROBES}
    if len(sys.argv) > 1:
        by_name[sys.argv[1]](Probe())
        return
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {torch.version.cuda}")

    def run(name: str) -> str:
        command = [sys.executable, __file__, name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired as error:
            return f"{(error.stdout or b'').decode()}{name}: no end after 60 s\n"
        return done.stdout + (f"{name}: {done.stderr[-300:]}\n" if done.returncode else "")

    with ThreadPoolExecutor(6) as pool:
        for text in pool.map(run, by_name):
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
