"""Lets vLLM import its vision code without torchvision, of which CPUs have no build for this torch; see `harness.vllm.images`.

Names that modules import become empty classes. The model's own preparation of images uses none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Empty(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Module(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_asked = any(_caller(depth) == "importlib.util" for depth in (2, 3, 4))  # whether it is installed: it is not
        if fullname.partition(".")[0] != "torchvision" or is_asked:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _caller(depth: int) -> str:
    try:
        return str(sys._getframe(depth).f_globals.get("__name__"))
    except ValueError:
        return ""


sys.meta_path.insert(0, _Finder())
