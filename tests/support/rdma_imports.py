"""What every process of the tests over RDMA imports: the fork server does so once, since imports take long in the guest."""

from __future__ import annotations

import importlib

from disagg.backends.mooncake.launch import import_engine
from disagg.backends.nixl.bindings import load_bindings

for module in ("disagg.manager", "disagg.testing.faults", "tests.support.rdma_pair", "tests.support.rdma_contract"):
    importlib.import_module(module)
load_bindings()
import_engine()
