"""The guest's first file system: busybox, kernel modules in the order of loading, and `init.sh`."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "crc32_generic", "crc32c_generic", "dummy", "veth", "bridge", "sch_netem",
    "ib_uverbs", "rdma_ucm", "rdma_rxe",
)  # fmt: skip
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


def build_initrd(root: Path, initrd: Path) -> None:
    """Write `initrd` from the unpacked packages at `root`."""
    modules = in_order(root, MODULES)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for name in ("bin", "modules"):
            (tree / name).mkdir()
        shutil.copy(root / "usr/bin/busybox", tree / "bin/busybox")
        shutil.copy(Path(__file__).with_name("init.sh"), tree / "init")
        (tree / "init").chmod(0o755)
        for number, module in enumerate(modules):
            shutil.copy(module, tree / f"modules/{number:02}-{module.name}")
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        archive = subprocess.run(
            [tree / "bin/busybox", "cpio", "-o", "-H", "newc"],
            cwd=tree, input=names.encode(), capture_output=True, check=True,
        ).stdout  # fmt: skip
        initrd.write_bytes(gzip.compress(archive, 1))


def in_order(root: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of kernel modules and of the modules that they depend on, each after those that it needs."""
    files = {path.stem.replace("-", "_"): path for path in (root / "usr/lib/modules").rglob("*.ko")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        found = _DEPENDS.search(files[name].read_bytes())
        for needed in found[1].decode().split(",") if found else ():
            if needed:
                add(needed.replace("-", "_"))
        ordered[name] = files[name]

    for name in names:
        add(name)
    return list(ordered.values())
