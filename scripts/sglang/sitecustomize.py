"""Lets the unmodified SGLang wheel start without a GPU, with the code of one tree.

Python imports this module at its start: `scripts/sglang_env.sh` links it into a folder that it puts on `PYTHONPATH`. The
packages of `STAND_INS`, which only GPUs, pictures and sound need, become modules in which every name is an empty class.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import _editable_skbc_disagg  # noqa: F401  this tree's `disagg`, with its extension module

STAND_INS = ("sgl_kernel", "soundfile", "torchvision")


class _Anything(type):
    """A class that has every attribute, each of the same kind."""

    def __getattr__(cls, name: str) -> type:
        return _attribute(name)


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        return _attribute(name)


def _attribute(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of `STAND_INS` and everything inside them. `importlib.util.find_spec` does not find them: a library
    that asks whether such a package is installed must do without it.
    """

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS or _asked_by_find_spec():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


def _asked_by_find_spec() -> bool:
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_globals.get("__name__") == "importlib.util":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


sys.meta_path.insert(0, _Finder())
