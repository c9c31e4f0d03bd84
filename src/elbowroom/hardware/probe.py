"""Measures a HardwareProfile of this machine, in a few seconds."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from elbowroom._folders import find_temporary
from elbowroom.errors import UsageError
from elbowroom.hardware.links import check_spill_folder, measure_device_link, measure_disk_link, name_file_system
from elbowroom.hardware.rates import measure_hook, measure_op_latency, measure_rates
from elbowroom.hardware.sizes import LINK_BLOCK_BYTES, Sizes, choose_sizes
from elbowroom.ir.hardware import HardwareProfile, Link, Tier
from elbowroom.ops.cpu_isa import find_isa
from elbowroom.progress import Advance, announcing
from elbowroom.tiers.host_memory import count_host_bytes

logger = logging.getLogger(__name__)


def probe(
    device: str = "auto",
    *,
    spill_folder: str | None = None,
    most_bytes: int | None = None,
    progress: Advance | None = None,
) -> HardwareProfile:
    """Measure this machine: compute rates, latencies, capacities, and the links between its tiers.

    Takes up to about ten seconds on two cores, 400 MiB of memory on a CPU, 2.5 GiB on a CUDA device, and 120 MiB in the
    spill folder. Other work on the machine affects the figures. The program's random state does not change.

    Args:
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA if available, otherwise the CPU.
        spill_folder: folder of the disk tier; by default the system's temporary folder.
        most_bytes: limit on the device memory that measuring takes. Below the default, shapes are smaller than those of
            real layers, and rates may be lower; the minimum is about 2 MB.
        progress: receives what is being measured and the share (0 to 1) done.

    Returns:
        A profile with tiers ("ram", "disk") on a CPU and ("device", "host", "disk") on CUDA. The capacity of the disk
        is its free space.

    Raises:
        UsageError: the device does not exist, CUDA is not available or its memory is in use, or the folder is missing,
            not writable or full.
    """
    chosen, folder = choose_place(device, spill_folder, most_bytes)
    warn_of_memory(folder)
    sizes = choose_sizes(chosen.type, most_bytes)
    announcement = announcing("measuring this machine", steady=False) if progress is None else nullcontext(progress)
    with announcement as report, measuring(chosen):
        profile = _measure(chosen, folder, sizes, report)
        report("done", 1.0)
    return profile


def choose_place(device: str, spill_folder: str | None, most_bytes: int | None) -> tuple[torch.device, str]:
    """Return the device and the spill folder that `probe` measures.

    Raises:
        UsageError: as for `probe`.
    """
    chosen = _choose_device(device)
    folder = find_temporary() if spill_folder is None else spill_folder
    check_spill_folder(folder, min(choose_sizes(chosen.type, most_bytes).block_bytes, LINK_BLOCK_BYTES))
    return chosen, folder


def warn_of_memory(spill_folder: str) -> None:
    """Warn if a spill folder is in memory."""
    if name_file_system(spill_folder) == "tmpfs":
        logger.warning("the spill folder %s is in memory (tmpfs): offloading to it saves no memory", spill_folder)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} is not a device; use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"devices of type {chosen.type!r} cannot be measured; use 'auto', 'cpu' or 'cuda'")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "CUDA is not available here (no NVIDIA device or driver, or a build of torch without CUDA); use "
            "device='cpu', or a shipped profile: elbowroom.hardware.shipped.load_shipped('rtx3090')"
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise UsageError(f"there is no device cuda:{index}; there are {torch.cuda.device_count()}, from cuda:0")
    return torch.device("cuda", index)


@contextlib.contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Return a context in which ops run without the caller's inference, no-grad and autocast modes.

    Raises:
        UsageError: the device has too little free memory.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{device} has too little free memory for measuring (about 2 GiB); probe before building the model, or end "
            "other processes on the device"
        ) from error
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the caching allocator would keep the blocks


def _measure(device: torch.device, folder: str, sizes: Sizes, report: Advance) -> HardwareProfile:
    report("op latency", 0.0)
    op_latency_seconds = measure_op_latency(device)
    hook_seconds = measure_hook(device)
    rates = measure_rates(device, sizes, lambda what, share: report(what, 0.05 + 0.5 * share))
    links = (_measure_cuda if device.type == "cuda" else _measure_cpu)(device, folder, sizes, report)
    return HardwareProfile(
        name=name_machine(device),
        device=device.type,
        isa=find_isa() if device.type == "cpu" else "",
        rates=rates,
        tiers=list_capacities(device, folder),
        links=links,
        op_latency_seconds=op_latency_seconds,
        hook_seconds=hook_seconds,
        # Granularity of PyTorch's allocators: the alignment on a CPU, the block size on CUDA.
        alignment_bytes=512 if device.type == "cuda" else 64,
    )


def _measure_cpu(device: torch.device, folder: str, sizes: Sizes, report: Advance) -> tuple[Link, ...]:
    report("link ram to disk", 0.55)
    link = measure_disk_link(
        "ram", folder, block_bytes=min(sizes.block_bytes, LINK_BLOCK_BYTES), fresh_blocks=True,
        compute=_mixed_work(device, sizes), device=device,
    )  # fmt: skip
    return (link,)


def _measure_cuda(device: torch.device, folder: str, sizes: Sizes, report: Advance) -> tuple[Link, ...]:
    compute, block_bytes = _mixed_work(device, sizes), min(sizes.block_bytes, LINK_BLOCK_BYTES)
    report("link device to host", 0.55)
    upper = measure_device_link(device, block_bytes, compute)
    report("link host to disk", 0.75)
    lower = measure_disk_link(
        "host", folder, block_bytes=block_bytes, fresh_blocks=False, compute=compute, device=device
    )
    return upper, lower


def list_capacities(device: torch.device, folder: str) -> tuple[Tier, ...]:
    """Return the tiers of a machine, the device's memory first. The capacity of the disk is its free space."""
    disk = Tier(name="disk", capacity_bytes=shutil.disk_usage(folder).free)
    if device.type == "cpu":
        return Tier(name="ram", capacity_bytes=count_host_bytes()), disk
    device_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    host = Tier(name="host", capacity_bytes=count_host_bytes())
    return Tier(name="device", capacity_bytes=device_bytes), host, disk


def _mixed_work(device: torch.device, sizes: Sizes) -> Callable[[], None]:
    """Return about a tenth of a second of work, half of the time matmul, half elementwise ops."""
    width, count = sizes.work_width, sizes.work_elements
    matrix = torch.ones(width, width, device=device, dtype=torch.float32)
    vector = torch.ones(count, device=device, dtype=torch.float32)

    def compute() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)
            torch.relu(vector)
            torch.add(vector, vector)

    return compute


def name_machine(device: torch.device) -> str:
    """Return the name of a device in a profile: on a CPU its model and the number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return f"this machine ({processor}, {torch.get_num_threads()} threads)"
