"""Which engines are installed, what they lack, and how they perform between child processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from disagg.commands.doctor.children import ChildFailed, ChildLate, child
from disagg.commands.doctor.machine import cma_refused, ptrace
from disagg.commands.shell.packages import ENGINE_PACKAGES, installed
from disagg.machine.findings import Finding, Level, Machine, ok
from disagg.machine.rdma import GID_VARIABLES


@dataclass(frozen=True)
class Distribution:
    """One of an engine's packages is enough, and with `exclusive` only one may be installed."""

    packages: tuple[str, ...]
    install: str
    libraries: tuple[str, ...] = ()
    exclusive: bool = False


IN_CLONE = ", in a clone of disagg"
"""Where the extras can be installed from."""
ENGINES: Mapping[str, Distribution] = {
    "nixl": Distribution(ENGINE_PACKAGES["nixl"], "pip install '.[nixl]'" + IN_CLONE),
    "mooncake": Distribution(
        ENGINE_PACKAGES["mooncake"],
        "pip install '.[mooncake-cpu]' (with CUDA 12: '.[mooncake]'; with CUDA 13: the package mooncake-transfer-engine-cuda13)"
        + IN_CLONE,
        ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"),
        exclusive=True,
    ),
}

DEBIAN = {
    "libibverbs": "libibverbs1 ibverbs-providers",
    "libmlx5": "ibverbs-providers",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "libnl-3": "libnl-3-200",
    "libnl-route-3": "libnl-route-3-200",
    "libssl": "libssl3",
    "libjsoncpp": "libjsoncpp25",
    "libglog": "libgoogle-glog0v6",
    "liburing": "liburing2",
}
"""Debian's packages, by the library's name before `.so`."""
NVIDIA = {
    "libcuda": "install NVIDIA's driver; on a machine without GPUs, install the engine's package without CUDA",
    "libcudart": (
        "install CUDA of that major version (pip install nvidia-cuda-runtime-cu12); without GPUs, Mooncake's package without "
        "CUDA: pip uninstall mooncake-transfer-engine && pip install '.[mooncake-cpu]', in a clone of disagg"
    ),
}


def library_fix(library: str) -> str:
    stem = library.partition(".so")[0]
    if stem in NVIDIA:
        return NVIDIA[stem]
    return f"apt install {DEBIAN[stem]}" if stem in DEBIAN else f"apt-file search {library}, then install a package it lists"


def engine(name: str, machine: Machine) -> Iterator[Finding]:
    """The engine is started in two processes that transfer to each other for about two seconds."""
    shipped = ENGINES[name]
    found = installed(shipped.packages)
    if not found:
        yield Finding(
            name, Level.WARNING, f"engine {name!r} is not installed", f"backend {name!r} cannot be used", shipped.install
        )
        return
    packages = ", ".join(f"{package} {version}" for package, version in found.items())
    if shipped.exclusive and len(found) > 1:
        yield Finding(
            name, Level.WARNING, f"several packages with the same import name are installed: {packages}",
            "the one that was installed last is loaded, perhaps with files of another",
            "pip uninstall all but one: " + " ".join(found),
        )  # fmt: skip
    missing = list(_missing(name, machine))
    yield from missing
    if not missing:
        yield _measured(name, packages, machine)


def _missing(name: str, machine: Machine) -> Iterator[Finding]:
    libraries = ENGINES[name].libraries
    if not libraries:
        return
    try:
        with child("libraries:" + ",".join(libraries), machine.environ) as task:
            found: dict[str, str] = task.answer()["missing"]
    except ChildFailed as error:
        yield Finding(
            name,
            Level.ERROR,
            f"the libraries of {name!r} could not be checked: {error}",
            f"backend {name!r} may not be usable",
            "python -m disagg.commands.doctor.child libraries:libnuma.so.1",
        )
        return
    for library, reason in found.items():
        yield _library(name, library, reason)


def _library(name: str, library: str, reason: str) -> Finding:
    return Finding(
        name, Level.ERROR, f"engine {name!r} is installed, but {library} cannot be loaded: {reason}",
        f"backend {name!r} cannot be used over any transport", library_fix(library),
    )  # fmt: skip


BUSY = 1.0
"""Running processes per core above which a late answer proves nothing about an engine."""
_LIBRARY = re.compile(r"(lib[\w+-]+\.so[.\d]*): ")


def _measured(name: str, packages: str, machine: Machine) -> Finding:
    try:
        with child(f"owner:{name}", machine.environ) as owner:
            target = owner.answer()
            with child(f"writer:{name}", machine.environ) as writer:
                writer.send(target)
                result = writer.answer()
    except ChildFailed as error:
        if isinstance(error, ChildLate) and machine.load > BUSY:
            return Finding(
                name, Level.WARNING, f"engine {name!r} ({packages}) could not be tested: {error}, while {machine.load:.1f} "
                "processes wait for each core", "it is not known whether it works here",
                f"disagg doctor --engine {name}, once the machine is less busy",
            )  # fmt: skip
        library = _LIBRARY.search(str(error))
        if library:
            return _library(name, library[1], str(error))
        return Finding(
            name, Level.ERROR, f"engine {name!r} ({packages}) does not work between two processes here: {error}",
            f"backend {name!r} cannot be used in this environment", _fix(str(error), machine),
        )  # fmt: skip
    speed = (
        f"{result['gbps']:.2f} GB/s for 32 MiB in one piece, {1e6 * result['latency_s']:.0f} us for 4 KiB from submit to done"
    )
    return ok(name, f"{packages}: started, 32 MiB registered, transport {result['transport']}; between two processes {speed}")


def _fix(error: str, machine: Machine) -> str:
    suspects = sorted(name for name in machine.environ if name.startswith(("UCX_", "MC_")) and name not in GID_VARIABLES)
    if suspects:
        return f"unset {' '.join(suspects)}, and try again"
    if machine.rdma_devices:
        return (
            "choose the RDMA device with --device-nic and its GID with UCX_IB_GID_INDEX or MC_GID_INDEX, or use --transport tcp"
        )
    if "within" in error:
        return (
            "read the log of disagg-bench --backend NAME --debug with UCX_LOG_LEVEL=info (nixl) or MC_LOG_LEVEL=INFO (mooncake)"
        )
    return "pip install --force-reinstall the engine's package"


def cma(machine: Machine) -> Finding:
    try:
        with child("byte", machine.environ) as owner, child("copy", machine.environ) as reader:
            reader.send(owner.answer())
            refusal = reader.answer()["refusal"]
    except ChildFailed as error:
        refusal = str(error)
    expected = ptrace(machine)
    if refusal:
        return cma_refused(f"{refusal}; {expected.cause}")
    return (
        expected
        if expected.level is not Level.OK
        else ok("cma", f"processes here may copy each other's memory; {expected.cause}")
    )


def nvlink(machine: Machine) -> Iterator[Finding]:
    """Tests only that it can start: transfers need pools on two GPUs."""
    if not machine.gpus:
        return
    try:
        with child("nvlink:", machine.environ) as task:
            task.answer()
    except ChildFailed as error:
        yield Finding(
            "nvlink",
            Level.WARNING,
            str(error),
            "GPU pools cannot be served, except without packing (pack_below=0), and not over backend 'nvlink'",
            f"pip install '.[nvlink]'{IN_CLONE}; if nvidia-smi shows another CUDA version than 13: the packages cuda-bindings "
            "and nvidia-cuda-nvrtc of that version",
        )
        return
    yield ok("nvlink", "the driver and its bindings work")


def gpu_peers(machine: Machine) -> Iterator[Finding]:
    if len(machine.gpus) < 2:
        return
    try:
        with child("gpus", machine.environ) as task:
            found = task.answer()
    except ChildFailed as error:
        yield Finding(
            "gpu", Level.ERROR, f"the CUDA driver does not respond: {error}", "GPU memory cannot be used", "nvidia-smi"
        )
        return
    if not found["apart"]:
        yield ok("gpu", f"{found['count']} GPUs can map each other's memory")
        return
    pairs = ", ".join(f"{ours}-{theirs}" for ours, theirs in found["apart"] if ours < theirs)
    yield Finding(
        "gpu", Level.WARNING, f"GPUs {pairs} cannot map each other's memory", "transfers between them go through the host",
        "nvidia-smi topo -p2p rw shows the reason; in a virtual machine, pass NVLink through and disable ACS",
    )  # fmt: skip
