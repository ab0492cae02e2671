#!/usr/bin/env bash
# Fetches QEMU and a kernel for the RDMA tests from Debian's packages, once, and prints the path of their folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python -m harness.rdma --fetch
