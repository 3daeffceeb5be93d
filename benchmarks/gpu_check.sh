#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Check lowtide on a CUDA GPU in under six minutes: the GPU tests, then budgets, overlap
# and largest batches. Needs nothing but an installed lowtide with its extras "dev";
# without a GPU, `benchmarks/gpu_check.py --device cpu --small` runs the same, smaller.
# Usage: benchmarks/gpu_check.sh [folder for the results]
set -eu
cd "$(dirname "$0")/.."
out="${1:-out/gpu}"
python="${PYTHON:-python3}"
[ -x .venv/bin/python ] && python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
# Equal bits need equal algorithms.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
"$python" -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee "$out/tests.txt" || true
"$python" benchmarks/gpu_check.py --device cuda --seconds 270 --out "$out/rows.json" \
    2>&1 | tee "$out/tables.txt"
